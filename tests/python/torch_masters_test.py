"""Models in bfloat16: clipped sums, noise and steps are those of float32 masters, and parameters are the masters, rounded."""

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")
if not hasattr(torch, "func"):
    pytest.skip("vmap in bfloat16 needs PyTorch 2.0", allow_module_level=True)

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")

STEPS, SAVED, SIZE, LETTERS, LENGTH = 6, 3, 8, 11, 5
CLIPPINGS = ("per-example", "ghost")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.fixture(autouse=True)
def without_onednn():
    """Its products in half precision take instructions that some virtual machines only claim to have."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture(scope="module")
def mechanism():
    return dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=3, delta=1e-6, clip=0.5)


class Language(nn.Module):
    """All kinds of layers that ghost clipping tells apart, and tied weights."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(LETTERS, 6), nn.LayerNorm(6)
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)
        self.head = nn.Linear(6, LETTERS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        return self.head(x + self.narrow(torch.tanh(self.wide(self.norm(x)))))


def model_of(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return Language().to(dtype)


def loss_of(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def cohorts(count=STEPS, size=SIZE):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(LETTERS, (2, size, LENGTH), generator=generator) for _ in range(count)]


def private(model, mechanism, name="sgd", **arguments):
    inner = OPTIMIZERS[name](model.parameters())
    options = dict(denominator=SIZE, key=dpmf.NoiseKey.from_seed(7), experiment="half", check=name == "sgd", **arguments)
    return dpmf.torch.PrivateOptimizer(inner, mechanism, **options)


def train(optimizer, model, data, clipping="per-example"):
    for tokens, targets in data:
        seen = optimizer.accumulate(model, loss_of, tokens, targets, clipping=clipping)
        assert seen.clipping == clipping
        optimizer.step()


def masters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def flat(tensors):
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])


def waiting(optimizer):
    return optimizer._noise.exact.numpy() * optimizer._noise.run.clip.unit


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_noise_and_steps_are_those_of_the_masters(mechanism, clipping):
    """SGD on float32 by hand, with the rows of a stream; the model is rounded to the nearest after every step."""
    model = model_of()
    optimizer = private(model, mechanism)
    assert all(p.dtype == torch.float32 for p in masters(optimizer)) and torch.equal(flat(model.parameters()), flat(masters(optimizer)))
    dimension = flat(model.parameters()).numel()
    stream = dpmf.NoiseStream(mechanism, dpmf.NoiseKey.from_seed(7), run="half", dimension=dimension)
    iterate, buffer = flat(model.parameters()).numpy().copy(), np.zeros(dimension, np.float32)
    for tokens, targets in cohorts():
        optimizer.accumulate(model, loss_of, tokens, targets, clipping=clipping)
        summed = waiting(optimizer)
        stream.add_to(summed)
        buffer = np.float32(0.9) * buffer + summed.astype(np.float32) / np.float32(SIZE)
        iterate -= np.float32(0.1) * buffer
        optimizer.step()
        assert all(p.grad is None for p in [*model.parameters(), *masters(optimizer)])
        np.testing.assert_allclose(flat(masters(optimizer)).numpy(), iterate, rtol=0, atol=2e-6)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert torch.equal(flat(model.parameters()), flat(masters(optimizer)).bfloat16().float())
    # Most masters lie between two numbers of bfloat16.
    assert (flat(model.parameters()) != flat(masters(optimizer))).float().mean() > 0.9


def test_steps_that_are_smaller_than_the_precision_of_a_parameter_add_up():
    """Of 64 equal contributions each moves a number below one by a quarter of what bfloat16 can tell apart."""
    mechanism = dpmf.mechanism(steps=64, epsilon=50, delta=1e-6, clip=1e-3)
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = dpmf.torch.PrivateOptimizer(sgd, mechanism, denominator=1, key=dpmf.NoiseKey.from_seed(1), experiment="small")
    before, alone = 1.0, 1.0
    for _ in range(64):
        optimizer.add_sum({model.weight: torch.full((1, 1), 0.9999e-3, dtype=torch.float64)}, 1)
        optimizer.step()
        now = float(masters(optimizer)[0].detach())
        # The same step of a parameter without a master.
        alone = float(torch.tensor(alone + now - before).bfloat16())
        before = now
    assert float(model.weight) == pytest.approx(1.0 - 0.064, abs=2.0**-8) and alone > 1.0 - 0.032


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_one_example_moves_the_sum_by_at_most_the_clip(mechanism, clipping):
    """Exactly, in units of the clip; and both ways have nearly the same sum."""
    model, (tokens, targets) = model_of(), cohorts(1)[0]
    optimizer = private(model, mechanism)
    clip = optimizer._noise.live().clip
    sums = []
    for some in (slice(None), slice(1, None)):
        optimizer.accumulate(model, loss_of, tokens[some], targets[some], clipping=clipping, chunk=1)
        sums.append(optimizer._noise.exact.clone())
        optimizer.zero_grad()
    square = sum(int(x) ** 2 for x in (sums[0] - sums[1]).tolist())
    assert 0.99 * clip.norm < math.sqrt(square) * clip.unit and square <= int(clip.norm / clip.unit) ** 2
    reference = model_of().float()
    exact = private(reference, mechanism)
    exact.accumulate(reference, loss_of, tokens, targets)
    difference = np.linalg.norm(sums[0].numpy() * clip.unit - waiting(exact))
    assert 0.0 < difference < 0.05 * np.linalg.norm(waiting(exact))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_resumed_bit_for_bit(mechanism, tmp_path, name, clipping):
    whole = model_of()
    expected = private(whole, mechanism, name)
    train(expected, whole, cohorts(), clipping)
    model, journal = model_of(), tmp_path / "journal"
    killed = private(model, mechanism, name, journal=journal)
    train(killed, model, cohorts()[:SAVED], clipping)
    torch.save({"model": model.state_dict(), "optimizer": killed.state_dict()}, tmp_path / "state.pt")
    train(killed, model, cohorts()[SAVED : SAVED + 1], clipping)
    killed.close()

    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(master.dtype == torch.float32 for master in state["optimizer"]["dpmf"]["masters"])
    again = model_of(seed=3)
    again.load_state_dict(state["model"])
    resumed = private(again, mechanism, name, journal=journal)
    resumed.load_state_dict(state["optimizer"])
    train(resumed, again, cohorts()[SAVED:], clipping)
    assert same(again, whole) and torch.equal(flat(masters(resumed)), flat(masters(expected)))
    assert not same(whole, model_of())
    resumed.close()


def test_the_state_of_a_model_of_another_type_is_refused(mechanism, tmp_path):
    model, journal = model_of(), tmp_path / "journal"
    optimizer = private(model, mechanism, journal=journal)
    train(optimizer, model, cohorts(1))
    state = optimizer.state_dict()
    optimizer.close()
    other = private(model_of(torch.float32), mechanism, journal=journal)
    with pytest.raises(dpmf.BindingError, match="has 7 float32 masters of parameters in bfloat16, and this optimizer has 0: resume"):
        other.load_state_dict(state)
    without = copy.deepcopy({**state, "dpmf": {k: v for k, v in state["dpmf"].items() if k != "masters"}})
    with pytest.raises(dpmf.BindingError, match="has 0 float32 masters"):
        private(model_of(), mechanism, journal=journal).load_state_dict(without)


def test_some_parameters_in_float32(mechanism):
    """As adapters on a model in bfloat16."""
    model = model_of()
    model.wide.float()
    model.wide.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    model.wide.register_forward_hook(lambda _, inputs, output: output.bfloat16())
    optimizer = private(model, mechanism)
    assert model.wide.weight is masters(optimizer)[3] and len(optimizer.state_dict()["dpmf"]["masters"]) == 5
    before = copy.deepcopy(model)
    train(optimizer, model, cohorts(2))
    train(optimizer, model, cohorts(2), "ghost")
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))


def test_what_is_done_to_parameters_between_steps_counts(mechanism):
    model = model_of()
    optimizer = private(model, mechanism)
    train(optimizer, model, cohorts(1))
    kept = flat([masters(optimizer)[0]])
    with torch.no_grad():
        model.narrow.bias.fill_(0.25)
        model.words.weight[0] = 0.5
    model.wide.weight.requires_grad_(False)
    frozen = model.wide.weight.clone()
    optimizer.add_sum({}, 0)
    group = optimizer.param_groups[0]
    group["lr"], group["momentum"] = 0.0, 0.0
    optimizer._checks = None
    optimizer.step()
    assert torch.equal(model.narrow.bias, torch.full((6,), 0.25).bfloat16()) and torch.equal(model.wide.weight, frozen)
    now = flat([masters(optimizer)[0]])
    assert torch.equal(now[:6], torch.full((6,), 0.5)) and torch.equal(now[6:], kept[6:])
    group["lr"] = 0.1
    train(optimizer, model, cohorts(1))
    assert torch.equal(model.wide.weight, frozen) and not torch.equal(model.narrow.bias, torch.full((6,), 0.25).bfloat16())


def test_what_was_written_into_parameters_is_in_the_state(mechanism):
    model = model_of()
    optimizer = private(model, mechanism)
    train(optimizer, model, cohorts(1))
    with torch.no_grad():
        model.narrow.bias.fill_(0.25)
    saved = dict(zip((p.shape for p in masters(optimizer)), optimizer.state_dict()["dpmf"]["masters"]))
    assert torch.equal(saved[model.narrow.bias.shape], torch.full((6,), 0.25))


def test_an_optimizer_that_steps_other_masters_is_refused(mechanism):
    model = model_of()
    inner = OPTIMIZERS["sgd"](model.parameters())
    dpmf.torch.PrivateOptimizer(inner, mechanism, denominator=SIZE)
    with pytest.raises(dpmf.BindingError, match="make a new optimizer for every run"):
        dpmf.torch.PrivateOptimizer(inner, mechanism, denominator=SIZE)


def test_an_optimizer_that_has_stepped(mechanism):
    """What it has kept of parameters is kept of their masters, in float32; where the noise cannot be laid out, all stays as it was."""
    model = model_of()
    inner = OPTIMIZERS["sgd"](model.parameters())
    loss_of(model(cohorts(1)[0][0]), cohorts(1)[0][1]).backward()
    inner.step()
    inner.zero_grad()
    before = {p: state["momentum_buffer"] for p, state in inner.state.items()}
    with pytest.raises(ValueError, match="a run with a journal needs its key"):
        dpmf.torch.PrivateOptimizer(inner, mechanism, denominator=SIZE, journal="nowhere")
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert len(inner.state) == len(before) and all(inner.state[p]["momentum_buffer"] is value for p, value in before.items())
    optimizer = dpmf.torch.PrivateOptimizer(inner, mechanism, denominator=SIZE)
    kept = [inner.state[p]["momentum_buffer"] for p in masters(optimizer)]
    assert len(inner.state) == len(before) and all(one.dtype == torch.float32 for one in kept)
    assert all(torch.equal(one, value.float()) for one, value in zip(kept, before.values()))
    train(optimizer, model, cohorts(1))


def test_float16_is_refused(mechanism):
    with pytest.raises(TypeError, match=r"float16, and half precision.*model\.float\(\).*autocast, or train a model in bfloat16"):
        private(model_of(torch.float16), mechanism)
