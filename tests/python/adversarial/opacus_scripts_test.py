"""Scripts that people write around dpmf.opacus: a record counts once, or the script is refused with a sentence."""

import copy
import functools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")
opacus = pytest.importorskip("opacus", reason="Opacus is not installed: scripts/setup-frameworks makes an environment with it")

import dpmf  # noqa: E402
import dpmf.opacus  # noqa: E402
from neighbours import Script, exceeding, judge, moved  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch_scripts_test import (  # noqa: E402
    BATCH,
    CLIP,
    DIMENSION,
    NO_BATCH,
    RECORDS,
    TOO_MANY,
    Rearranges,
    Remembers,
    Shared,
    Unchecked,
    batch_normalised,
    mechanism,
    module,
    plan,
    records,
    two_views_in_the_loader,
)
from watching import watch  # noqa: E402

pytestmark = [
    # Opacus 1.4 uses hooks that PyTorch 1.13 would rather not have.
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class Training:
    """A small training with Opacus' loop, and what it released."""

    def __init__(self, data, checked=True, model=None, planned=None, **loading):
        torch.manual_seed(0)
        self.data = data
        inside = (model or functools.partial(torch.nn.Linear, DIMENSION, 1, bias=False))()
        with torch.no_grad():
            for p in inside.parameters():
                p.zero_()
        engine = dpmf.opacus.PrivacyEngine(key=dpmf.NoiseKey.from_seed(5), experiment="scripts", seed=3)
        self.model, self.optimizer, self.loader = engine.make_private(
            module=inside,
            optimizer=torch.optim.SGD(inside.parameters(), lr=1.0),
            data_loader=DataLoader(data, **{"batch_size": BATCH, **loading}),
            mechanism=mechanism() if planned is None else planned(),
        )
        noise = self.optimizer._noise
        if checked:
            watch(self.optimizer, quiet=True)
        else:
            noise.run = Unchecked(noise.run, quiet=True)
            noise.check = lambda: None
        self.rows, deliver = [], noise.fill_gradients
        size = self.optimizer.expected_batch_size

        def delivered():
            self.rows.append(size * noise.flat.numpy().copy())
            deliver()

        noise.fill_gradients = delivered

    def backward(self, inputs):
        # A mean over the batch, as Opacus takes losses to be.
        self.model(inputs).sum(1).mean().backward()

    @property
    def released(self):
        inside = self.model._module
        tensors = [*inside.buffers(), *(v for part in inside.modules() for v in vars(part).values())]
        return self.rows, [t.detach().numpy().copy() for t in tensors if isinstance(t, torch.Tensor)]


def loop(run, batches=None, change=lambda inputs: inputs):
    for (inputs,) in run.loader if batches is None else batches:
        run.optimizer.zero_grad()
        run.backward(change(inputs))
        run.optimizer.step()


def in_parts(run):
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer) as parts:
        loop(run, parts)


def two_batches_a_step(run):
    for number, (inputs,) in enumerate(run.loader):
        run.optimizer.signal_skip_step(do_skip=number % 2 == 0)
        run.optimizer.zero_grad()
        run.backward(inputs)
        run.optimizer.step()


def gradients_by_hand(run):
    for (inputs,) in run.loader:
        run.optimizer.zero_grad()
        run.backward(inputs)
        for p in run.model.parameters():
            p.grad = 1e3 * inputs.sum(0, keepdim=True)
        run.optimizer.step()


def a_look_before(run):
    run.model.eval()
    with torch.no_grad():
        run.model(run.data.tensors[0])
    run.model.train()
    loop(run)


def two_epochs(run):
    for _ in range(2):
        loop(run)


def concatenated(run):
    loop(run, change=lambda inputs: torch.cat([inputs] * 4))


def repeated(run):
    loop(run, change=lambda inputs: inputs.repeat_interleave(2, 0))


def two_losses(run):
    for (inputs,) in run.loader:
        for last in (False, True):
            run.optimizer.signal_skip_step(do_skip=not last)
            run.optimizer.zero_grad()
            run.backward(inputs)
            run.optimizer.step()


def two_backwards(run):
    for (inputs,) in run.loader:
        run.optimizer.zero_grad()
        run.backward(inputs)
        run.backward(inputs)
        run.optimizer.step()


def gradients_used_twice(run):
    for (inputs,) in run.loader:
        run.optimizer.zero_grad()
        run.backward(inputs)
        run.optimizer.step()
        run.optimizer.step()


def one_ahead(run):
    batches = iter(run.loader)
    next(batches)
    (inputs,) = next(batches)
    run.backward(torch.cat([inputs] * 2))
    run.optimizer.step()


def same_batch_again(run):
    (inputs,) = next(iter(run.loader))
    for _ in range(2):
        run.optimizer.zero_grad()
        run.backward(inputs)
        run.optimizer.step()


def another_loader(run):
    loop(run, DataLoader(run.data, batch_size=BATCH))


def a_second_pass(run):
    loop(run)
    loop(run)


def skips_a_drawn_batch(run):
    batches = iter(run.loader)
    next(batches)
    (inputs,) = next(batches)
    run.backward(inputs)
    run.optimizer.step()


def an_epoch_too_many(run):
    for _ in range(3):
        loop(run)


def measured_batch(run):
    for (inputs,) in run.loader:
        run.optimizer.zero_grad()
        run.backward(inputs)
        run.optimizer.expected_batch_size = float((inputs.norm(dim=1) > 0).sum())
        run.optimizer.step()


def another_clip(run):
    for (inputs,) in run.loader:
        run.optimizer.max_grad_norm *= 2
        run.optimizer.zero_grad()
        run.backward(inputs)
        run.optimizer.step()


def scaled_loss(run):
    scaler = torch.amp.GradScaler("cpu")
    for (inputs,) in run.loader:
        run.optimizer.zero_grad()
        scaler.scale(run.model(inputs).sum(1).mean()).backward()
        scaler.step(run.optimizer)
        scaler.update()


def copied(run):
    copy.deepcopy(run.optimizer)


def nothing_backward(run):
    for _ in run.loader:
        run.optimizer.step()


MIXES = "not those of each example alone"
SCRIPTS = [
    Script(loop),
    Script(loop, options={"num_workers": 2}, name="workers"),
    Script(in_parts),
    Script(two_batches_a_step),
    Script(gradients_by_hand),
    Script(a_look_before),
    Script(loop, options=module(Shared), name="a layer that is used twice"),
    Script(two_epochs, options={"planned": plan}, times=2, name="sampled epochs"),
    Script(two_epochs, options={"planned": functools.partial(plan, "none")}, times=2, name="epochs without sampling"),
    Script(concatenated, TOO_MANY),
    Script(repeated, TOO_MANY),
    Script(two_losses, TOO_MANY),
    Script(two_losses, TOO_MANY, options={"planned": functools.partial(plan, "none")}, times=2, name="two losses, epochs"),
    Script(loop, TOO_MANY, options={"collate_fn": two_views_in_the_loader}, name="augmentation in the loader"),
    Script(one_ahead, TOO_MANY),
    Script(two_backwards, "called several times"),
    Script(gradients_used_twice, "released by the last step"),
    Script(same_batch_again, NO_BATCH),
    Script(another_loader, NO_BATCH),
    Script(a_second_pass, "not cover a second pass"),
    Script(skips_a_drawn_batch, "drawn for step 1, but this is step 0", options={"planned": plan}),
    Script(an_epoch_too_many, "were drawn, and the guarantee covers each of them once", options={"planned": plan}, times=2),
    Script(measured_batch, "the denominator was .* in the first step"),
    Script(another_clip, "max_grad_norm has changed"),
    Script(scaled_loss, "a GradScaler scaled the loss"),
    Script(copied, "cannot be pickled or copied"),
    Script(nothing_backward, "has no per-sample gradient"),
    Script(loop, MIXES, options=module(Rearranges, "sorts"), name="sorts its batch"),
    Script(loop, MIXES, options=module(Rearranges, "rolls"), name="mixes its batch"),
    Script(loop, MIXES, options=module(Rearranges, "centres"), name="centres its batch"),
    Script(loop, "the forward pass writes .*mean", options=module(Remembers, "in place"), name="a running mean in place"),
    Script(loop, "the forward pass writes .*mean", options=module(Remembers, "anew"), name="a running mean anew"),
    Script(loop, "the forward pass writes .*plain", options=module(Remembers, "no buffer"), name="a mean in an attribute"),
    Script(loop, "BatchNorm|the forward pass writes", options=module(batch_normalised), name="batch normalisation"),
]


def measure(script, checked=True):
    def released(absent=None):
        run = Training(records(absent), checked, **script.options)
        script.run(run)
        return run.released

    whole = released()
    moves = [moved(whole, released(absent), CLIP) for absent in range(0, RECORDS, 5)]
    return max(moves, key=lambda one: (one.most, one.steps))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_record_counts_once_or_the_script_is_refused(script):
    accepted = (dpmf.Error, ValueError, TypeError, opacus.validators.errors.UnsupportedModuleError)
    judge(script, measure, accepted)


def test_without_the_checks_they_exceed_the_clip(monkeypatch):
    """The power of the test above: what the refusals are for."""
    monkeypatch.setattr(dpmf.torch._gradients.Kept, "check", lambda _: None)
    monkeypatch.setattr(dpmf.opacus, "check_rows", lambda *_, **__: None)
    monkeypatch.setattr(dpmf.opacus, "check_unscaled", lambda _: None)
    refused = [script for script in SCRIPTS if script.refusal is not None]
    found = exceeding(refused, functools.partial(measure, checked=False))
    print(len(found), "of", len(refused), "exceed:", "; ".join(found))
    assert len(found) >= 10, found


def test_rows_that_cannot_be_compared_are_told():
    class Random(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(DIMENSION, 1, bias=False)

        def forward(self, inputs):
            return self.linear(torch.nn.functional.dropout(inputs, 0.5, self.training))

    class Alone(Random):
        def forward(self, inputs):
            if len(inputs) == 1:
                raise RuntimeError("batches of one are not known here")
            return self.linear(inputs)

    for model, reason in [(Random, "draws random numbers"), (Alone, "batches of one are not known here")]:
        run = Training(records(), model=model)
        with pytest.warns(dpmf.opacus.UncheckedModelWarning, match=reason):
            loop(run)
        assert run.optimizer.next_step == RECORDS // BATCH


@pytest.mark.filterwarnings("error::dpmf.opacus.UncheckedModelWarning")
def test_dropout_and_outputs_of_any_form_are_compared():
    class Forms(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.linear = torch.nn.Dropout(0.5), torch.nn.Linear(DIMENSION, 1, bias=False)

        def forward(self, inputs):
            outputs = self.linear(self.drop(inputs))
            return {"outputs": outputs, "squeezed": outputs.squeeze(), "loss": outputs.mean()}

    run = Training(records(), model=Forms)
    for (inputs,) in run.loader:
        run.optimizer.zero_grad()
        run.model(inputs)["outputs"].sum(1).mean().backward()
        run.optimizer.step()
    assert run.optimizer.next_step == RECORDS // BATCH
