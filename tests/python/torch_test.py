"""dpmf.torch on the real PyTorch."""

import copy
import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler  # noqa: E402

STEPS = 6


def mechanism_for(steps=STEPS, momentum=0.9, **arguments):
    arguments = {"epsilon": 3.0, "delta": 1e-6, "clip": 0.5, **arguments}
    return dpmf.plan(steps=steps, momentum=momentum, **arguments)


@pytest.fixture(scope="module")
def mechanism():
    return mechanism_for()


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(3 * 6 * 6, 4)
    )


def sgd(model, lr=0.1, momentum=0.9, **arguments):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, **arguments)


def batches(count=STEPS, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 8, 8, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(optimizer, model, data):
    for inputs, targets in data:
        optimizer.accumulate(model, cross_entropy, inputs, targets)
        optimizer.step()
    return flat(model.parameters())


# The noise


def test_noise_goes_onto_the_clipped_sum_before_the_step(mechanism):
    """SGD on the noisy mean, done by hand in NumPy with the rows of a stream."""
    model, key = model_of(), dpmf.NoiseKey.from_seed(7)
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8, key=key, run="by hand")
    dimension = flat(model.parameters()).numel()
    stream = dpmf.NoiseStream(mechanism, key, run="by hand", dimension=dimension)
    iterate, buffer = flat(model.parameters()).numpy().copy(), np.zeros(dimension, np.float32)
    for inputs, targets in batches():
        optimizer.accumulate(model, cross_entropy, inputs, targets)
        summed = flat(p.grad for p in model.parameters()).numpy().copy()
        stream.add_to(summed)
        buffer = np.float32(0.9) * buffer + summed / np.float32(8)
        iterate -= np.float32(0.1) * buffer
        optimizer.step()
        assert all(p.grad is None for p in model.parameters()), "a step consumes the gradients"
        np.testing.assert_allclose(flat(model.parameters()).numpy(), iterate, rtol=0, atol=2e-6)
    assert np.abs(iterate).max() > 0.1


def test_unused_parameters_have_noise_too(mechanism):
    used, unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    both = torch.nn.ModuleList([used, unused])
    before = flat(unused.parameters())
    optimizer = dpmf.torch.PrivateOptimizer(sgd(both), mechanism, denominator=1)
    for p in used.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(clipped=True)
    assert (flat(unused.parameters()) != before).all()


def test_frozen_parameters_have_none(mechanism):
    model = model_of()
    for p in model[0].parameters():
        p.requires_grad_(False)
    before = flat(model[0].parameters())
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    train(optimizer, model, batches(1))
    assert torch.equal(flat(model[0].parameters()), before)
    assert optimizer.coordinates == range(sum(p.numel() for p in model[3].parameters()))


def test_gradients_in_any_memory_order(mechanism):
    """Transposed and channels-last gradients are copied into the flat view in the order of the parameter."""
    results = []
    for arrange in (lambda g: g, lambda g: g.t().contiguous().t()):
        layer = torch.nn.Linear(3, 5, bias=False)
        torch.nn.init.zeros_(layer.weight)
        optimizer = dpmf.torch.PrivateOptimizer(
            sgd(layer), mechanism, denominator=1, key=dpmf.NoiseKey.from_seed(1), run="order"
        )
        gradient = arrange(torch.arange(15.0).view(5, 3) / 100)
        layer.weight.grad = gradient
        optimizer.step(clipped=True)
        results.append(layer.weight.detach().clone())
    assert not gradient.is_contiguous()
    assert torch.equal(*results)


def test_a_learning_rate_scheduler_takes_it(mechanism):
    planned = mechanism_for(schedule="exp:0.9")
    model = model_of()
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), planned, denominator=8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in batches():
        train(optimizer, model, [batch])
        scheduler.step()
    assert optimizer.next_step == STEPS


# Clipping


@pytest.mark.parametrize("vectorize", [True, False])
def test_each_example_is_clipped(vectorize):
    model, (inputs, targets) = model_of(), batches(1)[0]
    inputs = inputs * torch.logspace(-3, 3, len(inputs)).view(-1, 1, 1, 1)
    rows = []
    for one, target in zip(inputs, targets):
        gradients = torch.autograd.grad(cross_entropy(model(one[None]), target[None]), list(model.parameters()))
        rows.append(flat(gradients).double())
    clip = sorted(row.norm().item() for row in rows)[4]  # half of them are clipped
    expected = [row * min(1.0, clip / row.norm().item()) for row in rows]
    count = dpmf.torch.accumulate_clipped(
        model, cross_entropy, inputs, targets, clip=clip, chunk=3, vectorize=vectorize
    )
    got = flat(p.grad for p in model.parameters()).double()
    assert count == len(inputs)
    torch.testing.assert_close(got, sum(expected), rtol=1e-5, atol=1e-6)


def test_no_contribution_exceeds_the_clip_after_rounding():
    layer = torch.nn.Linear(1000, 3)
    generator = torch.Generator().manual_seed(3)
    for clip in (1.0, 0.3, 1e-3):
        for _ in range(50):
            layer.zero_grad()
            inputs = torch.randn(1, 1000, generator=generator) * 10
            dpmf.torch.accumulate_clipped(layer, lambda out, _: out.sum(), inputs, torch.zeros(1), clip=clip)
            norm = flat(p.grad for p in layer.parameters()).double().norm().item()
            assert clip * (1 - 1e-5) < norm <= clip


def test_an_example_without_a_finite_gradient_counts_as_zero():
    layer = torch.nn.Linear(2, 1, bias=False)
    inputs = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [float("inf"), 1.0], [0.0, 1.0]])
    dpmf.torch.accumulate_clipped(layer, lambda out, _: out.sum(), inputs, torch.zeros(4), clip=10.0)
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[1.0, 1.0]]), rtol=1e-5, atol=0)


def test_dropout_draws_for_every_example():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 1, bias=False))
    arguments = (model, lambda out, _: out.sum(), torch.ones(16, 64), torch.zeros(16))
    try:
        dpmf.torch.accumulate_clipped(*arguments, clip=1e6)
    except ValueError as refused:  # the vmap of PyTorch 1 has no dropout
        assert torch.__version__.startswith("1.") and "vectorize=False" in str(refused)
        dpmf.torch.accumulate_clipped(*arguments, clip=1e6, vectorize=False)
    assert 3 < len(model[1].weight.grad.unique()) <= 17


def test_a_cohort_may_come_in_parts_or_be_empty(mechanism):
    (inputs, targets), model = batches(1)[0], model_of()
    whole = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    whole.accumulate(model, cross_entropy, inputs, targets)
    expected = flat(p.grad for p in model.parameters())
    whole.zero_grad()
    whole.accumulate(model, cross_entropy, inputs[:3], targets[:3])
    whole.accumulate(model, cross_entropy, inputs[3:], targets[3:])
    torch.testing.assert_close(flat(p.grad for p in model.parameters()), expected)
    whole.zero_grad()
    before = flat(model.parameters())
    assert whole.accumulate(model, cross_entropy, inputs[:0], targets[:0]) == 0
    whole.step()
    assert (flat(model.parameters()) != before).all(), "noise alone"


# Resuming


def resumable(directory, model, mechanism, *, read):
    key = dpmf.NoiseKey.read(directory / "key") if read else dpmf.NoiseKey.create(directory / "key")
    return dpmf.torch.PrivateOptimizer(
        sgd(model), mechanism, denominator=8, key=key, run="resumable", journal=directory / "journal"
    )


def test_resuming_is_exact(tmp_path, mechanism):
    data = batches()
    model = model_of()
    first = resumable(tmp_path, model, mechanism, read=False)
    train(first, model, data[:3])
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, tmp_path / "state.pt")
    first.close()

    key = dpmf.NoiseKey.read(tmp_path / "key")
    whole = model_of()
    through = dpmf.torch.PrivateOptimizer(sgd(whole), mechanism, denominator=8, key=key, run="resumable")
    expected = train(through, whole, data)

    saved = torch.load(tmp_path / "state.pt")
    again = model_of(seed=5)
    second = resumable(tmp_path, again, mechanism, read=True)
    again.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert second.next_step == 3
    assert torch.equal(train(second, again, data[3:]), expected)


def test_no_step_is_released_for_other_gradients_after_a_crash(tmp_path, mechanism):
    data = batches()
    model = model_of()
    first = resumable(tmp_path, model, mechanism, read=False)
    train(first, model, data[:2])
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": first.state_dict()})
    after = train(first, model, data[2:3])
    first.close()  # the process ends after step 2, beyond what was saved

    def resumed():
        again = model_of()
        again.load_state_dict(saved["model"])
        optimizer = resumable(tmp_path, again, mechanism, read=True)
        optimizer.load_state_dict(saved["optimizer"])
        return again, optimizer

    again, optimizer = resumed()
    with pytest.raises(dpmf.StepReusedError) as caught:
        train(optimizer, again, data[3:4])
    assert caught.value.step == 2
    optimizer.close()

    again, optimizer = resumed()
    assert torch.equal(train(optimizer, again, data[2:3]), after), "the same gradients are released again"
    optimizer.close()

    again, optimizer = resumed()
    assert optimizer.burn() == 2
    train(optimizer, again, data[3:])
    assert optimizer.next_step == STEPS


def test_a_begun_journal_goes_on_only_with_its_state(tmp_path, mechanism):
    model = model_of()
    first = resumable(tmp_path, model, mechanism, read=False)
    train(first, model, batches(1))
    state = first.state_dict()
    first.close()
    second = resumable(tmp_path, model, mechanism, read=True)
    with pytest.raises(ValueError, match="load_state_dict"):
        train(second, model, batches(1))
    with pytest.raises(dpmf.BindingError, match="the state was altered"):
        second.load_state_dict({**state, "dpmf": {**state["dpmf"], "step": 0}})
    second.load_state_dict(state)
    with pytest.raises(ValueError, match="loaded once"):
        second.load_state_dict(state)


def test_without_a_journal_there_is_no_resuming(mechanism):
    model = model_of()
    first = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    train(first, model, batches(1))
    second = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    with pytest.raises(ValueError, match=r"NoiseKey\.create\(path\) and journal=path"):
        second.load_state_dict(first.state_dict())


def test_a_journal_needs_a_key_that_lasts(tmp_path, mechanism):
    with pytest.raises(ValueError, match=r"NoiseKey\.create\(path\)"):
        dpmf.torch.PrivateOptimizer(sgd(model_of()), mechanism, denominator=8, journal=tmp_path / "journal")


def test_a_lost_or_another_key(tmp_path, mechanism):
    model = model_of()
    first = resumable(tmp_path, model, mechanism, read=False)
    train(first, model, batches(1))
    state = first.state_dict()
    first.close()
    (tmp_path / "key").unlink()
    with pytest.raises(dpmf.NoiseKeyError, match="restore the file from a backup"):
        resumable(tmp_path, model, mechanism, read=True)
    second = resumable(tmp_path, model, mechanism, read=False)  # a new key at the old place
    with pytest.raises(dpmf.BindingError):
        second.load_state_dict(state)


def test_a_state_of_another_mechanism_or_model(tmp_path, mechanism):
    model = model_of()
    first = resumable(tmp_path, model, mechanism, read=False)
    state = first.state_dict()
    first.close()
    other = resumable(tmp_path, model, mechanism_for(epsilon=2.0), read=True)
    with pytest.raises(dpmf.BindingError, match=r"Mechanism\.load"):
        other.load_state_dict(state)
    smaller = resumable(tmp_path, torch.nn.Linear(2, 2), mechanism, read=True)
    with pytest.raises(dpmf.BindingError, match="same model"):
        smaller.load_state_dict(state)


def test_it_is_not_copied(mechanism):
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(dpmf.torch.PrivateOptimizer(sgd(model_of()), mechanism, denominator=8))


# What newcomers get wrong


def mismatch(optimizer_arguments, match, *, lr=0.1, **plan):
    model = model_of()
    with pytest.raises(dpmf.MismatchError, match=match):
        optimizer = dpmf.torch.PrivateOptimizer(
            sgd(model, lr=lr, **optimizer_arguments), mechanism_for(**plan), denominator=8
        )
        train(optimizer, model, batches(2))
    return model


def test_wrong_momentum():
    mismatch({"momentum": 0.5}, r"plan with momentum=0\.5")


def test_nesterov_not_planned():
    mismatch({"nesterov": True}, "nesterov=True")


def test_dampening():
    mismatch({"dampening": 0.1}, r"set dampening=0 and multiply the learning rate by 0\.9")


def test_weight_decay_not_planned():
    mismatch({"weight_decay": 0.01}, r"weight_decay=0\.01, coupled=True")


def test_weight_decay_planned_in_the_other_form():
    mismatch({"weight_decay": 0.01}, "coupled=True", weight_decay=0.01, learning_rate=0.1)


def test_weight_decay_planned_for_another_learning_rate():
    plan = dict(weight_decay=0.01, coupled=True, learning_rate=0.1)
    mismatch({"weight_decay": 0.01}, "learning_rate=0.2", lr=0.2, **plan)
    model = model_of()
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model, weight_decay=0.01), mechanism_for(**plan), denominator=8)
    train(optimizer, model, batches())
    assert optimizer.next_step == STEPS


def test_schedule_not_followed():
    model = mismatch({}, r"step 1 has 1 times .* plan with schedule", schedule="exp:0.5")
    assert all(p.grad is not None for p in model.parameters()), "refused before the gradients were used"


def test_learning_rate_changed_without_a_plan(mechanism):
    model = model_of()
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    train(optimizer, model, batches(1))
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(dpmf.MismatchError, match="schedule"):
        train(optimizer, model, batches(1))
    assert optimizer.next_step == 1


@pytest.mark.parametrize("check", [True, False])
def test_one_step_too_many(mechanism, check):
    model = model_of()
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8, check=check)
    with pytest.raises(dpmf.MismatchError, match="steps=7 before training, or stop after step 6"):
        train(optimizer, model, batches(STEPS + 1))


def test_adam_only_when_told(mechanism):
    model = model_of()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(dpmf.MismatchError, match="check=False"):
        dpmf.torch.PrivateOptimizer(adam, mechanism, denominator=8)
    optimizer = dpmf.torch.PrivateOptimizer(adam, mechanism, denominator=8, check=False)
    train(optimizer, model, batches())


def test_half_precision(mechanism):
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match=r"model\.float\(\).*autocast"):
            dpmf.torch.PrivateOptimizer(sgd(model_of().to(dtype)), mechanism, denominator=8)
    with pytest.raises(TypeError, match=r"model\.float\(\)"):
        dpmf.torch.PrivateOptimizer(sgd(model_of().double()), mechanism, denominator=8)


def test_sparse_gradients(mechanism):
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = dpmf.torch.PrivateOptimizer(sgd(table), mechanism, denominator=8)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        optimizer.step(clipped=True)


def test_batch_normalisation():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="GroupNorm"):
        dpmf.torch.accumulate_clipped(model, cross_entropy, torch.zeros(2, 2), torch.zeros(2).long(), clip=1.0)


def test_gradients_that_nobody_clipped(mechanism):
    model, (inputs, targets) = model_of(), batches(1)[0]
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    cross_entropy(model(inputs), targets).backward()
    with pytest.raises(ValueError, match="did not come from accumulate"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="there is no gradient"):
        optimizer.step()
    assert optimizer.next_step == 0


def test_not_calibrated():
    raw = dpmf.make_mechanism(dpmf.Workload.sgd(STEPS, momentum=0.9))
    with pytest.raises(ValueError, match=r"mechanism\.calibrate"):
        dpmf.torch.PrivateOptimizer(sgd(model_of()), raw, denominator=8)


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

    class Own(torch.utils.data.Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            return iter([0] * 48)

        def __len__(self):
            return 48

    with pytest.raises(dpmf.MismatchError, match="Own.*Cohorts"):
        dpmf.torch.check_loader(mechanism, DataLoader(data, batch_size=8, sampler=Own()))


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


def test_shards_cover_everything_once():
    for dimension in (0, 1, 5, 10, 1001):
        for world_size in (1, 2, 3, 7):
            parts = [dpmf.torch.shard(dimension, rank, world_size) for rank in range(world_size)]
            assert [coordinate for part in parts for coordinate in part] == list(range(dimension))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match="init_process_group"):
        dpmf.torch.shard(10)
    with pytest.raises(ValueError, match="below world_size"):
        dpmf.torch.shard(10, 2, 2)


def test_everything_public_is_documented():
    for name in dpmf.torch.__all__:
        thing = getattr(dpmf.torch, name)
        assert thing.__doc__, name
        if inspect.isclass(thing):
            methods = [m for n, m in vars(thing).items() if not n.startswith("_")]
            assert all(method.__doc__ for method in methods), name
