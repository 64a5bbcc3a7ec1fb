"""What dpmf.torch hands to the noise: the exact sum of contributions, each within the clip, and nothing else."""

import contextlib
import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")


@functools.lru_cache(maxsize=None)
def mechanism(clip=0.5, unit="record"):
    return dpmf.plan(steps=4, epsilon=3, delta=1e-6, clip=clip, unit=unit)


class Recorder:
    """A stream that adds no noise and keeps what it was given."""

    next_step = 0

    def add_to(self, values):
        self.given = values.astype(np.float64)
        return 0


def private(model, clip=0.5, **arguments):
    arguments = {"denominator": 8, **arguments}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dpmf.torch.PrivateOptimizer(sgd, mechanism(clip, arguments.pop("unit", "record")), **arguments)
    optimizer._noise.stream = Recorder()
    return optimizer


def released(optimizer):
    """What the noise of the next step is added to."""
    optimizer.step()
    return optimizer._noise.stream.given


def linear(width):
    """A model whose gradient is its input."""
    layer = torch.nn.Linear(width, 1, bias=False)
    return layer, lambda out, _: out.sum()


def sum_of(inputs, clip, **arguments):
    model, loss = linear(inputs.shape[1])
    optimizer = private(model, clip)
    optimizer.accumulate(model, loss, inputs, **arguments)
    return released(optimizer)


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(3 * 6 * 6, 4)
    )


def batch(size=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(4, (size,), generator=generator)


# One example moves the sum by at most the clip


@pytest.mark.parametrize("clip", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vectorize", [True, False])
def test_one_example_moves_the_sum_by_at_most_the_clip(clip, dtype, vectorize):
    """Random examples, by themselves and under autocast, where a product of matrices would round to 8 bits."""
    if dtype == torch.float16 and torch.__version__.startswith("1."):
        pytest.skip("PyTorch 1 has no float16 on the CPU")
    generator = torch.Generator().manual_seed(3)
    for size, mean in ((1, 0), (2, 0), (9, 0), (40, 3)):  # the last all pull the same way
        inputs = (mean + torch.randn(size, 300, generator=generator)).to(dtype or torch.float32)
        with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
            whole = sum_of(inputs, clip, vectorize=vectorize)
            inputs[0] = 0
            rest = sum_of(inputs, clip, vectorize=vectorize)
        moved = np.linalg.norm(whole - rest)
        assert clip * (1 - 1e-3) < moved <= clip


def test_nor_among_many_examples():
    """65,536 examples that all pull the same way: float32 would round every partial sum."""
    clip, count = 1.0, 65_536
    generator = torch.Generator().manual_seed(4)
    inputs = 1 + torch.rand(count, 5, generator=generator)

    def total(inputs):
        model, loss = linear(5)
        optimizer = private(model, clip, denominator=count)
        optimizer.accumulate(model, loss, inputs, chunk=8192)
        return released(optimizer)

    whole, moves = total(inputs), []
    for index in range(0, count, 4093):
        others = inputs.clone()
        others[index] = 0
        moves.append(np.linalg.norm(whole - total(others)))
    assert 0.98 * clip < max(moves) <= clip


def test_nor_in_a_sum_that_is_longer_than_planned():
    """Sums from elsewhere may be of more contributions than they say; they are pulled back before they are rounded."""
    layer, _ = linear(2)
    far = torch.tensor([[3e7, 1e7]])
    sums = []
    for moved in (torch.zeros(1, 2), torch.tensor([[0.3, 0.95]])):
        optimizer = private(layer, 1.0)
        optimizer.add_sum({layer.weight: far.double() + moved}, 1)
        sums.append(released(optimizer))
    assert 4000 < np.linalg.norm(sums[0]) <= 4096
    assert np.linalg.norm(sums[0] - sums[1]) <= 1.0
    with pytest.raises(ValueError, match="4097 contributions.*planned size of a cohort as denominator"):
        private(layer).add_sum({}, 4097)


def test_crafted_rounding():
    """Entries that round up one by one: a norm computed in less than float64 lets them pass."""
    width = 4096
    for clip in (1.0, 1e-3, 7.7e5, 1e-20, 1e20):
        each = np.float32(clip / np.sqrt(width))
        for value in (each, np.nextafter(each, np.float32(np.inf)), each * np.float32(1.0001)):
            inputs = torch.full((1, width), float(value))
            norm = np.linalg.norm(sum_of(inputs, clip))
            assert clip * (1 - 1e-3) < norm <= clip


def test_the_order_of_a_cohort_changes_no_bit():
    """In the exact sum, before it is rounded. Each example is a call, since vmap rounds by what it has beside it."""
    inputs, targets = batch(32)
    results = []
    for order in (range(32), range(31, -1, -1)):
        model = model_of()
        optimizer = private(model)
        for index in order:
            optimizer.accumulate(model, cross_entropy, inputs[index : index + 1], targets[index : index + 1])
        results.append(optimizer._noise.exact.clone())
    assert torch.equal(*results) and results[0].abs().min() > 0


@pytest.mark.parametrize("vectorize", [True, False])
def test_each_example_is_clipped(vectorize):
    model, (inputs, targets) = model_of(), batch()
    inputs = inputs * torch.logspace(-3, 3, len(inputs)).view(-1, 1, 1, 1)
    rows = []
    for one, target in zip(inputs, targets):
        gradients = torch.autograd.grad(cross_entropy(model(one[None]), target[None]), list(model.parameters()))
        rows.append(flat(gradients).double())
    norms = sorted(row.norm().item() for row in rows)
    clip = (norms[3] + norms[4]) / 2  # half of them are clipped
    # What is clipped is clipped 2^-11 lower, for the rounding of the sum.
    expected = sum(row * min(1.0, (1 - 2**-11) * clip / row.norm().item()) for row in rows)
    optimizer = private(model, clip)
    seen = optimizer.accumulate(model, cross_entropy, inputs, targets, chunk=3, vectorize=vectorize)
    assert (seen.examples, seen.unprotected_clipped) == (8, 0.5)
    assert seen.unprotected_loss == pytest.approx(cross_entropy(model(inputs), targets).item(), rel=1e-5)
    np.testing.assert_allclose(released(optimizer), expected.numpy(), rtol=0, atol=1e-5)


def test_an_example_without_a_finite_gradient_counts_as_zero():
    inputs = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [float("inf"), 1.0], [0.0, 1.0]])
    np.testing.assert_allclose(sum_of(inputs, 10.0), [1.0, 1.0], rtol=1e-7)


def test_dropout_draws_for_every_example():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 1, bias=False))
    optimizer = private(model, 1e6)
    arguments = (model, lambda out, _: out.sum(), torch.ones(16, 64), torch.zeros(16))
    try:
        optimizer.accumulate(*arguments)
    except ValueError as refused:  # the vmap of PyTorch 1 has no dropout
        assert torch.__version__.startswith("1.") and "vectorize=False" in str(refused)
        optimizer.accumulate(*arguments, vectorize=False)
    assert 3 < len(np.unique(released(optimizer))) <= 17


# Nothing else is released


@pytest.mark.parametrize("when", ["before", "after", "between", "zeroed"])
def test_a_stray_backward_changes_nothing_that_is_released(when):
    results = []
    for stray in (False, True):
        model, (inputs, targets) = model_of(), batch()
        optimizer = private(model)

        def log(now):
            if stray and now == when:
                (1e6 * cross_entropy(model(inputs), targets)).backward()
                if when == "zeroed":
                    model.zero_grad()

        log("before"), log("zeroed")
        optimizer.accumulate(model, cross_entropy, inputs[:4], targets[:4])
        log("between")
        optimizer.accumulate(model, cross_entropy, inputs[4:], targets[4:])
        log("after")
        before = flat(model.parameters())
        results.append((released(optimizer).tobytes(), flat(model.parameters()) - before))
        assert all(p.grad is None for p in model.parameters())
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_accumulate_leaves_no_trace_in_the_model():
    """Clipped sums without noise are private data, so they are not left where others read."""
    model, (inputs, targets) = model_of(), batch()
    optimizer = private(model)
    optimizer.accumulate(model, cross_entropy, inputs, targets)
    assert all(p.grad is None for p in model.parameters())


def test_a_failed_call_adds_nothing():
    model, loss = linear(2)
    optimizer = private(model)
    calls = []

    def failing(out, _):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of memory")
        return out.sum()

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.accumulate(model, failing, torch.ones(4, 2), vectorize=False, chunk=1)
    with pytest.raises(ValueError, match="nothing to release"):
        optimizer.step()


def test_parameters_of_others_are_not_touched():
    """A module may hold more than the optimizer does."""
    model, (inputs, targets) = model_of(), batch()
    sgd = torch.optim.SGD(model[3].parameters(), lr=0.1)
    optimizer = dpmf.torch.PrivateOptimizer(sgd, mechanism(), denominator=8)
    before = flat(model[0].parameters())
    optimizer.accumulate(model, cross_entropy, inputs, targets)
    optimizer.step()
    assert torch.equal(flat(model[0].parameters()), before)
    with pytest.raises(ValueError, match="both in the optimizer and requires a gradient"):
        optimizer.accumulate(model_of(), cross_entropy, inputs, targets)


def test_sums_from_elsewhere():
    layer, loss = linear(3)
    other, _ = linear(3)
    optimizer = private(layer)
    optimizer.add_sum({layer.weight: torch.tensor([[0.25, 0.0, -0.5]])}, 1)
    optimizer.accumulate(layer, loss, torch.tensor([[0.25, 0.0, 0.0]]))
    np.testing.assert_allclose(released(optimizer), [0.5, 0.0, -0.5], rtol=1e-3)
    optimizer.add_sum({}, 0)
    np.testing.assert_array_equal(released(optimizer), [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="not the optimizer's"):
        optimizer.add_sum({other.weight: torch.zeros(1, 3)}, 1)
    with pytest.raises(ValueError, match="not finite"):
        optimizer.add_sum({layer.weight: torch.full((1, 3), float("nan"))}, 1)
    with pytest.raises(TypeError, match="to_dense"):
        optimizer.add_sum({layer.weight: torch.zeros(1, 3).to_sparse()}, 1)


def test_sums_from_elsewhere_in_any_memory_order():
    layer = torch.nn.Linear(3, 5, bias=False)
    gradient = torch.arange(15.0).view(5, 3) / 100
    turned = gradient.t().contiguous().t()
    assert not turned.is_contiguous()
    results = []
    for one in (gradient, turned):
        optimizer = private(layer)
        optimizer.add_sum({layer.weight: one}, 1)
        results.append(released(optimizer).tobytes())
    assert results[0] == results[1]


# Shapes of inputs


class Bilinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(3, 2), torch.nn.Linear(4, 2)

    def forward(self, left, right=None):
        return {"both": self.left(left) * self.right(right["inner"])}


@pytest.mark.parametrize("vectorize", [True, False])
def test_inputs_and_targets_may_be_trees_and_keywords(vectorize):
    torch.manual_seed(0)
    left, right, wanted = torch.randn(6, 3), torch.randn(6, 4), torch.randn(6, 2)

    def loss(outputs, targets):
        return (outputs["both"] - targets["wanted"][0]).square().sum()

    results = []
    for inputs in ((left, {"inner": right}), {"left": left, "right": {"inner": right}}):
        torch.manual_seed(1)
        model = Bilinear()
        expected = torch.autograd.grad(
            loss(model(left, {"inner": right}), {"wanted": [wanted]}), list(model.parameters())
        )
        optimizer = private(model, 1e3)
        seen = optimizer.accumulate(model, loss, inputs, {"wanted": [wanted]}, chunk=4, vectorize=vectorize)
        assert seen.examples == 6
        results.append(released(optimizer))
        np.testing.assert_allclose(results[-1], flat(expected).numpy(), rtol=1e-5)
    assert results[0].tobytes() == results[1].tobytes()


def test_inputs_that_do_not_fit_together():
    model, loss = linear(2)
    optimizer = private(model)
    with pytest.raises(ValueError, match=r"\(3, 2\), \(4,\).*one leading axis of the same length"):
        optimizer.accumulate(model, loss, torch.zeros(3, 2), torch.zeros(4))
    with pytest.raises(TypeError, match="hold a str.*functools.partial"):
        optimizer.accumulate(model, loss, {"input": torch.zeros(3, 2), "mode": "train"})


@pytest.mark.parametrize("vectorize", [True, False])
def test_the_examples_of_a_user_are_clipped_as_one(vectorize):
    """unit="user" is granted to those who say which examples are of one user."""
    model, loss = linear(2)
    optimizer = private(model, 1.0, unit="user")
    users = torch.tensor([[[3.0, 0.0], [3.0, 0.0]], [[0.0, 0.25], [0.0, 0.25]]])
    with pytest.raises(dpmf.MismatchError, match='every user, but what is clipped here is every record.*grouped=True'):
        optimizer.accumulate(model, loss, users[:, 0])
    seen = optimizer.accumulate(model, loss, users, grouped=True, vectorize=vectorize)
    assert (seen.examples, seen.unprotected_clipped) == (2, 0.5)
    np.testing.assert_allclose(released(optimizer), [1.0, 0.5], rtol=1e-3)
    with pytest.raises(dpmf.MismatchError, match='plan with unit="user"'):
        private(model).accumulate(model, loss, users, grouped=True)


def test_plans_state_what_training_clips():
    statement = mechanism().privacy
    assert statement.unit == "record" == dpmf.plan(steps=4, epsilon=3, delta=1e-6).privacy.unit
    assert "for every record" in str(statement) and "for every user" not in str(statement)


# Modules in which an example has no gradient of its own


def test_normalisation_across_examples():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="GroupNorm"):
        private(model).accumulate(model, cross_entropy, torch.zeros(2, 2), torch.zeros(2).long())


def test_statistics_of_the_data():
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 1), torch.nn.InstanceNorm1d(2, track_running_stats=True))
    with pytest.raises(ValueError, match="track_running_stats=False"):
        private(model).accumulate(model, lambda out, _: out.sum(), torch.ones(2, 1, 3), vectorize=False)


def test_sparse_gradients():
    table = torch.nn.Embedding(5, 2, sparse=True)
    with pytest.raises(TypeError, match="sparse=False"):
        private(table).accumulate(table, lambda out, _: out.sum(), torch.tensor([[1]]))


def test_wrapped_modules():
    model, loss = linear(2)
    optimizer = private(model)
    with pytest.raises(ValueError, match=r"DataParallel.*module\.module.*group=True"):
        optimizer.accumulate(torch.nn.Sequential(torch.nn.DataParallel(model)), loss, torch.zeros(2, 2))
