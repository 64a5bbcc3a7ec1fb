"""Ghost clipping: the sums of dpmf.torch without gradients of examples, against gradients of examples in float64.

A sum is private if one example moves it by at most the clip, as real numbers. So cases compare the integers of two sums, of which one lacks
an example, without rounding.
"""

import contextlib
import copy
import math
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")
if not hasattr(torch, "func"):
    pytest.skip("ghost clipping needs PyTorch 2.0", allow_module_level=True)

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from dpmf._core import _Clip  # noqa: E402
from dpmf.torch import _ghost, _products  # noqa: E402
from dpmf.torch._gradients import Batch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning"),
    pytest.mark.filterwarnings("error::dpmf.torch.UncheckedModelWarning"),
]

CASES = 10_000 if os.environ.get("DPMF_SLOW") else 120


# Models


class Conv1D(nn.Module):
    """As in transformers: a Linear whose weight lies the other way round."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / 4)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class OffsetRMSNorm(nn.Module):
    """As in Gemma."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / 4)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


class Lora(nn.Module):
    def __init__(self, base, width, made, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, made, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


class Transformer(nn.Module):
    """A language model of one block; its position embedding is the same for all examples."""

    def __init__(self, vocabulary=17, width=8, length=64, tied=False, transposed=False, positions="row", lora=False, inplace=False):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.first, self.second = nn.LayerNorm(width), OffsetRMSNorm(width)
        linear = (lambda a, b: Conv1D(b, a)) if transposed else nn.Linear
        self.attend, self.out = linear(width, 3 * width), linear(width, width)
        self.wide, self.narrow = linear(width, 4 * width), linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.activation = nn.ReLU(inplace=True) if inplace else gelu
        self.positions = positions
        if tied:
            self.head.weight = self.words.weight
        if lora:
            self.requires_grad_(False)
            self.wide = Lora(self.wide, width, 4 * width)

    def block(self, x):
        size, length, width = x.shape
        q, k, v = self.attend(self.first(x)).view(size, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(size * length, width)
        x = x + self.out(attended).view(x.shape)  # all tokens along one axis
        return x + self.narrow(self.activation(self.wide(self.second(x))))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        places = places if self.positions == "flat" else places[None]
        return self.head(self.block(self.words(tokens) + self.places(places)))


class Twice(nn.Module):
    """Calls a layer several times, and shares its weight with another."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.LayerNorm(5)
        self.other.weight = self.one.weight

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.norm(self.one(x)))
        return self.other(x)


class Again(nn.Module):
    """Almost the same three times: the gradients of all calls point one way."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.layer.weight.data = torch.eye(6) + 0.1 * torch.randn(6, 6)

    def forward(self, x):
        return self.layer(self.layer(self.layer(x)))


def tokens_loss(outputs, targets):
    """targets: the next tokens, -100 where there is none, and a weight for each example."""
    targets, weight = targets
    return weight.mean() * cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def squares(outputs, targets):
    targets, weight = targets
    return weight.mean() * (outputs * targets).sum()


def tokens(size, length, vocabulary=17):
    inputs, targets = torch.randint(vocabulary, (2, size, length))
    return inputs, (targets, torch.ones(size))


def numbers(module, *shape, size=7):
    inputs = torch.randn(size, *shape)
    return inputs, (torch.randn_like(module(inputs)), torch.ones(size))


def sequential(*parts):
    return nn.Sequential(*parts), squares


LAYERS = {
    "linear": (lambda: sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "linear on sequences": (lambda: sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), (4, 6)),
    "linear on long sequences": (lambda: sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3)), (50, 6)),
    "linear on grids": (lambda: sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (2, 3, 6)),
    "frozen bias": (lambda: sequential(frozen(nn.Linear(6, 5), "bias"), nn.Tanh(), frozen(nn.Linear(5, 3), "weight")), (6,)),
    "transposed": (lambda: sequential(Conv1D(5, 6), nn.Tanh(), Conv1D(3, 5)), (4, 6)),
    "layer norm": (lambda: sequential(nn.LayerNorm(6), nn.Tanh(), nn.LayerNorm((4, 6))), (4, 6)),
    "layer norm without bias": (lambda: sequential(nn.Linear(6, 6), nn.LayerNorm(6, bias=False)), (6,)),
    "rms norm": (lambda: sequential(nn.RMSNorm(6), nn.Tanh(), OffsetRMSNorm(6)), (4, 6)),
    "group norm": (lambda: sequential(nn.GroupNorm(2, 6), nn.Tanh(), nn.Conv2d(6, 4, 1)), (6, 5, 5)),
    "convolutions": (lambda: sequential(nn.Conv2d(2, 3, (3, 2), stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2, dilation=2)), (2, 9, 9)),
    "one dimension": (lambda: sequential(nn.Conv1d(2, 3, 3, padding=2, stride=2), nn.ReLU(inplace=True), nn.Conv1d(3, 2, 2)), (2, 9)),
    "other convolutions": (lambda: sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2)), (4, 5, 5)),
    "padded the same": (lambda: sequential(nn.Conv1d(2, 3, 3, padding="same"), nn.PReLU(3)), (2, 9)),
    "frames": (lambda: (Frames(), squares), (3, 2, 6, 6)),
    "several calls": (lambda: (Twice(), squares), (5,)),
    "several calls on sequences": (lambda: (Twice(), squares), (4, 5)),
}


def frozen(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


class Frames(nn.Module):
    """Folds a second axis into the first, as for videos."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), OffsetRMSNorm(4)

    def forward(self, x):
        made = self.norm(self.conv(x.flatten(0, 1)))
        return self.scale(made.movedim(1, -1)).reshape(*x.shape[:2], -1)


MODELS = {
    "untied": dict(),
    "tied": dict(tied=True),
    "transposed": dict(transposed=True),
    "positions without an axis of examples": dict(positions="flat", tied=True),
    "adapters": dict(lora=True),
    "written in place": dict(inplace=True),
}


# What is compared


def trained_of(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def clipped(module, loss, inputs, targets, clip, *, check=True):
    """The clipped sum in units of the clip, by parameter, and what it was made of."""
    trained = trained_of(module)
    sums = {name: torch.zeros(p.shape, dtype=torch.int64) for name, p in trained.items()}
    ghost, batch = _ghost.Ghost(module, trained), Batch(inputs, targets)

    def take(name, first, values):
        sums[name][first : first + len(values)] += values

    with ghost.opened():
        if check:
            ghost.check(batch.parts, loss)
        else:
            ghost.shared = ghost._find_shared(batch.parts, batch.length)
        made = ghost.contributions(batch.parts, loss)
        longer = made.add(clip, take)
    return sums, made, longer


def apart(module, loss, inputs, targets, precision):
    """The gradients of examples, each alone, as rows, by PyTorch."""
    module = copy.deepcopy(module).to(precision)
    parts, rows = Batch(inputs, targets), []
    for index in range(parts.length):
        positional, _, own = _ghost.cut_examples(parts.parts, torch.tensor([index]))
        positional, own = torch.utils._pytree.tree_map(lambda x: x.to(precision) if x.is_floating_point() else x, (positional, own))
        value = loss(module(*positional), own[0])
        found = torch.autograd.grad(value, list(trained_of(module).values()), allow_unused=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(found, trained_of(module).values())]))
    return torch.stack(rows).double().numpy()


def in_float64(module, loss, inputs, targets):
    return apart(module, loss, inputs, targets, torch.float64)


def flat(sums, clip):
    return torch.cat([one.reshape(-1) for one in sums.values()]).double().numpy() * clip.unit


def expected_sum(rows, target):
    norms = np.linalg.norm(rows, axis=1)
    scales = np.where(np.isfinite(norms), np.minimum(1.0, target / np.maximum(norms, 1e-300)), 0.0)
    return (np.where(np.isfinite(rows), rows, 0.0) * scales[:, None]).sum(0)


def compare(module, loss, inputs, targets):
    rows = in_float64(module, loss, inputs, targets)
    clip = _Clip(float(np.median(np.linalg.norm(rows, axis=1))), rows.shape[1])
    sums, made, longer = clipped(module, loss, inputs, targets, clip)
    assert np.linalg.norm(flat(sums, clip) - expected_sum(rows, clip.norm)) < 2e-6 * len(rows) * clip.norm
    assert 0 < made.charge() < 1e-5
    assert len(rows) // 2 <= int(longer.sum()) <= len(rows) // 2 + 1
    bounds = made.norms().square.sqrt().numpy()
    np.testing.assert_allclose(bounds, np.linalg.norm(rows, axis=1), rtol=2e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_sums_of_every_layer_are_those_of_gradients_in_float64(layer):
    torch.manual_seed(1)
    (module, loss), shape = LAYERS[layer][0](), LAYERS[layer][1]
    compare(module, loss, *numbers(module, *shape))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", [3, 40])
def test_sums_of_language_models(model, length):
    torch.manual_seed(2)
    module = Transformer(**MODELS[model])
    inputs, targets = tokens(7, length)
    targets[0][0, 2:] = -100  # padding
    targets[1][1] = 30.0
    compare(module, tokens_loss, inputs, targets)


def test_padding_of_embeddings():
    torch.manual_seed(3)
    module = nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 17))
    inputs, targets = tokens(8, 12, 9)
    compare(module, tokens_loss, inputs, targets)


@pytest.mark.parametrize("parts", [_products.PART, 64, 8])
def test_the_size_of_slices_does_not_matter(monkeypatch, parts):
    torch.manual_seed(4)
    module, (inputs, targets) = Transformer(tied=True), tokens(6, 9)
    clip = _Clip(1.0, 10_000)
    whole, *_ = clipped(module, tokens_loss, inputs, targets, clip)
    monkeypatch.setattr(_products, "PART", parts)
    monkeypatch.setattr(_products, "SLICE", 50)
    cut, *_ = clipped(module, tokens_loss, inputs, targets, clip)
    for name in whole:
        assert (whole[name] - cut[name]).abs().max() <= 1  # a tie, in another order


@pytest.mark.parametrize("model", ["tied", "adapters"])
@pytest.mark.parametrize("wide", [1, 1 << 40])
def test_losses_one_by_one_and_together(monkeypatch, model, wide):
    """Large outputs go through the loss one example after the other, and may be written into by it."""

    def scaled(outputs, targets):
        return tokens_loss(outputs.mul_(3.0), targets)

    torch.manual_seed(4)
    module, (inputs, targets) = Transformer(**MODELS[model]), tokens(7, 12)
    monkeypatch.setattr(_ghost, "WIDE", wide)
    for loss in (tokens_loss, scaled):
        compare(module, loss, inputs, targets)


def test_small_gradients_are_made_once():
    """Those of adapters of low rank, which are smaller than what goes in and comes back."""
    torch.manual_seed(4)
    module, (inputs, targets) = Transformer(lora=True), tokens(7, 40)
    _, made, _ = clipped(module, tokens_loss, inputs, targets, _Clip(1.0, 10_000))
    assert made.made.keys() == {"wide.down.weight", "wide.up.weight"} and not made.pairs and not made.rows
    assert made.products == 7 * 40


@contextlib.contextmanager
def in_half(precision):
    """Without oneDNN, whose products in half precision take instructions that some virtual machines only claim to have."""
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=precision):
        yield


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast(precision):
    """Layers compute in half precision, and one example still moves the sum by at most the clip."""
    torch.manual_seed(5)
    module, (inputs, targets) = Transformer(), tokens(7, 12)
    targets[1][:] = 50.0
    rows = in_float64(module, tokens_loss, inputs, targets)
    clip = _Clip(0.1, rows.shape[1])
    with in_half(precision):
        most, sums, _ = moved(module, tokens_loss, inputs, targets, clip, 3)
    assert 0.99 < most <= 1.0
    assert np.linalg.norm(flat(sums, clip) - expected_sum(rows, clip.norm)) < 0.05 * len(rows) * clip.norm


# Adversaries


def squared_units(sums, without):
    """Without rounding."""
    return sum(int(x) ** 2 for name in sums for x in (sums[name] - without[name]).reshape(-1).tolist())


def moved(module, loss, inputs, targets, clip, index, *, check=False):
    """By how many clips an example moves the sum; the sum; and what it was made of."""
    sums, made, _ = clipped(module, loss, inputs, targets, clip, check=check)
    gone = targets[1].clone()
    gone[index] = math.nan
    without, *_ = clipped(module, loss, inputs, (targets[0], gone), clip, check=check)
    square = squared_units(sums, without)
    # Exactly: a double has 53 bits, and the clip less than 2**33 units.
    limit = int(clip.norm / clip.unit * 2**20)
    most = math.sqrt(square) * clip.unit / clip.norm
    return most if square << 40 <= limit**2 else max(most, math.nextafter(1.0, 2.0)), sums, made


def random_case(seed):
    """A module, a batch that means harm, and a clip."""
    torch.manual_seed(seed)
    chance = np.random.default_rng(seed)
    size = int(chance.integers(2, 6))
    kind = chance.choice(["language", "linear", "again", "cancelling", "convolution"], p=[0.5, 0.1, 0.1, 0.2, 0.1])
    if kind == "language":
        options = dict(tied=bool(chance.integers(2)), transposed=bool(chance.integers(2)), lora=chance.random() < 0.15)
        options["positions"] = str(chance.choice(["row", "flat"]))
        module, loss = Transformer(vocabulary=int(chance.choice([3, 17, 60])), **options), tokens_loss
        inputs, targets = tokens(size, int(chance.choice([1, 2, 9, 33, 60])), module.words.num_embeddings)
        if chance.random() < 0.4:
            inputs[int(chance.integers(size))] = 1  # one token repeated
        if chance.random() < 0.3:
            inputs[:] = 0
            targets[0][:] = int(chance.integers(2))
        if chance.random() < 0.4:
            targets[0][int(chance.integers(size)), int(chance.integers(1, 5)) :] = -100
        if chance.random() < 0.3:
            module.words.weight.data *= 10.0 ** chance.integers(-4, 5)  # huge activations
        if chance.random() < 0.2:
            module.head.weight.data[:] = module.head.weight.data[0]  # gradients cancel
    elif kind == "convolution":
        module, loss = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)), squares
        inputs, targets = numbers(module, 2, 6, 6, size=size)
        inputs *= torch.tensor(10.0 ** chance.uniform(-6, 8, (size, 1, 1, 1))).float()
    else:
        shape = (int(chance.choice([2, 8, 80])), 6) if kind == "cancelling" else (6,)
        parts = dict(cancelling=[nn.Linear(6, 4)], linear=[nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)], again=[Again()])
        module, loss = nn.Sequential(*parts[kind]), squares
        inputs, targets = numbers(module, *shape, size=size)
        inputs *= torch.tensor(10.0 ** chance.uniform(-6, 12, (size, *[1] * len(shape)))).float()
        if kind == "cancelling":
            # Tokens cancel in pairs but for a little, which single precision would lose.
            inputs[:, 1::2] = -inputs[:, ::2] * (1.0 + 2.0 ** -float(chance.integers(10, 23)))
            targets[0][:, 1::2] = targets[0][:, ::2]
    targets[1][:] = torch.tensor(10.0 ** chance.uniform(-3, 6, size)).float()
    special = chance.random(size)
    targets[1][torch.tensor(special < 0.1)] = 0.0
    targets[1][torch.tensor((special > 0.1) & (special < 0.15))] = math.inf
    if inputs.is_floating_point() and chance.random() < 0.1:
        inputs.view(-1)[0] = math.nan
    return module, loss, inputs, targets, _Clip(float(10.0 ** chance.uniform(-3, 1)), 10_000), int(chance.integers(size))


def excess(seed):
    """By how much a case moves the sum beyond the clip, how much it moves at all, and how far it is from gradients in float64."""
    module, loss, inputs, targets, clip, index = random_case(seed)
    most, sums, made = moved(module, loss, inputs, targets, clip, index)
    rows = in_float64(module, loss, inputs, targets)
    scale, _ = made.weights(clip.norm * (1.0 - made.charge()))
    reach = made.norms().reach_sq.sqrt()
    # Single precision is off by parts of what was added up, before it cancelled; deep down, by a number without sense. Where a softmax is
    # almost one, what is missing of one has no digits left, and PyTorch's own gradients in single precision are off as well.
    norms = np.linalg.norm(rows, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.linalg.norm(apart(module, loss, inputs, targets, torch.float32) - rows, axis=1) <= 1e-4 * norms
    trusted = np.isfinite(norms) & near & (reach.numpy() < 30.0 * norms) & (scale.numpy() > 0.0)
    longest = np.max((scale.numpy() * norms)[trusted] / clip.norm, initial=0.0)
    return most, longest


def test_no_example_moves_a_sum_by_more_than_the_clip():
    found = np.array([excess(seed) for seed in range(CASES)])
    assert found[:, 0].max() <= 1.0
    # Scaled gradients in float64, where those in single precision are close to them.
    assert found[:, 1].max() <= 1.0 + 1e-3
    # The cases are hard enough: most of them use up the clip.
    assert (found[:, 0] > 0.999).mean() > 0.4 and (found[:, 1] > 0.999).mean() > 0.4


def without_cross_terms(pairs, rows):
    parts = [norms_by_products([pair], rows) for pair in pairs]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def without_repeats(pairs, rows):
    square = sum(pair.right.double().square().sum((1, 2)) for pair in pairs)
    return square, sum(pair.right.double().square().sum(2).sqrt().sum(1) for pair in pairs)


def half_of_the_norm(values):
    square = values.double().square().sum(1)
    return _products.Norms(0.5 * square, square)


def half_of_what_is_made(made):
    square = made.values.square().sum(1)
    return _products.Norms(0.5 * square, square)


norms_by_products = _products._norms_by_products

BROKEN = {
    "cross terms left out": (_products, "_norms_by_products", without_cross_terms),
    "tokens that come again": (_products, "_norms_by_row", without_repeats),
    "a norm that is too small": (_ghost, "norms_of_rows", half_of_the_norm),
    "gradients that are made": (_products.Made, "norms", half_of_what_is_made),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_cases_find_faults(monkeypatch, fault):
    monkeypatch.setattr(*BROKEN[fault])
    assert max(excess(seed)[0] for seed in range(100)) > 1.001


def test_a_norm_that_single_precision_loses():
    """Products of ten thousand tokens whose gradients cancel: the bound is above the norm, and close to it."""
    torch.manual_seed(6)
    module = nn.Linear(2, 2, bias=False)
    x = torch.randn(1, 5000, 2)
    inputs = torch.stack((x, -x * (1.0 + 2.0**-20)), 2).reshape(1, -1, 2).repeat(2, 1, 1)
    targets = (torch.ones(2, 10_000, 2), torch.tensor([1e6, 1.0]))
    for clip in (_Clip(1e-3, 4), _Clip(1e6, 4)):
        most, _, made = moved(module, squares, inputs, targets, clip, 0)
        exact = inputs.double().sum(1).norm(dim=1) * math.sqrt(2) * targets[1].double()
        ratios = made.norms().square.sqrt() / exact
        assert most <= 1.0 and ratios.min() >= 1.0 and ratios.max() < 1.001
        assert made.norms().reach_sq.sqrt()[0] > 1e6 * exact[0]


def test_an_example_whose_products_are_far_longer_than_their_sum_counts_for_less():
    """Otherwise its rounding errors would not be covered by the charge."""
    module = nn.Linear(1, 1, bias=False)
    inputs = torch.tensor([[[1e6], [-1e6], [1.0]], [[1.0], [0.0], [0.0]]])
    sums, made, longer = clipped(module, squares, inputs, (torch.ones(2, 3, 1), torch.ones(2)), _Clip(1.0, 1))
    scale, _ = made.weights(1.0)
    assert scale[0] == pytest.approx(_ghost.REACH / 2e6, rel=1e-4) and scale[1] == pytest.approx(1.0)
    assert longer.tolist() == [True, True]


def test_more_than_can_be_charged_is_refused():
    made = clipped(nn.Linear(1, 1), squares, *numbers(nn.Linear(1, 1), 1), _Clip(1.0, 2))[1]
    made.examples, made.products = 1 << 12, 1 << 24
    with pytest.raises(ValueError, match="chunk=1024"):
        made.charge()


def test_the_charge_is_what_is_proved():
    for examples, products, dimension in ((1, 1, 1), (64, 64 * 1024, 10**8), (256, 256, 10)):
        x, y = _ghost.charge(examples, products, dimension), 2 * (products + 4) * 2.0**-53 * examples * _ghost.REACH
        assert (1 - x) * (1 + y) + 2.0**-32 * math.sqrt(dimension) <= 1.0


# accumulate()


def mechanism(**arguments):
    return dpmf.mechanism(steps=4, momentum=0.9, epsilon=3, delta=1e-6, clip=0.5, **arguments)


def private(model, plan=None, **arguments):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return dpmf.torch.PrivateOptimizer(sgd, plan or mechanism(), denominator=8, **arguments)


def waiting(optimizer):
    return optimizer._noise.exact.numpy() * optimizer._noise.run.clip.unit


@pytest.mark.parametrize("place", ["host", "device"])
def test_accumulate_in_parts_is_the_sum_of_gradients_of_examples(place):
    torch.manual_seed(7)
    model, (inputs, targets) = Transformer(tied=True), tokens(11, 6)
    rows = in_float64(model, tokens_loss, inputs, targets)
    one, several, usual = (private(model, release_on=place) for _ in range(3))
    seen = one.accumulate(model, tokens_loss, inputs, targets, clipping="ghost")
    assert (seen.clipping, seen.examples) == ("ghost", 11) and 0.0 < seen.charged < 1e-5
    for part in (slice(0, 1), slice(1, 8), slice(8, 11)):
        again = several.accumulate(
            model, tokens_loss, inputs[part], (targets[0][part], targets[1][part]), clipping="ghost", chunk=2, vectorize=False
        )
    plain = usual.accumulate(model, tokens_loss, inputs, targets)
    assert (plain.clipping, plain.charged) == ("per-example", 0.0)
    assert seen.unprotected_loss == pytest.approx(plain.unprotected_loss, rel=1e-5)
    assert seen.unprotected_clipped == plain.unprotected_clipped and again.examples == 3
    for optimizer in (one, several):
        assert np.linalg.norm(waiting(optimizer) - expected_sum(rows, 0.5)) < 1e-5
        assert optimizer._noise.run.contributions == 11
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_auto_says_which(monkeypatch):
    model, (inputs, targets) = Transformer(), tokens(4, 6)
    optimizer, dimension = private(model), sum(p.numel() for p in model.parameters())
    assert optimizer.accumulate(model, tokens_loss, inputs, targets, clipping="auto").clipping == "per-example"
    monkeypatch.setattr(dpmf.torch, "MOST_ROWS", 4 * 3 * dimension)
    assert optimizer.accumulate(model, tokens_loss, inputs, targets, clipping="auto", chunk=3).clipping == "per-example"
    assert optimizer.accumulate(model, tokens_loss, inputs, targets, clipping="auto", chunk=4).clipping == "ghost"
    assert optimizer.accumulate(model, tokens_loss, inputs, targets, clipping="auto", views=2).clipping == "per-example"
    with pytest.raises(ValueError, match="clipping is 'gost'"):
        optimizer.accumulate(model, tokens_loss, inputs, targets, clipping="gost")


def test_an_empty_batch_counts_no_one():
    model, (inputs, targets) = Transformer(), tokens(4, 6)
    optimizer = private(model)
    seen = optimizer.accumulate(model, tokens_loss, inputs[:0], (targets[0][:0], targets[1][:0]), clipping="ghost")
    assert seen.examples == 0 and optimizer._noise.run.contributions == 0 and not waiting(optimizer).any()
    optimizer.step()


def test_examples_that_are_not_finite_count_as_zero():
    torch.manual_seed(8)
    model, (inputs, targets) = Transformer(tied=True), tokens(5, 6)
    rows = in_float64(model, tokens_loss, inputs, targets)
    targets[1][:3] = torch.tensor([math.nan, math.inf, -math.inf])
    optimizer = private(model)
    seen = optimizer.accumulate(model, tokens_loss, inputs, targets, clipping="ghost")
    assert np.linalg.norm(waiting(optimizer) - expected_sum(rows[3:], 0.5)) < 1e-5
    assert optimizer._noise.run.contributions == 5 and seen.unprotected_clipped >= 0.6


def test_frozen_layers_are_left_out():
    torch.manual_seed(9)
    model, (inputs, targets) = Transformer(), tokens(5, 6)
    optimizer = private(model)
    model.words.requires_grad_(False)
    model.attend.bias.requires_grad_(False)
    rows = in_float64(model, tokens_loss, inputs, targets)
    optimizer.accumulate(model, tokens_loss, inputs, targets, clipping="ghost")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    views = dict(zip((name for name, _ in model.named_parameters()), optimizer._noise.exact_views))
    found = torch.cat([views[name].reshape(-1) for name in names]).double().numpy() * optimizer._noise.run.clip.unit
    assert np.linalg.norm(found - expected_sum(rows, 0.5)) < 1e-5 and not views["words.weight"].any()


def test_dropout_is_trained_with_and_warned_of():
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    inputs, targets = numbers(model, 4, size=6)
    optimizer = private(model)
    optimizer.accumulate(model, squares, inputs, targets, clipping="ghost")  # it is switched off for the check
    assert waiting(optimizer).any() and model[1].training

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x * torch.rand_like(x))

    with pytest.warns(dpmf.torch.UncheckedModelWarning, match="random numbers"):
        noisy = Noisy()
        private(noisy).accumulate(noisy, squares, inputs, targets, clipping="ghost")


# What is refused


class Uses(nn.Module):
    """A layer, and some use of its parameters or inputs."""

    def __init__(self, use, **parts):
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.use(self, x)


def sorted_examples(model, x):
    return model.layer(x[x[:, 0].argsort()])


def once_more(model, x):
    model.calls = getattr(model, "calls", 0) + 1
    return model.layer(model.layer(x)) if model.calls > 20 else model.layer(x)


def counted(model, x):
    model.seen += 1
    return model.layer(x)


REFUSED = {
    "a parameter of the module itself": (
        Uses(lambda m, x: m.layer(x) + m.token, token=nn.Parameter(torch.zeros(4))),
        "parameter .*token belongs to Uses",
    ),
    "a weight that is used by a function": (
        Uses(lambda m, x: m.layer(x) + nn.functional.linear(x, m.layer.weight)),
        "parameter layer.weight is used outside",
    ),
    "a penalty": (Uses(lambda m, x: m.layer(x) + m.layer.weight.square().sum()), "parameter layer.weight is used outside"),
    "forward in place of a call": (Uses(lambda m, x: m.layer.forward(x)), "parameter layer.* is used outside"),
    "attention of PyTorch": (
        Uses(lambda m, x: m.attention(*[m.layer(x)[:, None]] * 3)[0][:, 0], attention=nn.MultiheadAttention(4, 2)),
        "parameter attention.in_proj_weight belongs to MultiheadAttention",
    ),
    "sorted examples": (Uses(sorted_examples), "sorts, shuffles or mixes"),
    "examples that see each other": (Uses(lambda m, x: m.layer(x) + m.layer(x).mean(0)), "sorts, shuffles or mixes"),
    "a place for few examples": (Uses(lambda m, x: m.layer(x) + (x.sum(0) if len(x) > 6 else 0.0)), "sorts, shuffles or mixes"),
    "examples along the second axis": (Uses(lambda m, x: m.layer(x[None].repeat(3, 1, 1)).sum(0)), "entry of its own"),
    "batch norm": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "mixes the examples of a batch"),
    "statistics": (Uses(counted, seen=nn.Buffer(torch.zeros(()))) if hasattr(nn, "Buffer") else None, "forward pass writes to seen"),
    "a spectral norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "parametrizations.weight"),
    "weights scaled by frequency": (nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True)), "scale_grad_by_freq"),
    "one loss of all": (Uses(lambda m, x: m.layer(x).mean()), "compute the loss in loss"),
    "a gradient of no one": (Uses(lambda m, x: m.layer(x).sum(0)), "compute the loss in loss"),
    "a recurrent layer": (Uses(lambda m, x: m.layer(m.cells(x[:, None])[0][:, 0]), cells=nn.LSTM(4, 4)), "cells.*(leading axes|one tensor)"),
    "a checkpoint without gradients": (
        Uses(lambda m, x: m.layer(checkpoint(m.inner, x, use_reentrant=True)), inner=nn.Linear(4, 4)),
        "use_reentrant=False",
    ),
    "no gradients": (Uses(lambda m, x: m.layer(x) + torch.no_grad()(m.inner)(x), inner=nn.Linear(4, 4)), "switched off"),
    "a wrapper": (nn.DataParallel(nn.Linear(4, 4)), "wrapped in DataParallel"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_refusals_count_and_release_nothing(what):
    torch.manual_seed(11)
    model, words = REFUSED[what]
    if model is None:
        pytest.skip("this PyTorch has no torch.nn.Buffer")
    inputs = torch.randint(9, (7,)) if "frequency" in what else torch.randn(7, 4)
    before = copy.deepcopy(model.state_dict())
    optimizer = private(model)
    with pytest.raises(ValueError, match=words):
        optimizer.accumulate(model, squares, inputs, (torch.randn(7, 4), torch.ones(7)), clipping="ghost")
    assert optimizer._noise.run.contributions is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_an_expert_with_few_places_is_refused_whichever_example_loses_its_place():
    """The last of many examples are dropped, and only where there are as many."""
    torch.manual_seed(15)
    model = Uses(lambda m, x: m.layer(x) * (torch.arange(len(x)) < 12)[:, None])
    optimizer = private(model)

    def accumulate(size):
        targets = torch.randn(size, 4), torch.ones(size)
        optimizer.accumulate(model, squares, torch.randn(size, 4), targets, clipping="ghost")

    accumulate(10)
    accumulate(9)
    with pytest.raises(dpmf.MismatchError, match="sorts, shuffles or mixes"):
        accumulate(20)


@pytest.mark.parametrize("slow", [0.1, 0.001])
@pytest.mark.parametrize("where", ["module", "loss", "wide loss"])
def test_what_remembers_examples_in_a_number_is_refused(monkeypatch, where, slow):
    torch.manual_seed(16)
    kept = [0.0]

    def remember(x):
        kept[0] = (1 - slow) * kept[0] + slow * float(x.detach().mean())
        return x - kept[0]

    if where == "wide loss":
        monkeypatch.setattr(_ghost, "WIDE", 1)
    model = Uses(lambda m, x: m.layer(remember(x) if where == "module" else x))
    loss = squares if where == "module" else lambda outputs, targets: squares(remember(outputs), targets)
    optimizer, inputs, targets = private(model), torch.randn(7, 4) + 1, (torch.randn(7, 4), torch.ones(7))
    with pytest.raises(dpmf.MismatchError, match="remembers examples"):
        optimizer.accumulate(model, loss, inputs, targets, clipping="ghost", vectorize=where != "loss")
    assert optimizer._noise.run.contributions is None


def test_a_loss_that_remembers_after_the_check_is_refused():
    torch.manual_seed(17)
    model, calls = Uses(lambda m, x: m.layer(x)), []
    optimizer, inputs, targets = private(model), torch.randn(7, 4) + 1, (torch.randn(7, 4), torch.ones(7))

    def loss(outputs, targets):
        calls.append(float(outputs.sum()))
        return squares(outputs, targets) * (1 if len(calls) < 100 else sum(calls[100:]))

    optimizer.accumulate(model, loss, inputs, targets, clipping="ghost", vectorize=False)
    assert len(calls) < 100
    with pytest.raises(dpmf.MismatchError, match="after others were seen: .*remembers examples"):
        for _ in range(20):
            optimizer.accumulate(model, loss, inputs, targets, clipping="ghost", vectorize=False)


def test_users_and_views_are_refused():
    model, (inputs, targets) = Transformer(), tokens(4, 6)
    with pytest.raises(ValueError, match="views is 2, and several entries are one contribution"):
        private(model).accumulate(model, tokens_loss, inputs, targets, clipping="ghost", views=2)
    with pytest.raises(ValueError, match="grouped is given"):
        plan = mechanism(unit="user")
        private(model, plan).accumulate(model, tokens_loss, inputs, targets, clipping="ghost", grouped=True)


def test_layers_that_are_called_more_often_than_at_first_are_refused():
    torch.manual_seed(12)
    model = Uses(once_more)
    inputs, targets = torch.randn(3, 4), (torch.randn(3, 4), torch.ones(3))
    optimizer = private(model)
    optimizer.accumulate(model, squares, inputs, targets, clipping="ghost")
    model.calls = 20
    with pytest.raises(ValueError, match="layer is called 2 times"):
        optimizer.accumulate(model, squares, inputs, targets, clipping="ghost")


class Tasks(nn.Module):
    """Several kinds of inputs; examples of one kind see each other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, left=None, right=None):
        return self.layer(left) if right is None else self.layer(right - right.mean(0))


def test_every_form_of_inputs_is_checked():
    torch.manual_seed(12)
    model, inputs = Tasks(), torch.randn(5, 4)
    targets = torch.randn(5, 4), torch.ones(5)
    optimizer = private(model)
    optimizer.accumulate(model, squares, {"left": inputs}, targets, clipping="ghost")
    optimizer.step()
    with pytest.raises(dpmf.MismatchError, match="sorts, shuffles or mixes"):
        optimizer.accumulate(model, squares, {"right": inputs}, targets, clipping="ghost")


def test_a_form_is_checked_once(monkeypatch):
    model, (inputs, targets) = Transformer(), tokens(5, 6)
    optimizer, calls = private(model), []
    find = _ghost.Ghost._find_shared
    monkeypatch.setattr(_ghost.Ghost, "_find_shared", lambda self, *rest: calls.append(1) or find(self, *rest))
    for length in (6, 3, 6):
        part = targets[0][:, :length], targets[1]
        optimizer.accumulate(model, tokens_loss, inputs[:, :length], part, clipping="ghost")
    assert len(calls) == 1


def test_positions_of_as_many_tokens_as_examples_are_not_taken_for_examples():
    """Six positions for six examples: their gradient is a sum over the examples, unless each has positions of its own."""
    torch.manual_seed(13)
    model, (inputs, targets) = Transformer(positions="flat"), tokens(6, 6)
    compare(model, tokens_loss, inputs, targets)
    clip = _Clip(0.01, 10_000)
    targets[1][0] = 1e4
    assert 0.99 < moved(model, tokens_loss, inputs, targets, clip, 0, check=True)[0] <= 1.0


# Compiled modules and checkpoints


class Checkpointed(Transformer):
    def block(self, x):
        return checkpoint(super().block, x, use_reentrant=False)


def test_checkpoints_that_are_not_reentrant():
    torch.manual_seed(14)
    model, (inputs, targets) = Checkpointed(), tokens(5, 6)
    compare(model, tokens_loss, inputs, targets)


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="this PyTorch has no torch.compiler.set_stance")
@pytest.mark.parametrize("clipping", ["ghost", "per-example"])
def test_compiled_modules_run_as_they_were(clipping):
    torch.manual_seed(15)
    model, (inputs, targets) = Transformer(), tokens(5, 6)
    rows = in_float64(model, tokens_loss, inputs, targets)
    wrapped = torch.compile(model, backend="eager")
    within = nn.Sequential(torch.compile(model, backend="eager"))
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    for module in (wrapped, within, in_place) if clipping == "ghost" else (wrapped,):
        optimizer = private(module)
        optimizer.accumulate(module, tokens_loss, inputs, targets, clipping=clipping)
        assert np.linalg.norm(waiting(optimizer) - expected_sum(rows, 0.5)) < 1e-5
