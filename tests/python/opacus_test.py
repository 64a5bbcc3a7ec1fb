"""dpmf.opacus on the real Opacus."""

import contextlib
import functools
import gzip
import importlib.util
import json
import math
import pathlib
import sys
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")
opacus = pytest.importorskip("opacus", reason="Opacus is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.opacus  # noqa: E402
import dpmf.torch  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler  # noqa: E402
from watching import watch  # noqa: E402

pytestmark = [
    # Opacus 1.4 uses hooks that PyTorch 1.13 would rather not have.
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

COUNT, BATCH, STEPS = 44, 8, 6
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(COUNT, 5, generator=generator) * 3, torch.randint(3, (COUNT,), generator=generator)
    )


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


def sgd(model, **arguments):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **arguments})


def private(engine=None, model=None, loader=None, optimizer=None, **arguments):
    model = model or model_of()
    arguments = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 1, "max_grad_norm": 0.4, **arguments}
    return (engine or dpmf.opacus.PrivacyEngine()).make_private_with_epsilon(
        module=model,
        optimizer=optimizer or sgd(model),
        data_loader=DataLoader(data(), batch_size=BATCH, shuffle=True) if loader is None else loader,
        **arguments,
    )


def train(model, optimizer, loader):
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return flat(model.parameters())


def hand_out(optimizer, loader, count):
    """The first batch, taken for one of so many examples, which the test gives itself."""
    next(iter(loader))
    optimizer._noise.run.hand_out(0, count)


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def test_the_noise_is_the_streams():
    """A run with Opacus is a run with dpmf.torch on the same batches: other code for clipping, the same noise and draws."""
    key = dpmf.NoiseKey.from_seed(3)
    engine = dpmf.opacus.PrivacyEngine(key=key, experiment="twin")
    model, optimizer, loader = private(engine)
    result = train(model, optimizer, loader)

    twin = model_of()
    by_hand = dpmf.torch.PrivateOptimizer(
        sgd(twin), engine.mechanism, key=key, experiment="twin", denominator=optimizer.expected_batch_size
    )
    batches = dpmf.torch.SampledBatches(engine.plan.sampler(key, run="twin"))
    for inputs, targets in by_hand.batches(DataLoader(data(), batch_sampler=batches)):
        by_hand.accumulate(twin, cross_entropy, inputs, targets)
        by_hand.step()
    expected = flat(twin.parameters())
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert (expected - flat(model_of().parameters())).abs().max() > 0.05


def released(optimizer):
    """What the noise of the next step is added to."""
    run = watch(optimizer, quiet=True)
    optimizer.step()
    return run.given


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_one_example_moves_the_sum_by_at_most_the_clip(dtype):
    inputs, targets = (100 * data().tensors[0][:9], data().tensors[1][:9])
    moves = []
    for index in range(9):
        sums = []
        for weight in (1.0, 0.0):
            model, optimizer, loader = private()
            hand_out(optimizer, loader, 9)
            with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
                losses = cross_entropy(model(inputs), targets, reduction="none")
                (losses * torch.ones(9).index_fill(0, torch.tensor(index), weight)).mean().backward()
                sums.append(released(optimizer))
        # As real numbers.
        moves.append(sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(sums[0].tolist(), sums[1].tolist())))
    assert Fraction(0.4 * (1 - 1e-8)) ** 2 < max(moves) <= Fraction(0.4) ** 2


def test_the_engine_takes_an_arithmetic():
    key = dpmf.NoiseKey.from_seed(3)
    rows = {}
    for options in (dict(), dict(arithmetic="exact"), dict(arithmetic="float")):
        engine = dpmf.opacus.PrivacyEngine(key=key, experiment="arithmetic", seed=9, **options)
        _, optimizer, _ = private(engine)
        run = optimizer._noise.run
        assert run.arithmetic == options.get("arithmetic", "exact")
        assert ("Every bit" in str(optimizer.privacy)) == (run.arithmetic == "exact")
        run.denominator = 1
        run.contribute(0)
        optimizer._noise.release()
        rows[str(options)] = optimizer._noise.flat.numpy().tobytes()
    first, exact, single = rows.values()
    assert first == exact != single


def test_an_example_without_a_finite_gradient_counts_as_zero():
    model, optimizer, loader = private()
    hand_out(optimizer, loader, 2)
    inputs = torch.ones(2, 5)
    inputs[1] = float("nan")
    cross_entropy(model(inputs), torch.zeros(2).long()).backward()
    assert 0.1 < np.linalg.norm(released(optimizer)) <= 0.4


def test_several_backward_count_no_example_twice():
    """Opacus would clip both gradients of an example and add them up."""
    model, optimizer, loader = private()
    inputs, targets = next(iter(loader))
    for _ in range(2):
        cross_entropy(model(inputs), targets).backward()
    with pytest.raises(ValueError, match=r"zero_grad\(\) before the backward\(\) of each batch"):
        optimizer.step()
    optimizer.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    assert optimizer.next_step == 1


def test_what_was_frozen_or_joins_moves_only_with_noise():
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    wrapped, private_optimizer, loader = private(model=model, optimizer=optimizer)
    batches = iter(loader)
    before = [flat(layer.parameters()) for layer in (model[0], model[2])]
    train(wrapped, private_optimizer, [next(batches)])
    after = [flat(layer.parameters()) for layer in (model[0], model[2])]
    assert torch.equal(before[0], after[0]) and (before[1] != after[1]).float().mean() > 0.5
    # A layer that Opacus has no hooks in has gradients of backward() only.
    model[0].requires_grad_(True)
    second = next(batches)
    with pytest.raises(ValueError, match="frozen when the engine made the module private"):
        train(wrapped, private_optimizer, [second])
    model[0].requires_grad_(False)
    # Frozen between backward() and step(): its .grad is there, and not clipped.
    private_optimizer.zero_grad()
    cross_entropy(wrapped(second[0]), second[1]).backward()
    model[2].weight.requires_grad_(False)
    kept = model[2].weight.detach().clone()
    private_optimizer.step()
    assert torch.equal(model[2].weight, kept)
    model[2].requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters are frozen"):
        private_optimizer.step()
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": torch.nn.Linear(1, 1).parameters()})
    with pytest.raises(ValueError, match="2 are new"):
        train(wrapped, private_optimizer, [next(batches)])
    assert private_optimizer.next_step == 2


def test_it_plans_for_the_optimizer():
    engine = dpmf.opacus.PrivacyEngine()
    model = model_of()
    private(engine, model, optimizer=sgd(model, weight_decay=0.01, nesterov=True), schedule="cooldown:0.5:0.1")
    workload = engine.mechanism.workload
    assert (workload.steps, workload.momentum, workload.nesterov) == (STEPS, 0.9, True)
    assert (workload.weight_decay, workload.coupled) == (0.01, True)
    np.testing.assert_allclose(workload.learning_rates[[0, -1]], [0.1, 0.01])
    assert engine.mechanism.privacy.unit == "record"
    assert engine.mechanism.privacy.clip == 0.4


def test_accounting_is_the_mechanisms():
    engine = dpmf.opacus.PrivacyEngine()
    model, optimizer, loader = private(engine)
    assert engine.get_epsilon(1e-5) == 0.0, "nothing was released"
    train(model, optimizer, loader)
    assert len(engine.accountant) == STEPS
    assert engine.get_epsilon(1e-5) == pytest.approx(2.0, rel=1e-9)
    assert 2.0 < engine.get_epsilon(1e-7) < 4.0
    # Without sampling, that of one Gaussian mechanism.
    engine = dpmf.opacus.PrivacyEngine()
    train(*private(engine, poisson_sampling=False))
    noise = engine.mechanism.privacy.noise_multiplier
    assert engine.get_epsilon(1e-7) == dpmf.account(noise, 1e-7)["epsilon_exact"] > 2.0


def indices(loader):
    """The examples of each batch, by their inputs."""
    place = {tuple(inputs.tolist()): index for index, inputs in enumerate(data().tensors[0])}
    return [[place[tuple(one.tolist())] for one in inputs] for inputs, _ in loader]


def test_the_data_comes_once():
    """A mechanism for one participation."""
    mechanism, model = dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=2, delta=1e-5), model_of()
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    *_, loader = dpmf.opacus.PrivacyEngine().make_private(
        module=model, optimizer=sgd(model), data_loader=loader, mechanism=mechanism
    )
    assert len(loader) == STEPS
    seen = sum(indices(loader), [])
    assert sorted(seen) == list(range(COUNT)) != seen
    with pytest.raises(dpmf.MismatchError, match="second pass"):
        next(iter(loader))


# Several epochs


EPOCHS = 3
SAMPLINGS = {"sampled": True, "none": False}


@pytest.mark.parametrize("poisson_sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_epochs_stays_as_it_is(poisson_sampling, workers, caplog):
    """Each loop is an epoch and goes on where the last ended; the plan is for all of them, and is told of in one line."""
    engine = dpmf.opacus.PrivacyEngine()
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True, num_workers=workers)
    with caplog.at_level("INFO", logger="dpmf"):
        model, optimizer, loader = private(engine, loader=loader, epochs=EPOCHS, poisson_sampling=poisson_sampling)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "dpmf" and "planning" not in record.getMessage()]
    plan = engine.plan
    better = plan.dp_sgd["rmse"] / plan.rmse
    assert plan.mechanism == engine.mechanism and plan.epochs == EPOCHS
    for part in (plan.chosen["mechanism"], f"sampling {plan.sampling}", f"{better:.2f} times less error than DP-SGD"):
        assert part in line
    assert "\n" not in line and (plan.sampling == "none") == (not poisson_sampling)
    assert optimizer.expected_batch_size == COUNT // STEPS

    epochs, place = [], {tuple(inputs.tolist()): index for index, inputs in enumerate(data().tensors[0])}
    for epoch in range(EPOCHS):
        assert len(loader) == plan.steps // EPOCHS == STEPS
        epochs.append([])
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            epochs[-1].append([place[tuple(one.tolist())] for one in inputs])
        assert optimizer.next_step == STEPS * (epoch + 1) == len(engine.accountant)
        assert engine.get_epsilon(1e-5) == pytest.approx(2.0, rel=1e-9)
    # Each example once in every epoch: in a batch that is drawn again where bins are reshuffled, and otherwise always at the same place.
    assert all(sorted(sum(epoch, [])) == list(range(COUNT)) for epoch in epochs)
    assert (epochs[0] == epochs[1] == epochs[2]) == (not plan.sampling.startswith("reshuffled-bins"))
    if not poisson_sampling:
        assert {len(batch) for batch in epochs[0]} == {7, 8}
    with pytest.raises(dpmf.MismatchError, match="all 18 steps were drawn.*more epochs"):
        next(iter(loader))
    assert optimizer.next_step == STEPS * EPOCHS


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_at_a_batch_and_a_loop_that_ends_early(workers):
    """A batch belongs to its step: who looks at it, or leaves it, does not move what comes."""
    key = dpmf.NoiseKey.from_seed(3)
    loader = DataLoader(data(), batch_size=BATCH, num_workers=workers)
    results = []
    for curious in (False, True):
        engine = dpmf.opacus.PrivacyEngine(key=key, experiment="curious")
        model, optimizer, batches = private(engine, loader=loader, epochs=EPOCHS)
        if curious:
            first = next(iter(batches))
            for _ in range(2):
                for inputs, _ in batches:
                    assert torch.equal(inputs, first[0])
                    break  # before any step
            train(model, optimizer, [next(iter(batches))])
            assert optimizer.next_step == 1 and len(batches) == STEPS
        for _ in range(EPOCHS):
            results.append(train(model, optimizer, batches))
        assert optimizer.next_step == STEPS * EPOCHS
    assert torch.equal(results[EPOCHS - 1], results[-1])


def test_batches_in_another_order_are_refused():
    model, optimizer, loader = private(epochs=EPOCHS)
    batches = iter(loader)
    next(batches)
    with pytest.raises(dpmf.MismatchError, match="drawn for step 1, but this is step 0.*begins with the coming step"):
        train(model, optimizer, [next(batches)])
    kept = list(loader)
    with pytest.raises(dpmf.MismatchError, match="drawn for step 5, but this is step 0"):
        train(model, optimizer, kept)
    assert optimizer.next_step == 0
    optimizer.zero_grad()
    train(model, optimizer, loader)
    assert optimizer.next_step == STEPS


def test_clips_for_every_parameter():
    """Each is clipped by itself; an example moves the sum by at most the root of the sum of their squares."""
    clips = [0.1, 0.2, 0.3, 0.4]
    engine = dpmf.opacus.PrivacyEngine()
    model, optimizer, loader = private(engine, max_grad_norm=clips, clipping="per_layer")
    joint = sum(Fraction(clip) ** 2 for clip in clips)
    assert joint <= Fraction(engine.mechanism.privacy.clip) ** 2 <= joint * Fraction(1 + 1e-12)
    hand_out(optimizer, loader, 1)
    cross_entropy(model(torch.full((1, 5), 1e4)), torch.zeros(1).long()).backward()
    norms = [float(p.grad_sample.norm()) for p in model.parameters()]
    given, start = released(optimizer), 0
    for p, clip, norm in zip(model.parameters(), clips, norms):
        part = given[start : start + p.numel()]
        start += p.numel()
        assert np.linalg.norm(part) == pytest.approx(min(clip, norm), rel=1e-6)
    assert any(norm > clip for norm, clip in zip(norms, clips))
    assert sum(Fraction(value) ** 2 for value in given.tolist()) <= Fraction(engine.mechanism.privacy.clip) ** 2
    with pytest.raises(ValueError, match="3 clips for 4 parameters"):
        private(max_grad_norm=clips[:3], clipping="per_layer")
    with pytest.raises(ValueError, match="positive and finite"):
        private(max_grad_norm=[0.1, 0.0, 0.1, 0.1], clipping="per_layer")
    for wrong in (dict(max_grad_norm=clips), dict(clipping="per_layer")):
        with pytest.raises(ValueError, match="flat clipping needs one norm for all parameters, and per_layer a list"):
            private(**wrong)
    with pytest.raises(ValueError, match="fixed for the run"):
        private(clipping="adaptive")


def test_a_noise_multiplier_is_an_epsilon():
    def call(**arguments):
        model, engine = model_of(), dpmf.opacus.PrivacyEngine()
        loader = DataLoader(data(), batch_size=BATCH)
        engine.make_private(
            module=model, optimizer=sgd(model), data_loader=loader, noise_multiplier=1.2, max_grad_norm=1.0, **arguments
        )
        return engine

    for wrong in (dict(), dict(epochs=3), dict(target_delta=1e-5), dict(poisson_sampling=True)):
        with pytest.raises(ValueError, match=r"noise_multiplier=1\.2 .*call make_private_with_epsilon.*target_delta"):
            call(**wrong)
    engine = call(epochs=EPOCHS, target_delta=1e-5)
    spent = dpmf.poisson_epsilon(1.2, 1 / STEPS, STEPS * EPOCHS, 1e-5)[0]
    assert engine.plan.statement.epsilon == spent and engine.plan.statement.clip == 1.0
    # The planner's DP-SGD has that ε too; it draws batches of 8 on average, of 44, and Opacus a sixth of the data.
    noise = engine.plan.dp_sgd["noise_multiplier"]
    assert dpmf.poisson_epsilon(noise, engine.plan.batch / COUNT, STEPS * EPOCHS, 1e-5)[0] == pytest.approx(spent, rel=1e-3)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
def test_adaptive_optimizers_are_planned_for(name):
    engine, model = dpmf.opacus.PrivacyEngine(), model_of()
    wrapped, optimizer, loader = private(
        engine, model, optimizer=getattr(torch.optim, name)(model.parameters(), lr=0.01), epochs=2
    )
    workload = engine.mechanism.workload
    assert workload.is_prefix_sum and workload.steps == 2 * STEPS
    before = flat(model.parameters())
    for _ in range(2):
        train(wrapped, optimizer, loader)
    assert optimizer.next_step == 2 * STEPS and not torch.equal(before, flat(model.parameters()))


def test_batches_in_parts():
    """Opacus' BatchMemoryManager: logical batches of 8 in physical ones of 3, one row of noise each."""
    key = dpmf.NoiseKey.from_seed(3)
    results = []
    for split in (False, True):
        engine = dpmf.opacus.PrivacyEngine(key=key, experiment="parts", seed=9)
        model, optimizer, loader = private(engine, epochs=2)
        for epoch in (1, 2):
            if split:
                with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
                    assert len(parts) > 2 * STEPS
                    if epoch == 2:  # a loop that ends within a batch leaves nothing of it behind
                        train(model, optimizer, [next(iter(parts))])
                    results.append(train(model, optimizer, parts))
            else:
                results.append(train(model, optimizer, loader))
            assert optimizer.next_step == STEPS * epoch
    torch.testing.assert_close(results[1], results[3], rtol=0, atol=1e-5)


def test_batches_in_parts_by_workers():
    """They draw ahead, and nobody counts what is taken from a loader that Opacus makes."""
    model, optimizer, loader = private(loader=DataLoader(data(), batch_size=BATCH, num_workers=1))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        with pytest.raises(dpmf.MismatchError, match="num_workers=0 with BatchMemoryManager"):
            train(model, optimizer, parts)
    assert optimizer.next_step == 0


MADE = {
    # A mechanism by name, and how its data is sampled.
    "banded, cyclic Poisson": ("banded-toeplitz:bands=2", "cyclic-poisson:2:0.36"),
    "banded, balls in bins": ("banded:bands=2", "balls-in-bins:6"),
    "banded, reshuffled bins": ("banded:bands=2", "reshuffled-bins:6"),
    "banded inverse, balls in bins": ("banded-inverse:bands=2", "balls-in-bins:6"),
    "recall, epochs without sampling": ("recall:buffers=2:recalls=2", "none"),
    "as planned: blt, balls in bins": (None, None),
    "as planned, without sampling": (None, "none"),
}


@functools.lru_cache(maxsize=None)
def mechanism_of(name):
    kind, sampling = MADE[name]
    if kind is None:
        return None
    participation = "single" if sampling.startswith("cyclic") else f"epochs:{EPOCHS}"
    made = dpmf.make_mechanism(dpmf.Workload.sgd(STEPS * EPOCHS, momentum=0.9), kind, participation=participation)
    made = made if sampling == "none" else made.with_sampling(sampling)
    return made.calibrate(2.0, 1e-5, 0.4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", MADE)
def test_checkpoints_of_the_engine(name, workers, tmp_path):
    """Opacus' save_checkpoint and load_checkpoint in the middle of an epoch, and a crash after it: the same script goes on, and
    the bits are those of a run that was never interrupted."""
    key = dpmf.NoiseKey.from_seed(6)
    _, sampling = MADE[name]

    def begin(journal, seed=0):
        model, mechanism = model_of(seed), mechanism_of(name)
        loader = DataLoader(data(), batch_size=BATCH, shuffle=True, num_workers=workers)
        engine = dpmf.opacus.PrivacyEngine(
            key=key, experiment="resumed", journal=journal and tmp_path / journal, seed=None if journal else 9
        )
        if mechanism is None:
            arguments = dict(epochs=EPOCHS, poisson_sampling=sampling != "none")
            made = private(engine, model, loader, **arguments)
            assert sampling == "none" or engine.plan.sampling in ("balls-in-bins:6", "reshuffled-bins:6")
            return engine, *made
        epochs = EPOCHS if sampling.startswith("cyclic") else None
        made = engine.make_private(module=model, optimizer=sgd(model), data_loader=loader, mechanism=mechanism, epochs=epochs)
        return engine, *made

    first, model, optimizer, loader = begin("journal")
    started = loader.batch_sampler.order
    train(model, optimizer, loader)
    for step, batch in enumerate(loader):
        train(model, optimizer, [batch])
        if step == 1:
            first.save_checkpoint(path=tmp_path / "state.pt", module=model, optimizer=optimizer)
        if step == 3:
            break  # what came after the checkpoint is lost but for the journal
    optimizer.close()

    second, model, optimizer, loader = begin("journal", seed=5)
    with pytest.raises(ValueError, match="belongs to a run that has begun"):
        next(iter(loader))
    second.load_checkpoint(path=tmp_path / "state.pt", module=model, optimizer=optimizer)
    assert optimizer.next_step == STEPS + 2 == len(second.accountant) and len(loader) == STEPS - 2
    result = train(model, optimizer, loader)
    assert optimizer.next_step == 2 * STEPS and len(loader) == STEPS
    result = train(model, optimizer, loader)
    assert optimizer.next_step == EPOCHS * STEPS

    _, model, optimizer, loader = begin(None)
    if isinstance(loader.batch_sampler, dpmf.torch.Cohorts):
        loader.batch_sampler.seed = started["seed"]
    for _ in range(EPOCHS):
        expected = train(model, optimizer, loader)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_single_pass_is_resumed(by_hand, tmp_path):
    """A mechanism for one participation: the order of the data comes from the state, or from who made the cohorts."""
    key, mechanism = dpmf.NoiseKey.from_seed(6), dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=2, delta=1e-5)

    def begin(journal, seed=None, start=None, model_seed=0):
        engine = dpmf.opacus.PrivacyEngine(key=key, experiment="once", journal=journal and tmp_path / journal, seed=seed)
        model, loader = model_of(model_seed), DataLoader(data(), batch_size=BATCH, shuffle=True)
        if start is not None:
            loader = DataLoader(data(), batch_sampler=dpmf.torch.Cohorts(COUNT, BATCH, seed=seed, start=start))
        made = engine.make_private(module=model, optimizer=sgd(model), data_loader=loader, mechanism=mechanism)
        return engine, *made

    engine, model, optimizer, loader = begin("journal", seed=9)
    batches = iter(loader)
    for _ in range(2):
        train(model, optimizer, [next(batches)])
    engine.save_checkpoint(path=tmp_path / "state.pt", module=model, optimizer=optimizer)
    optimizer.close()
    arguments = dict(seed=9, start=2) if by_hand else {}
    engine, model, optimizer, loader = begin("journal", model_seed=5, **arguments)
    engine.load_checkpoint(path=tmp_path / "state.pt", module=model, optimizer=optimizer)
    assert optimizer.next_step == 2 and len(loader) == STEPS - 2
    assert torch.equal(train(model, optimizer, loader), train(*begin(None, seed=9)[1:]))
    with pytest.raises(dpmf.MismatchError, match="second pass"):
        next(iter(loader))


def test_a_run_goes_on_with_its_own_data(tmp_path):
    key = dpmf.NoiseKey.from_seed(6)

    def engine(**arguments):
        return dpmf.opacus.PrivacyEngine(key=key, experiment="order", journal=tmp_path / "journal", **arguments)

    mechanism = mechanism_of("recall, epochs without sampling")

    def begin(seed):
        model, one = model_of(), engine()
        loader = DataLoader(data(), batch_sampler=dpmf.torch.Cohorts(COUNT, BATCH, epochs=EPOCHS, seed=seed))
        return one.make_private(module=model, optimizer=sgd(model), data_loader=loader, mechanism=mechanism)

    model, optimizer, loader = begin(seed=1)
    train(model, optimizer, loader)
    state = optimizer.state_dict()
    optimizer.close()
    _, optimizer, loader = begin(seed=2)
    with pytest.raises(dpmf.MismatchError, match="seed 2.*but the run began with.*seed 1"):
        optimizer.load_state_dict(state)
    _, optimizer, loader = begin(seed=1)
    optimizer.load_state_dict(state)
    assert optimizer.next_step == STEPS and len(loader) == STEPS


# What newcomers get wrong


def test_poisson_sampling():
    mechanism, model = dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=2, delta=1e-5), model_of()
    arguments = dict(module=model, optimizer=sgd(model), mechanism=mechanism)
    with pytest.raises(dpmf.MismatchError, match="poisson_sampling=False"):
        dpmf.opacus.PrivacyEngine().make_private(
            data_loader=DataLoader(data(), batch_size=BATCH), poisson_sampling=True, **arguments
        )
    loader = opacus.data_loader.DPDataLoader.from_data_loader(DataLoader(data(), batch_size=BATCH))
    with pytest.raises(dpmf.MismatchError, match="Poisson sampling may draw the same example in any number of steps"):
        dpmf.opacus.PrivacyEngine().make_private(data_loader=loader, **arguments)
    with pytest.raises(dpmf.MismatchError, match="batch sampler of its own, but the plan decides how to draw"):
        private(loader=loader)


def test_several_epochs():
    mechanism, model = dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=2, delta=1e-5), model_of()
    arguments = dict(module=model, optimizer=sgd(model), data_loader=DataLoader(data(), batch_size=BATCH))
    with pytest.raises(dpmf.MismatchError, match="in 3 epochs each example takes part in 3 steps"):
        dpmf.opacus.PrivacyEngine().make_private(mechanism=mechanism, epochs=3, **arguments)
    with pytest.raises(dpmf.MismatchError, match="epochs is 2, but the mechanism was planned for 3"):
        dpmf.opacus.PrivacyEngine().make_private(
            mechanism=mechanism_of("recall, epochs without sampling"), epochs=2, **arguments
        )


def test_other_samplers():
    for sampler in (RandomSampler(data(), replacement=True), WeightedRandomSampler([1.0] * COUNT, COUNT)):
        with pytest.raises(dpmf.MismatchError, match="RandomSampler, but the plan decides how to draw"):
            private(loader=DataLoader(data(), batch_size=BATCH, sampler=sampler))
    part = DataLoader(data(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * COUNT, 16, replacement=False))
    with pytest.raises(dpmf.MismatchError, match="Subset"):
        private(loader=part)


def test_a_mechanism_for_another_optimizer():
    mechanism = dpmf.mechanism(steps=STEPS, momentum=0.5, epsilon=2, delta=1e-5)
    model = model_of()
    arguments = dict(module=model, data_loader=DataLoader(data(), batch_size=BATCH), mechanism=mechanism)
    with pytest.raises(dpmf.MismatchError, match=r"plan with momentum=0\.9"):
        dpmf.opacus.PrivacyEngine().make_private(optimizer=sgd(model), **arguments)
    with pytest.raises(dpmf.MismatchError, match="check=False"):
        dpmf.opacus.PrivacyEngine().make_private(optimizer=torch.optim.Adam(model.parameters()), **arguments)


def test_more_batches_than_steps():
    mechanism = dpmf.mechanism(steps=STEPS - 1, momentum=0.9, epsilon=2, delta=1e-5)
    model = model_of()
    with pytest.raises(dpmf.MismatchError, match=f"plan with steps={STEPS}"):
        dpmf.opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(data(), batch_size=BATCH),
            mechanism=mechanism,
        )


def test_one_step_too_many():
    model, optimizer, loader = private()
    train(model, optimizer, loader)
    with pytest.raises(dpmf.MismatchError, match=f"stop after step {STEPS}"):
        train(model, optimizer, [(torch.zeros(2, 5), torch.zeros(2).long())])


def test_a_schedule_that_was_not_planned():
    model, optimizer, loader = private()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    batches = iter(loader)
    train(model, optimizer, [next(batches)])
    scheduler.step()
    with pytest.raises(dpmf.MismatchError, match="schedule"):
        train(model, optimizer, [next(batches)])
    assert optimizer.next_step == 1


def test_gradients_used_twice():
    model, optimizer, loader = private()
    batches = iter(loader)
    train(model, optimizer, [next(batches)])
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()
    assert optimizer.next_step == 1


def test_batches_from_another_loader():
    """The loader that was given, instead of the one that make_private returns: nobody counts its passes."""
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    model, optimizer, returned = private(loader=loader)
    with pytest.raises(dpmf.MismatchError, match="train on the data loader that make_private returned"):
        train(model, optimizer, loader)
    assert optimizer.next_step == 0
    optimizer.zero_grad()
    train(model, optimizer, returned)


def test_a_statement_for_users():
    mechanism = dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=2, delta=1e-5, unit="user")
    model = model_of()
    with pytest.raises(dpmf.MismatchError, match='here every record is clipped: plan with unit="record"'):
        dpmf.opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(data(), batch_size=BATCH),
            mechanism=mechanism,
        )


def test_names_of_runs():
    with pytest.raises(ValueError, match="the same noise at every start"):
        private(dpmf.opacus.PrivacyEngine(key=dpmf.NoiseKey.generate(), experiment="a"))


@pytest.mark.skipif(not hasattr(torch.optim.Optimizer, "register_step_post_hook"), reason="PyTorch 1 has no such hooks")
def test_hooks_of_an_optimizer():
    model, optimizer, loader = private()
    steps = []
    optimizer.register_step_post_hook(lambda self, *_: steps.append(self.next_step))
    train(model, optimizer, loader)
    assert steps == list(range(1, STEPS + 1))


def test_what_opacus_engine_takes():
    """Accountants and secure_mode change nothing: the mechanism has its own accounting."""
    for accountant in ("prv", "rdp", "gdp"):
        engine = dpmf.opacus.PrivacyEngine(accountant=accountant, secure_mode=False)
        assert engine.mechanism is None and engine.plan is None
    with pytest.raises(ValueError, match="accountant is 'mine'.*prv, rdp or gdp"):
        dpmf.opacus.PrivacyEngine(accountant="mine")
    with pytest.raises(ValueError, match="no meaning with correlated noise"):
        private(noise_multiplier=1.1)
    # What is off, and what is only about accountants.
    private(noise_generator=None, normalize_clipping=False, alphas=[2, 3], eps_error=0.01, batch_first=True, loss_reduction="sum")
    for wrong, match in [
        (dict(normalize_clipping=True), "divide the learning rate by max_grad_norm"),
        (dict(total_steps=18), "pass epochs"),
        (dict(grad_sample_mode="ghost_fsdp"), "hooks, functorch or ghost"),
        (dict(grad_sample_mode="ghost", batch_first=False), "batch_first=True"),
        (dict(criterion=torch.nn.CrossEntropyLoss()), 'only grad_sample_mode="ghost"'),
        (dict(max_grad_norm=-1.0), "clip"),
    ]:
        with pytest.raises(ValueError, match=match):
            private(**wrong)
    iterable = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self: iter(data())})()
    with pytest.raises(dpmf.MismatchError, match="IterableDataset"):
        private(loader=DataLoader(iterable, batch_size=BATCH))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("poisson_sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("batch", [8, 9, 10, 13, 44])
def test_steps_and_denominator_are_those_of_opacus(batch, poisson_sampling, drop_last):
    def made(engine):
        model = model_of()
        loader = DataLoader(data(), batch_size=batch, shuffle=not poisson_sampling, drop_last=drop_last)
        budget = dict(target_epsilon=2.0, target_delta=1e-5, epochs=EPOCHS, max_grad_norm=0.4)
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=sgd(model), data_loader=loader, poisson_sampling=poisson_sampling, **budget
        )
        return len(loader), optimizer.expected_batch_size

    assert made(dpmf.opacus.PrivacyEngine()) == made(opacus.PrivacyEngine())


def test_arguments_that_nobody_knows():
    for wrong, near in (("poison_sampling", "poisson_sampling"), ("grad_sample_modus", "grad_sample_mode")):
        for value in (False, None, 3):
            with pytest.raises(ValueError, match=f"{wrong} is not an argument of the engine: did you mean {near}"):
                private(**{wrong: value})
    with pytest.raises(ValueError, match="xyz is not an argument of the engine: leave it out"):
        private(xyz=None)


@pytest.mark.skipif(not hasattr(opacus.grad_sample.grad_sample_module, "GradSampleHooks"), reason="Opacus has it since 1.6")
def test_a_model_that_is_not_wrapped():
    """Hooks on the model itself: the same bits as with a wrapper, and the checks of a wrapper."""
    states = []
    for wrap_model in (True, False):
        engine = dpmf.opacus.PrivacyEngine(key=dpmf.NoiseKey.from_seed(3), experiment="wrapped")
        model = model_of()
        hooks, optimizer, loader = private(engine, model, wrap_model=wrap_model)
        assert isinstance(hooks, torch.nn.Module) == wrap_model
        train(model if not wrap_model else hooks, optimizer, loader)
        states.append(flat(model.parameters()))
    assert torch.equal(*states)

    class Sorted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = torch.nn.Linear(5, 3)

        def forward(self, inputs):
            return self.inside(inputs[inputs[:, 0].argsort()])

    model = Sorted()
    _, optimizer, loader = private(model=model, wrap_model=False)
    with pytest.raises(dpmf.MismatchError, match="sorts, shuffles or mixes"):
        train(model, optimizer, loader)
    wrapped, *_ = private()
    with pytest.raises(ValueError, match="wrap_model is False, but the module is wrapped"):
        private(model=wrapped, wrap_model=False)


def test_opacus_own_parameters():
    model = model_of()
    arguments = dict(module=model, optimizer=sgd(model), data_loader=DataLoader(data(), batch_size=BATCH))
    with pytest.raises(ValueError, match="make_private_with_epsilon"):
        dpmf.opacus.PrivacyEngine().make_private(noise_multiplier=1.0, max_grad_norm=1.0, **arguments)
    with pytest.raises(ValueError, match="make_private_with_epsilon"):
        dpmf.opacus.PrivacyEngine().make_private(**arguments)
    with pytest.raises(ValueError, match="noise_generator"):
        private(noise_generator=torch.Generator())
    model, optimizer, loader = private()
    optimizer.noise_multiplier /= 2
    with pytest.raises(dpmf.MismatchError, match="schedulers of noise"):
        train(model, optimizer, loader)


def test_half_precision():
    model = model_of().half()
    with pytest.raises(TypeError, match=r"model\.float\(\)"):
        private(model=model)


def test_one_engine_for_one_run():
    engine = dpmf.opacus.PrivacyEngine()
    private(engine)
    with pytest.raises(ValueError, match="new engine"):
        private(engine)


# The examples


@pytest.fixture
def images(tmp_path):
    """Images made up here, in the format of the data set."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 320), ("t10k", 200)):
        labels = generator.integers(10, size=count, dtype=np.uint8)
        pictures = generator.integers(80, size=(count, 28, 28), dtype=np.uint8)
        pictures[np.arange(count), 2 * labels] = 255  # a bright line whose height is the class
        for name, header, array in (("images-idx3", 16, pictures), ("labels-idx1", 8, labels)):
            (tmp_path / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(bytes(header) + array.tobytes(), 1))
    return tmp_path


def test_the_example_runs_with_either_engine(images, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("fashion_mnist", EXAMPLES / "fashion_mnist.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for engine in ("opacus", "dpmf"):
        arguments = ["--engine", engine, "--epsilon", "3", "--lr", "0.1", "--batch-size", "16", "--epochs", "2"]
        monkeypatch.setattr(sys, "argv", ["fashion_mnist.py", *arguments, "--data", str(images)])
        example.main()
        result = json.loads(capsys.readouterr().out)
        assert result["engine"] == engine and result["spent"] == pytest.approx(3, rel=0.01)
        assert 0.0 <= result["accuracy"] <= 1.0


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
def test_the_script_for_opacus_changes_in_one_line(images, monkeypatch, capsys):
    """examples/python/opacus_mnist.py, and the same with the import of Opacus."""
    ours = (EXAMPLES / "opacus_mnist.py").read_text()
    line = "from dpmf.opacus import PrivacyEngine\n"
    body = ours.split('"""\n', 1)[1]
    assert body.count(line) == 1 and body.count("dpmf") == 1
    theirs = body.replace(line, "from opacus import PrivacyEngine\n")
    for script in (body, theirs):
        arguments = ["--epochs", "2", "--batch-size", "16", "--data", str(images)]
        monkeypatch.setattr(sys, "argv", ["opacus_mnist.py", *arguments])
        exec(compile(script, "opacus_mnist.py", "exec"), {"__name__": "__main__", "__file__": str(EXAMPLES / "x.py"), "__doc__": ""})
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 2 and all(text.startswith(f"epoch {epoch}: loss ") for epoch, text in enumerate(printed, 1))
        assert float(printed[-1].partition("ε = ")[2].partition(",")[0]) == pytest.approx(3, rel=0.01)


def test_a_plan_with_its_sampler():
    """Few examples a batch, and none in some: what is released is that of dpmf.torch."""
    made = dpmf.make_mechanism(dpmf.Workload.sgd(STEPS, momentum=0.9), "banded-toeplitz:bands=2")
    mechanism = made.with_sampling("cyclic-poisson:2:0.05").calibrate(2.0, 1e-5, 0.4)
    key = dpmf.NoiseKey.from_seed(4)
    examples = data()

    def loader(sampling=mechanism.sampling):
        sampler = dpmf.Sampler(sampling, key, units=COUNT, steps=STEPS, run="test")
        batches = dpmf.torch.SampledBatches(sampler)
        return DataLoader(examples, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(examples))

    def made_private(loader, **arguments):
        model = model_of()
        engine = dpmf.opacus.PrivacyEngine(key=key, experiment="test")
        made = engine.make_private(module=model, optimizer=sgd(model), data_loader=loader, mechanism=mechanism, **arguments)
        return engine, *made

    for wrong in (loader("cyclic-poisson:2:0.1"), loader("balls-in-bins:2")):
        with pytest.raises(dpmf.MismatchError, match="relies on sampling cyclic-poisson:2:0.05"):
            made_private(wrong)
    with pytest.raises(dpmf.MismatchError, match="batches of 8, but the mechanism draws 1.1 examples a step"):
        made_private(DataLoader(examples, batch_size=BATCH))
    with pytest.raises(dpmf.MismatchError, match="not sampled, but .*relies on sampling"):
        made_private(loader(), poisson_sampling=False)
    with pytest.raises(dpmf.MismatchError, match="not sampled"):
        dpmf.opacus.CorrelatedOptimizer(sgd(model_of()), mechanism, expected_batch_size=8)

    reference = model_of()
    plain = dpmf.torch.PrivateOptimizer(sgd(reference), mechanism, key=key, experiment="test")
    sizes = []
    for inputs, targets in plain.batches(loader()):
        sizes.append(len(inputs))
        plain.accumulate(reference, cross_entropy, inputs, targets)
        plain.step()
    assert 0 in sizes and any(sizes)

    engine, model, optimizer, batches = made_private(loader())
    assert optimizer.expected_batch_size == plain.denominator == pytest.approx(1.1)
    train(model, optimizer, batches)
    assert torch.allclose(flat(model.parameters()), flat(reference.parameters()), atol=1e-5)
    assert engine.get_epsilon(1e-5) == 2.0 and engine.get_epsilon(1e-6) > 2.0


# Ghost clipping

ghosts = pytest.mark.skipif(dpmf._opacus_ghost.OpacusCriterion is object, reason="this Opacus has no ghost clipping")


def test_ghost_clipping_needs_its_criterion_of_opacus(monkeypatch):
    monkeypatch.setattr(dpmf._opacus_ghost, "OpacusCriterion", object)
    with pytest.raises(ValueError, match="needs Opacus 1.5"):
        private(grad_sample_mode="ghost")


@ghosts
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ghost_clipping_trains_as_hooks_do(reduction):
    """Called as in Opacus, which returns a criterion too; with large batches in parts as well."""
    key, results = dpmf.NoiseKey.from_seed(3), []
    for mode in ("hooks", "ghost", "parts"):
        engine = dpmf.opacus.PrivacyEngine(key=key, experiment="ghosts")
        given = dict(loss_reduction=reduction)
        if mode != "hooks":
            given.update(grad_sample_mode="ghost", criterion=torch.nn.CrossEntropyLoss(reduction=reduction))
        model, optimizer, *criterion, loader = private(engine, **given)
        criterion = criterion[0] if criterion else torch.nn.CrossEntropyLoss(reduction=reduction)
        parts = BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer)
        with parts if mode == "parts" else contextlib.nullcontext(loader) as batches:
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss = criterion(model(inputs), targets)
                loss.backward()
                optimizer.step()
        assert optimizer.next_step == STEPS and math.isfinite(loss.item())
        assert not any(part._forward_hooks for part in model._module.modules()) or mode == "hooks"
        results.append(flat(model.parameters()))
    assert (results[0] - flat(model_of().parameters())).abs().max() > 0.02
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=2e-6 * (1 if reduction == "mean" else BATCH))


def ghost_engine():
    return dpmf.opacus.PrivacyEngine(key=dpmf.NoiseKey.from_seed(3), experiment="ghosts")


@ghosts
def test_losses_of_examples_are_scaled_and_added_like_losses():
    model, optimizer, criterion, loader = private(ghost_engine(), grad_sample_mode="ghost")
    inputs, targets = next(iter(loader))
    outputs = model(inputs)
    loss = criterion(outputs, targets)
    once = cross_entropy(outputs, targets).item()
    mixed = 1.0 - (2 * loss + loss / 2 - 0.25 * loss)
    assert mixed.item() == pytest.approx(1.0 - 2.25 * once, rel=1e-5) and repr(loss).startswith("ExampleLosses(")
    assert mixed.detach().item() == mixed.item()


@ghosts
def test_ghost_clipping_refuses_what_would_count_twice_or_not_at_all():
    model, optimizer, criterion, loader = private(ghost_engine(), grad_sample_mode="ghost")
    inputs, targets = next(iter(loader))
    with pytest.raises(ValueError, match=r"backward\(\) was not called"):
        optimizer.step()
    loss = criterion(model(inputs), targets)
    loss.backward()
    with pytest.raises(ValueError, match="without a forward pass"):
        loss.backward()
    with pytest.raises(ValueError, match=r"backward\(\) was called several times"):
        criterion(model(inputs), targets).backward()
    optimizer.zero_grad()
    first = criterion(model(inputs), targets)
    model(inputs)
    with pytest.raises(ValueError, match="last forward pass"):
        first.backward()
    with pytest.raises(ValueError, match="losses for"):
        criterion(model(inputs)[:3], targets[:3]).backward()
    optimizer.zero_grad()
    criterion(model(inputs), targets).backward()
    released(optimizer)
    assert optimizer.next_step == 1


class Sorted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.layer(x[order])[order.argsort()]


@ghosts
def test_ghost_clipping_refuses_modules_that_mix_examples():
    model, *_, loader = private(ghost_engine(), model=Sorted(), grad_sample_mode="ghost")
    with pytest.raises(dpmf.MismatchError, match="sorts, shuffles or mixes"):
        for inputs, _ in loader:
            model(inputs)
