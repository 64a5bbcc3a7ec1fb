"""Scripts that people write around dpmf.torch: a record counts once, or the script is refused with a sentence."""

import copy
import functools
import os
import pickle
import random
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from neighbours import Script, exceeding, judge, moved  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from watching import Watched, watch  # noqa: E402

RECORDS, BATCH, DIMENSION, CLIP = 12, 4, 6, 0.5
STEPS = RECORDS // BATCH

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")


@functools.cache
def mechanism():
    return dpmf.mechanism(steps=STEPS, epsilon=2, delta=1e-5, clip=CLIP)


@functools.cache
def plan(sampling="auto"):
    return dpmf.plan(
        examples=RECORDS, batch=BATCH, epochs=2, epsilon=4, delta=1e-5, clip=CLIP, sampling=sampling, cache=False, unit="record"
    )


def records(absent=None):
    data = torch.randn(RECORDS, DIMENSION, generator=torch.Generator().manual_seed(1))
    data *= 10 * CLIP / data.norm(dim=1, keepdim=True)
    if absent is not None:
        data[absent] = 0
    return TensorDataset(data)


def total(outputs, _=None):
    return outputs.sum()


class Unchecked(Watched):
    """A run that lets everything pass, to show what its refusals are for."""

    def follow(self, *arguments, **options):
        pass

    def hand_out(self, *arguments):
        pass

    def contribute(self, count):
        if self.run.contributions is None:
            self.run.contribute(0)

    def check_release(self):
        self.contribute(0)

    @property
    def denominator(self):
        return vars(self).get("divides", self.run.denominator)

    def __setattr__(self, name, value):
        if name == "denominator":
            if self.run.denominator is None:
                self.run.denominator = value
            vars(self)["divides"] = value
        else:
            super().__setattr__(name, value)


class Training:
    """A small training, and what it released."""

    def __init__(self, data, checked=True, model=None, planned=None, loader=None, **options):
        torch.manual_seed(0)
        self.data, self.checked = data, checked
        self.model = (model or functools.partial(torch.nn.Linear, DIMENSION, 1, bias=False))()
        self.parameters = list(self.model.parameters())
        with torch.no_grad():
            for p in self.parameters:
                p.zero_()
        self.key = dpmf.NoiseKey.from_seed(5)
        self.plan = planned and planned()
        used = mechanism() if self.plan is None else self.plan.mechanism
        self.loader = self.plain_loader() if loader is None else loader(self)
        self.optimizer = dpmf.torch.PrivateOptimizer(
            torch.optim.SGD(self.parameters, lr=1.0),
            used,
            denominator=BATCH,
            key=self.key,
            **{"experiment": "scripts", **options},
        )
        noise = self.optimizer._noise
        if checked:
            watch(self.optimizer, quiet=True)
        else:
            noise.run = Unchecked(noise.run, quiet=True)
            noise.check = lambda: None
        self.rows, deliver = [], noise.fill_gradients

        def delivered():
            self.rows.append(BATCH * noise.flat.numpy().copy())
            deliver()

        noise.fill_gradients = delivered

    def plain_loader(self):
        return DataLoader(self.data, batch_sampler=dpmf.torch.Cohorts(RECORDS, BATCH, seed=3))

    def add(self, inputs, **options):
        self.optimizer.accumulate(self.model, total, inputs, **options)

    def each(self, act):
        for (inputs,) in self.optimizer.batches(self.loader):
            act(inputs)
            self.optimizer.step()

    @property
    def released(self):
        tensors = [*self.model.buffers(), *(v for part in self.model.modules() for v in vars(part).values())]
        return self.rows, [t.detach().numpy().copy() for t in tensors if isinstance(t, torch.Tensor)]


# ---------------------------------------------------------------------------------------------------------------------
# Scripts that are right
# ---------------------------------------------------------------------------------------------------------------------


def plain(run):
    run.each(run.add)


def in_halves(run):
    run.each(lambda inputs: [run.add(part) for part in inputs.split(2)])


def views(run):
    run.each(lambda inputs: run.add(torch.cat([inputs, 2 * inputs, 3 * inputs]), views=3))


def started_again(run):
    def act(inputs):
        run.add(inputs)
        run.optimizer.zero_grad()
        run.add(inputs)

    run.each(act)


def a_stray_backward(run):
    def act(inputs):
        run.model(inputs).sum().backward()
        run.add(inputs)
        run.model(inputs).square().sum().backward()

    run.each(act)


def one_by_one(run):
    run.each(lambda inputs: run.add(inputs, vectorize=False))


def dropout_one_by_one(run):
    """Losses that draw random numbers, of torch and of Python."""

    def loss(outputs, _):
        return total(torch.nn.functional.dropout(outputs, 0.1), None) * random.choice([1.0, 1.5])

    torch.manual_seed(1)
    random.seed(1)
    run.each(lambda inputs: run.optimizer.accumulate(run.model, loss, inputs, vectorize=False))


def a_running_mean_of_losses(run):
    mean = [1.0]

    def loss(outputs, _):
        value = total(outputs, None)
        mean[0] = 0.9 * mean[0] + 0.1 * abs(float(value.detach()))
        return value / mean[0]

    run.each(lambda inputs: run.optimizer.accumulate(run.model, loss, inputs, vectorize=False))


def tried_twice(run):
    """The first attempt runs out of memory half-way."""
    def act(inputs):
        calls = []

        def failing(outputs, _):
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("out of memory")
            return outputs.sum()

        with pytest.raises(RuntimeError, match="out of memory"):
            run.optimizer.accumulate(run.model, failing, inputs, vectorize=False, chunk=1)
        run.add(inputs)

    run.each(act)


def two_batches_a_step(run):
    loader = DataLoader(run.data, batch_sampler=dpmf.torch.Cohorts(RECORDS, 2, seed=3))
    for number, (inputs,) in enumerate(run.optimizer.batches(loader, batches_per_step=2)):
        run.add(inputs)
        if number % 2:
            run.optimizer.step()


def huge_and_broken_gradients(run):
    """Losses that overflow, of which none counts more than another."""
    run.each(lambda inputs: run.add(torch.where(inputs.abs() > 1, 1e30 * inputs, inputs)))


def two_epochs(run):
    for _ in range(2):
        plain(run)


def noise_between(run):
    for number, (inputs,) in enumerate(run.optimizer.batches(run.loader)):
        if number == 1:
            run.optimizer.burn()
        else:
            run.add(inputs)
            run.optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Scripts in which a record would count more often
# ---------------------------------------------------------------------------------------------------------------------


def two_losses(run):
    run.each(lambda inputs: [run.add(inputs), run.add(inputs)])


def concatenated(run):
    run.each(lambda inputs: run.add(torch.cat([inputs] * 4)))


def repeated(run):
    run.each(lambda inputs: run.add(inputs.repeat_interleave(2, 0)))


def one_more(run):
    run.each(lambda inputs: run.add(torch.cat([inputs, inputs[:1]])))


def sum_twice(run):
    def act(inputs):
        clipped = CLIP * torch.nn.functional.normalize(inputs.double()).sum(0, keepdim=True) * (1 - 1e-9)
        for _ in range(2):
            run.optimizer.add_sum({run.model.weight: clipped}, len(inputs))

    run.each(act)


def all_of_it(run):
    run.each(lambda inputs: run.add(run.data.tensors[0]))


def accumulated_over_the_pass(run):
    """What a loop does that adds the last batches again."""
    seen = []
    for (inputs,) in run.optimizer.batches(run.loader):
        seen.append(inputs)
        run.add(torch.cat(seen))
        run.optimizer.step()


def same_batch_next_step(run):
    (inputs,) = next(iter(run.optimizer.batches(run.loader)))
    for _ in range(STEPS):
        run.add(inputs)
        run.optimizer.step()


def skipped_and_repeated(run):
    batches = run.optimizer.batches(run.loader)
    next(batches)
    (inputs,) = next(batches)
    for _ in range(2):
        run.add(inputs)
        run.optimizer.step()


def drawn_ahead(run):
    batches = list(run.optimizer.batches(run.loader))
    for (inputs,) in batches:
        run.add(inputs)
        run.optimizer.step()


def before_any_batch(run):
    run.optimizer.batches(run.loader)
    for _ in range(2):
        run.add(run.data.tensors[0][:BATCH])
        run.optimizer.step()


def two_passes(run):
    plain(run)
    run.loader = run.plain_loader()
    for number, (inputs,) in enumerate(run.loader):
        if number == 0:
            list(run.optimizer.batches(run.loader)) if run.checked else None
        if run.optimizer.next_step < STEPS:
            run.add(inputs)
            run.optimizer.step()


def another_pass_in_the_middle(run):
    for _ in range(2):
        for (inputs,) in run.optimizer.batches(run.plain_loader()):
            run.add(inputs)
            run.optimizer.step()
            break


def two_modules_that_share_weights(run):
    wrapped = torch.nn.Sequential(run.model, torch.nn.Identity())
    run.each(lambda inputs: [run.add(inputs), run.optimizer.accumulate(wrapped, total, inputs)])


def measured_denominator(run):
    def act(inputs):
        run.add(inputs)
        run.optimizer.denominator = float((inputs.norm(dim=1) > 0).sum())

    run.each(act)


def first_of_two_twice(run):
    loader = DataLoader(run.data, batch_sampler=dpmf.torch.Cohorts(RECORDS, 2, seed=3))
    for inputs in run.optimizer.batches(loader, batches_per_step=2):
        run.add(inputs[0])
        run.add(inputs[0])
        run.optimizer.step()


def by_two_threads(run):
    def act(inputs):
        failed = []

        def work():
            try:
                run.add(inputs)
            except BaseException as error:  # carried over to the main thread
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
        if failed:
            raise failed[0]

    run.each(act)


def step_without_a_batch(run):
    for (inputs,) in run.optimizer.batches(run.loader):
        run.model(inputs).sum().backward()
        run.optimizer.step()


def with_a_closure(run):
    for (inputs,) in run.optimizer.batches(run.loader):
        run.add(inputs)
        run.optimizer.step(lambda: run.model(inputs).sum())


def copied(run):
    twin = copy.deepcopy(run.optimizer)
    run.each(run.add)
    return twin


def pickled(run):
    pickle.loads(pickle.dumps(run.optimizer))


def forked(run):
    (inputs,) = next(iter(run.optimizer.batches(run.loader)))
    run.add(inputs)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run.optimizer._noise.run.run.release(np.zeros(DIMENSION, np.int64), np.zeros(DIMENSION, np.float32))
            said = "released"
        except BaseException as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 10_000).decode()
    assert said != "released"
    raise dpmf.MismatchError(said)


def new_parameters(run):
    (inputs,) = next(iter(run.optimizer.batches(run.loader)))
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def grouped_records(run):
    run.each(lambda inputs: run.add(inputs[:, None], grouped=True))


def scaled_loss(run):
    scaler = torch.amp.GradScaler("cpu")
    for (inputs,) in run.optimizer.batches(run.loader):
        run.optimizer.accumulate(run.model, lambda outputs, _: scaler.scale(outputs.sum()), inputs)
        scaler.step(run.optimizer)
        scaler.update()


def no_sampler(run):
    run.each(run.add)


def without_batches(run):
    for (inputs,) in run.loader:
        run.add(inputs)
        run.optimizer.step()


def skips_a_drawn_batch(run):
    batches = run.optimizer.batches(run.loader)
    next(batches)
    (inputs,) = next(batches)
    run.add(inputs)
    run.optimizer.step()


def one_sampler_for_two_runs(run):
    """A6: the same secret batches in two runs, which are composed as if they were independent."""
    plain(run)
    other = Training(run.data, planned=lambda: run.plan, loader=lambda _: run.loader, experiment="another")
    plain(other)


def another_order_in_the_second_epoch(run):
    for seed in (3, 4):
        loader = DataLoader(run.data, batch_sampler=dpmf.torch.Cohorts(RECORDS, BATCH, epochs=2, seed=seed))
        for (inputs,) in run.optimizer.batches(loader):
            run.add(inputs)
            run.optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------------------------------


class Remembers(torch.nn.Module):
    """Keeps a statistic of what it sees, as home-made normalisation and codebooks do."""

    def __init__(self, how):
        super().__init__()
        self.linear = torch.nn.Linear(DIMENSION, 1, bias=False)
        self.register_buffer("mean", torch.zeros(DIMENSION))
        self.plain = torch.zeros(DIMENSION)
        self.how = how

    def forward(self, inputs):
        seen = inputs.detach().mean(0)
        if self.how == "in place":
            self.mean.mul_(0.9).add_(seen, alpha=0.1)
        elif self.how == "anew":
            self.mean = 0.9 * self.mean + 0.1 * seen
        elif self.how == "no buffer":
            self.plain = self.plain + seen
        return self.linear(inputs)


class Rearranges(torch.nn.Module):
    """Lets examples meet inside of a batch."""

    def __init__(self, how):
        super().__init__()
        self.linear = torch.nn.Linear(DIMENSION, 1, bias=False)
        self.how = how

    def forward(self, inputs):
        if self.how == "sorts":
            inputs = inputs[inputs[:, 0].argsort()]
        elif self.how == "centres":
            inputs = inputs - inputs.mean(0)
        elif self.how == "rolls":
            inputs = inputs + inputs.roll(1, 0)
        return self.linear(inputs)


class Shared(torch.nn.Module):
    """Uses one layer twice."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(DIMENSION, 1, bias=False)

    def forward(self, inputs):
        return self.linear(inputs) + self.linear(2 * inputs)


def module(make, *arguments):
    return {"model": functools.partial(make, *arguments)}


# ---------------------------------------------------------------------------------------------------------------------
# Loaders
# ---------------------------------------------------------------------------------------------------------------------


def loading(**options):
    return {"loader": lambda run: DataLoader(run.data, **options)}


def reading(change):
    return {"loader": lambda run: DataLoader(change(run.data), batch_size=BATCH)}


def sampling_by(make, **options):
    return {"loader": lambda run: DataLoader(run.data, batch_sampler=make(run), **options)}


def with_replacement(run):
    drawn = RandomSampler(run.data, replacement=True, generator=torch.Generator().manual_seed(1))
    return DataLoader(run.data, batch_size=BATCH, sampler=drawn)


def weighted(run):
    weights = [1.0] + [0.1] * (RECORDS - 1)
    drawn = WeightedRandomSampler(weights, RECORDS, generator=torch.Generator().manual_seed(1))
    return DataLoader(run.data, batch_size=BATCH, sampler=drawn)


def batch_normalised():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(DIMENSION, affine=False), torch.nn.Linear(DIMENSION, 1, bias=False))


def two_views_in_the_loader(batch):
    inputs = torch.stack([one for (one,) in batch])
    return [torch.cat([inputs, -inputs])]


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([*self.data] * 2)


class Twice(SequentialSampler):
    def __iter__(self):
        return iter([index for index in super().__iter__() for _ in range(2)])

    def __len__(self):
        return 2 * super().__len__()


def sampled_loader(run):
    batches = dpmf.torch.SampledBatches(run.plan.sampler(run.key, run="scripts"), epochs=2)
    return DataLoader(run.data, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(run.data))


SAMPLED = {"planned": plan, "loader": sampled_loader}
UNSAMPLED = {
    "planned": functools.partial(plan, "none"),
    "loader": lambda run: DataLoader(run.data, batch_sampler=dpmf.torch.Cohorts(RECORDS, BATCH, epochs=2, seed=3)),
}
TOO_MANY = r"contributions, but only \d+ examples were handed out for it"
NO_BATCH = "has no batch of its own"

SCRIPTS = [
    Script(plain),
    Script(plain, options=loading(batch_size=BATCH), name="plain loader"),
    Script(plain, options=sampling_by(lambda run: dpmf.torch.Cohorts(RECORDS, BATCH, seed=3), num_workers=2), name="workers"),
    Script(in_halves),
    Script(views),
    Script(started_again),
    Script(a_stray_backward),
    Script(one_by_one),
    Script(dropout_one_by_one),
    Script(a_running_mean_of_losses, "remembers examples"),
    Script(tried_twice),
    Script(two_batches_a_step),
    Script(huge_and_broken_gradients),
    Script(noise_between),
    Script(plain, options=module(Shared), name="a layer that is used twice"),
    Script(plain, options=module(Rearranges, "sorts"), name="sorts its batch"),
    Script(plain, options=module(Rearranges, "rolls"), name="mixes its batch"),
    Script(one_by_one, options=module(Rearranges, "sorts"), name="sorts its batch, one by one"),
    Script(two_epochs, options=SAMPLED, times=2, name="sampled epochs"),
    Script(two_epochs, options=UNSAMPLED, times=2, name="epochs without sampling"),
    Script(two_losses, TOO_MANY),
    Script(two_losses, TOO_MANY, options=loading(batch_size=BATCH), name="two losses, plain loader"),
    Script(concatenated, TOO_MANY),
    Script(repeated, TOO_MANY),
    Script(one_more, TOO_MANY),
    Script(sum_twice, TOO_MANY),
    Script(all_of_it, TOO_MANY),
    Script(accumulated_over_the_pass, TOO_MANY),
    Script(
        plain,
        TOO_MANY,
        options=loading(batch_size=BATCH, collate_fn=two_views_in_the_loader),
        name="augmentation in the loader",
    ),
    Script(same_batch_next_step, NO_BATCH),
    Script(skipped_and_repeated, NO_BATCH),
    Script(drawn_ahead, NO_BATCH),
    Script(before_any_batch, NO_BATCH),
    Script(two_passes, "does not cover a second pass|would use examples a second time|start with number"),
    Script(another_pass_in_the_middle, "start with number 0, but the run is at step 1"),
    Script(two_modules_that_share_weights, TOO_MANY),
    Script(measured_denominator, "the denominator was .* in the first step"),
    Script(first_of_two_twice, TOO_MANY),
    Script(by_two_threads, TOO_MANY),
    Script(step_without_a_batch, "nothing to release in step 0"),
    Script(with_a_closure, "without one"),
    Script(copied, "cannot be pickled or copied"),
    Script(pickled, "cannot be pickled or copied"),
    Script(forked, "process"),
    Script(new_parameters, "cannot be added"),
    Script(grouped_records, "for every record, but here every user is clipped"),
    Script(scaled_loss, "a GradScaler scaled the loss"),
    Script(one_by_one, "the forward pass writes to mean", options=module(Remembers, "in place"), name="a running mean in place"),
    Script(one_by_one, "the forward pass writes to mean", options=module(Remembers, "anew"), name="a running mean anew"),
    Script(one_by_one, "the forward pass writes to plain", options=module(Remembers, "no buffer"), name="a mean in an attribute"),
    Script(plain, "released without noise", options=module(Remembers, "in place"), name="a running mean, vectorized"),
    Script(plain, "GroupNorm", options=module(batch_normalised), name="batch normalisation"),
    Script(
        plain,
        "Subset contains some examples several times",
        options=reading(lambda data: Subset(data, [0] * BATCH + list(range(RECORDS - BATCH)))),
        name="a subset that repeats",
    ),
    Script(
        plain,
        "ConcatDataset contains some examples several times",
        options=reading(lambda data: ConcatDataset([Subset(data, range(6))] * 2)),
        name="data twice",
    ),
    Script(plain, "entries of the list are the same object", options=reading(lambda data: [data[index] for index in range(6)] * 2), name="a list twice"),
    Script(plain, "with replacement", options={"loader": with_replacement}, name="with replacement"),
    Script(plain, "with replacement", options={"loader": weighted}, name="weighted"),
    Script(
        plain,
        "cannot tell whether each example comes once",
        options=sampling_by(lambda run: BatchSampler(Twice(range(6)), BATCH, False)),
        name="a sampler of one's own",
    ),
    Script(plain, "IterableDataset", options=reading(lambda data: Stream(Subset(data, range(6)))), name="a stream"),
    Script(no_sampler, "relies on sampling", options={"planned": plan}, name="shuffled where sampling is planned"),
    Script(without_batches, "relies on sampling", options=SAMPLED, name="batches that nobody saw"),
    Script(skips_a_drawn_batch, "drawn for step 1, but this is step 0", options=SAMPLED),
    Script(one_sampler_for_two_runs, "each run needs a sampler of its own", options=SAMPLED),
    Script(another_order_in_the_second_epoch, "but the run began with", options=UNSAMPLED, times=2),
    Script(two_losses, TOO_MANY, options=UNSAMPLED, times=2, name="two losses, epochs"),
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
    judge(script, measure, (dpmf.Error, ValueError, TypeError))


def test_without_the_checks_they_exceed_the_clip(monkeypatch):
    """The power of the test above: what the refusals are for."""
    monkeypatch.setattr(dpmf.torch._data, "check_loader", lambda *_, **__: None)
    monkeypatch.setattr(dpmf.torch._gradients.Kept, "check", lambda _: None)
    monkeypatch.setattr(dpmf.torch._gradients, "check_module", lambda *_, **__: None)
    monkeypatch.setattr(dpmf.torch, "check_unscaled", lambda _: None)
    refused = [script for script in SCRIPTS if script.refusal is not None]
    found = exceeding(refused, functools.partial(measure, checked=False))
    print(len(found), "of", len(refused), "exceed:", "; ".join(found))
    assert len(found) >= 20, found


def test_views_are_averaged_before_the_clip():
    small = TensorDataset(records().tensors[0] / 100)
    run = Training(small)
    (inputs,) = next(iter(run.optimizer.batches(run.loader)))
    mean = lambda outputs, _: outputs.mean()  # noqa: E731
    run.optimizer.accumulate(run.model, mean, torch.cat([inputs, 3 * inputs]), views=2)
    noise = run.optimizer._noise
    summed = noise.exact * noise.run.clip.unit
    assert torch.allclose(summed.float(), 2 * inputs.sum(0), rtol=1e-5)
    for views, sentence in [(0, "at least 1"), (3, "not 3 of each example")]:
        with pytest.raises(ValueError, match=sentence):
            run.add(inputs, views=views)


def test_a_refused_statistic_is_forgotten():
    run = Training(records(), model=functools.partial(Remembers, "in place"))
    with pytest.raises(ValueError, match="the forward pass writes to mean"):
        one_by_one(run)
    assert run.model.mean.abs().sum() == 0 and run.optimizer.next_step == 0


def test_a_statistic_in_place_is_refused_without_a_way_around():
    run = Training(records(), model=functools.partial(Remembers, "in place"))
    with pytest.raises(ValueError, match="released without noise") as refused:
        plain(run)
    assert "vectorize=False" not in str(refused.value) and "opacus" not in str(refused.value)


def test_modules_that_keep_constants_train():
    run = Training(records(), model=functools.partial(Remembers, "nothing"))
    one_by_one(run)
    assert len(run.rows) == STEPS
