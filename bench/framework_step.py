"""One framework's half of bench/frameworks.py: takes a step of noise whenever a line comes, and says how many seconds it took, and
how many of processor time on all threads.

    python bench/framework_step.py torch|torch-alone|jax|flower|opacus|jax-privacy|flower-dp MECHANISM DIMENSION exact|float

Where noise is made ahead (torch, jax, flower), its row is ready when a step is timed, as it is where a gradient takes longer than a row;
the processor time is that of the step and of one row. torch-alone makes the noise within the step.

Ours are checked bit by bit against a dpmf.NoiseStream on some coordinates, at every step; a rival by its mean square.
"""

import math
import pathlib
import sys
import tempfile
import time

import numpy as np

framework, file, dimension, arithmetic = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
#: Coordinates that are checked: the first, some in the middle, the last.
PLACES = [range(0, 500), range(dimension // 2, dimension // 2 + 500), range(dimension - 500, dimension)]
CLIP, COHORT = 1.0, 400


class Expected:
    """What a run releases of sums at PLACES."""

    def __init__(self, mechanism, key, run):
        import dpmf

        self.streams = [
            dpmf.NoiseStream(mechanism, key, run=run, coordinates=places, arithmetic=arithmetic) for places in PLACES
        ]

    def check(self, sums, released, denominator):
        """Of a step: sums and released are whole, and flat."""
        for places, stream in zip(PLACES, self.streams):
            row = np.array(sums[places.start : places.stop])
            stream.add_to(row)
            found = np.asarray(released[places.start : places.stop], np.float64)
            wanted = row.astype(np.float64) / denominator
            assert np.allclose(found, wanted, rtol=1e-6, atol=1e-12), (framework, file, found[:3], wanted[:3])


def check_variance(values, expected):
    """A mean square within seven standard deviations."""
    ratio = sum(float(np.dot(p, p)) for p in (np.asarray(q, np.float64) for q in np.array_split(values, 64)))
    ratio /= values.size * expected
    assert abs(ratio - 1) < 7 * math.sqrt(2 / values.size) + 1e-5, (framework, ratio)


def clocks():
    return np.array([time.perf_counter(), time.process_time()])


def timed(call):
    """Seconds, and those of processor time, of a call; and what it returned."""
    began = clocks()
    value = call()
    return clocks() - began, value


def with_row(call, run):
    """timed(), with the processor time of the next row of noise, which is made before anything else is timed."""
    began = clocks()
    seconds, value = timed(call)
    if run.ahead and run.next_step < run.steps:
        run.prepare()
    seconds[1] = (clocks() - began)[1]
    return seconds, value


def with_torch(ahead=None):
    """A step of dpmf.torch.PrivateOptimizer with SGD in it: noise, mean, update."""
    import dpmf
    import dpmf.torch
    import torch

    mechanism, key = dpmf.Mechanism.load(file), dpmf.NoiseKey.from_seed(1)
    weight = torch.nn.Parameter(torch.zeros(dimension))
    optimizer = dpmf.torch.PrivateOptimizer(
        torch.optim.SGD([weight], lr=1.0), mechanism, key=key, experiment="bench", denominator=COHORT, arithmetic=arithmetic,
        check=False, ahead=ahead,
    )
    batches = None
    if mechanism.sampling != "none":
        data = torch.utils.data.TensorDataset(torch.arange(4000))
        sampler = dpmf.Sampler(mechanism.sampling, key, units=4000, steps=mechanism.steps, run="bench")
        loader = torch.utils.data.DataLoader(
            data, batch_sampler=dpmf.torch.SampledBatches(sampler), collate_fn=dpmf.torch.EmptyCollate(data)
        )
        batches = iter(optimizer.batches(loader))
    expected = Expected(mechanism, key, "bench")
    nothing = np.zeros(dimension, np.float64)
    while True:
        if batches is not None:
            next(batches)
        optimizer.add_sum({}, 0)
        with torch.no_grad():
            weight.zero_()
        seconds, _ = with_row(optimizer.step, optimizer._noise.run)
        expected.check(nothing, -weight.detach().numpy(), COHORT)
        yield seconds


def with_opacus():
    """The same step of Opacus' DPOptimizer: noise, mean, update."""
    import torch
    from opacus.optimizers import DPOptimizer

    weight = torch.nn.Parameter(torch.zeros(dimension))
    optimizer = DPOptimizer(
        torch.optim.SGD([weight], lr=1.0), noise_multiplier=1.0, max_grad_norm=CLIP, expected_batch_size=COHORT
    )
    while True:
        weight.summed_grad = torch.zeros(dimension)
        weight.grad_sample = torch.zeros(1)  # only asked whether it is there
        with torch.no_grad():
            weight.zero_()

        def step():
            optimizer.add_noise()
            optimizer.scale_grad()
            optimizer.original_optimizer.step()

        seconds, _ = timed(step)
        check_variance(weight.detach().numpy() * COHORT, CLIP**2)
        yield seconds


def with_jax():
    """A step of dpmf.jax.Run: its batch with the noise, a compiled update with the mean, and the commit. State and gradient are donated,
    as for the rival."""
    import dpmf
    import dpmf.jax
    import jax
    import jax.numpy as jnp

    mechanism, key = dpmf.Mechanism.load(file), dpmf.NoiseKey.from_seed(1)
    run = dpmf.jax.Run(
        mechanism, key, jnp.zeros(dimension), examples=4000, denominator=COHORT, experiment="bench", arithmetic=arithmetic
    )
    noise = dpmf.jax.add_correlated_noise(run)
    state = noise.init(jnp.zeros(dimension))
    update = jax.jit(
        lambda gradient, state, batch: noise.update(dpmf.jax.Sum.of(gradient, batch=batch), state, batch=batch), donate_argnums=(0, 1)
    )
    expected = Expected(mechanism, key, "bench")
    nothing = np.zeros(dimension, np.float32)
    batches = run.batches(state)

    def step(gradient, batch):
        nonlocal state
        noisy, state = update(gradient, state, batch)
        run.commit(state)
        return jax.block_until_ready(noisy)

    for _ in range(mechanism.steps):
        gradient = jax.block_until_ready(jnp.zeros(dimension, jnp.float32))
        began = clocks()
        handed, batch = timed(lambda: next(batches))
        # The row of the next step is made while the gradient of this one would be.
        if run._shipping is not None:
            run._shipping[1].result()
        seconds, noisy = timed(lambda: step(gradient, batch))
        seconds += handed
        seconds[1] = (clocks() - began)[1]
        expected.check(nothing, np.asarray(noisy), COHORT)
        yield seconds


def with_jax_privacy():
    """A compiled update of jax-privacy's privatizer for a buffered Toeplitz matrix; state and gradient donated, its best case."""
    import jax
    import jax.numpy as jnp
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import buffered_toeplitz

    buffers = int(file)
    if buffers == 0:
        privatizer = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))
        inverse = np.eye(1024)
    else:
        with jax.enable_x64(True):
            blt = buffered_toeplitz.optimize(n=1024, min_buffers=buffers, max_buffers=buffers)
            inverse = np.linalg.inv(np.asarray(blt.materialize(1024)))
            single = buffered_toeplitz.StreamingMatrixBuilder(
                output_scale=np.asarray(blt.output_scale, np.float32), buf_decay=np.asarray(blt.buf_decay, np.float32)
            )
        privatizer = noise_addition.matrix_factorization_privatizer(
            single.build_inverse(), stddev=1.0, prng_key=jax.random.key(0)
        )
    state = privatizer.init(jnp.zeros(dimension, jnp.float32))
    update = jax.jit(privatizer.update, donate_argnums=(0, 1))
    for step in range(1024):
        gradient = jax.block_until_ready(jnp.zeros(dimension, jnp.float32))
        seconds, (noisy, state) = timed(lambda: jax.block_until_ready(update(gradient, state)))
        check_variance(np.asarray(noisy), float((inverse[step] ** 2).sum()))
        yield seconds


def with_flower():
    """The noise of a round of dpmf.flower.PrivateFedAvg that nobody answers, through its journal. The strategy then moves the model
    and writes it to disk, as ever, and this is not timed: nor is it for the rival.
    """
    import dpmf
    import dpmf.flower

    mechanism = dpmf.Mechanism.load(file)
    with tempfile.TemporaryDirectory() as folder:
        from flwr.app import Array, ArrayRecord

        size = dict(clients=4000) if mechanism.sampling != "none" else dict(cohort=COHORT)
        strategy = dpmf.flower.PrivateFedAvg(mechanism, pathlib.Path(folder) / "run", arithmetic=arithmetic, **size)
        start = ArrayRecord({"weight": Array(np.zeros(dimension, np.float32))})
        run = dpmf.flower.Run(mechanism, strategy.directory, start, strategy.arithmetic, strategy.clients())
        run.clients.begin({f"{unit:04}" for unit in range(4000)}, run.key)
        run.follow()
        strategy._run = run
        expected = Expected(mechanism, run.key, run.private.run)
        private, released = run.private, []

        class Timed:
            """The run, of which what it released is kept."""

            def __getattr__(self, name):
                return getattr(private, name)

            def release(self, total, noisy):
                seconds, step = with_row(lambda: private.release(total, noisy), private)
                released[:] = [seconds, noisy.copy()]
                return step

        run.private = Timed()
        nothing = np.zeros(dimension, np.float32)
        while True:
            strategy.aggregate_train(1, [])
            expected.check(nothing, released[1], 1)
            yield released[0]


def with_flower_dp():
    """The noise of Flower's own strategy with clipping at the server."""
    from flwr.supercore.differential_privacy import add_gaussian_noise_inplace

    while True:
        values = np.zeros(dimension, np.float32)
        seconds, _ = timed(lambda: add_gaussian_noise_inplace([values], 1.0))
        check_variance(values, 1.0)
        yield seconds


steps = {
    "torch": with_torch,
    "torch-alone": lambda: with_torch(ahead=0),
    "opacus": with_opacus,
    "jax": with_jax,
    "jax-privacy": with_jax_privacy,
    "flower": with_flower,
    "flower-dp": with_flower_dp,
}[framework]()
# The first pays for compiling, and for pages and threads.
next(steps)
# Whatever a library prints goes elsewhere.
print("ready", flush=True)
for _ in sys.stdin:
    print(*next(steps), flush=True)
