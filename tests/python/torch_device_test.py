"""dpmf.torch on devices: the path of an accelerator on the host's memory, bit by bit, and on pretended CUDA tensors, byte by byte."""

import contextlib
import copy
import gc
import os
import pathlib
import time
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from dpmf.torch import _device, _gradients  # noqa: E402
from dpmf.torch._device import Bank, DeviceStep, Extent  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")

STEPS = 6
KEY = dpmf.NoiseKey.from_seed(8)

FORMS = {
    "independent": dict(),
    "tree": dict(),
    "optimal": dict(),
    "structured": dict(),
    "banded:bands=2": dict(),
    "blt": dict(),
    "optimal:dense": dict(),
}


def mechanism_of(selector="optimal", steps=STEPS, **terms):
    made = dpmf.make_mechanism(dpmf.Workload.sgd(steps, momentum=0.9), selector)
    return made.calibrate(3.0, 1e-6, terms.pop("clip", 0.5), **terms)


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))


def cohorts(count=STEPS, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)) for _ in range(count)
    ]


def private(model, mechanism, **arguments):
    arguments = {"denominator": 8, "key": KEY, "experiment": "devices", **arguments}
    return dpmf.torch.PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), mechanism, **arguments)


def trained(mechanism, **arguments):
    model = model_of()
    optimizer = private(model, mechanism, **arguments)
    for inputs, targets in cohorts():
        optimizer.accumulate(model, cross_entropy, inputs[:5], targets[:5])
        optimizer.accumulate(model, cross_entropy, inputs[5:], targets[5:])
        optimizer.step()
    optimizer.close()
    return bits(model)


def bits(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().view(np.uint32).copy()


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("selector", FORMS)
def test_a_device_releases_the_bits_of_the_host(selector, arithmetic):
    mechanism = mechanism_of(selector)
    expected = trained(mechanism, arithmetic=arithmetic, release_on="host", ahead=0)
    for release_on, ahead in (("host", 1), ("device", 0), ("device", 2)):
        found = trained(mechanism, arithmetic=arithmetic, release_on=release_on, ahead=ahead)
        assert np.array_equal(found, expected), (release_on, ahead)


@pytest.mark.parametrize("sampling", ["cyclic-poisson:1:0.1", "cyclic-poisson:3:0.3", "balls-in-bins:3"])
def test_samplers_go_with_devices(sampling):
    made = dpmf.make_mechanism(dpmf.Workload.sgd(STEPS), "independent" if sampling.startswith("cyclic-poisson:1") else "banded:bands=3")
    with contextlib.suppress(dpmf.Error):
        made = made.with_sampling(sampling)
    if made.sampling == "none":
        made = dpmf.make_mechanism(dpmf.Workload.sgd(STEPS), "independent").with_sampling(sampling)
    mechanism = made.calibrate(3.0, 1e-6, 0.5)
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*cohorts(10))))

    def run(release_on):
        model = model_of()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dpmf.torch.PrivateOptimizer(
            sgd, mechanism, key=KEY, experiment="devices", release_on=release_on, ahead=1, check=False
        )
        sampler = dpmf.Sampler(sampling, KEY, units=len(data), steps=STEPS, run="devices")
        loader = torch.utils.data.DataLoader(
            data, batch_sampler=dpmf.torch.SampledBatches(sampler), collate_fn=dpmf.torch.EmptyCollate(data)
        )
        for inputs, targets in optimizer.batches(loader):
            optimizer.accumulate(model, cross_entropy, inputs, targets)
            optimizer.step()
        assert optimizer.next_step == STEPS
        return bits(model)

    assert np.array_equal(run("device"), run("host"))


def bank_of(run, sizes, *, extents=None):
    length = sum(sizes)
    total, released = torch.zeros(length, dtype=torch.int64), torch.zeros(length)
    return Bank(total, released, extents or [Extent(0, 0, 0, length)], exact=run.arithmetic == "exact")


def run_of(dimension, mechanism=None, **arguments):
    run = dpmf.PrivateRun(mechanism or mechanism_of(), KEY, dimension=dimension, run="devices", **arguments)
    run.denominator = 1.0
    return run


def scattered(dimension):
    """Coordinates of two devices that take turns, in pieces that begin and end within blocks of the digest, and on their edges."""
    edges = [0, 1, 16_383, 16_384, 40_000, 65_536, dimension]
    extents, sizes = ([], []), [0, 0]
    for turn, (first, last) in enumerate(zip(edges, edges[1:])):
        own = turn % 2
        extents[own].append(Extent(sizes[own], first, first, last - first))
        sizes[own] += last - first
    return extents, sizes


def on_two(run, dimension):
    extents, sizes = scattered(dimension)
    banks = [bank_of(run, [size], extents=own) for own, size in zip(extents, sizes)]
    return DeviceStep(run, banks)


def put(banks, total):
    for bank in banks:
        for extent in bank.extents:
            bank.sum[extent.local : extent.local + extent.length] = total[extent.place : extent.place + extent.length]


def taken(banks, dimension):
    released = torch.zeros(dimension)
    for bank in banks:
        for extent in bank.extents:
            released[extent.place : extent.place + extent.length] = bank.released[extent.local : extent.local + extent.length]
    return released


def sums_of(dimension, step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-(1 << 40), 1 << 40, (dimension,), generator=generator)


def on_host(run, total):
    total, released = total.clone(), torch.zeros(len(total))
    run.contribute(0)
    run.release(total.numpy(), released.numpy())
    return released


@pytest.mark.parametrize("ahead", [0, 2])
def test_near_ties_are_resolved_on_the_host(ahead, monkeypatch):
    """Every second sum is as close to a tie as its row allows: one in a hundred of them is in doubt."""
    monkeypatch.setattr(_device, "SLICE", 1 << 15)
    dimension = 100_000
    there, here = run_of(dimension, ahead=ahead), run_of(dimension, ahead=0)
    step, in_doubt = on_two(there, dimension), 0
    for index in range(STEPS):
        row = np.zeros(dimension, np.int64)
        there.coming_row().ship(0, row)
        lift, shift, doubt, _ = there.fixed_row()
        total = sums_of(dimension, index)
        ties = (total << lift >> shift << shift) + (1 << (shift - 1))
        near = (ties - torch.from_numpy(row) + (1 << (lift - 1))) >> lift
        total[::2] = near[::2]
        put(step.banks, total)
        there.contribute(0)
        step.release()
        moved = (total << lift) + torch.from_numpy(row) + (1 << (shift - 1))
        in_doubt += int((((moved + doubt) & ((1 << shift) - 1)) <= 2 * doubt).sum())
        assert torch.equal(taken(step.banks, dimension).view(torch.int32), on_host(here, total).view(torch.int32))
        assert not any(bank.sum.any() for bank in step.banks)
    step.close()
    assert 500 < in_doubt < 20_000


def test_a_wrong_answer_to_a_doubt_would_show(monkeypatch):
    """The test above can fail: without the host's answers some of the same releases are other ones."""
    dimension = 20_000
    there, here = run_of(dimension, ahead=0), run_of(dimension, ahead=0)
    step = DeviceStep(there, [bank_of(there, [dimension])])
    row = np.zeros(dimension, np.int64)
    there.coming_row().ship(0, row)
    lift, shift, _, _ = there.fixed_row()
    total = (torch.full((dimension,), 1 << (shift - 1)) - torch.from_numpy(row) + (1 << (lift - 1))) >> lift
    put(step.banks, total)
    there.contribute(0)
    monkeypatch.setattr(Bank, "add_exact", lambda bank, *row, of=Bank.add_exact: of(bank, *row) * 0)
    step.release()
    assert not torch.equal(taken(step.banks, dimension), on_host(here, total))


def test_a_journal_knows_a_sum_wherever_it_is_released(tmp_path):
    dimension, mechanism = 100_000, mechanism_of()

    def opened(new=False):
        arguments = dict(dimension=dimension, ahead=1)
        journal = tmp_path / "journal"
        run = dpmf.PrivateRun(mechanism, KEY, run="devices", journal=journal, **arguments) if new else (
            dpmf.PrivateRun.open(mechanism, KEY, journal, **arguments)
        )
        run.denominator = 1.0
        return run

    first = opened(new=True)
    expected = on_host(first, sums_of(dimension, 0))
    step = on_two(first, dimension)
    put(step.banks, sums_of(dimension, 1))
    first.contribute(0)
    step.release()
    second_row = taken(step.banks, dimension)
    step.close()
    first.close()
    # The step of the host on devices, that of devices on the host; another sum on neither.
    again = opened()
    step = on_two(again, dimension)
    for wrong in (sums_of(dimension, 2), sums_of(dimension, 0) + torch.nn.functional.one_hot(torch.tensor(99_999), dimension)):
        put(step.banks, wrong)
        again.contribute(0)
        with pytest.raises(dpmf.StepReusedError):
            step.release()
        again.clear()
    put(step.banks, sums_of(dimension, 0))
    again.contribute(0)
    assert step.release() == 0
    assert torch.equal(taken(step.banks, dimension), expected)
    step.close()
    with pytest.raises(dpmf.StepReusedError):
        on_host(again, sums_of(dimension, 3))
    again.clear()
    assert torch.equal(on_host(again, sums_of(dimension, 1)), second_row)
    again.close()


def test_a_run_resumes_on_another_path_with_a_row_in_flight(tmp_path):
    mechanism = mechanism_of()

    def resumed(release_on, ahead, steps, state=None):
        model = model_of()
        optimizer = private(model, mechanism, journal=tmp_path / "journal", release_on=release_on, ahead=ahead)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for inputs, targets in cohorts()[steps]:
            optimizer.accumulate(model, cross_entropy, inputs, targets)
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        optimizer.close()
        return model, state

    uninterrupted = model_of()
    optimizer = private(uninterrupted, mechanism, release_on="host", ahead=0)
    for inputs, targets in cohorts():
        optimizer.accumulate(uninterrupted, cross_entropy, inputs, targets)
        optimizer.step()
    _, state = resumed("device", 1, slice(0, 2))
    _, state = resumed("host", 1, slice(2, 3), state)
    _, kept = resumed("device", 0, slice(3, 4), state)
    resumed("device", 1, slice(4, 5), kept)  # lost: its state was not kept
    model, _ = resumed("host", 0, slice(4, 6), kept)
    assert np.array_equal(bits(model), bits(uninterrupted))


def test_a_step_that_was_burned_is_passed_over_with_its_row_in_flight():
    mechanism = mechanism_of()
    models = []
    for release_on, ahead in (("host", 0), ("host", 2), ("device", 0), ("device", 2)):
        model = model_of()
        optimizer = private(model, mechanism, release_on=release_on, ahead=ahead, check=False)
        for step, (inputs, targets) in enumerate(cohorts()):
            optimizer.accumulate(model, cross_entropy, inputs, targets)
            optimizer.burn() if step in (1, 2, 4) else optimizer.step()
        assert optimizer.next_step == STEPS
        optimizer.close()
        models.append(bits(model))
    assert all(np.array_equal(models[0], other) for other in models[1:])


def test_a_release_that_fails_is_tried_again(monkeypatch):
    dimension = 40_000
    there, here = run_of(dimension, ahead=1), run_of(dimension, ahead=0)
    step = DeviceStep(there, [bank_of(there, [dimension])])
    put(step.banks, sums_of(dimension, 0))
    there.contribute(0)
    with monkeypatch.context() as failing:
        failing.setattr(step, "read", lambda verdict: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.release()
    assert there.next_step == 0
    step.release()
    assert torch.equal(taken(step.banks, dimension), on_host(here, sums_of(dimension, 0)))
    step.close()


class Interrupted:
    """A run that is interrupted once, right after one of its methods has done its work."""

    def __init__(self, run, name):
        self.run, self.name = run, name

    def __getattr__(self, name):
        value = getattr(self.run, name)
        if name != self.name:
            return value

        def interrupted(*arguments):
            value(*arguments)
            self.name = None
            raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize("after", ["nothing", "zero_grad"])
@pytest.mark.parametrize("method", ["release", "clear"])
@pytest.mark.parametrize("release_on", ["host", "device"])
def test_an_interrupt_leaves_no_sum_for_the_next_step(release_on, method, after):
    """Between the moment when a step is over for the run and that when its sum is zero, a sum would be released once more."""
    mechanism, (first, second) = mechanism_of(), cohorts(2)
    models = []
    for interrupt in (True, False):
        model = model_of()
        optimizer = private(model, mechanism, release_on=release_on, check=False)
        optimizer.accumulate(model, cross_entropy, *first)
        noise = optimizer._noise
        # Both end without a step of the model: the noise of the first step is used, unless it is given up.
        if interrupt:
            run = noise.run
            if method == "release" and release_on == "device":
                noise.device_step.run = Interrupted(run, "release_elsewhere")
            else:
                noise.run = Interrupted(run, method)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step() if method == "release" else optimizer.zero_grad()
            noise.run = run
            if noise.device_step is not None:
                noise.device_step.run = run
        else:
            optimizer.burn() if method == "release" else optimizer.zero_grad()
        if after == "zero_grad":
            optimizer.zero_grad()
        optimizer.accumulate(model, cross_entropy, *second)
        optimizer.step()
        assert optimizer.next_step == (2 if method == "release" else 1)
        optimizer.close()
        models.append(bits(model))
    assert np.array_equal(*models)


def test_a_release_that_is_refused_is_left_nowhere(tmp_path):
    """Whoever holds a gradient of an earlier step holds memory of releases: it does not show a row with a second sum."""
    mechanism = mechanism_of()

    def begun(state=None):
        model = model_of()
        optimizer = private(model, mechanism, journal=tmp_path / "journal", release_on="device")
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        return model, optimizer

    def step(model, optimizer, cohort):
        optimizer.accumulate(model, cross_entropy, *cohort)
        optimizer.step()

    model, optimizer = begun()
    step(model, optimizer, cohorts()[0])
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer, cohorts()[1])
    optimizer.close()
    model, optimizer = begun(state)
    views = optimizer._noise.views
    with pytest.raises(dpmf.StepReusedError):
        step(model, optimizer, cohorts()[2])
    assert not any(view.any() for view in views)
    assert not any(bank.row.any() for bank in optimizer._noise.device_step.banks)
    optimizer.zero_grad()
    step(model, optimizer, cohorts()[1])
    assert all(view.any() for view in views)
    optimizer.close()


def own_threads():
    """Names of the threads that draw or ship noise."""
    tasks, names = pathlib.Path("/proc/self/task"), []
    for task in tasks.iterdir() if tasks.exists() else ():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    names += [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("dpmf-ahead", "dpmf-ship"))]


def test_no_thread_is_left():
    gc.collect()
    before = len(own_threads())
    weight = torch.nn.Parameter(torch.zeros(300_000))
    mechanism = mechanism_of()
    for leave in ("close", "drop", "fail"):
        optimizer = dpmf.torch.PrivateOptimizer(
            torch.optim.SGD([weight], lr=1.0, momentum=0.9), mechanism, denominator=1, release_on="device", ahead=3
        )
        # They name themselves once they run.
        if pathlib.Path("/proc").exists():
            for _ in range(12_000):  # two minutes: a machine may be busy
                if len(own_threads()) >= before + 4:
                    break
                time.sleep(0.01)
            assert len(own_threads()) >= before + 4
        optimizer.add_sum({}, 0)
        optimizer.step()
        if leave == "close":
            optimizer.close()
        if leave == "fail":
            with pytest.raises(ValueError, match="closure"):
                optimizer.step(lambda: None)
        del optimizer
        gc.collect()
    for _ in range(100):
        if len(own_threads()) == before:
            break
        threading.Event().wait(0.05)
    assert len(own_threads()) == before


def test_a_child_that_was_forked_ends():
    weight = torch.nn.Parameter(torch.zeros(300_000))
    optimizer = private(torch.nn.ParameterList([weight]), mechanism_of(), ahead=2)
    child = os.fork() if hasattr(os, "fork") else None
    if child == 0:
        # Its copy of the run has no threads to wait for, and is refused.
        try:
            optimizer.add_sum({}, 0)
        except dpmf.Error:
            del optimizer
            gc.collect()
            os._exit(0)
        os._exit(1)
    if child is not None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.add_sum({}, 0)
    optimizer.step()


def test_where_to_release_is_one_of_two():
    with pytest.raises(ValueError, match="release_on"):
        private(model_of(), mechanism_of(), release_on="gpu")


class Counter:
    """What a step on a pretended device costs: bytes alive and at most, copies to the host, and waiting for the device."""

    def __init__(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        counter = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if any(word in str(function) for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
                    counter.waits.append(str(function))
                out = function(*args, **(kwargs or {}))
                counter.see(str(function), args, out)
                return out

        self.mode = Mode()
        self.alive, self.now, self.peak = {}, 0, 0
        self.to_host, self.to_device, self.waits = 0, 0, []

    def see(self, name, args, out):
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if name.startswith("aten.copy_"):
            self.moved(given[1], given[0])
        elif name.startswith(("aten._to_copy", "aten.to.")) and isinstance(out, torch.Tensor):
            self.moved(given[0], out)
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self.hold(tensor)

    def moved(self, source, target):
        if source.device.type == "cuda" and target.device.type == "cpu":
            self.to_host += target.numel() * target.element_size()
        if source.device.type == "cpu" and target.device.type == "cuda":
            self.to_device += target.numel() * target.element_size()

    def hold(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive[key] = [0, size]
            self.now += size
            self.peak = max(self.peak, self.now)
        self.alive[key][0] += 1
        weakref.finalize(tensor, self.drop, key)

    def drop(self, key):
        self.alive[key][0] -= 1
        if self.alive[key][0] == 0:
            self.now -= self.alive.pop(key)[1]


class PretendedShipper(_device.Shipper):
    """Numbers of pretended tensors cannot be written."""

    @staticmethod
    def fill(row, place, buffer):
        assert buffer.device.type == "cpu" and buffer.dtype in (torch.int64, torch.float32)


class PretendedStep(DeviceStep):
    """Nor can they be read."""

    @staticmethod
    def read(verdict):
        host = verdict.to("cpu")
        assert host.dtype == torch.int64 and host.shape == (3,)
        return [1, 2, 0]


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_a_step_on_an_accelerator_costs_little_memory_and_no_transfer(arithmetic, journal, tmp_path):
    """Clip, sum, noise, digest and release of 256 examples and 1.2 million parameters, on CUDA tensors that FakeTensorMode
    pretends."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    shapes, examples = ((1000, 1000), (200_000,), ()), 256
    dimension = 1_200_001
    run = run_of(dimension, arithmetic=arithmetic, ahead=0, **(dict(journal=tmp_path / "journal") if journal else {}))
    counter = Counter()
    with fake.FakeTensorMode(allow_non_fake_inputs=True), counter.mode:
        rows = [torch.zeros(examples, *shape, device="cuda") for shape in shapes]
        gradients = torch.zeros(dimension, device="cuda")
        before = counter.now
        assert before >= 4 * (examples + 1) * dimension
        counter.peak = counter.now
        total = torch.zeros(dimension, dtype=torch.int64, device="cuda")
        bank = Bank(total, gradients, [Extent(0, 0, 0, dimension)], exact=arithmetic == "exact")
        step = PretendedStep(run, [bank], PretendedShipper)
        counter.to_host = 0
        views = [part.view(shape) for part, shape in zip(total.split([1_000_000, 200_000, 1]), shapes)]
        longer = _gradients.add_clipped(rows, views, run.clip)
        assert longer.device.type == "cuda"
        run.contribute(0)
        assert step.release() == 0
        most = counter.peak - before
    # One row comes from the host, and next to nothing goes back.
    assert counter.to_device >= (8 if arithmetic == "exact" else 4) * dimension
    assert counter.to_host == (24 if arithmetic == "exact" or journal else 0) <= 64
    assert counter.waits == []
    assert 12 * dimension < most <= (64 << 20) + 16 * dimension, f"{(most - 16 * dimension) / 2**20:.1f} MB"


def test_the_counter_sees_what_it_counts():
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    counter = Counter()
    with fake.FakeTensorMode(allow_non_fake_inputs=True), counter.mode:
        first = torch.zeros(1000, device="cuda")
        second = first.double()
        assert (counter.now, counter.peak) == (12_000, 12_000)
        del second
        gc.collect()
        assert (counter.now, counter.peak) == (4000, 12_000)
        first[:10].cpu()
        torch.zeros(3).to("cuda")
        with contextlib.suppress(RuntimeError):
            first.nonzero()  # its size is not known
    assert (counter.to_host, counter.to_device) == (40, 12)
    assert any("nonzero" in name for name in counter.waits)
