"""Scripts that people write around dpmf.torch and dpmf.opacus: one record moves a release by at most one clip, or the script is
refused with a sentence.

Every script is run on two sets of data that differ in one record, with the same noise. The gradient of a record is the record
itself, ten times longer than the clip, and nothing where the record is zero; so what a release moves by is what the record counts.
"""

import functools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

RECORDS, BATCH, DIMENSION, CLIP = 12, 4, 6, 0.5
STEPS = RECORDS // BATCH


@functools.cache
def mechanism():
    return dpmf.plan(steps=STEPS, epsilon=2, delta=1e-5, clip=CLIP)


def records(absent=None):
    data = torch.randn(RECORDS, DIMENSION, generator=torch.Generator().manual_seed(1))
    data *= 10 * CLIP / data.norm(dim=1, keepdim=True)
    if absent is not None:
        data[absent] = 0
    return TensorDataset(data)


def total(outputs, _=None):
    return outputs.sum()


def watched(noise):
    """The sums to which noise is added, step by step."""
    sums, release = [], noise.release

    def watch():
        sums.append(noise.exact * dpmf.torch._sums.spacing(CLIP))
        return release()

    noise.release = watch
    return sums


class Run:
    """A small training, and what it released before noise."""

    def __init__(self, data, model=None, **options):
        torch.manual_seed(0)
        self.model = model or torch.nn.Linear(DIMENSION, 1, bias=False)
        parameters = [p for p in self.model.parameters()]
        with torch.no_grad():
            for p in parameters:
                p.zero_()
        loader = {"batch_sampler": dpmf.torch.Cohorts(RECORDS, BATCH, seed=3), **options}
        self.loader = DataLoader(data, **loader)
        key = dpmf.NoiseKey.from_seed(5)
        self.optimizer = dpmf.torch.PrivateOptimizer(
            torch.optim.SGD(parameters, lr=1.0), mechanism(), denominator=1, key=key, experiment="misuse")
        self.sums = watched(self.optimizer._noise)

    def add(self, inputs, **options):
        self.optimizer.accumulate(self.model, total, inputs, **options)

    def each(self, act):
        for (inputs,) in self.optimizer.batches(self.loader):
            act(inputs)
            self.optimizer.step()


def plain(run):
    run.each(run.add)


def halves(run):
    run.each(lambda inputs: [run.add(part) for part in inputs.split(2)])


def views(run):
    run.each(lambda inputs: run.add(torch.cat([inputs, 2 * inputs, 3 * inputs]), views=3))


def started_again(run):
    def act(inputs):
        run.add(inputs)
        run.optimizer.zero_grad()
        run.add(inputs)

    run.each(act)


def two_losses(run):
    run.each(lambda inputs: [run.add(inputs), run.add(inputs)])


def concatenated(run):
    run.each(lambda inputs: run.add(torch.cat([inputs] * 4)))


def repeated(run):
    run.each(lambda inputs: run.add(inputs.repeat_interleave(2, 0)))


def sum_twice(run):
    def act(inputs):
        clipped = CLIP * torch.nn.functional.normalize(inputs.double()).sum(0, keepdim=True) * (1 - 1e-9)
        for _ in range(2):
            run.optimizer.add_sum({run.model.weight: clipped}, len(inputs))

    run.each(act)


def one_more(run):
    run.each(lambda inputs: run.add(torch.cat([inputs, inputs[:1]])))


def all_of_it(run):
    run.each(lambda inputs: run.add(run.loader.dataset.tensors[0]))


def same_batch_next_step(run):
    batches = iter(run.optimizer.batches(run.loader))
    (inputs,) = next(batches)
    for _ in range(STEPS):
        run.add(inputs)
        run.optimizer.step()


def before_any_batch(run):
    run.optimizer.batches(run.loader)
    run.add(run.loader.dataset.tensors[0][:BATCH])
    run.optimizer.step()


def two_passes(run):
    plain(run)
    plain(run)


def measured_denominator(run):
    def act(inputs):
        run.add(inputs)
        run.optimizer.denominator = float((inputs.norm(dim=1) > 0).sum())

    run.each(act)


def moves(script, **options):
    """By how many clips one record moves what is released, all steps together, at most over some records."""
    def released(absent=None):
        run = Run(records(absent), **options)
        script(run)
        return torch.stack(run.sums)

    whole = released()
    return max(float((whole - released(absent)).norm()) / CLIP for absent in range(0, RECORDS, 3))


@pytest.mark.parametrize("options", [
    {},
    {"batch_sampler": None, "batch_size": BATCH},
    {"num_workers": 2},
], ids=["cohorts", "batch_size", "workers"])
@pytest.mark.parametrize("script", [plain, halves, views, started_again])
def test_a_record_counts_once(script, options):
    # Less than half a clip would be a test of nothing.
    assert 0.9 < moves(script, **options) <= 1


@pytest.mark.parametrize("options", [{}, {"batch_sampler": None, "batch_size": BATCH}], ids=["cohorts", "batch_size"])
@pytest.mark.parametrize("script, sentence", [
    (two_losses, "step 0 would have 8 contributions, but 4 examples were handed out"),
    (concatenated, "16 contributions, but 4 examples"),
    (repeated, "8 contributions, but 4 examples"),
    (one_more, "5 contributions, but 4 examples"),
    (sum_twice, "8 contributions, but 4 examples"),
    (all_of_it, "12 contributions, but 4 examples"),
    (same_batch_next_step, "step 1 has no batch of its own"),
    (before_any_batch, "step 0 has no batch of its own"),
    (two_passes, "covers no second pass|gives examples that took part before|no second pass|start with number"),
    (measured_denominator, "the denominator is .* since the first step"),
])
def test_a_record_that_would_count_more_often_is_refused(script, sentence, options):
    with pytest.raises(dpmf.MismatchError, match=sentence):
        moves(script, **options)


def test_without_the_count_they_would_exceed_the_clip(monkeypatch):
    """The power of the tests above: what the refusals are for."""
    monkeypatch.setattr(dpmf.torch.Passes, "check_count", lambda *_: None)
    assert moves(two_losses) > 1.9 and moves(concatenated) > 3.9 and moves(repeated) > 1.9 and moves(all_of_it) > 1.7


def test_views_are_averaged_before_the_clip():
    small = TensorDataset(records().tensors[0] / 100)
    run = Run(small)
    (inputs,) = next(iter(run.optimizer.batches(run.loader)))
    mean = lambda outputs, _: outputs.mean()  # noqa: E731
    run.optimizer.accumulate(run.model, mean, torch.cat([inputs, 3 * inputs]), views=2)
    noise = run.optimizer._noise
    summed = noise.exact * dpmf.torch._sums.spacing(CLIP)
    assert torch.allclose(summed.float(), 2 * inputs.sum(0), rtol=1e-5)
    for views, sentence in [(0, "at least 1"), (3, "not 3 of each example")]:
        with pytest.raises(ValueError, match=sentence):
            run.add(inputs, views=views)


class Remembers(torch.nn.Module):
    """Keeps a statistic of what it sees, as home-made normalisation and codebooks do."""

    def __init__(self, how):
        super().__init__()
        self.linear = torch.nn.Linear(DIMENSION, 1, bias=False)
        self.register_buffer("mean", torch.zeros(DIMENSION))
        self.plain = torch.zeros(DIMENSION)
        self.how = how

    @property
    def weight(self):
        return self.linear.weight

    def forward(self, inputs):
        seen = inputs.detach().mean(0)
        if self.how == "in place":
            self.mean.mul_(0.9).add_(seen, alpha=0.1)
        elif self.how == "anew":
            self.mean = 0.9 * self.mean + 0.1 * seen
        elif self.how == "no buffer":
            self.plain = self.plain + seen
        return self.linear(inputs)


@pytest.mark.parametrize("how", ["in place", "anew", "no buffer"])
def test_a_statistic_of_the_data_is_refused_and_forgotten(how):
    run = Run(records(), Remembers(how))
    with pytest.raises(ValueError, match="the forward pass writes (mean|plain), which the module keeps"):
        run.each(lambda inputs: run.add(inputs, vectorize=False))
    assert how == "no buffer" or how == "anew" or run.model.mean.abs().sum() == 0
    assert run.optimizer.next_step == 0


def test_a_statistic_in_place_is_refused_by_vmap_without_a_way_around():
    run = Run(records(), Remembers("in place"))
    with pytest.raises(ValueError, match="released without noise") as refused:
        run.each(run.add)
    assert "vectorize=False" not in str(refused.value) and "opacus" not in str(refused.value)


def test_modules_that_keep_constants_train():
    run = Run(records(), Remembers("nothing"))
    run.each(lambda inputs: run.add(inputs, vectorize=False))
    assert len(run.sums) == STEPS


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="PyTorch 1 has no GradScaler for the CPU")
def test_a_scaled_loss_is_refused():
    run = Run(records())
    scaler = torch.amp.GradScaler("cpu")
    (inputs,) = next(iter(run.optimizer.batches(run.loader)))
    run.optimizer.accumulate(run.model, lambda outputs, _: scaler.scale(outputs.sum()), inputs)
    with pytest.raises(dpmf.MismatchError, match="scaled by a GradScaler"):
        scaler.step(run.optimizer)
    assert run.optimizer.next_step == 0


# ---------------------------------------------------------------------------------------------------------------------
# Opacus
# ---------------------------------------------------------------------------------------------------------------------

opacus = pytest.importorskip("opacus", reason="Opacus is not installed: scripts/setup-frameworks makes an environment with it")

import dpmf.opacus  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402


def private(data, model=None):
    model = model or torch.nn.Linear(DIMENSION, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    engine = dpmf.opacus.PrivacyEngine(key=dpmf.NoiseKey.from_seed(5), experiment="misuse", seed=3)
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=float(BATCH)),
        data_loader=DataLoader(data, batch_size=BATCH),
        mechanism=mechanism(),
    )


def opacus_moves(script):
    def released(absent=None):
        model, optimizer, loader = private(records(absent))
        sums = watched(optimizer._noise)
        script(model, optimizer, loader)
        return torch.stack(sums)

    whole = released()
    return max(float((whole - released(absent)).norm()) / CLIP for absent in range(0, RECORDS, 3))


def opacus_plain(model, optimizer, loader, change=lambda inputs: inputs):
    for (inputs,) in loader:
        optimizer.zero_grad()
        # A mean over the batch, as Opacus takes losses to be.
        model(change(inputs)).sum(1).mean().backward()
        optimizer.step()


def opacus_in_parts(model, optimizer, loader):
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
        opacus_plain(model, optimizer, parts)


def opacus_two_losses(model, optimizer, loader):
    for (inputs,) in loader:
        for last in (False, True):
            optimizer.signal_skip_step(do_skip=not last)
            optimizer.zero_grad()
            model(inputs).sum(1).mean().backward()
            optimizer.step()


def opacus_one_ahead(model, optimizer, loader):
    batches = iter(loader)
    for _ in range(2):
        (inputs,) = next(batches)
    model(torch.cat([inputs] * 2)).sum(1).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("script", [opacus_plain, opacus_in_parts])
def test_a_record_counts_once_with_opacus(script):
    assert 0.9 < opacus_moves(script) <= 1


@pytest.mark.parametrize("script, sentence", [
    (functools.partial(opacus_plain, change=lambda inputs: torch.cat([inputs] * 4)), "16 contributions, but 4 examples"),
    (functools.partial(opacus_plain, change=lambda inputs: inputs.repeat_interleave(2, 0)), "8 contributions, but 4 examples"),
    (opacus_two_losses, "8 contributions, but 4 examples"),
    (opacus_one_ahead, "8 contributions, but 4 examples"),
], ids=["concatenated", "repeated", "two losses", "one ahead"])
def test_a_record_that_would_count_more_often_is_refused_with_opacus(script, sentence):
    with pytest.raises(dpmf.MismatchError, match=sentence):
        opacus_moves(script)


def test_without_the_count_they_would_exceed_the_clip_with_opacus(monkeypatch):
    monkeypatch.setattr(dpmf.opacus, "check_count", lambda *_: None)
    assert opacus_moves(opacus_two_losses) > 1.9
    assert opacus_moves(functools.partial(opacus_plain, change=lambda inputs: torch.cat([inputs] * 4))) > 3.9


@pytest.mark.parametrize("how", ["in place", "anew", "no buffer"])
def test_a_statistic_of_the_data_is_refused_with_opacus(how):
    model, optimizer, loader = private(records(), Remembers(how))
    with pytest.raises(ValueError, match="the forward pass writes .*(mean|plain), which the module keeps"):
        opacus_plain(model, optimizer, loader)
    assert optimizer.next_step == 0
    # Nothing is learned from what is only looked at.
    model.eval()
    model(records().tensors[0])


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="PyTorch 1 has no GradScaler for the CPU")
def test_a_scaled_loss_is_refused_with_opacus():
    model, optimizer, loader = private(records())
    scaler = torch.amp.GradScaler("cpu")
    (inputs,) = next(iter(loader))
    scaler.scale(model(inputs).sum(1).mean()).backward()
    with pytest.raises(dpmf.MismatchError, match="scaled by a GradScaler"):
        scaler.step(optimizer)
    assert optimizer.next_step == 0
