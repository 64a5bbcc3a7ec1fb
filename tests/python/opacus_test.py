"""dpmf.opacus on the real Opacus."""

import contextlib
import gzip
import importlib.util
import json
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

pytestmark = [
    # Opacus 1.4 uses hooks that PyTorch 1.13 would rather not have.
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

COUNT, BATCH, STEPS = 44, 8, 6
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "python" / "fashion_mnist.py"


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
        data_loader=loader or DataLoader(data(), batch_size=BATCH, shuffle=True),
        **arguments,
    )


def train(model, optimizer, loader):
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return flat(model.parameters())


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def test_the_noise_is_the_streams():
    """A run with Opacus is a run with dpmf.torch on the same cohorts: other code for clipping, the same noise."""
    key = dpmf.NoiseKey.from_seed(3)
    engine = dpmf.opacus.PrivacyEngine(key=key, experiment="twin", seed=9)
    model, optimizer, loader = private(engine)
    result = train(model, optimizer, loader)

    twin = model_of()
    by_hand = dpmf.torch.PrivateOptimizer(sgd(twin), engine.mechanism, denominator=BATCH, key=key, experiment="twin")
    cohorts = dpmf.torch.Cohorts(COUNT, BATCH, seed=9)
    for inputs, targets in by_hand.batches(DataLoader(data(), batch_sampler=cohorts)):
        by_hand.accumulate(twin, cross_entropy, inputs, targets)
        by_hand.step()
    expected = flat(twin.parameters())
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert (expected - flat(model_of().parameters())).abs().max() > 0.05


class Recorder:
    """A stream that adds no noise and keeps what it was given."""

    next_step = 0

    def add_to(self, values):
        assert values.dtype == np.float64
        self.given = values.copy()
        return 0


def released(optimizer):
    """What the noise of the next step is added to."""
    optimizer._noise.stream = Recorder()
    optimizer.step()
    return optimizer._noise.stream.given


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_one_example_moves_the_sum_by_at_most_the_clip(dtype):
    inputs, targets = (100 * data().tensors[0][:9], data().tensors[1][:9])
    moves = []
    for index in range(9):
        sums = []
        for weight in (1.0, 0.0):
            model, optimizer, loader = private()
            next(iter(loader))
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
        stream = optimizer._noise.stream
        assert stream.arithmetic == options.get("arithmetic", "exact")
        assert ("Every bit" in str(optimizer.privacy)) == (stream.arithmetic == "exact")
        rows[str(options)] = stream.next_row().tobytes()
    first, exact, single = rows.values()
    assert first == exact != single


def test_an_example_without_a_finite_gradient_counts_as_zero():
    model, optimizer, loader = private()
    next(iter(loader))
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
    first, second, third, *_ = list(loader)
    before = [flat(layer.parameters()) for layer in (model[0], model[2])]
    train(wrapped, private_optimizer, [first])
    after = [flat(layer.parameters()) for layer in (model[0], model[2])]
    assert torch.equal(before[0], after[0]) and (before[1] != after[1]).float().mean() > 0.5
    # A layer that Opacus has no hooks in has gradients of backward() only.
    model[0].requires_grad_(True)
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
        train(wrapped, private_optimizer, [third])
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
    noise = engine.mechanism.privacy.noise_multiplier
    assert engine.get_epsilon(1e-7) == dpmf.account(noise, 1e-7)["epsilon_exact"] > 2.0


def test_the_data_comes_once():
    model, optimizer, loader = private()
    seen = sum((loader_batch.tolist() for loader_batch in map(torch.as_tensor, loader.batch_sampler)), [])
    assert sorted(seen) == list(range(COUNT)) != seen
    with pytest.raises(dpmf.MismatchError, match="second pass"):
        next(iter(loader))


def test_batches_in_parts():
    """Opacus' BatchMemoryManager: logical batches of 8 in physical ones of 3, one row of noise each."""
    key = dpmf.NoiseKey.from_seed(3)
    results = []
    for split in (False, True):
        model, optimizer, loader = private(dpmf.opacus.PrivacyEngine(key=key, experiment="parts", seed=9))
        if split:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
                results.append(train(model, optimizer, parts))
        else:
            results.append(train(model, optimizer, loader))
        assert optimizer.next_step == STEPS
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_checkpoints_of_the_engine(tmp_path):
    """Opacus' save_checkpoint and load_checkpoint, in the middle of the pass."""
    key = dpmf.NoiseKey.from_seed(6)

    def engine(journal):
        journal = journal and tmp_path / journal
        return dpmf.opacus.PrivacyEngine(key=key, experiment="resumed", journal=journal, seed=9)

    expected = train(*private(engine(None)))

    first = engine("journal")
    model, optimizer, loader = private(first)
    train(model, optimizer, [batch for batch, _ in zip(loader, range(2))])
    first.save_checkpoint(path=tmp_path / "state.pt", module=model, optimizer=optimizer)
    optimizer.close()

    second = engine("journal")
    rest = DataLoader(data(), batch_sampler=dpmf.torch.Cohorts(COUNT, BATCH, seed=9, start=2))
    model = model_of(seed=5)
    model, optimizer, rest = second.make_private(
        module=model, optimizer=sgd(model), data_loader=rest, mechanism=first.mechanism
    )
    second.load_checkpoint(path=tmp_path / "state.pt", module=model, optimizer=optimizer)
    assert optimizer.next_step == 2 == len(second.accountant)
    assert torch.equal(train(model, optimizer, rest), expected)


# What newcomers get wrong


def test_poisson_sampling():
    with pytest.raises(dpmf.MismatchError, match="poisson_sampling=False"):
        private(poisson_sampling=True)
    loader = opacus.data_loader.DPDataLoader.from_data_loader(DataLoader(data(), batch_size=BATCH))
    with pytest.raises(dpmf.MismatchError, match="Poisson sampling may draw the same one in any number of steps"):
        private(loader=loader)


def test_several_epochs():
    with pytest.raises(dpmf.MismatchError, match="in 3 epochs each takes part in 3 steps"):
        private(epochs=3)


def test_other_samplers():
    for sampler in (RandomSampler(data(), replacement=True), WeightedRandomSampler([1.0] * COUNT, COUNT)):
        with pytest.raises(dpmf.MismatchError, match="with replacement"):
            private(loader=DataLoader(data(), batch_size=BATCH, sampler=sampler))
    part = DataLoader(data(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * COUNT, 16, replacement=False))
    with pytest.raises(dpmf.MismatchError, match="Subset"):
        private(loader=part)


def test_a_mechanism_for_another_optimizer():
    mechanism = dpmf.plan(steps=STEPS, momentum=0.5, epsilon=2, delta=1e-5)
    model = model_of()
    arguments = dict(module=model, data_loader=DataLoader(data(), batch_size=BATCH), mechanism=mechanism)
    with pytest.raises(dpmf.MismatchError, match=r"plan with momentum=0\.9"):
        dpmf.opacus.PrivacyEngine().make_private(optimizer=sgd(model), **arguments)
    with pytest.raises(dpmf.MismatchError, match="check=False"):
        dpmf.opacus.PrivacyEngine().make_private(optimizer=torch.optim.Adam(model.parameters()), **arguments)
    with pytest.raises(dpmf.MismatchError, match="make_private"):
        private(model=model, optimizer=torch.optim.Adam(model.parameters()))


def test_more_batches_than_steps():
    mechanism = dpmf.plan(steps=STEPS - 1, momentum=0.9, epsilon=2, delta=1e-5)
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
    with pytest.raises(dpmf.MismatchError, match="did not hand out"):
        train(model, optimizer, loader)
    assert optimizer.next_step == 0
    optimizer.zero_grad()
    train(model, optimizer, returned)


def test_a_statement_for_users():
    mechanism = dpmf.plan(steps=STEPS, momentum=0.9, epsilon=2, delta=1e-5, unit="user")
    model = model_of()
    with pytest.raises(dpmf.MismatchError, match='what is clipped here is every record: plan with unit="record"'):
        dpmf.opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(data(), batch_size=BATCH),
            mechanism=mechanism,
        )


def test_names_of_runs():
    with pytest.raises(ValueError, match="the same at every start"):
        private(dpmf.opacus.PrivacyEngine(key=dpmf.NoiseKey.generate(), experiment="a"))


@pytest.mark.skipif(not hasattr(torch.optim.Optimizer, "register_step_post_hook"), reason="PyTorch 1 has no such hooks")
def test_hooks_of_an_optimizer():
    model, optimizer, loader = private()
    steps = []
    optimizer.register_step_post_hook(lambda self, *_: steps.append(self.next_step))
    train(model, optimizer, loader)
    assert steps == list(range(1, STEPS + 1))


def test_what_opacus_engine_takes():
    assert dpmf.opacus.PrivacyEngine(secure_mode=True).mechanism is None
    with pytest.raises(ValueError, match="accountant is 'prv'.*its own accounting"):
        dpmf.opacus.PrivacyEngine(accountant="prv")
    with pytest.raises(ValueError, match="noise_multiplier is given, but clip and noise are those of a mechanism"):
        private(noise_multiplier=1.1)


def test_opacus_own_parameters():
    model = model_of()
    arguments = dict(module=model, optimizer=sgd(model), data_loader=DataLoader(data(), batch_size=BATCH))
    with pytest.raises(ValueError, match="make_private_with_epsilon"):
        dpmf.opacus.PrivacyEngine().make_private(noise_multiplier=1.0, max_grad_norm=1.0, **arguments)
    with pytest.raises(ValueError, match="flat"):
        private(clipping="per_layer")
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


# The example


def test_the_example_runs_with_either_engine(tmp_path, monkeypatch, capsys):
    """examples/python/fashion_mnist.py on images made up here, in the format of the data set."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 320), ("t10k", 200)):
        labels = generator.integers(10, size=count, dtype=np.uint8)
        images = generator.integers(80, size=(count, 28, 28), dtype=np.uint8)
        images[np.arange(count), 2 * labels] = 255  # a bright line whose height is the class
        for name, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            (tmp_path / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(bytes(header) + array.tobytes(), 1))
    spec = importlib.util.spec_from_file_location("fashion_mnist", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for engine in ("opacus", "dpmf"):
        arguments = ["--engine", engine, "--epsilon", "3", "--lr", "0.1", "--batch-size", "16"]
        monkeypatch.setattr(sys, "argv", ["fashion_mnist.py", *arguments, "--data", str(tmp_path)])
        example.main()
        result = json.loads(capsys.readouterr().out)
        assert result["engine"] == engine and result["spent"] == pytest.approx(3, rel=0.01)
        assert 0.0 <= result["accuracy"] <= 1.0


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
        with pytest.raises(dpmf.MismatchError, match="counts on sampling cyclic-poisson:2:0.05"):
            made_private(wrong)
    with pytest.raises(dpmf.MismatchError, match="not sampled, but .*counts on sampling"):
        made_private(DataLoader(examples, batch_size=BATCH))
    with pytest.raises(dpmf.MismatchError, match="counts on sampling"):
        made_private(loader(), poisson_sampling=True)
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
