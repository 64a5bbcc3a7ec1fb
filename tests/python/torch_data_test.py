"""The data of dpmf.torch: every example takes part in one step, where that can be seen."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, Subset  # noqa: E402
from torch.utils.data import SubsetRandomSampler, TensorDataset, WeightedRandomSampler  # noqa: E402

STEPS = 6


@pytest.fixture(scope="module")
def mechanism():
    return dpmf.mechanism(steps=STEPS, epsilon=3, delta=1e-6)


def private(model, mechanism, **arguments):
    return dpmf.torch.PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mechanism, denominator=8, **arguments)


def test_samplers(mechanism):
    data = TensorDataset(torch.zeros(48))
    dpmf.torch.check_loader(mechanism, DataLoader(data, batch_size=8, shuffle=True))
    dpmf.torch.check_loader(mechanism, DataLoader(data, batch_sampler=dpmf.torch.Cohorts(48, 8)))
    weighted = WeightedRandomSampler([1.0] * 48, 48)
    for loader in (
        DataLoader(data, batch_size=8, sampler=RandomSampler(data, replacement=True)),
        DataLoader(data, batch_size=8, sampler=weighted),
    ):
        with pytest.raises(dpmf.MismatchError, match="disjoint batches"):
            dpmf.torch.check_loader(mechanism, loader)
    with pytest.raises(dpmf.MismatchError, match="2 epochs"):
        dpmf.torch.check_loader(mechanism, DataLoader(data, batch_size=8), epochs=2)
    with pytest.raises(dpmf.MismatchError, match="plan with steps=12"):
        dpmf.torch.check_loader(mechanism, DataLoader(data, batch_size=4))

    twice = [*range(24)] * 2
    for loader in (
        DataLoader(Subset(data, twice), batch_size=8),
        DataLoader(Subset(Subset(data, twice), range(48)), batch_size=8),
        DataLoader(ConcatDataset([Subset(data, range(24)), data, data]), batch_size=16),
    ):
        with pytest.raises(dpmf.MismatchError, match="contains some examples several times"):
            dpmf.torch.check_loader(mechanism, loader)
    dpmf.torch.check_loader(mechanism, DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(24))))
    with pytest.raises(dpmf.MismatchError, match="with replacement"):
        dpmf.torch.check_loader(mechanism, DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(twice)))

    class Twice(BatchSampler):
        def __iter__(self):
            return iter([[*range(8)]] * 6)

    with pytest.raises(dpmf.MismatchError, match="Twice.*Cohorts"):
        sampler = Twice(torch.utils.data.SequentialSampler(data), 8, False)
        dpmf.torch.check_loader(mechanism, DataLoader(data, batch_sampler=sampler))

    class Own(torch.utils.data.Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            return iter([0] * 48)

        def __len__(self):
            return 48

    with pytest.raises(dpmf.MismatchError, match="Own.*Cohorts"):
        dpmf.torch.check_loader(mechanism, DataLoader(data, batch_size=8, sampler=Own()))


def run_through(optimizer, model, loader):
    for inputs, targets in optimizer.batches(loader):
        optimizer.accumulate(model, mse_loss, inputs, targets)
        optimizer.step()


def of_three_batches():
    return TensorDataset(torch.randn(24, 3), torch.randn(24, 1))


def test_a_second_pass_is_refused(mechanism):
    """Six steps are planned, and three batches come twice."""
    data = of_three_batches()
    for sampling in (dict(batch_size=8, shuffle=True), dict(batch_sampler=dpmf.torch.Cohorts(24, 8))):
        model, loader = torch.nn.Linear(3, 1), DataLoader(data, **sampling)
        optimizer = private(model, mechanism)
        with warnings.catch_warnings():
            warnings.simplefilter("error", dpmf.torch.UncheckedDataWarning)
            run_through(optimizer, model, loader)
        with pytest.raises(dpmf.MismatchError, match="the run is at step 3"):
            run_through(optimizer, model, loader)
        with pytest.raises(dpmf.MismatchError, match="the run is at step 3|the run began with"):
            run_through(optimizer, model, DataLoader(data, batch_sampler=dpmf.torch.Cohorts(24, 8)))
        assert optimizer.next_step == 3
    sampled = DataLoader(data, batch_size=8, sampler=RandomSampler(data, replacement=True))
    with pytest.raises(dpmf.MismatchError, match="with replacement"):
        private(model, mechanism).batches(sampled)


def test_a_batch_is_for_one_step(mechanism):
    model = torch.nn.Linear(3, 1)
    optimizer = private(model, mechanism)
    batches = optimizer.batches(DataLoader(of_three_batches(), batch_size=8))
    for inputs, targets in batches:
        for part in (slice(4), slice(4, None)):  # in parts is another matter
            optimizer.accumulate(model, mse_loss, inputs[part], targets[part])
        optimizer.step()
        break
    with pytest.raises(dpmf.MismatchError, match="step 1 has no batch of its own"):
        optimizer.accumulate(model, mse_loss, inputs, targets)
    optimizer.add_sum({}, 0)
    optimizer.step()  # noise alone
    assert optimizer.next_step == 2


def test_batches_that_make_one_step_together(mechanism):
    model = torch.nn.Linear(3, 1)
    optimizer = private(model, mechanism)
    for number, (inputs, targets) in enumerate(
        optimizer.batches(DataLoader(of_three_batches(), batch_size=4), batches_per_step=2)
    ):
        optimizer.accumulate(model, mse_loss, inputs, targets)
        if number % 2 == 1:
            optimizer.step()
    assert optimizer.next_step == 3
    with pytest.raises(dpmf.MismatchError, match="plan with steps=8"):
        private(model, mechanism).batches(DataLoader(of_three_batches(), batch_size=1), batches_per_step=3)


def test_a_pass_that_was_interrupted_goes_on(tmp_path, mechanism):
    data, model = of_three_batches(), torch.nn.Linear(3, 1)
    first = private(model, mechanism, key=dpmf.NoiseKey.create(tmp_path / "key"), journal=tmp_path / "journal")
    loader = DataLoader(data, batch_sampler=dpmf.torch.Cohorts(24, 8, seed=1))
    inputs, targets = next(first.batches(loader))
    first.accumulate(model, mse_loss, inputs, targets)
    with pytest.raises(ValueError, match=r"step\(\) or zero_grad\(\)"):
        first.batches(loader)
    first.step()
    state = first.state_dict()
    first.close()
    second = private(model, mechanism, key=dpmf.NoiseKey.read(tmp_path / "key"), journal=tmp_path / "journal")
    second.load_state_dict(state)
    for wrong, match in ((dict(seed=1), "start=1"), (dict(seed=2, start=1), "the run began with")):
        with pytest.raises(dpmf.MismatchError, match=match):
            second.batches(DataLoader(data, batch_sampler=dpmf.torch.Cohorts(24, 8, **wrong)))
    run_through(second, model, DataLoader(data, batch_sampler=dpmf.torch.Cohorts(24, 8, seed=1, start=1)))
    assert second.next_step == 3


def test_data_that_nobody_checks_is_said_so_once(mechanism):
    model = torch.nn.Linear(3, 1)
    optimizer = private(model, mechanism)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", dpmf.torch.UncheckedDataWarning)
        for inputs, targets in DataLoader(of_three_batches(), batch_size=8):
            optimizer.accumulate(model, mse_loss, inputs, targets)
            optimizer.step()
    assert [warning.category for warning in caught] == [dpmf.torch.UncheckedDataWarning]
    assert "optimizer.batches(loader)" in str(caught[0].message) and caught[0].filename == __file__


def test_cohorts_in_parts_of_ranks():
    parts = [list(dpmf.torch.Cohorts(50, 8, seed=4, rank=rank, world_size=3)) for rank in range(3)]
    together = [sorted(sum(of_ranks, [])) for of_ranks in zip(*parts)]
    assert together == [sorted(cohort) for cohort in dpmf.torch.Cohorts(50, 8, seed=4)]
    with pytest.raises(ValueError, match="the same seed"):
        dpmf.torch.Cohorts(50, 8, rank=0, world_size=3)
    with pytest.raises(ValueError, match="below world_size"):
        dpmf.torch.Cohorts(50, 8, seed=4, rank=3, world_size=3)


def test_cohorts_are_a_partition_and_come_once():
    cohorts = dpmf.torch.Cohorts(50, 8, seed=4)
    all_of_them = list(cohorts)
    assert [len(cohort) for cohort in all_of_them] == [8] * 6 + [2] and len(cohorts) == 7
    assert sorted(sum(all_of_them, [])) == list(range(50)) != sum(all_of_them, [])
    with pytest.raises(dpmf.MismatchError, match="one epoch"):
        next(iter(cohorts))
    assert list(dpmf.torch.Cohorts(50, 8, seed=4, start=3)) == all_of_them[3:]
    assert len(dpmf.torch.Cohorts(50, 8, drop_last=True)) == 6
    assert list(dpmf.torch.Cohorts(50, 8)) != list(dpmf.torch.Cohorts(50, 8))


def test_sampled_batches():
    key = dpmf.NoiseKey.from_seed(1)
    data = TensorDataset(torch.arange(60.0).reshape(30, 2), torch.arange(30))

    def sampler():
        return dpmf.Sampler("cyclic-poisson:3:0.1", key, units=30, steps=40, run="test")

    def loader(**arguments):
        batches = dpmf.torch.SampledBatches(sampler(), **arguments)
        return DataLoader(data, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(data))

    whole = loader()
    assert len(whole) == 40
    batches = [(inputs, labels) for inputs, labels in whole]
    assert [labels.tolist() for _, labels in batches] == [batch.tolist() for batch in sampler()]
    # Some are empty, and look like the others.
    empty = [(inputs, labels) for inputs, labels in batches if len(labels) == 0]
    assert empty and all(inputs.shape == (0, 2) and labels.dtype == torch.int64 for inputs, labels in empty)

    rest = [labels.tolist() for _, labels in loader(start=25)]
    assert rest == [labels.tolist() for _, labels in batches[25:]]
    parts = [[labels.tolist() for _, labels in loader(rank=rank, world_size=2)] for rank in range(2)]
    for step, (_, labels) in enumerate(batches):
        assert sorted(parts[0][step] + parts[1][step]) == labels.tolist()

    with pytest.raises(dpmf.MismatchError, match="once"):
        next(iter(whole))
    with pytest.raises(ValueError, match="start is 41"):
        loader(start=41)
    with pytest.raises(ValueError, match="rank is 2"):
        loader(rank=2, world_size=2)


def test_sampled_batches_for_a_mechanism_that_counts_on_none(mechanism):
    data = TensorDataset(torch.zeros(48))

    def loader(sampling):
        sampler = dpmf.Sampler(sampling, dpmf.NoiseKey.generate(), units=48, steps=STEPS)
        return DataLoader(data, batch_sampler=dpmf.torch.SampledBatches(sampler))

    for sampling in ("balls-in-bins:3", "reshuffled-bins:3", "cyclic-poisson:2:0.1"):
        with pytest.raises(dpmf.MismatchError, match=f"the sampler is {sampling}, but .* at most one step"):
            dpmf.torch.check_loader(mechanism, loader(sampling))
    # As many bins as steps: everybody once.
    dpmf.torch.check_loader(mechanism, loader("balls-in-bins:6"))
    dpmf.torch.check_loader(mechanism, loader("reshuffled-bins:6"))
