"""dpmf.plan over data, batch and epochs: the mechanism and the sampler of least error."""

import json
import os
import signal
import subprocess
import sys
import threading

import dpmf
import numpy as np
import pytest

REQUEST = dict(examples=800, batch=100, epochs=4, delta=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def plan(folder):
    return dpmf.plan(**REQUEST, epsilon=2, cache=folder)


@pytest.fixture(scope="module")
def unsampled(folder):
    return dpmf.plan(**REQUEST, epsilon=2, sampling="none", cache=folder)


def test_a_plan_is_the_least_error_of_its_rows(plan):
    assert (plan.steps, plan.examples, plan.batch, plan.epochs) == (32, 800, 100, 4)
    rows = plan.rows
    assert {"mechanism", "sampling", "bands", "buffers", "recalls", "noise_multiplier", "rmse", "ratio_to_bound"} <= set(rows[0])
    assert [row["rmse"] for row in rows] == sorted(row["rmse"] for row in rows)
    assert plan.chosen == next(row for row in rows if row["excluded"] is None)
    assert plan.chosen["estimated"] is False and plan.chosen["rmse"] == plan.rmse
    assert plan.dp_sgd in rows and plan.dp_sgd["sampling"] == "cyclic-poisson:1:0.125"
    assert plan.rmse < plan.dp_sgd["rmse"] and plan.lower_bound_rmse > 0
    # What is planned is what is deployed, at clip 1.
    mechanism, statement = plan.mechanism, plan.statement
    assert mechanism is plan.mechanism and mechanism.privacy == statement
    assert (statement.epsilon, statement.delta) == (2, 1e-5)
    rmse = statement.noise_multiplier * mechanism.sqrt_loss / np.sqrt(32)
    assert rmse == pytest.approx(plan.rmse, rel=1e-12)
    assert np.sqrt(np.mean(plan.per_step() ** 2)) == pytest.approx(plan.rmse, rel=1e-12)
    assert mechanism.sampling == plan.sampling == plan.chosen["sampling"] != "none"
    assert mechanism.recalls == plan.chosen["recalls"] and mechanism.buffers == plan.chosen["buffers"] <= 8


def test_the_file_has_the_sampling(plan, tmp_path):
    plan.save(tmp_path / "plan.safetensors")
    read = dpmf.Mechanism.load(tmp_path / "plan.safetensors")
    assert read == plan.mechanism and read.sampling == plan.sampling and read.privacy == plan.statement


def test_the_sampler_of_a_plan(plan, unsampled):
    key = dpmf.NoiseKey.from_seed(3)
    sampler = plan.sampler(key, run="test")
    assert (sampler.sampling, sampler.units, sampler.steps) == (plan.sampling, 800, 32)
    assert sampler.expected_batch == pytest.approx(100)
    assert plan.sampler(key, units=600, run="test", start=5).next_step == 5
    plan.mechanism.check_sampling(sampler.sampling)
    with pytest.raises(dpmf.MismatchError, match='does not rely on sampling.*balls-in-bins:8"'):
        unsampled.sampler(key)


def test_no_trust_no_sampling(plan, unsampled):
    assert unsampled.sampling == unsampled.mechanism.sampling == "none"
    assert unsampled.mechanism.participation == "epochs:4"
    assert unsampled.rmse > unsampled.lower_bound_rmse
    assert all(row["excluded"] for row in unsampled.rows if row["sampling"] != "none")
    # Batches that keep their members are what several epochs mean.
    unsampled.mechanism.check_sampling("balls-in-bins:8")
    unsampled.mechanism.check_sampling("balls-in-bins:16")
    unsampled.mechanism.check_sampling("single-epoch")
    for sampler in ("balls-in-bins:9", "cyclic-poisson:4:0.5", "poisson"):
        with pytest.raises(dpmf.MismatchError, match=r'dpmf\.Sampler\("balls-in-bins:8"'):
            unsampled.mechanism.check_sampling(sampler)


def test_another_sampling_is_refused(plan):
    others = {"single-epoch", "poisson", "with-replacement", "balls-in-bins:16", "cyclic-poisson:1:0.125", "cyclic-poisson:1:0.25"}
    for sampler in others - {plan.sampling}:
        with pytest.raises(dpmf.MismatchError, match=f"relies on sampling {plan.sampling} and holds under no other"):
            plan.mechanism.check_sampling(sampler)


def test_optimizer_memory_and_clip(folder):
    plan = dpmf.plan(
        **REQUEST, epsilon=2, momentum=0.9, schedule=np.linspace(1, 0.1, 32), buffers=0, clip=0.5, unit="user", cache=folder
    )
    assert plan.mechanism.workload == dpmf.Workload.sgd(momentum=0.9, schedule=np.linspace(1, 0.1, 32))
    assert plan.mechanism.buffers == 0 and plan.statement.clip == 0.5 and plan.statement.unit == "user"
    assert any("0 are allowed" in (row["excluded"] or "") for row in plan.rows)


def test_people_read_it(plan):
    text, page = repr(plan), plan._repr_html_()
    assert text.startswith("<dpmf.Plan\n") and "800 examples in batches of 100, 4 epochs" in text and plan.sampling in text
    assert "times that of DP-SGD" in text
    assert page.startswith('<div class="dpmf-plan">') and plan.sampling in page and "<svg" in page
    assert "in secret" in repr(plan.mechanism) and "in secret" in str(plan.statement)


def test_a_mechanism_with_sampling(tmp_path):
    made = dpmf.make_mechanism(dpmf.Workload.prefix_sum(40), "banded-toeplitz:bands=4")
    assert made.sampling == "none"
    sampled = made.with_sampling("cyclic-poisson:4:0.0667")
    assert (sampled.sampling, sampled.participation, sampled.privacy) == ("cyclic-poisson:4:0.0667", "min-separation:4", None)
    assert sampled.mechanism == made.mechanism and sampled.identity != made.identity
    calibrated = sampled.calibrate(2, 1e-5)
    alone = dpmf.make_mechanism(dpmf.Workload.prefix_sum(40), "banded-toeplitz:bands=4", participation="min-separation:4")
    noise = alone.calibrate(2, 1e-5)
    # Per unit of what is released: the sensitivities are of one participation, and of all of them.
    assert calibrated.privacy.noise_std < noise.privacy.noise_std
    assert 1.999 < sampled.with_noise(calibrated.privacy.noise_multiplier, 1e-5).privacy.epsilon <= 2
    assert made.with_sampling("balls-in-bins:10").participation == "epochs:4"
    anew = made.with_sampling("reshuffled-bins:10")
    assert (anew.sampling, anew.participation) == ("reshuffled-bins:10", "min-separation:1:4")
    stated = anew.calibrate(2, 1e-5)
    assert "anew in every epoch" in str(stated.privacy)
    stated.save(tmp_path / "anew.safetensors")
    assert dpmf.Mechanism.load(tmp_path / "anew.safetensors").sampling == anew.sampling
    assert sampled.with_sampling("none").sampling == "none"
    with pytest.raises(dpmf.UnsupportedError, match="more than 3 diagonals"):
        made.with_sampling("cyclic-poisson:3:0.1")
    with pytest.raises(ValueError, match="bins is 11"):
        made.with_sampling("balls-in-bins:11")
    with pytest.raises(dpmf.UnsupportedError, match="non-negative"):
        dpmf.make_mechanism(dpmf.Workload.prefix_sum(40), "tree").with_sampling("balls-in-bins:10")


def test_audits_do_not_refute_what_is_calibrated(plan, tmp_path):
    # The same games refute noise of seven tenths, and twice the rate, in the tests of the library.
    made = dpmf.make_mechanism(dpmf.Workload.prefix_sum(32), "banded-toeplitz:bands=3")
    for mechanism in (plan.mechanism, made.with_sampling("cyclic-poisson:3:0.2").calibrate(2, 1e-5)):
        report = dpmf.audit(mechanism, trials=100_000)
        assert report["refuted"] is False and report["steps"] == 32
        # And it looks closely: at some point two thirds of the promised δ are seen.
        assert max(row["delta_lower"] / row["delta"] for row in report["rows"]) > 0.66
        mechanism.save(tmp_path / "m.safetensors")
        command = [os.environ["DPMF"], "audit", tmp_path / "m.safetensors", "--trials", "1e5", "--json"]
        told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert told["refuted"] is False and told["rows"] == report["rows"]


def test_bad_requests_are_named():
    good = dict(**REQUEST, epsilon=2.0, cache=False)
    for bad, message in [
        (dict(examples=0), "examples is 0"),
        (dict(batch=801), "batch is 801"),
        (dict(epochs=0), "epochs is 0"),
        (dict(epsilon=0.0), "epsilon is 0"),
        (dict(delta=1.0), "delta is 1"),
        (dict(clip=-1.0), "clip is -1"),
        (dict(schedule=[1.0, 0.5]), "schedule has 2 step sizes, but steps is 32"),
        (dict(sampling="poisson"), "must be auto or none"),
        (dict(batch=None), "also needs batch and epochs"),
        (dict(steps=32), "steps cannot be combined with examples"),
        (dict(dense=True, gap=1e-3), "dense, gap cannot be combined with examples"),
        (dict(unit="household"), "household"),
    ]:
        with pytest.raises(ValueError, match=message):
            dpmf.plan(**{**good, **bad})
    with pytest.raises(dpmf.UnsupportedError, match="the relation replace-one with sampling"):
        dpmf.plan(**good, adjacency="replace-one")
    # As dpmf 0.2 took it.
    for extra in (dict(), dict(momentum=0.9), dict(participation="epochs:2")):
        with pytest.raises(ValueError, match=r"needs the size of the data.*dpmf\.mechanism\(steps=…"):
            dpmf.plan(steps=32, epsilon=2, delta=1e-5, **extra)


def test_progress_is_text_and_may_stop(folder):
    lines = []
    dpmf.plan(**REQUEST, epsilon=2, cache=folder, progress=lines.append)
    assert lines and all(isinstance(line, str) for line in lines)
    with pytest.raises(dpmf.StoppedError):
        dpmf.plan(**REQUEST, epsilon=2, cache=folder, progress=lambda line: False)

    def fails(line):
        raise LookupError(line)

    with pytest.raises(LookupError, match="parts"):
        dpmf.plan(**REQUEST, epsilon=2, cache=folder, progress=fails)


def test_ctrl_c_ends_a_plan():
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    # A shell's background jobs start with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            dpmf.plan(examples=200_000, batch=100, epochs=2, epsilon=2, delta=1e-5, cache=False)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def test_fits_are_kept_where_they_belong(tmp_path):
    def planned(**environment):
        kept = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "HOME")}
        code = 'import dpmf; print(dpmf.plan(examples=40, batch=10, epochs=2, epsilon=2, delta=1e-5).rmse)'
        done = subprocess.run(
            [sys.executable, "-c", code], env={**kept, **environment}, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    first = planned(XDG_CACHE_HOME=str(tmp_path / "cache"), HOME=str(tmp_path / "home"))
    assert any((tmp_path / "cache" / "dpmf" / "plans").iterdir()) and not (tmp_path / "home").exists()
    assert planned(XDG_CACHE_HOME=str(tmp_path / "cache"), HOME=str(tmp_path / "home")) == first
    assert planned(XDG_CACHE_HOME="relative", HOME=str(tmp_path / "home")) == first
    assert any((tmp_path / "home" / ".cache" / "dpmf" / "plans").iterdir()) and not (tmp_path / "relative").exists()
    assert planned() == first
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "home"}
