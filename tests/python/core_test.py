"""Workloads, factorizations, mechanisms and accounting against NumPy and dp-accounting."""

import copy
import doctest
import hashlib
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree

import dp_accounting
import dpmf
import dpmf._progress
import numpy as np
import pytest

WORKLOADS = {
    "prefix sum": dpmf.Workload.prefix_sum(24),
    "momentum": dpmf.Workload.sgd(24, momentum=0.9, schedule="cooldown:0.5:0.1"),
    "nesterov": dpmf.Workload.sgd(24, momentum=0.7, nesterov=True, learning_rate=0.1),
    "decoupled": dpmf.Workload.sgd(24, momentum=0.5, weight_decay=0.2, learning_rate=0.3),
    "coupled": dpmf.Workload.sgd(24, momentum=0.5, weight_decay=0.2, coupled=True, learning_rate=0.3),
    "averaged": dpmf.Workload.sgd(24, average="ema:0.8"),
    "matrix": dpmf.Workload.from_matrix(np.tril(np.random.default_rng(0).uniform(0.5, 1.5, (24, 24)))),
}


def sgd(gradients, rates, momentum=0.0, nesterov=False, weight_decay=0.0, coupled=False, ema=None):
    """θ₀ − θ of every step, by the loop that people write."""
    theta = buffer = average = 0.0
    out = []
    for g, rate in zip(gradients, rates):
        if coupled:
            g = g + weight_decay * theta
        buffer = momentum * buffer + g
        direction = g + momentum * buffer if nesterov else buffer
        if not coupled:
            theta = (1 - rate * weight_decay) * theta
        theta = theta - rate * direction
        average = theta if ema is None else ema * average + (1 - ema) * theta
        out.append(-average)
    return np.array(out)


@pytest.mark.parametrize("name, options", [
    ("prefix sum", {}),
    ("momentum", dict(momentum=0.9)),
    ("nesterov", dict(momentum=0.7, nesterov=True)),
    ("decoupled", dict(momentum=0.5, weight_decay=0.2)),
    ("coupled", dict(momentum=0.5, weight_decay=0.2, coupled=True)),
    ("averaged", dict(ema=0.8)),
])
def test_a_workload_is_the_loop_of_its_optimizer(name, options):
    workload = WORKLOADS[name]
    gradients = np.random.default_rng(1).normal(size=24)
    expected = sgd(gradients, workload.learning_rates, **options)
    assert workload.apply(gradients) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert workload.matrix() @ gradients == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_optimum_multiplies_to_its_workload_and_meets_its_certificate(name):
    workload = WORKLOADS[name]
    optimum = dpmf.factorize(workload)
    b, c = optimum.dense()
    a = workload.matrix()
    assert b @ c == pytest.approx(a, rel=1e-9, abs=1e-9)
    assert np.array_equal(b, np.tril(b)) and np.array_equal(c, np.tril(c))
    sensitivity = np.linalg.norm(c, axis=0).max()
    assert sensitivity == pytest.approx(1, rel=1e-9)
    loss = sensitivity**2 * np.linalg.norm(b) ** 2
    assert loss == pytest.approx(optimum.certificate.loss, rel=1e-6)
    # The dual bound, from the paper's formula with the singular values of A D^{1/2}.
    v = optimum.v
    bound = np.linalg.svd(a * np.sqrt(v), compute_uv=False).sum() ** 2 / v.sum()
    # The certificate is rounded down, by no more than the gap it certifies.
    assert bound * (1 - 1e-6) <= optimum.certificate.lower_bound <= bound * (1 + 1e-12)
    assert optimum.certificate.gap <= 1e-6


@pytest.mark.parametrize("mechanism", ["independent", "tree", "honaker-online", "honaker-full", "sqrt-toeplitz",
                                       "optimal-prefix", "structured", "optimal", "optimal:dense", "state-space",
                                       "optimal-prefix:dense", "structured:diagonals=2:rank=3"])
@pytest.mark.parametrize("name", ["prefix sum", "momentum", "matrix"])
def test_every_mechanism_as_deployed(mechanism, name):
    workload = WORKLOADS[name]
    made = dpmf.make_mechanism(workload, mechanism)
    b, c = made.matrices()
    assert b @ c == pytest.approx(workload.matrix(), rel=1e-9, abs=1e-9)
    assert made.coloring() @ c == pytest.approx(np.eye(24), abs=1e-9)
    assert made.sensitivity == pytest.approx(np.linalg.norm(c, axis=0).max(), rel=1e-9)
    assert made.per_step_error() == pytest.approx(made.sensitivity**2 * (b**2).sum(axis=1), rel=1e-9)
    assert made.loss == pytest.approx(made.per_step_error().sum())
    assert made.sqrt_loss == pytest.approx(np.sqrt(made.loss))
    assert made.max_sqrt_loss == pytest.approx(np.sqrt(made.per_step_error().max()))
    assert made.final_sqrt_loss == pytest.approx(np.sqrt(made.per_step_error()[-1]))
    assert made.certificate.loss == made.loss and made.certificate.ratio_to_bound > 1 - 1e-9
    assert made.verify().lower_bound == pytest.approx(made.certificate.lower_bound, rel=1e-6)
    assert made.mechanism == mechanism and made.participation == "single"


def test_the_optimum_of_an_optimizer_is_a_stream_and_that_of_a_matrix_is_not():
    assert dpmf.make_mechanism(WORKLOADS["momentum"]).form == "state-space"
    matrix = dpmf.make_mechanism(WORKLOADS["matrix"])
    assert (matrix.form, matrix.buffers) == ("dense", None)
    optimum = dpmf.factorize(WORKLOADS["momentum"])
    assert optimum.state_space(buffers=2).buffers == 2
    assert optimum.state_space() == dpmf.make_mechanism(WORKLOADS["momentum"])
    assert optimum.dense_mechanism() == dpmf.make_mechanism(WORKLOADS["momentum"], "optimal:dense")
    with pytest.raises(dpmf.UnsupportedError, match="streaming for a matrix"):
        dpmf.factorize(WORKLOADS["matrix"]).state_space()


@pytest.mark.parametrize("make", [
    lambda *arguments, **choices: dpmf.make_mechanism(WORKLOADS["momentum"], *arguments, **choices),
    lambda name="optimal", **choices: dpmf.mechanism(workload=WORKLOADS["momentum"], mechanism=name, epsilon=8, delta=1e-6,
                                                **choices),
], ids=["make_mechanism", "plan"])
def test_what_a_mechanism_leaves_open_is_chosen_in_its_name_or_by_keywords(make):
    three = make(buffers=3)
    assert (three.mechanism, three.form, three.buffers) == ("optimal:buffers=3", "state-space", 3)
    assert three == make("optimal:buffers=3") and make("state-space", buffers=3).identity == three.identity
    dense = make(dense=True)
    assert (dense.mechanism, dense.form, dense.buffers) == ("optimal:dense", "dense", None)
    assert dense == make("optimal:dense") != make()
    loose = make(tolerance=0.1)
    assert loose.mechanism == "optimal:tolerance=0.1" and loose.buffers < make().buffers
    assert make(tolerance=1e-4).identity == make().identity
    # A keyword goes before the name, and beside what else the name says.
    assert make("state-space:buffers=3", buffers=2).mechanism == "state-space:buffers=2"
    for name, choice, message in [
        ("tree", dict(buffers=3), "tree takes no options"),
        ("tree", dict(tolerance=1e-3), "tree takes no options"),
        ("independent", dict(dense=True), "independent takes no options"),
        ("state-space", dict(dense=True), "state-space takes only buffers, tolerance"),
        ("optimal", dict(dense=True, buffers=3), "keeps no buffers with dense rows"),
        ("optimal", dict(tolerance=-1.0), "tolerance is -1"),
        ("optimal-dense", {}, 'mechanism "optimal-dense" does not exist; choose one of independent, tree'),
    ]:
        with pytest.raises(ValueError, match=message):
            make(name, **choice)


@pytest.mark.parametrize("call", [
    dpmf.make_mechanism, dpmf.factorize, dpmf.compare,
    lambda workload, **options: dpmf.mechanism(workload=workload, epsilon=8, delta=1e-6, **options),
], ids=["make_mechanism", "factorize", "compare", "plan"])
def test_a_participation_is_used(call):
    call(WORKLOADS["momentum"], participation="single")
    with pytest.raises(ValueError, match="participation is many, but it must be single, epochs:K"):
        call(WORKLOADS["momentum"], participation="many")
    for participation in ("epochs:4", "min-separation:3"):
        call(WORKLOADS["momentum"], participation=participation)


def test_compare_has_the_rows_of_the_command_line():
    rows = dpmf.compare(WORKLOADS["momentum"])
    assert [row["mechanism"] for row in rows][:9] == [
        "independent", "tree", "honaker-online", "honaker-full", "sqrt-toeplitz", "optimal-prefix", "structured",
        "optimal", "state-space"]
    by_name = {row["mechanism"]: row for row in rows}
    assert set(rows[0]) == {"mechanism", "sqrt_loss", "max_sqrt_loss", "final_sqrt_loss", "ratio_to_bound", "buffers",
                            "recalls", "work"}
    assert by_name["optimal"]["ratio_to_bound"] == pytest.approx(1, abs=1e-5)
    assert [row["mechanism"] for row in rows if row["buffers"] is None] == [
        "honaker-full", "sqrt-toeplitz", "optimal-prefix", "optimal"]
    assert by_name["independent"]["buffers"] == 0
    assert by_name["independent"]["ratio_to_bound"] > by_name["honaker-online"]["ratio_to_bound"] > 1.1
    # The stream of the tolerance has its place among those with a number of buffers, each number once.
    best = dpmf.make_mechanism(WORKLOADS["momentum"]).buffers
    only = dpmf.compare(WORKLOADS["momentum"], ["tree", "state-space"], buffers=[best + 1, best - 1, best])
    assert [row["mechanism"] for row in only] == ["tree"] + 3 * ["state-space"]
    assert [row["buffers"] for row in only[1:]] == [best - 1, best, best + 1]
    chosen = dpmf.compare(WORKLOADS["momentum"], ["optimal:tolerance=1e-4", "state-space:buffers=1", "optimal"])
    assert [(row["mechanism"], row["buffers"]) for row in chosen] == [
        ("optimal", best), ("state-space", 1), ("optimal", None)]
    assert chosen[2] == by_name["optimal"]


def test_compare_names_what_it_leaves_out():
    long = dpmf.Workload.prefix_sum(20_000)
    with pytest.warns(UserWarning, match="optimal:dense is left out: a dense matrix of 20000 × 20000 entries"):
        rows = dpmf.compare(long, ["independent", "optimal:dense"])
    assert [row["mechanism"] for row in rows] == ["independent"]
    with pytest.raises(dpmf.UnsupportedError, match="a dense matrix"):
        dpmf.compare(long, ["optimal:dense"])


SIGMAS = [0.1, 0.341, 0.682, 1.0, 2.728, 8.0, 50.0]
DELTAS = [1e-2, 1e-5, 1e-6, 1e-9, 1e-15]


@pytest.mark.parametrize("sigma", SIGMAS)
def test_accounting_agrees_with_dp_accounting(sigma):
    renyi = dp_accounting.rdp.RdpAccountant(orders=list(range(2, 513)))
    renyi.compose(dp_accounting.GaussianDpEvent(sigma))
    for delta in DELTAS:
        ours = dpmf.account(sigma, delta)
        exact = dp_accounting.get_epsilon_gaussian(sigma, delta, tol=1e-12)
        assert ours["epsilon_exact"] == pytest.approx(exact, rel=1e-9, abs=1e-11)
        assert ours["epsilon_rdp"] == pytest.approx(renyi.get_epsilon(delta), rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_calibration_agrees_with_dp_accounting(epsilon):
    for delta in (1e-5, 1e-8):
        expected = dp_accounting.get_sigma_gaussian(epsilon, delta)
        assert dpmf.calibrate_noise(epsilon, delta) == pytest.approx(expected, rel=1e-6)
        assert dpmf.calibrate_noise(epsilon, delta, adjacency="replace-one") == pytest.approx(2 * expected, rel=1e-6)
        mechanism = dpmf.mechanism(steps=16, epsilon=epsilon, delta=delta, clip=0.3)
        assert mechanism.privacy.noise_multiplier == pytest.approx(expected, rel=1e-6)
        assert mechanism.privacy.noise_std == pytest.approx(0.3 * expected * mechanism.sensitivity, rel=1e-6)


def test_composition():
    assert dpmf.compose([3.0, 4.0]) == pytest.approx(2.4, rel=1e-12)
    with pytest.raises(ValueError, match=r"noise multipliers\[1\] is -1"):
        dpmf.compose([1.0, -1.0])


def test_noise_may_be_given_instead_of_epsilon():
    mechanism = dpmf.make_mechanism(WORKLOADS["momentum"]).with_noise(1.0, 1e-6, 0.5, unit="record")
    assert mechanism.privacy.epsilon == dpmf.account(1.0, 1e-6)["epsilon_exact"]
    assert (mechanism.privacy.unit, mechanism.privacy.clip) == ("record", 0.5)


def test_an_audit_cannot_refute_a_true_promise_and_comes_close_to_it():
    mechanism = dpmf.mechanism(steps=8, momentum=0.5, epsilon=2, delta=1e-5)
    report = dpmf.audit(mechanism, trials=400_000)
    assert not report["refuted"] and 1.8 < report["epsilon_lower"] <= 2
    with pytest.raises(ValueError, match="not calibrated"):
        dpmf.audit(dpmf.make_mechanism(WORKLOADS["momentum"]))
    with pytest.raises(dpmf.UnsupportedError, match="would take hours"):
        dpmf.audit(mechanism, trials=10**15)


def planned():
    return dpmf.mechanism(steps=32, momentum=0.9, epsilon=8, delta=1e-6, clip=0.5)


def test_a_statement_says_what_it_covers():
    statement = planned().privacy
    assert str(statement).startswith("(8, 1e-6)-differential privacy for every record, over 32 steps.")
    assert (statement.epsilon, statement.delta, statement.clip, statement.steps) == (8, 1e-6, 0.5, 32)
    assert statement.to_dict()["noise_multiplier"] == statement.noise_multiplier
    assert statement.participation == "in at most one step"
    assert statement.to_dict()["participation"] == {"kind": "single", "times": 1, "separation": None}
    assert statement.mu == statement.to_dict()["mu"] == dpmf.account(statement.noise_multiplier, 1e-6)["mu"]
    assert statement.rho == pytest.approx(statement.mu**2 / 2)
    assert statement.covers and statement.does_not_cover and statement.key == "system"


@pytest.mark.parametrize("duplicate", [
    lambda m, path: pickle.loads(pickle.dumps(m)),
    lambda m, path: copy.deepcopy(m),
    lambda m, path: dpmf.Mechanism.from_bytes(m.to_bytes()),
    lambda m, path: (m.save(path), dpmf.Mechanism.load(path))[1],
    lambda m, path: (m.save(str(path)), dpmf.Mechanism.load(str(path)))[1],
], ids=["pickle", "deepcopy", "bytes", "file", "file by name"])
def test_mechanisms_are_kept_whole(duplicate, tmp_path):
    mechanism = planned()
    again = duplicate(mechanism, tmp_path / "m.safetensors")
    assert again == mechanism and hash(again) == hash(mechanism) and again.identity == mechanism.identity
    assert again.privacy == mechanism.privacy and again.certificate == mechanism.certificate
    assert again.mechanism == mechanism.mechanism == "optimal" and again.participation == mechanism.participation
    assert again != dpmf.mechanism(steps=32, momentum=0.9, epsilon=7, delta=1e-6) and again != "mechanism"


def test_the_identity_is_that_of_the_noise_and_equality_that_of_the_file():
    bare = dpmf.make_mechanism(WORKLOADS["momentum"])
    user, record = (bare.calibrate(8, 1e-6, unit=unit) for unit in ("user", "record"))
    assert len(user.identity) == 64 and int(user.identity, 16)
    # The same noise with another promise, or by another name.
    assert record.identity == user.identity and record != user and hash(record) == hash(user)
    named = dpmf.make_mechanism(WORKLOADS["momentum"], "state-space")
    assert named.identity == bare.identity and named != bare
    # Other noise.
    others = [bare, user, bare.calibrate(7, 1e-6), bare.calibrate(8, 1e-6, 0.5),
              dpmf.make_mechanism(WORKLOADS["momentum"], buffers=2), dpmf.make_mechanism(WORKLOADS["nesterov"])]
    assert len({mechanism.identity for mechanism in others}) == len(others)


def repacked(data, **changes):
    """A file with another header, sealed again."""
    length = int.from_bytes(data[:8], "little")
    container, content = json.loads(data[8:8 + length]), data[8 + length:]
    header = {**json.loads(container.pop("__metadata__")["dpmf"])["header"], **changes}
    if header["mechanism"] is None:
        container, content = {}, b""
    text, digest = json.dumps(header), hashlib.sha256()
    fields = [text.encode()]
    for name in sorted(container):
        tensor = container[name]
        begin, end = tensor["data_offsets"]
        shape = b"".join(size.to_bytes(8, "little") for size in tensor["shape"])
        fields += [name.encode(), tensor["dtype"].encode(), shape, content[begin:end]]
    for field in fields:
        digest.update(len(field).to_bytes(8, "little") + field)
    sealed = f'{{"sha256":"{digest.hexdigest()}","header":{text}}}'
    head = json.dumps({"__metadata__": {"dpmf": sealed}, **container}).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + content


def test_a_plan_is_read_for_its_mechanism(tmp_path):
    mechanism, path = planned(), tmp_path / "plan.safetensors"
    path.write_bytes(repacked(mechanism.to_bytes(), recipe={"rounds": 32}))
    assert path.read_bytes() != mechanism.to_bytes()
    assert dpmf.Mechanism.load(path) == mechanism == dpmf.Mechanism.from_bytes(path.read_bytes())
    path.write_bytes(repacked(mechanism.to_bytes(), mechanism=None, recipe={"rounds": 32}))
    with pytest.raises(dpmf.FormatError, match="plan.safetensors: it is the plan of a run without noise"):
        dpmf.Mechanism.load(path)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_pickled(name):
    again = pickle.loads(pickle.dumps(WORKLOADS[name]))
    assert again == WORKLOADS[name] and np.array_equal(again.matrix(), WORKLOADS[name].matrix())
    assert again != dpmf.Workload.prefix_sum(23)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    planned().save(path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(dpmf.FormatError, match="m.safetensors: the hash does not match"):
        dpmf.Mechanism.load(path)
    with pytest.raises(dpmf.FileError, match="none") as missing:
        dpmf.Mechanism.load(tmp_path / "none")
    assert isinstance(missing.value, OSError) and missing.value.kind == "io"


def test_mechanisms_show_themselves():
    mechanism = planned()
    text = repr(mechanism)
    for part in ("momentum 0.9, 32 steps", f"optimal (state-space), {mechanism.buffers} model-sized buffers",
                 "times the lower bound", "ε = 8.0000, δ = 1e-6, each record in at most one step"):
        assert part in text
    dense = repr(dpmf.make_mechanism(WORKLOADS["momentum"], dense=True))
    assert "optimal:dense (dense), all earlier noise regenerated" in dense and "not calibrated" in dense
    html = mechanism._repr_html_()
    tree = xml.etree.ElementTree.fromstring(html)
    curve = tree.find(".//{http://www.w3.org/2000/svg}polyline").get("points").split()
    assert len(curve) == 32
    heights = [float(point.split(",")[1]) for point in curve]
    assert np.argmin(heights) == np.argmax(mechanism.per_step_error())
    assert "ε = 8.0000" in html
    xml.etree.ElementTree.fromstring(dpmf.mechanism(steps=1, epsilon=1, delta=1e-6)._repr_html_())


def test_the_error_is_drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mechanism = planned()
    axes = mechanism.plot_error()
    drawn = axes.lines[0].get_ydata()
    assert drawn == pytest.approx(np.sqrt(mechanism.per_step_error()), rel=1e-12)
    assert axes.lines[0].get_label() == "optimal"
    assert "standard deviation" in axes.get_ylabel() and "noise multiplier × clip" in axes.get_ylabel()
    # The same quantity, by the same name, as in a notebook.
    notebook = mechanism._repr_html_()
    assert f"standard deviation of the error, at most {drawn.max():.4f} × noise multiplier × clip" in notebook
    _, other = plt.subplots()
    assert mechanism.plot_error(other, color="red", label="ours") is other
    assert other.lines[0].get_color() == "red"
    plt.close("all")


def test_shared_axes_hold_every_curve_whole():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = planned().plot_error()
    worse = dpmf.make_mechanism(dpmf.Workload.sgd(64, momentum=0.9), "independent")
    worse.plot_error(axes)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert bottom == 0 and top > axes.lines[1].get_ydata().max() > axes.lines[0].get_ydata().max()
    assert left < 1 and right > 64
    axes.set_ylim(0, 1)
    worse.plot_error(axes)
    assert axes.get_ylim() == (0, 1), "limits that were set stay"
    plt.close("all")


def test_progress_is_told_on_the_calling_thread_and_may_stop_the_solver():
    seen = []
    dpmf.factorize(WORKLOADS["momentum"], progress=lambda p: seen.append((p.iteration, p.gap, threading.get_ident())))
    assert [iteration for iteration, _, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][1] <= 1e-6 < seen[0][1]
    assert {thread for _, _, thread in seen} == {threading.get_ident()}
    with pytest.raises(dpmf.StoppedError) as stopped:
        dpmf.factorize(WORKLOADS["momentum"], progress=lambda p: p.iteration < 3)
    assert stopped.value.iterations == 3 and stopped.value.kind == "interrupted"
    with pytest.raises(ZeroDivisionError):
        dpmf.factorize(WORKLOADS["momentum"], progress=lambda p: 1 / 0)


def test_progress_is_told_through_the_fit_too():
    workload, seen = dpmf.Workload.sgd(2000, momentum=0.9), []
    made = dpmf.make_mechanism(workload, progress=lambda p: seen.append((p.stage, p.share, threading.get_ident(), str(p))))
    stages = [stage for stage, _, _, _ in seen]
    first = stages.index("fitting")
    assert set(stages[:first]) == {"solving"} and set(stages[first:]) == {"fitting"}
    assert {thread for _, _, thread, _ in seen} == {threading.get_ident()}
    shares = [share for _, share, _, _ in seen[first:] if share is not None]
    assert shares and all(0 < share <= 1 for share in shares)
    assert re.fullmatch("solving, iteration 1, gap .*e.*", seen[0][3]) and re.fullmatch("fitting, .* % of a pass", seen[first][3])
    with pytest.raises(dpmf.StoppedError):
        dpmf.make_mechanism(workload, progress=lambda p: p.stage != "fitting")
    optimum, stages = dpmf.factorize(workload), []
    again = optimum.state_space(progress=lambda p: stages.append(p.stage))
    assert set(stages) == {"fitting"} and again.identity == made.identity


def test_ctrl_c_stops_a_fit_at_once():
    heard = []

    def told(progress):
        heard.append(progress.stage)
        if progress.stage == "fitting":
            os.kill(os.getpid(), signal.SIGINT)

    # A shell's background jobs start with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            dpmf.make_mechanism(dpmf.Workload.prefix_sum(20_000), progress=told)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard.count("fitting") == 1, "the fit went on"


def test_ctrl_c_leaves_work_that_does_not_listen():
    program = """
import dpmf, os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
mechanism = dpmf.mechanism(steps=256, epsilon=1, delta=1e-5)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    dpmf.audit(mechanism, trials=100_000_000)  # hours of work
except KeyboardInterrupt:
    print("left")
print(dpmf.factorize(dpmf.Workload.prefix_sum(50)).certificate.gap <= 1e-6)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["left", "True"], "what was given up holds up nothing else: " + done.stderr


def test_a_line_shows_long_work_where_somebody_sees_it(capsys, monkeypatch):
    workload = dpmf.Workload.sgd(500, momentum=0.9)
    monkeypatch.setattr(dpmf._progress, "SECONDS", 3600.0)
    dpmf.make_mechanism(workload, progress=True)
    assert capsys.readouterr().err == "", "what is done sooner shows nothing"
    monkeypatch.setattr(dpmf._progress, "SECONDS", 0.0)
    monkeypatch.setattr(dpmf._progress, "PACE", 0.0)
    dpmf.make_mechanism(workload)
    assert capsys.readouterr().err == "", "nobody sees what goes into a file"
    dpmf.make_mechanism(workload, progress=True)
    written = capsys.readouterr()
    lines = [line.rstrip() for line in written.err.split("\r")]
    assert written.out == "" and "\n" not in written.err
    assert lines[1].startswith("dpmf: solving, iteration 1, gap ") and any("fitting" in line for line in lines)
    assert lines[-2:] == ["", ""], "the line is taken away"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    dpmf.compare(workload, ["blt"])
    assert "dpmf: fitting" in capsys.readouterr().err
    dpmf.plan(examples=400, batch=100, epochs=2, epsilon=2, delta=1e-5, cache=False)
    assert "dpmf: " in capsys.readouterr().err
    dpmf.factorize(workload, progress=False)
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="progress is 'yes', but it must be a function, True or False"):
        dpmf.factorize(workload, progress="yes")


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_callback_may_itself_factorize(threads):
    program = (
        "import dpmf; w = dpmf.Workload.prefix_sum(50); inner = lambda p: dpmf.factorize(w).certificate.gap;"
        "print(dpmf.factorize(dpmf.Workload.prefix_sum(60), progress=inner).certificate.gap <= 1e-6)"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "RAYON_NUM_THREADS": threads},
                          capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "True", done.stderr


def test_ctrl_c_stops_a_solver_and_other_threads_run_meanwhile():
    ticks, done = [], threading.Event()

    def count():
        while not done.wait(0.02):
            ticks.append(None)
            if len(ticks) == 10:
                os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=count)
    # A shell's background jobs start with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            # Hours of work: no double-precision solver reaches such a gap.
            dpmf.factorize(dpmf.Workload.prefix_sum(300_000), gap=1e-15, max_iterations=10**6)
    finally:
        done.set()
        other.join()
        signal.signal(signal.SIGINT, before)
    assert len(ticks) >= 10


def test_failure_to_converge_carries_what_was_reached():
    with pytest.raises(dpmf.ConvergenceError) as failure:
        dpmf.factorize(WORKLOADS["momentum"], gap=1e-9, max_iterations=3)
    assert failure.value.iterations == 3 and failure.value.gap > failure.value.target == 1e-9
    assert failure.value.v.shape == (24,)


@pytest.mark.parametrize("call, message", [
    (lambda: dpmf.Workload.prefix_sum(0), "steps is 0, but at least one step is needed"),
    (lambda: dpmf.Workload.sgd(10, momentum=1.0), r"momentum is 1, but it must lie in \[0, 1\)"),
    (lambda: dpmf.Workload.sgd(10, schedule="linear"), "schedule is linear, but known factors are"),
    (lambda: dpmf.Workload.sgd(10, schedule=[1.0] * 9), "schedule has 9 step sizes, but steps is 10"),
    (lambda: dpmf.Workload.sgd(schedule=[1.0, -1.0]), r"learning rate\[1\] is -1"),
    (lambda: dpmf.Workload.sgd(), "steps is None"),
    (lambda: dpmf.Workload.from_matrix([[1.0, 2.0], [1.0, 1.0]]), r"\[0, 1\] is 2, but a workload must be lower"),
    (lambda: dpmf.Workload.from_matrix(np.eye(3)[:2]), "it must be square"),
    (lambda: dpmf.factorize(WORKLOADS["matrix"], solver="fast"), 'solver is "fast", but it must be auto, linear'),
    (lambda: dpmf.factorize(WORKLOADS["matrix"], iteration="best"), 'iteration is "best"'),
    (lambda: dpmf.make_mechanism(WORKLOADS["matrix"], "best"), 'mechanism "best" does not exist; choose one of independent'),
    (lambda: dpmf.mechanism(steps=3, epsilon=0, delta=1e-6), "epsilon is 0"),
    (lambda: dpmf.mechanism(steps=3, epsilon=1, delta=1), "delta is 1"),
    (lambda: dpmf.mechanism(steps=3, epsilon=1, delta=1e-6, clip=float("nan")), "clip is NaN"),
    (lambda: dpmf.mechanism(steps=3, epsilon=1, delta=1e-6, unit="house"), "privacy unit is house"),
    (lambda: dpmf.mechanism(steps=3, epsilon=1, delta=1e-6, workload=WORKLOADS["matrix"]), "remove steps"),
    (lambda: dpmf.account(-1.0, 1e-6), "noise multiplier is -1"),
])
def test_bad_arguments_are_value_errors_that_name_them(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("call", [
    lambda: dpmf.Workload.from_matrix("text"),
    lambda: dpmf.Workload.sgd(3, schedule=object()),
    lambda: dpmf.factorize("workload"),
])
def test_arguments_of_another_type_are_type_errors(call):
    with pytest.raises(TypeError):
        call()


def test_unsupported_sizes_say_what_to_do():
    with pytest.raises(dpmf.UnsupportedError, match="use the linear solver"):
        dpmf.factorize(dpmf.Workload.prefix_sum(20_000), solver="dense")


def test_a_plan_for_a_workload_is_the_plan_for_its_optimizer():
    options = dict(momentum=0.9, schedule="cooldown:0.5:0.1")
    a = dpmf.mechanism(steps=24, epsilon=2, delta=1e-6, **options)
    b = dpmf.mechanism(workload=dpmf.Workload.sgd(24, **options), epsilon=2, delta=1e-6)
    assert a == b


def test_examples_in_documentation_run():
    examples = 0
    for name in ["__doc__", *dpmf.__all__]:
        item = dpmf if name == "__doc__" else getattr(dpmf, name)
        text = inspect.getdoc(item) or ""
        test = doctest.DocTestParser().get_doctest(text, {}, f"dpmf.{name}", None, None)
        examples += len(test.examples)
        assert doctest.DocTestRunner().run(test).failed == 0, name
    assert examples >= 10


def test_everything_public_is_documented():
    for name in dpmf.__all__:
        item = getattr(dpmf, name)
        if name == "__version__":
            continue
        assert inspect.getdoc(item), name
        if inspect.isclass(item) and not issubclass(item, Exception):
            members = [m for m in vars(item) if not m.startswith("_")]
            assert all(inspect.getdoc(getattr(item, m)) for m in members), name
