"""What dpmf.torch hands to the noise: the exact sum of contributions, each within the clip, and nothing else."""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from dpmf.torch import _gradients  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from watching import watch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")

VECTORS = pathlib.Path(__file__).parents[2] / "golden" / "clip.json"


@functools.lru_cache(maxsize=None)
def mechanism(clip=0.5, unit="record"):
    return dpmf.mechanism(steps=4, epsilon=3, delta=1e-6, clip=clip, unit=unit)


def private(model, clip=0.5, **arguments):
    arguments = {"denominator": 8, **arguments}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dpmf.torch.PrivateOptimizer(sgd, mechanism(clip, arguments.pop("unit", "record")), **arguments)
    watch(optimizer, quiet=True)
    return optimizer


def released(optimizer):
    """What the noise of the next step is added to."""
    optimizer.step()
    return optimizer._noise.run.given


def linear(width):
    """A model whose gradient is its input."""
    layer = torch.nn.Linear(width, 1, bias=False)
    return layer, lambda out, _: out.sum()


def sum_of(inputs, clip, **arguments):
    model, loss = linear(inputs.shape[1])
    optimizer = private(model, clip)
    optimizer.accumulate(model, loss, inputs, **arguments)
    return released(optimizer)


def norm_sq(values):
    """In exact arithmetic."""
    return sum((Fraction(value) ** 2 for value in values.tolist()), Fraction(0))


def difference(first, second):
    """In exact arithmetic."""
    return [Fraction(a) - Fraction(b) for a, b in zip(first.tolist(), second.tolist())]


def within(moved, clip):
    """Whether a difference is at most the clip, as real numbers."""
    return sum(x * x for x in moved) <= Fraction(clip) ** 2


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
        moved = difference(whole, rest)
        assert within(moved, clip)
        # Nothing but the grid keeps it from the whole clip.
        assert not within(moved, clip * (1 - 1e-8))


def test_nor_among_many_examples():
    """65,536 examples that all pull the same way: float32 would round every partial sum, and the sum itself."""
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
        moves.append(difference(whole, total(others)))
    assert all(within(moved, clip) and not within(moved, clip * (1 - 1e-8)) for moved in moves)


def test_no_more_contributions_than_are_added_without_error():
    layer, _ = linear(2)
    optimizer = private(layer)
    optimizer.add_sum({}, 2**20)
    with pytest.raises(ValueError, match="1048577 contributions, but at most 1048576 can be added exactly"):
        optimizer.add_sum({}, 1)


def test_crafted_rounding():
    """Entries that round up one by one: a norm computed in less than float64 lets them pass."""
    width = 4096
    for clip in (1.0, 1e-3, 7.7e5, 1e-20, 1e20):
        each = np.float32(clip / np.sqrt(width))
        for value in (each, np.nextafter(each, np.float32(np.inf)), each * np.float32(1.0001)):
            inputs = torch.full((1, width), float(value))
            clipped = sum_of(inputs, clip)
            assert Fraction(clip * (1 - 1e-7)) ** 2 < norm_sq(clipped) <= Fraction(clip) ** 2


def test_the_order_of_a_cohort_changes_no_bit():
    """Each example is a call, since vmap rounds by what it has beside it."""
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
    expected = sum(row * min(1.0, clip / row.norm().item()) for row in rows)
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
    optimizer.add_sum({layer.weight: torch.tensor([[0.25, 0.0, -0.25]])}, 1)
    optimizer.accumulate(layer, loss, torch.tensor([[0.25, 0.0, 0.0]]))
    np.testing.assert_allclose(released(optimizer), [0.5, 0.0, -0.25], rtol=1e-6)
    optimizer.add_sum({}, 0)
    np.testing.assert_array_equal(released(optimizer), [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="not the optimizer's"):
        optimizer.add_sum({other.weight: torch.zeros(1, 3)}, 1)
    with pytest.raises(ValueError, match="not finite"):
        optimizer.add_sum({layer.weight: torch.full((1, 3), float("nan"))}, 1)
    with pytest.raises(TypeError, match="to_dense"):
        optimizer.add_sum({layer.weight: torch.zeros(1, 3).to_sparse()}, 1)
    with pytest.raises(TypeError, match="torch.int64.*float64"):
        optimizer.add_sum({layer.weight: torch.zeros(1, 3, dtype=torch.int64)}, 1)
    with pytest.raises(ValueError, match="examples is -1"):
        optimizer.add_sum({}, -1)
    with pytest.raises(ValueError, match="norm 1.25, but that of 2 contributions of norm at most 0.5 has at most 1: clip"):
        optimizer.add_sum({layer.weight: torch.tensor([[0.75, 1.0, 0.0]], dtype=torch.float64)}, 2)
    with pytest.raises(ValueError, match="0 contributions"):
        optimizer.add_sum({layer.weight: torch.ones(1, 3)}, 0)


@pytest.mark.parametrize("dtype, count", [(torch.float64, 40_000), (torch.float32, 40), (torch.float32, 1500)], ids=str)
def test_what_a_sum_from_elsewhere_may_have_lost_is_charged(dtype, count):
    """Contributions of the clip that all pull the same way, added one after the other: in float32, one of them moves
    the computed sum by more than the clip."""
    clip, unit = 1.0, torch.finfo(dtype).eps / 2
    generator = torch.Generator().manual_seed(count)
    rows = 1 + 1e-3 * torch.rand(count, 5, generator=generator, dtype=torch.float64)
    rows = (rows / rows.norm(dim=1, keepdim=True) * (1 - 1e-7)).to(dtype)

    def total(rows):
        layer, _ = linear(5)
        one_by_one = torch.from_numpy(np.add.accumulate(rows.numpy(), axis=0)[-1])  # in order, in the type of the rows
        optimizer = private(layer, clip)
        optimizer.add_sum({layer.weight: one_by_one[None]}, count)
        return one_by_one.double(), released(optimizer)

    computed, whole = total(rows)
    moves, before = [], []
    for index in range(0, count, max(count // 8, 1)):
        others = rows.clone()
        others[index] = 0
        without, rest = total(others)
        assert within(difference(whole, rest), clip)
        moves.append(float(np.linalg.norm(whole - rest)))
        before.append(float((computed - without).norm()))
    assert (max(before) > clip) == (dtype == torch.float32)
    # And by no more than it may have lost.
    np.testing.assert_allclose(whole, computed * (1 - (count**2 + 3 * count) * unit), rtol=1e-7)
    assert max(moves) > 0.8


def test_sums_that_may_have_lost_too_much():
    layer, _ = linear(2)
    with pytest.raises(ValueError, match="a sum of 4096 contributions in this precision may be off by 100 %.*in float64"):
        private(layer).add_sum({layer.weight: torch.ones(1, 2)}, 4096)
    with pytest.raises(ValueError, match="off by 27.3 %"):
        private(layer).add_sum({layer.weight: torch.ones(1, 2).bfloat16()}, 7)
    private(layer).add_sum({layer.weight: torch.ones(1, 2, dtype=torch.float64)}, 4096)


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
    with pytest.raises(dpmf.MismatchError, match='every user, but here every record is clipped.*grouped=True'):
        optimizer.accumulate(model, loss, users[:, 0])
    seen = optimizer.accumulate(model, loss, users, grouped=True, vectorize=vectorize)
    assert (seen.examples, seen.unprotected_clipped) == (2, 0.5)
    np.testing.assert_allclose(released(optimizer), [1.0, 0.5], rtol=1e-3)
    with pytest.raises(dpmf.MismatchError, match='plan with unit="user"'):
        private(model).accumulate(model, loss, users, grouped=True)


def test_plans_state_what_training_clips():
    statement = mechanism().privacy
    assert statement.unit == "record" == dpmf.mechanism(steps=4, epsilon=3, delta=1e-6).privacy.unit
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


# Both ways to the clipped sum


def both_ways(rows, norm):
    """By torch, elementwise, and over the memory itself; in units of the clip."""
    clip = dpmf._core._Clip(norm, max(sum(row.shape[1:].numel() for row in rows), 1))
    results, longer = [], []
    for add in (_gradients.add_by_torch, _gradients.add_in_place):
        sums = [torch.zeros(row.shape[1:], dtype=torch.int64) for row in rows]
        longer.append(add(rows, sums, clip))
        results.append(sums)
    assert torch.equal(*longer)
    return *results, longer[0]


def contributions(count, dtype=torch.float32):
    """To parameters of several blocks, of one and of none, some longer than 1, some not, and some on the grid."""
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randn(count, *shape, generator=generator) for shape in ((3, 900), (), (17,), (0, 4))]
    size = torch.logspace(-3, 0, count) if count else torch.ones(0)
    return [(row * size.view(-1, *[1] * (row.dim() - 1))).to(dtype) for row in rows]


@pytest.mark.parametrize("clip", [1.0, 0.3, 1e-20, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 97])
def test_both_ways_give_one_sum(clip, dtype, count):
    """To the unit where nothing is scaled; where it is, norms in another order may differ in the last bit, and with them one
    unit for each contribution."""
    by_torch, in_place, longer = both_ways(contributions(count, dtype), clip)
    scaled = int(longer.sum())
    assert clip in (0.3, 1.0) or scaled == (count if clip == 1e-20 else 0)
    for one, other in zip(by_torch, in_place):
        assert bool(((one - other).abs() <= scaled).all())
        # Mostly none at all.
        assert float((one != other).double().mean() if one.numel() else 0) < 0.02


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_both_ways_leave_out_what_is_not_finite(wrong):
    rows = contributions(9)
    without = [row.clone() for row in rows]
    rows[0][2, 1, 899] = rows[2][4, 16] = rows[1][0] = wrong
    for row in without:
        row[[0, 2, 4]] = 0
    for got, expected in zip(both_ways(rows, 1.0), both_ways(without, 1.0)[:2]):
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert both_ways(rows, 1e20)[2].tolist() == [index in (0, 2, 4) for index in range(9)]
    # Finite, but its square is not in float32.
    assert float(both_ways([torch.full((1, 2), 3e38)], 1.0)[1][0].sum() * 2.0**-32) == pytest.approx(2**0.5)


def test_both_ways_see_memory_in_any_order():
    rows = contributions(33)
    strided = [row.transpose(0, -1).contiguous().transpose(0, -1) if row.dim() > 1 else row for row in rows]
    strided[2] = torch.stack([rows[2]] * 2, 1)[:, 1]
    assert not strided[0].is_contiguous() and not strided[2].is_contiguous()
    for got, expected in zip(both_ways(strided, 1.0)[:2], both_ways(rows, 1.0)[:2]):
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
    same = torch.ones(1, 5).expand(4, 5)
    assert torch.equal(both_ways([same], 10.0)[1][0] * 2.0**-29, torch.full((5,), 4.0))


def test_a_sum_does_not_depend_on_the_number_of_threads():
    """Large enough to be shared out."""
    code = (
        "import dpmf, torch; from dpmf.torch import _gradients as g; torch.manual_seed(0); "
        "rows = [torch.randn(64, 9000), torch.randn(64, 3)]; sums, _ = g.clipped_sum(rows, dpmf._core._Clip(0.7, 9003)); "
        "import hashlib; print(hashlib.sha256(torch.cat(sums).numpy().tobytes()).hexdigest())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "5")
    }
    assert len(printed) == 1


def test_the_sum_over_memory_refuses_what_it_cannot_add():
    rows, sums = np.ones((2, 3), np.float32), np.zeros(3, np.int64)
    add = dpmf._core._Clip(1.0, 3).add_rows
    assert add([rows], [sums]).tolist() == [True, True]
    assert add([rows.astype(np.float64)], [sums]).tolist() == [True, True]
    for wrong, match in [
        (([rows.astype(np.int64)], [sums]), "float32 or all of float64"),
        (([rows, rows.astype(np.float64)], [sums, sums.copy()]), "float32 or all of float64"),
        (([rows], [sums.astype(np.float32)]), "int64"),
        (([rows.T], [np.zeros(2, np.int64)]), "contiguous"),
        (([rows], [np.zeros(4, np.int64)]), "contributions to a part"),
        (([rows, rows[:1]], [sums, np.zeros(3, np.int64)]), "numbers of rows differ"),
        (([rows], []), "parts of the sum"),
        (([rows, rows], [sums, sums]), "passed twice"),
        (([rows], [sums], 1.5), "share"),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            add(*wrong)


@pytest.mark.parametrize("case", json.loads(VECTORS.read_text()), ids=lambda case: case["about"])
def test_the_vectors_of_the_core(case):
    """golden/clip.json, on the host and as any device computes it."""
    bits = np.array(case["contributions"], np.uint32).view(np.float32)
    rows = [torch.from_numpy(bits)]
    clip = dpmf._core._Clip(case["clip"], bits.shape[1])
    assert (clip.unit, clip.target) == (case["unit"], case["target"])
    for add in (_gradients.add_by_torch, _gradients.add_in_place):
        sums = [torch.zeros(bits.shape[1], dtype=torch.int64)]
        longer = add(rows, sums, clip)
        # A norm that is added up in another order may move an integer by one.
        scaled = sum(case["clipped"])
        assert longer.tolist() == case["clipped"]
        assert int((sums[0] - torch.tensor(case["sum"])).abs().max()) <= (scaled if add is _gradients.add_by_torch else 0)


def test_slices_change_nothing(monkeypatch):
    rows = contributions(33)
    whole = both_ways(rows, 1.0)[0]
    monkeypatch.setattr(_gradients, "SLICE", 100)
    for got, expected in zip(both_ways(rows, 1.0)[0], whole):
        assert bool(((got - expected).abs() <= 33).all()) and float((got != expected).double().mean() if got.numel() else 0) < 0.02
