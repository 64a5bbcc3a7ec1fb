"""dpmf.torch on the real PyTorch."""

import contextlib
import copy
import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")

STEPS = 6


def mechanism_for(steps=STEPS, momentum=0.9, **arguments):
    arguments = {"epsilon": 3.0, "delta": 1e-6, "clip": 0.5, **arguments}
    return dpmf.mechanism(steps=steps, momentum=momentum, **arguments)


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


def waiting(optimizer):
    """The clipped sum that the next step releases."""
    return optimizer._noise.exact.numpy() * optimizer._noise.run.clip.unit


def train(optimizer, model, data):
    for inputs, targets in data:
        optimizer.accumulate(model, cross_entropy, inputs, targets)
        optimizer.step()
    return flat(model.parameters())


# The noise


def test_noise_goes_onto_the_clipped_sum_before_the_step(mechanism):
    """SGD on the noisy mean, done by hand in NumPy with the rows of a stream."""
    model, key = model_of(), dpmf.NoiseKey.from_seed(7)
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8, key=key, experiment="by hand")
    dimension = flat(model.parameters()).numel()
    stream = dpmf.NoiseStream(mechanism, key, run="by hand", dimension=dimension)
    iterate, buffer = flat(model.parameters()).numpy().copy(), np.zeros(dimension, np.float32)
    for inputs, targets in batches():
        optimizer.accumulate(model, cross_entropy, inputs, targets)
        summed = waiting(optimizer)
        stream.add_to(summed)
        buffer = np.float32(0.9) * buffer + summed.astype(np.float32) / np.float32(8)
        iterate -= np.float32(0.1) * buffer
        optimizer.step()
        assert all(p.grad is None for p in model.parameters()), "a step consumes the gradients"
        np.testing.assert_allclose(flat(model.parameters()).numpy(), iterate, rtol=0, atol=2e-6)
    assert np.abs(iterate).max() > 0.1


@pytest.mark.parametrize("options", [dict(), dict(arithmetic="exact"), dict(arithmetic="float")], ids=str)
def test_arithmetic(mechanism, options):
    """In exact arithmetic what is released lies on the grid of the stream, and is float32 of the float64 that came out."""
    model, key, (inputs, targets) = model_of(), dpmf.NoiseKey.from_seed(3), batches(1)[0]
    optimizer = dpmf.torch.PrivateOptimizer(
        sgd(model), mechanism, denominator=8, key=key, experiment="arithmetic", **options
    )
    optimizer.accumulate(model, cross_entropy, inputs, targets)
    expected = waiting(optimizer)
    arithmetic = options.get("arithmetic", "exact")
    stream = dpmf.NoiseStream(
        mechanism, key, run="arithmetic", dimension=len(expected), arithmetic=arithmetic
    )
    stream.add_to(expected)
    optimizer._noise.release()
    found = optimizer._noise.flat.numpy()
    assert found.tobytes() == expected.astype(np.float32).tobytes()
    units = expected / (stream.grid or 2.0**-8)
    assert np.array_equal(units, np.round(units)) == (arithmetic == "exact")
    assert ("Every bit" in str(optimizer.privacy)) == (arithmetic == "exact")
    with pytest.raises(ValueError, match="must be exact or float"):
        dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8, arithmetic="double")


def test_unused_parameters_have_noise_too(mechanism):
    used, unused = torch.nn.Linear(2, 1), torch.nn.Linear(50, 2)
    before = flat(unused.parameters())
    optimizer = dpmf.torch.PrivateOptimizer(sgd(torch.nn.ModuleList([used, unused])), mechanism, denominator=1)
    optimizer.accumulate(used, lambda out, _: out.sum(), torch.zeros(3, 2))
    optimizer.step()
    assert (flat(unused.parameters()) != before).sum() > 80, "a few may round to zero"


# Parameters that are frozen and thawed


def test_a_frozen_parameter_stays_and_ignores_its_noise(mechanism):
    """The row of a step covers the same coordinates whatever is trained, so the others have the same noise."""
    key, results = dpmf.NoiseKey.from_seed(1), []
    for frozen in (False, True):
        model = model_of()
        optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8, key=key, experiment="frozen")
        model[0].requires_grad_(not frozen)
        before = flat(model[0].parameters())
        optimizer.add_sum({}, 0)
        optimizer.step()
        assert torch.equal(flat(model[0].parameters()), before) == frozen
        results.append(flat(model[3].parameters()))
    assert torch.equal(*results)
    assert len(optimizer.coordinates) == flat(model.parameters()).numel()


def test_gradual_unfreezing_moves_nothing_without_noise():
    """As many tensors are trained in the second step as in the first, but others; in the end all of them."""
    model, key, mechanism = model_of(), dpmf.NoiseKey.from_seed(5), mechanism_for(momentum=0.0)
    parameters = list(model.parameters())
    optimizer = dpmf.torch.PrivateOptimizer(
        sgd(model, momentum=0.0), mechanism, denominator=8, key=key, experiment="thawed"
    )
    stream = dpmf.NoiseStream(mechanism, key, run="thawed", dimension=flat(parameters).numel())
    for trained, (inputs, targets) in zip(("1001", "1010", "0110", "1111"), batches()):
        for p, now in zip(parameters, trained):
            p.requires_grad_(now == "1")
        before = [p.detach().clone() for p in parameters]
        optimizer.accumulate(model, cross_entropy, inputs, targets)
        sizes = [p.numel() for p in parameters]
        sums = waiting(optimizer)
        noisy = sums.copy()
        stream.add_to(noisy)
        sums, noisy = torch.from_numpy(sums).split(sizes), torch.from_numpy(noisy).float().split(sizes)
        optimizer.step()
        for p, was, now, clipped, expected in zip(parameters, before, trained, sums, noisy):
            if now == "1":
                torch.testing.assert_close((was - p.detach()).reshape(-1) * 8 / 0.1, expected, rtol=0, atol=1e-4)
            else:
                assert torch.equal(p, was) and not clipped.any()


def test_parameters_that_join_or_leave_are_refused(mechanism):
    model, (inputs, targets) = model_of(), batches(1)[0]
    late = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    optimizer = dpmf.torch.PrivateOptimizer(inner, mechanism, denominator=8)
    with pytest.raises(ValueError, match="cannot be added"):
        optimizer.add_param_group({"params": late.parameters()})
    optimizer.accumulate(model, cross_entropy, inputs, targets)
    before = flat(model.parameters())
    inner.add_param_group({"params": late.parameters()})
    with pytest.raises(ValueError, match="2 are new, of 4.*without noise.*all parameters that will ever be trained"):
        optimizer.step()
    del inner.param_groups[1]
    kept = inner.param_groups[0]["params"]
    inner.param_groups[0]["params"] = [kept[0], torch.nn.Parameter(torch.zeros(4))]  # as many as before
    with pytest.raises(ValueError, match="1 are new, of 2"):
        optimizer.step()
    assert torch.equal(flat(model.parameters()), before) and optimizer.next_step == 0
    inner.param_groups[0]["params"] = kept
    optimizer.step()
    model.half()
    with pytest.raises(TypeError, match=r"model\.float\(\)"):
        optimizer.add_sum({}, 0)
        optimizer.step()


def test_a_learning_rate_scheduler_takes_it(mechanism):
    planned = mechanism_for(schedule="exp:0.9")
    model = model_of()
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), planned, denominator=8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in batches():
        train(optimizer, model, [batch])
        scheduler.step()
    assert optimizer.next_step == STEPS


def test_a_cohort_may_come_in_parts_or_be_empty(mechanism):
    (inputs, targets), model = batches(1)[0], model_of()
    whole = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    whole.accumulate(model, cross_entropy, inputs, targets)
    expected = waiting(whole)
    whole.zero_grad()
    whole.accumulate(model, cross_entropy, inputs[:3], targets[:3])
    whole.accumulate(model, cross_entropy, inputs[3:], targets[3:])
    np.testing.assert_allclose(waiting(whole), expected, rtol=1e-5, atol=1e-6)
    whole.zero_grad()
    before = flat(model.parameters())
    assert whole.accumulate(model, cross_entropy, inputs[:0], targets[:0]).examples == 0
    whole.step()
    assert (flat(model.parameters()) != before).float().mean() > 0.9, "noise alone"


@pytest.mark.skipif(not hasattr(torch.optim.Optimizer, "register_step_post_hook"), reason="PyTorch 1 has no such hooks")
def test_hooks_of_an_optimizer(mechanism):
    model, called = model_of(), []
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    optimizer.register_step_pre_hook(lambda self, *_: called.append(("before", self.next_step)))
    handle = optimizer.register_step_post_hook(lambda self, *_: called.append(("after", self.next_step)))
    train(optimizer, model, batches(1))
    handle.remove()
    train(optimizer, model, batches(1))
    assert called == [("before", 0), ("after", 1), ("before", 1)]


@pytest.mark.skipif(not hasattr(torch.optim.Optimizer, "register_state_dict_post_hook"), reason="PyTorch 1 has no such hooks")
def test_hooks_of_a_state(tmp_path, mechanism):
    model, called = model_of(), []
    with contextlib.closing(resumable(tmp_path, model, mechanism, read=False)) as optimizer:
        optimizer.register_state_dict_pre_hook(lambda self: called.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda self, state: {**state, "note": "mine"})
        train(optimizer, model, batches(1))
        state = optimizer.state_dict()
    assert called == ["before saving"] and state["note"] == "mine"
    with contextlib.closing(resumable(tmp_path, model, mechanism, read=True)) as optimizer:
        optimizer.register_load_state_dict_pre_hook(lambda self, state: {name: state[name] for name in state if name != "note"})
        optimizer.register_load_state_dict_post_hook(lambda self: called.append(("after loading", self.next_step)))
        optimizer.load_state_dict(state)
    assert called[1:] == [("after loading", 1)]


# Resuming


def resumable(directory, model, mechanism, *, read):
    key = dpmf.NoiseKey.read(directory / "key") if read else dpmf.NoiseKey.create(directory / "key")
    return dpmf.torch.PrivateOptimizer(
        sgd(model), mechanism, denominator=8, key=key, journal=directory / "journal"
    )


def test_resuming_is_exact(tmp_path, mechanism):
    data = batches()
    arguments = dict(denominator=8, key=dpmf.NoiseKey.from_seed(2), experiment="resumable")
    model = model_of()
    first = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, journal=tmp_path / "journal", **arguments)
    train(first, model, data[:3])
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, tmp_path / "state.pt")
    first.close()

    whole = model_of()
    through = dpmf.torch.PrivateOptimizer(sgd(whole), mechanism, **arguments)
    expected = train(through, whole, data)

    saved = torch.load(tmp_path / "state.pt")
    again = model_of(seed=5)
    second = dpmf.torch.PrivateOptimizer(sgd(again), mechanism, journal=tmp_path / "journal", **arguments)
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
    with pytest.warns(UserWarning, match="this state cannot be loaded.*journal=path"):
        state = first.state_dict()
    with pytest.raises(ValueError, match=r"NoiseKey\.create\(path\) and journal=path"):
        second.load_state_dict(state)


def first_noise(mechanism, **arguments):
    model = model_of()
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8, **arguments)
    before = flat(model.parameters())
    optimizer.add_sum({}, 0)
    optimizer.step()
    optimizer.close()
    return flat(model.parameters()) - before


def test_no_two_starts_have_the_same_noise_but_those_of_an_experiment(tmp_path, mechanism):
    key, seeded = dpmf.NoiseKey.create(tmp_path / "key"), dpmf.NoiseKey.from_seed(3)
    assert not torch.equal(first_noise(mechanism, key=key), first_noise(mechanism, key=key))
    journal = tmp_path / "journal"
    begun = first_noise(mechanism, key=key, journal=journal)
    journal.unlink()  # a journal that is lost is a new run
    assert not torch.equal(begun, first_noise(mechanism, key=key, journal=journal))
    for secret in (key, None):
        with pytest.raises(ValueError, match="the same noise at every start.*from_seed"):
            first_noise(mechanism, key=secret, experiment="a")
    with pytest.raises(ValueError, match="the same noise at every start"):
        first_noise(mechanism, key=key, experiment="a", journal=tmp_path / "other")
    assert not torch.equal(first_noise(mechanism, key=seeded), first_noise(mechanism, key=seeded))
    assert torch.equal(*(first_noise(mechanism, key=seeded, experiment="a") for _ in range(2)))


def test_a_run_goes_on_in_its_arithmetic(tmp_path, mechanism):
    key, model = dpmf.NoiseKey.from_seed(4), model_of()

    def private(**options):
        return dpmf.torch.PrivateOptimizer(
            sgd(model), mechanism, denominator=8, key=key, journal=tmp_path / "journal", **options
        )

    first = private()
    train(first, model, batches(1))
    state = first.state_dict()
    first.close()
    with pytest.raises(dpmf.BindingError, match="another arithmetic: it has exact, but this stream has float"):
        private(arithmetic="float").load_state_dict(state)
    again = private(arithmetic="exact")
    again.load_state_dict(state)
    assert again.next_step == 1
    again.close()


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
    mismatch({}, r"step 1 has 1 times .* plan with schedule", schedule="exp:0.5")


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


@pytest.mark.parametrize("beta", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_what_adam_is_planned_for(name, beta):
    """Gradients of size one leave the second moment at one, and then Adam is linear: the workload it is planned for."""
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = getattr(torch.optim, name)([parameter], lr=0.01, betas=(beta, 0.99), eps=0.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0 - 0.1 * step)
    iterates = []
    for sign in signs:
        parameter.grad = sign.double().view(1)
        adam.step()
        schedule.step()
        iterates.append(-float(parameter.detach()))
    plan = dict(schedule=[1.0 - 0.1 * step for step in range(len(signs))], epsilon=2, delta=1e-5)
    workload = dpmf.mechanism(optimizer=f"adam:{beta}", **plan).workload
    np.testing.assert_allclose(0.01 * workload.apply(signs.numpy()), iterates, rtol=1e-9, atol=1e-15)
    # Given as it is, it is planned for as running sums.
    assert dpmf.mechanism(optimizer=adam, **plan).workload == dpmf.mechanism(**plan).workload
    if beta:
        assert not np.allclose(0.01 * dpmf.mechanism(momentum=beta, **plan).workload.apply(signs.numpy()), iterates, rtol=0.1)


def test_plans_for_adaptive_optimizers():
    def optimizer_of(name, **arguments):
        model = model_of()
        return model, getattr(torch.optim, name)(model.parameters(), **arguments)

    budget = dict(steps=STEPS, epsilon=3, delta=1e-6, clip=0.5)
    running_sum = dpmf.mechanism(**budget)
    for name, arguments in [
        ("Adam", dict(betas=(0.8, 0.99))),
        ("AdamW", dict(lr=0.01)),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
        ("RMSprop", {}),
        ("RMSprop", dict(momentum=0.7)),
        ("Adagrad", {}),
        ("Adadelta", {}),
    ]:
        model, optimizer = optimizer_of(name, **arguments)
        planned = dpmf.mechanism(optimizer=optimizer, **budget)
        assert planned.workload.is_prefix_sum
        train(dpmf.torch.PrivateOptimizer(optimizer, planned, denominator=8), model, batches())
        model, optimizer = optimizer_of(name, **arguments)
        train(dpmf.torch.PrivateOptimizer(optimizer, running_sum, denominator=8), model, batches())

    for word in ("adam", "adamw", "rmsprop"):
        assert dpmf.mechanism(optimizer=word, **budget) == running_sum, "a name means what the optimizer itself does"
    model, adam = optimizer_of("Adam")
    train(dpmf.torch.PrivateOptimizer(adam, dpmf.mechanism(optimizer="adam:0.9", **budget), denominator=8), model, batches())
    model, adam = optimizer_of("Adam")
    with pytest.raises(dpmf.MismatchError, match="Adam, planned for as momentum 0.9, but the mechanism was planned for 0.5.*check=False"):
        dpmf.torch.PrivateOptimizer(adam, dpmf.mechanism(momentum=0.5, **budget), denominator=8)
    dpmf.torch.PrivateOptimizer(adam, dpmf.mechanism(momentum=0.5, **budget), denominator=8, check=False)
    optimizer = dpmf.torch.PrivateOptimizer(adam, dpmf.mechanism(optimizer=adam, **budget), denominator=8)
    train(optimizer, model, batches(1))
    adam.param_groups[0]["lr"] *= 2
    with pytest.raises(dpmf.MismatchError, match="schedule"):
        train(optimizer, model, batches(1))
    for wrong in ("sgd", "adam:1", "adam:x", "adam:-0.5"):
        with pytest.raises(ValueError, match="momentum, nesterov, weight_decay and coupled"):
            dpmf.mechanism(optimizer=wrong, **budget)
    with pytest.raises(TypeError, match="optimizer of torch.optim"):
        dpmf.mechanism(optimizer=3, **budget)
    with pytest.raises(ValueError, match="optimizer already determines momentum"):
        dpmf.mechanism(optimizer="adam", momentum=0.9, **budget)
    with pytest.raises(ValueError, match="remove optimizer"):
        dpmf.mechanism(optimizer="adam", workload=dpmf.Workload.prefix_sum(4), epsilon=3, delta=1e-6)


SCHEDULERS = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5),
    "warm-up from zero": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=STEPS + 1, cycle_momentum=False),
    "one after the other": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        [3],
    ),
    "together": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_by_object(name):
    """The mechanism is for the rates that training has, and looking at them changes neither scheduler nor optimizer."""
    model = model_of()
    groups = [{"params": p, "lr": 0.1 * (1 + place)} for place, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    made = dpmf.mechanism(steps=STEPS, optimizer=optimizer, schedule=scheduler, epsilon=3, delta=1e-6, clip=0.5)
    private = dpmf.torch.PrivateOptimizer(optimizer, made, denominator=8)
    rates = []
    for inputs, targets in batches():
        private.accumulate(model, cross_entropy, inputs, targets)
        rates.append(optimizer.param_groups[0]["lr"])
        private.step()
        scheduler.step()
    np.testing.assert_allclose(made.workload.learning_rates, rates, rtol=1e-12)
    assert len(set(rates)) > 1
    # A scheduler over the private optimizer says the same.
    again = SCHEDULERS[name](dpmf.torch.PrivateOptimizer(sgd(model_of()), mechanism_for(), denominator=8))
    assert dpmf.mechanism(steps=STEPS, momentum=0.9, schedule=again, epsilon=3, delta=1e-6).workload.steps == STEPS


def test_schedules_that_are_not_known_before():
    optimizer = sgd(model_of())
    budget = dict(optimizer=optimizer, epsilon=3, delta=1e-6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau, whose learning rates depend on losses"):
        dpmf.mechanism(steps=STEPS, schedule=plateau, **budget)
    with pytest.raises(ValueError, match="StepLR, which has no end: pass steps"):
        dpmf.mechanism(schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2), **budget)
    two = torch.optim.SGD([{"params": p} for p in list(model_of().parameters())[:2]], lr=0.1)
    uneven = torch.optim.lr_scheduler.LambdaLR(two, [lambda step: 1.0, lambda step: 0.5**step])
    with pytest.raises(dpmf.MismatchError, match="LambdaLR changes the learning rates of the parameter groups in different ways"):
        dpmf.mechanism(steps=STEPS, optimizer=two, schedule=uneven, epsilon=3, delta=1e-6)


def test_half_precision(mechanism):
    """bfloat16 is trained through masters in float32: torch_masters_test.py."""
    with pytest.raises(TypeError, match=r"model\.float\(\).*autocast"):
        dpmf.torch.PrivateOptimizer(sgd(model_of().half()), mechanism, denominator=8)
    with pytest.raises(TypeError, match=r"model\.float\(\)"):
        dpmf.torch.PrivateOptimizer(sgd(model_of().double()), mechanism, denominator=8)


def test_gradients_that_nobody_clipped(mechanism):
    model, (inputs, targets) = model_of(), batches(1)[0]
    optimizer = dpmf.torch.PrivateOptimizer(sgd(model), mechanism, denominator=8)
    cross_entropy(model(inputs), targets).backward()
    with pytest.raises(ValueError, match=r"nothing to release in step 0: call accumulate.*loss\.backward\(\) are not used: they are a mean"):
        optimizer.step()
    optimizer.accumulate(model, cross_entropy, inputs, targets)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="nothing to release"):
        optimizer.step()
    assert optimizer.next_step == 0


def test_not_calibrated():
    raw = dpmf.make_mechanism(dpmf.Workload.sgd(STEPS, momentum=0.9))
    with pytest.raises(ValueError, match=r"mechanism\.calibrate"):
        dpmf.torch.PrivateOptimizer(sgd(model_of()), raw, denominator=8)


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
