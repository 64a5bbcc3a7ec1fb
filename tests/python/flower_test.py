"""dpmf.flower against the real library: strategy and client in one process, the simulation engine, and a deployment."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from fractions import Fraction

import pytest

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
pytest.importorskip("flwr", reason="Flower is not installed: pip install -r tests/python/requirements-frameworks.txt")

import dpmf  # noqa: E402
import dpmf.flower  # noqa: E402
import numpy as np  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

ROUNDS, COHORT, CLIP = 4, 3, 0.5
SHAPES = {"weights": (3, 2), "bias": (2,)}
DIMENSION = 8
APP = pathlib.Path(__file__).parents[2] / "examples" / "python" / "flower_app"
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def plan(**options):
    defaults = dict(steps=ROUNDS, momentum=0.9, schedule="cooldown:0.5:0.1", epsilon=8, delta=1e-6, clip=CLIP,
                    unit="user")
    return dpmf.mechanism(**{**defaults, **options})


MECHANISM = plan()


def arrays(vector, shapes=SHAPES):
    parts = np.split(np.asarray(vector, np.float32), np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1])
    return ArrayRecord({name: Array(part.reshape(shape)) for (name, shape), part in zip(shapes.items(), parts)})


def vector(record):
    return np.concatenate([array.numpy().reshape(-1) for array in record.values()])


def gradient(partition):
    """What a client subtracts, whatever the model; norms from well below to well above the clip."""
    return np.random.default_rng(partition).standard_normal(DIMENSION) * 10.0 ** (partition % 3 - 2)


def clipped(partition):
    update = gradient(partition)
    return update * min(1, CLIP / np.linalg.norm(update))


def client(train=None, mods=(dpmf.flower.clipping_mod,)):
    app = ClientApp(mods=list(mods))
    dpmf.flower.answer_enrolment(app)

    @app.train()
    def on_train(message, context):
        partition = context.node_config["partition-id"]
        update = gradient(partition) if train is None else train(partition)
        moved = vector(message.content["arrays"]) - update
        content = RecordDict({"arrays": arrays(moved), "metrics": MetricRecord({"secret": 1.0})})
        return Message(content, reply_to=message)

    return app


class Nodes(Grid):
    """Clients in this process, with new node numbers every time, as in a simulation."""

    run = set_run = create_message = push_messages = pull_messages = None

    def __init__(self, app, count=ROUNDS * COHORT, tamper=lambda replies: replies):
        first = int.from_bytes(os.urandom(4), "big")
        self.app, self.tamper, self.trained, self.replies = app, tamper, [], []
        self.contexts = {first + i: Context(1, first + i, {"partition-id": i}, RecordDict(), {}) for i in range(count)}

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            context = self.contexts[message.metadata.dst_node_id]
            training = message.metadata.message_type == "train"
            if training:
                self.trained.append((message.content["config"]["dpmf-step"], context.node_config["partition-id"]))
            try:
                replies.append(self.app(message, context))
            except Exception as fault:
                replies.append(Message(Error(0, str(fault)), reply_to=message))
        if messages and training:
            replies = self.tamper(replies)
            self.replies += replies
        return replies


def strategy(directory, **options):
    return dpmf.flower.PrivateFedAvg(options.pop("mechanism", MECHANISM), directory,
                                     **{**dict(cohort=COHORT, enrolment_timeout=0.0), **options})


def noisy_sums(directory, sums, mechanism=MECHANISM):
    """What the run in a directory releases of a sum for each of its steps."""
    key = dpmf.NoiseKey.read(directory / "noise.key")
    with dpmf.DurableStream.open(mechanism, key, directory / "journal", dimension=DIMENSION) as journal:
        run = journal.run
    stream, rows = dpmf.NoiseStream(mechanism, key, run=run, dimension=DIMENSION), np.array(sums)
    for row in rows:
        stream.add_to(row)
    return rows


def close(values, expected, mechanism=MECHANISM):
    """Whether models are equal but for float32. What float32 moves over the middle between two neighbours on the grid, as
    good as never, is a grid off: at most one coordinate."""
    stream = dpmf.NoiseStream(mechanism, dpmf.NoiseKey.generate(), dimension=1)
    off = np.abs(values - expected)
    return np.sort(off)[-2] <= 1e-5 * np.abs(expected).max() and off.max() <= 10 * stream.grid / COHORT


def clipped_sum(updates, clip, dimension):
    """The sum that the server takes, as real numbers."""
    bound, total = dpmf._core._Clip(clip, dimension), np.zeros(dimension, np.int64)
    for update in updates:
        bound.add_rows([update[None, :]], [total])
    return total * bound.unit


START = np.linspace(-1, 1, DIMENSION).astype(np.float32)

WORKLOADS = {
    "momentum": dict(),
    "nesterov": dict(nesterov=True),
    "decoupled": dict(weight_decay=0.1, learning_rate=0.3),
    "coupled": dict(weight_decay=0.1, coupled=True, learning_rate=0.3),
}


@pytest.mark.parametrize("options", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("mods", [[dpmf.flower.clipping_mod], []], ids=["client clips", "server clips"])
def test_the_model_is_the_workload_of_noisy_clipped_sums(tmp_path, options, mods):
    mechanism = plan(**options)
    nodes = Nodes(client(mods=mods))
    start = np.zeros(DIMENSION, np.float32)
    result = strategy(tmp_path, mechanism=mechanism).start(nodes, arrays(start))
    # Every client took part once, in the cohort that it was put in before.
    assert sorted(partition for _, partition in nodes.trained) == list(range(ROUNDS * COHORT))
    sums = np.zeros((ROUNDS, DIMENSION))
    for step, partition in nodes.trained:
        sums[step] += clipped(partition)
    rows = noisy_sums(tmp_path, sums, mechanism)
    expected = -(mechanism.workload.matrix() @ rows)[-1] / COHORT
    assert close(vector(result.arrays), expected, mechanism)
    metrics = result.train_metrics_clientapp[ROUNDS]
    assert metrics["epsilon"] == mechanism.privacy.epsilon and "secret" not in metrics


def test_the_server_makes_the_noise_of_a_round_while_clients_train(tmp_path, monkeypatch):
    """Every round waits, within its first client, for the row of that round: nothing else has asked for it by then."""
    rows, hand_out = [], dpmf.flower._run.Run.hand_out

    def handed_out(run, clients):
        hand_out(run, clients)
        rows.append(run._row)

    monkeypatch.setattr(dpmf.flower._run.Run, "hand_out", handed_out)

    waited = []

    def train(partition):
        if len(nodes.trained) % COHORT == 1:
            waited.append(rows[-1].result(timeout=300))
        return gradient(partition)

    nodes = Nodes(client(train))
    strategy(tmp_path).start(nodes, arrays(START), num_rounds=3)
    assert waited == [None] * 3 and len(rows) == 3
    # What is saved after a round holds no row of the next one, which would have to be made before that begins.
    with np.load(tmp_path / "state.npz") as state:
        saved = len(state["stream"])
    fresh = dpmf.PrivateRun(MECHANISM, dpmf.NoiseKey.generate(), dimension=DIMENSION, ahead=0)
    assert saved == len(fresh.checkpoint_bytes())
    fresh.prepare()
    assert saved < len(fresh.checkpoint_bytes())


def test_the_mod_sends_one_clipped_update_and_nothing_else(tmp_path):
    nodes = Nodes(client())
    strategy(tmp_path).start(nodes, arrays(START), num_rounds=1)
    for reply in nodes.replies:
        assert not reply.content.metric_records
        assert np.linalg.norm(vector(reply.content["arrays"]).astype(np.float64)) <= CLIP


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_clipping_holds_after_rounding(scale):
    random = np.random.default_rng(0)
    for clip in (1e-3, 0.3, 1.0, 7.0):
        update = random.standard_normal(10_000) * scale
        norm = np.linalg.norm(dpmf.flower._client.clipped(update, clip).astype(np.float64))
        assert norm <= clip
        # But for half a unit of the server's grid in every coordinate.
        assert norm >= (1 - 1e-6) * min(clip, np.linalg.norm(update)) - 2**-33 * np.sqrt(10_000) * clip


@pytest.mark.parametrize("count", [2, 9, 5000])
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_one_client_moves_the_sum_by_at_most_the_clip(count, clip):
    """Clients that all pull the same way: float32 would round the sum further than one of them moves it."""
    updates = list(1 + np.random.default_rng(1).random((count, 5)))
    whole = clipped_sum(updates, clip, 5)
    assert whole.dtype == np.float64
    for index in range(0, count, max(count // 16, 1)):
        without = [update for number, update in enumerate(updates) if number != index]
        rest = clipped_sum(without, clip, 5)
        # As real numbers, and nothing but the grid keeps it from the whole clip.
        moved = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(whole.tolist(), rest.tolist()))
        assert Fraction(clip * (1 - 1e-8)) ** 2 < moved <= Fraction(clip) ** 2
        assert clipped_sum(without[::-1], clip, 5).tobytes() == rest.tobytes()


@pytest.mark.parametrize("options", [dict(), dict(arithmetic="float")], ids=str)
def test_the_exact_sum_goes_to_the_noise(tmp_path, monkeypatch, options):
    """One round: the model is that of the sum in whole numbers, released by the run."""
    rounds = []

    class Stream:
        """A run that keeps what it was given, and what came of it."""

        def __init__(self, stream):
            self.stream = stream

        def __getattr__(self, name):
            return getattr(self.stream, name)

        def __setattr__(self, name, value):
            if name == "stream":
                super().__setattr__(name, value)
            else:
                setattr(self.stream, name, value)

        def release(self, total, released):
            given = total.copy()
            step = self.stream.release(total, released)
            rounds.append((given, released.astype(np.float64)))
            return step

    opened = dpmf.flower.Run._open
    monkeypatch.setattr(dpmf.flower.Run, "_open", lambda *arguments: Stream(opened(*arguments)))
    mechanism = plan()
    # All are clipped, by the server, so that float32 does not hold their sum.
    app = client(lambda partition: np.random.default_rng(partition).standard_normal(DIMENSION), mods=[])
    result = strategy(tmp_path, mechanism=mechanism, **options).start(Nodes(app), arrays(START), num_rounds=1)
    given, noisy = rounds[0]
    assert given.dtype == np.int64 and not np.array_equal(given, given.astype(np.float32))
    grid = dpmf.NoiseStream(mechanism, dpmf.NoiseKey.generate(), dimension=1, **options).grid
    assert (grid is None) == bool(options)
    if grid is not None:
        assert np.array_equal(noisy / grid, np.round(noisy / grid))
    rate = mechanism.workload.learning_rates[0]
    assert np.array_equal(vector(result.arrays), (START - rate * (noisy / COHORT)).astype(np.float32))


def test_a_run_goes_on_in_its_arithmetic(tmp_path):
    strategy(tmp_path).start(Nodes(client()), arrays(START), num_rounds=1)
    with pytest.raises(dpmf.BindingError, match="another arithmetic: it has exact, but this stream has float"):
        strategy(tmp_path, arithmetic="float").start(Nodes(client()), arrays(START))
    result = strategy(tmp_path, arithmetic="exact").start(Nodes(client()), arrays(START), num_rounds=2)
    assert sorted(result.train_metrics_clientapp) == [2]


def test_dropouts_leave_the_denominator_and_an_empty_cohort_releases_noise(tmp_path):
    nodes = Nodes(client(), tamper=lambda replies: [])
    mechanism = plan(momentum=0.0, schedule="constant")
    result = strategy(tmp_path, mechanism=mechanism).start(nodes, arrays(np.zeros(DIMENSION)))
    expected = -noisy_sums(tmp_path, np.zeros((ROUNDS, DIMENSION)), mechanism).sum(axis=0) / COHORT
    assert np.allclose(vector(result.arrays), expected, rtol=1e-5)


def test_replies_that_are_none_of_the_cohorts_count_for_nothing(tmp_path):
    def tamper(replies):
        good, second, third = replies
        stranger = Message(good.content, dst_node_id=1, message_type="train")
        stranger.metadata._src_node_id = 12345
        second.content = RecordDict({"arrays": arrays(np.full(DIMENSION, np.nan)), "dpmf": good.content["dpmf"]})
        third.content = RecordDict({"arrays": ArrayRecord([np.zeros(3, np.float32)])})
        return [good, good, stranger, second, third]

    nodes = Nodes(client(), tamper=tamper)
    mechanism = plan(momentum=0.0, schedule="constant")
    result = strategy(tmp_path, mechanism=mechanism).start(nodes, arrays(np.zeros(DIMENSION)))
    counted = [partition for _, partition in nodes.trained[::COHORT]]
    expected = -noisy_sums(tmp_path, list(map(clipped, counted)), mechanism).sum(axis=0) / COHORT
    assert close(vector(result.arrays), expected, mechanism)


def test_a_client_declines_to_take_part_twice():
    context = Context(1, 5, {"partition-id": 0}, RecordDict(), {})
    app = client()

    def ask(step, run="r"):
        config = ConfigRecord({"dpmf-clip": CLIP, "dpmf-step": step, "dpmf-run": run})
        content = RecordDict({"arrays": arrays(START), "config": config})
        return app(Message(content, dst_node_id=5, message_type="train"), context)

    assert not ask(2).has_error()
    # The same round again, after a crash of the server.
    assert not ask(2).has_error()
    assert "took part in round 3 and takes part once" in ask(3).error.reason


class Crash(BaseException):
    pass


class Crashing:
    """Counts what could be the last thing a process does, and raises at one of them."""

    def __init__(self, monkeypatch, at):
        self.left, self.released = at, []
        write, crash = dpmf.flower._run.write_durably, self

        def crashing_write(path, data):
            crash.tick()
            write(path, data)
            crash.tick()

        class Stream:
            def __init__(self, stream):
                self.stream = stream

            def __getattr__(self, name):
                return getattr(self.stream, name)

            def __setattr__(self, name, value):
                if name == "stream":
                    super().__setattr__(name, value)
                else:
                    setattr(self.stream, name, value)

            def release(self, total, released):
                crash.tick()
                given = total.tobytes()
                step = self.stream.release(total, released)
                crash.released.append((step, given, released.tobytes()))
                crash.tick()

            def burn(self):
                self.stream.burn()
                crash.tick()

        opened = dpmf.flower.Run._open
        monkeypatch.setattr(dpmf.flower._run, "write_durably", crashing_write)
        monkeypatch.setattr(dpmf.flower._clients, "write_durably", crashing_write)
        monkeypatch.setattr(dpmf.flower.Run, "_open", lambda run, saved: Stream(opened(run, saved)))

    def tick(self):
        self.left -= 1
        if self.left == 0:
            raise Crash


def made(name, steps, sampling=None, participation="single", **options):
    """A mechanism of a name, with what it counts on."""
    mechanism = dpmf.make_mechanism(dpmf.Workload.sgd(steps, momentum=0.9), name, participation=participation)
    mechanism = mechanism if sampling is None else mechanism.with_sampling(sampling)
    return mechanism.calibrate(8, 1e-6, CLIP, unit="user")


#: Every way in which clients take part, with mechanisms that are planned for it: what to give to the strategy.
WAYS = {
    "single": lambda: dict(mechanism=MECHANISM),
    "recall, epochs": lambda: dict(mechanism=made("recall", 6, participation="epochs:3")),
    "blt, min-separation": lambda: dict(mechanism=made("blt", 6, participation="min-separation:3:2")),
    "banded-toeplitz, min-separation": lambda: dict(mechanism=made("banded-toeplitz:bands=2", 6,
                                                                   participation="min-separation:2")),
    "banded-toeplitz, cyclic Poisson": lambda: sampled(made("banded-toeplitz:bands=2", 6, "cyclic-poisson:2:0.7")),
    "blt, balls in bins": lambda: sampled(dpmf.plan(examples=12, batch=4, epochs=2, momentum=0.9, epsilon=8, delta=1e-6,
                                                    clip=CLIP, unit="user", cache=False)),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def sampled(mechanism):
    return dict(mechanism=mechanism, cohort=None, clients=12)


def mechanism_of(options):
    given = options["mechanism"]
    return given.mechanism if isinstance(given, dpmf.Plan) else given


def check_participation(trained, mechanism):
    """That no client was asked sooner again, or more often, than the mechanism covers."""
    separation, times = dpmf._checks.participation_of(mechanism)
    rounds = {}
    for step, partition in trained:
        rounds.setdefault(partition, set()).add(step)
    for steps in rounds.values():
        assert len(steps) <= times
        assert all(np.diff(sorted(steps)) >= separation)
    return rounds


@pytest.mark.parametrize("repeatable", [True, False], ids=["same updates again", "other updates"])
@ways
def test_whatever_stops_a_run_no_noise_is_used_twice(tmp_path, monkeypatch, repeatable, way):
    options = way()
    mechanism = mechanism_of(options)
    steps = mechanism.steps
    random = np.random.default_rng(0)
    app = client(None if repeatable else lambda partition: random.standard_normal(DIMENSION))
    crashes = 0
    for at in range(1, 100):
        with monkeypatch.context() as patch:
            crash = Crashing(patch, at)
            directory, trained, stops = tmp_path / str(at), [], 0
            while True:
                nodes = Nodes(app)
                try:
                    result = strategy(directory, **options).start(nodes, arrays(START))
                    break
                except Crash:
                    stops += 1
                    # And once more, two operations later.
                    crash.left = 2 if stops == 1 else 0
                finally:
                    trained += nodes.trained
        inputs = {}
        for step, given, released in crash.released:
            assert inputs.setdefault(step, (given, released)) == (given, released)
        check_participation(trained, mechanism)
        given_up = result.train_metrics_clientapp[steps]["given-up"] if result.train_metrics_clientapp else 0
        if repeatable:
            assert given_up == 0 and sorted(inputs) == list(range(steps))
        assert len(inputs) >= steps - 2
        if stops == 0:
            break
        crashes += 1
    # Four files at the start, and at least three points in every round.
    assert crashes >= 4 + 3 * steps


@ways
def test_a_run_that_is_interrupted_ends_with_the_same_bits(tmp_path, monkeypatch, way):
    options = way()
    # Whom a ledger chooses is decided anew at every round; here in the same way for both.
    monkeypatch.setattr(dpmf.flower._clients.random, "SystemRandom", lambda: random.Random(5))
    strategy(tmp_path / "whole", **options).start(Nodes(client()), arrays(START), num_rounds=0)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    whole = strategy(tmp_path / "whole", **options).start(Nodes(client()), arrays(START))
    stops = 0
    with monkeypatch.context() as patch:
        crash = Crashing(patch, 4)
        while True:
            try:
                parts = strategy(tmp_path / "parts", **options).start(Nodes(client()), arrays(START))
                break
            except Crash:
                stops += 1
                crash.left = 4 + stops % 3
    assert stops >= 3
    assert np.array_equal(vector(whole.arrays), vector(parts.arrays))
    assert not np.array_equal(vector(whole.arrays), START)


def test_a_run_that_is_resumed_ends_where_an_unbroken_one_ends(tmp_path):
    parts = strategy(tmp_path)
    first = parts.start(Nodes(client()), arrays(START), num_rounds=2)
    # Another initial model changes nothing: the run has its own.
    seen = []
    last = parts.start(Nodes(client()), arrays(0 * START), evaluate_fn=lambda round, _: seen.append(round))
    assert seen == [2, 3, 4] and sorted(last.train_metrics_clientapp) == [3, 4]
    assert not np.array_equal(vector(first.arrays), vector(last.arrays))
    again = parts.start(Nodes(client()), arrays(START))
    assert np.array_equal(vector(again.arrays), vector(last.arrays))


def test_mistakes_are_answered(tmp_path):
    with pytest.raises(dpmf.MismatchError, match="plan with steps=5"):
        strategy(tmp_path).start(Nodes(client()), arrays(START), num_rounds=5)
    with pytest.raises(dpmf.MismatchError, match="11 clients enrolled.*plan with steps=3"):
        strategy(tmp_path / "few").start(Nodes(client(), count=11), arrays(START))
    with pytest.raises(TypeError, match="array 'weights' of the model is float64"):
        strategy(tmp_path).start(Nodes(client()), ArrayRecord({"weights": Array(np.zeros(3))}))
    with pytest.raises(ValueError, match="not calibrated"):
        strategy(tmp_path, mechanism=dpmf.make_mechanism(dpmf.Workload.prefix_sum(4), "optimal"))
    with pytest.raises(ValueError, match="cohort is 0"):
        strategy(tmp_path, cohort=0)
    with pytest.raises(dpmf.MismatchError, match="learning_rate"):
        strategy(tmp_path, mechanism=plan(weight_decay=0.1), learning_rate=0.5)
    with pytest.raises(dpmf.UnsupportedError, match="without average"):
        strategy(tmp_path, mechanism=plan(average="uniform"))
    with pytest.raises(dpmf.HaltedError, match=r"PrivateFedAvg\.start"):
        strategy(tmp_path).aggregate_train(1, [])


def test_a_directory_belongs_to_one_run(tmp_path):
    strategy(tmp_path).start(Nodes(client()), arrays(START), num_rounds=2)
    with pytest.raises(dpmf.BindingError, match="another mechanism"):
        strategy(tmp_path, mechanism=plan(epsilon=1)).start(Nodes(client()), arrays(START))
    with pytest.raises(dpmf.BindingError, match="the model now has"):
        strategy(tmp_path).start(Nodes(client()), ArrayRecord([np.zeros(3, np.float32)]))
    assert (tmp_path / "noise.key").stat().st_mode & 0o077 == 0
    (tmp_path / "journal").rename(tmp_path / "moved")
    with pytest.raises(dpmf.FormatError, match="journal is missing"):
        strategy(tmp_path).start(Nodes(client()), arrays(START))
    (tmp_path / "moved").rename(tmp_path / "journal")
    (tmp_path / "noise.key").unlink()
    with pytest.raises(dpmf.NoiseKeyError, match="cannot be resumed"):
        strategy(tmp_path).start(Nodes(client()), arrays(START))


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("lost", ["journal", "state.npz", "cohorts.json"])
def test_a_run_that_lost_a_file_does_not_begin_again(tmp_path, lost, done):
    nodes = Nodes(client())
    strategy(tmp_path).start(nodes, arrays(START), num_rounds=done)
    (tmp_path / lost).unlink()
    again = Nodes(client())
    if (lost, done) == ("cohorts.json", 0):
        strategy(tmp_path).start(again, arrays(START))  # nobody was asked: they may be drawn anew
        return
    with pytest.raises(dpmf.FormatError, match=f"{lost} is missing.*begin a new run in another directory"):
        strategy(tmp_path).start(again, arrays(START))
    assert not again.trained


def test_cohorts_that_are_lost_with_the_state_are_missed(tmp_path):
    strategy(tmp_path).start(Nodes(client()), arrays(START), num_rounds=2)
    (tmp_path / "cohorts.json").unlink()
    (tmp_path / "state.npz").unlink()
    with pytest.raises(dpmf.FormatError, match="cohorts.json is missing"):
        strategy(tmp_path).start(Nodes(client()), arrays(START))


def test_cohorts_that_are_damaged_or_of_another_size(tmp_path):
    strategy(tmp_path).start(Nodes(client()), arrays(START), num_rounds=2)
    with pytest.raises(dpmf.MismatchError, match="cohort is 2, but the run in .* has cohorts of 3"):
        strategy(tmp_path, cohort=2).start(Nodes(client()), arrays(START))
    kept = (tmp_path / "cohorts.json").read_text()
    good = json.loads(kept)
    cohorts = good["cohorts"]
    bad = [cohorts[:2], [cohorts[0]] * ROUNDS, [[1, 2, 3], *cohorts[1:]], 3]
    for damaged in (kept[:20], "3", "{}", *(json.dumps({**good, "cohorts": other}) for other in bad)):
        (tmp_path / "cohorts.json").write_text(damaged)
        with pytest.raises(dpmf.FormatError, match="cohorts.json is damaged"):
            strategy(tmp_path).start(Nodes(client()), arrays(START))


def test_a_client_is_a_user(tmp_path):
    with pytest.raises(dpmf.MismatchError, match='here every user is clipped: plan with unit="user"'):
        strategy(tmp_path, mechanism=plan(unit="record"))


def test_two_nodes_with_one_name_are_one_client(tmp_path):
    app = ClientApp()
    dpmf.flower.answer_enrolment(app, name=lambda context: str(context.node_config["partition-id"] // 2))
    with pytest.raises(dpmf.MismatchError, match="6 clients enrolled"):
        strategy(tmp_path).start(Nodes(app), arrays(START))


# ---------------------------------------------------------------------------------------------------------------------
# The real engines
# ---------------------------------------------------------------------------------------------------------------------


def steps_done(directory):
    try:
        with np.load(directory / "state.npz") as state:
            return int(state["step"])
    except FileNotFoundError:
        return 0


def released(directory):
    """Records in the journal, of 64 bytes behind a header of 256."""
    return ((directory / "journal").stat().st_size - 256) // 64


def stop(process, how=signal.SIGTERM):
    if process.poll() is None:
        os.killpg(process.pid, how)
    process.wait(timeout=300)


def start(*command, log, **environment):
    return subprocess.Popen(command, cwd=APP, env={**os.environ, **environment}, start_new_session=True,
                            stdout=log.open("a"), stderr=subprocess.STDOUT)


def until(condition, seconds, what, *processes, logs=()):
    deadline = time.monotonic() + seconds
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            text = "\n".join(log.read_text()[-3000:] for log in logs)
            pytest.fail(f"{what}: {'a process ended' if ended else 'too slow'}\n{text}")
        time.sleep(0.02)


def test_a_simulation_is_killed_and_resumed(tmp_path):
    pytest.importorskip("ray", reason="the simulation engine needs flwr[simulation]")
    directory, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "simulate.py", str(directory), "12", "2"]
    first = start(*command, log=log)
    try:
        until(lambda: steps_done(directory) >= 2, 900, "two rounds of a simulation", first, logs=[log])
    finally:
        stop(first, signal.SIGKILL)
    done = steps_done(directory)
    assert 2 <= done < 12, "it was killed too late"
    before = (directory / "journal").read_bytes()
    asked = ledger(directory)

    second = subprocess.run(command, cwd=APP, capture_output=True, text=True, timeout=900)
    assert "error after 12 rounds" in second.stdout, second.stdout + second.stderr
    assert f"{done} of 12 rounds are done; continuing" in second.stderr + second.stdout
    assert steps_done(directory) == 12 and released(directory) == 12
    # What was journalled stays as it was: no step was released anew.
    assert (directory / "journal").read_bytes().startswith(before)
    assert ledger(directory)[: len(asked)] == asked
    check_participation([(round, int(name)) for round, names in enumerate(ledger(directory)) for name in names],
                        dpmf.Mechanism.load(directory / "mechanism.safetensors"))


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_a_deployment_on_loopback(tmp_path):
    programs = pathlib.Path(sys.executable).parent
    link_port, *node_ports = free_ports(5)
    home, directory, log = tmp_path / "home", tmp_path / "run", tmp_path / "log"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.loopback]\naddress = "127.0.0.1:{link_port}"\ninsecure = true\n')
    environment = dict(FLWR_HOME=str(home), PATH=f"{programs}:{os.environ['PATH']}")
    processes = []
    try:
        processes.append(start(
            programs / "flower-superlink", "--insecure", "--disable-runtime-dependency-installation",
            "--port", str(link_port), log=log, **environment))
        for partition, port in enumerate(node_ports):
            processes.append(start(
                programs / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link_port}",
                "--port", str(port), "--node-config", f"partition-id={partition}", log=log, **environment))
        listening = lambda: socket.socket().connect_ex(("127.0.0.1", link_port)) == 0  # noqa: E731
        until(listening, 900, "the SuperLink", *processes, logs=[log])
        run = [programs / "flwr", "run", str(APP), "loopback", "--stream", "--run-config",
               f'rounds=4 cohort=2 directory="{directory}"']
        seen = tmp_path / "stream"
        processes.append(start(*run, log=seen, **environment))
        ended = lambda: "error after 4 rounds" in seen.read_text()  # noqa: E731
        until(ended, 900, "four rounds of a deployment", *processes[:-1], logs=[log, seen])
    finally:
        for process in reversed(processes):
            stop(process)
    assert steps_done(directory) == 4 and released(directory) == 4
    assert seen.read_text().count(", 2 of 2 clients;") == 4


def test_the_app_learns(tmp_path):
    sys.path.insert(0, str(APP))
    try:
        from private_app import client_app, server_app, task
    finally:
        sys.path.remove(str(APP))
    nodes = Nodes(client_app.app, count=20)
    context = Context(1, 1, {}, RecordDict(), dict(rounds=10, cohort=4, epochs=2, epsilon=50.0, directory=str(tmp_path)))
    server_app.main(nodes, context)
    with np.load(tmp_path / "state.npz") as state:
        learned = task.error(state["model"])
    assert learned < 0.5 * task.error(np.zeros(task.FEATURES))


# ---------------------------------------------------------------------------------------------------------------------
# Several rounds for every client
# ---------------------------------------------------------------------------------------------------------------------


@ways
def test_the_model_is_the_workload_whoever_takes_part(tmp_path, way):
    options = way()
    mechanism = mechanism_of(options)
    nodes = Nodes(client())
    result = strategy(tmp_path, **options).start(nodes, arrays(np.zeros(DIMENSION)))
    rounds = check_participation(nodes.trained, mechanism)
    sums = np.zeros((mechanism.steps, DIMENSION))
    for step, partition in nodes.trained:
        sums[step] += clipped(partition)
    denominator = COHORT
    metrics = result.train_metrics_clientapp[mechanism.steps]
    if mechanism.sampling != "none":
        key = dpmf.NoiseKey.read(tmp_path / "noise.key")
        with dpmf.DurableStream.open(mechanism, key, tmp_path / "journal", dimension=DIMENSION) as journal:
            sampler = dpmf.Sampler(mechanism.sampling, key, units=12, steps=mechanism.steps, run=journal.run)
        names = json.loads((tmp_path / "clients.json").read_text())["clients"]
        for step in range(mechanism.steps):
            drawn = {int(names[unit]) for unit in sampler.members(step)}
            assert {partition for round, partition in nodes.trained if round == step} == drawn
        denominator = sampler.expected_batch
        # How many were drawn is a secret.
        assert "clients" not in metrics
    else:
        assert all(sum(step == round for round, _ in nodes.trained) == COHORT for step in range(mechanism.steps))
        assert metrics["clients"] == COHORT
    rows = noisy_sums(tmp_path, sums, mechanism)
    expected = -(mechanism.workload.matrix() @ rows)[-1] / denominator
    assert close(vector(result.arrays), expected, mechanism)
    assert len(rounds) >= COHORT and max(map(len, rounds.values())) <= dpmf._checks.participation_of(mechanism)[1]


def test_epochs_are_cohorts_that_take_turns(tmp_path):
    mechanism = made("recall", 7, participation="epochs:3")
    nodes = Nodes(client(), count=9)
    strategy(tmp_path, mechanism=mechanism).start(nodes, arrays(START))
    rounds = check_participation(nodes.trained, mechanism)
    assert sorted(map(sorted, rounds.values())) == [[0, 3, 6]] * 3 + [[1, 4]] * 3 + [[2, 5]] * 3
    with pytest.raises(dpmf.MismatchError, match="7 clients enrolled.*3 cohorts take turns: use cohort=2"):
        strategy(tmp_path / "few", mechanism=mechanism).start(Nodes(client(), count=7), arrays(START))


def ledger(directory):
    return json.loads((directory / "ledger.json").read_text())["rounds"]


SEPARATED = made("blt", 6, participation="min-separation:3:2")


def test_a_client_that_did_not_answer_counts_as_one_that_took_part(tmp_path):
    """In every round one fails and one is too late: both have had the model."""
    def tamper(replies):
        first, second, third = replies
        return [Message(Error(0, "out of memory"), reply_to=message_to(first)), third]

    def message_to(reply):
        asked = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
        return asked

    nodes = Nodes(client(), tamper=tamper)
    result = strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START))
    rounds = check_participation(nodes.trained, SEPARATED)
    assert sum(map(len, rounds.values())) == 6 * COHORT
    # Those that were asked: how many replied with something that counts depends on data.
    assert result.train_metrics_clientapp[6]["clients"] == COHORT
    assert [sorted(names) for names in ledger(tmp_path)] == [
        sorted(str(partition) for step, partition in nodes.trained if step == round) for round in range(6)]


def test_separation_holds_across_restarts_and_new_node_numbers(tmp_path):
    """Every start has other nodes for the same clients, as after they re-joined."""
    trained = []
    for rounds in range(1, 7):
        nodes = Nodes(client(), count=9)
        strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START), num_rounds=rounds)
        assert len(nodes.trained) == COHORT
        trained += nodes.trained
    # Nine clients and three in three rounds: everyone takes part twice, three rounds apart.
    rounds = check_participation(trained, SEPARATED)
    assert sorted(map(len, rounds.values())) == [2] * 9


def test_a_client_that_joins_again_under_its_name_waits_for_its_turn(tmp_path):
    """It leaves after it was asked, and is back under another node number before the next round."""
    class Rejoining(Nodes):
        joined = 0

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = super().send_and_receive(messages, timeout=timeout)
            if messages and messages[0].metadata.message_type == "train":
                for message in messages:
                    old = message.metadata.dst_node_id
                    partition = self.contexts.pop(old).node_config["partition-id"]
                    # Nothing is left of its own memory either. Numbers of nodes never come again.
                    self.joined += 1
                    new = 2**40 + self.joined
                    self.contexts[new] = Context(1, new, {"partition-id": partition}, RecordDict(), {})
            return replies

    nodes = Rejoining(client(), count=9)
    strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START))
    rounds = check_participation(nodes.trained, SEPARATED)
    assert sorted(map(len, rounds.values())) == [2] * 9


def test_a_client_that_joins_late_is_asked(tmp_path):
    strategy(tmp_path, mechanism=SEPARATED).start(Nodes(client(), count=9), arrays(START), num_rounds=3)
    nodes = Nodes(client(), count=30)
    strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START))
    assert any(partition >= 9 for _, partition in nodes.trained)


def test_too_few_clients_that_may_be_asked(tmp_path):
    with pytest.raises(dpmf.MismatchError, match="8 clients enrolled.*need 9, since a client takes part in at most 2 rounds, at least 3"):
        strategy(tmp_path / "few", mechanism=SEPARATED).start(Nodes(client(), count=8), arrays(START))
    strategy(tmp_path, mechanism=SEPARATED).start(Nodes(client(), count=9), arrays(START), num_rounds=1)
    # Only those who took part and one other are still there: the round is theirs, and the mean divides by three.
    asked = {int(name) for name in ledger(tmp_path)[0]}
    other = min(set(range(9)) - asked)

    def only(partitions):
        nodes = Nodes(client(), count=9)
        nodes.contexts = {n: c for n, c in nodes.contexts.items() if c.node_config["partition-id"] in partitions}
        return nodes

    nodes = only(asked | {other})
    before = vector(strategy(tmp_path, mechanism=SEPARATED).start(only(set()), arrays(START), num_rounds=1).arrays)
    result = strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START), num_rounds=2)
    assert nodes.trained == [(1, other)] and result.train_metrics_clientapp[2]["clients"] == 1
    # Then nobody may be asked: it is said, and nothing is released.
    nodes = only(asked | {other})
    kept, journal = (tmp_path / "state.npz").read_bytes(), released(tmp_path)
    with pytest.raises(dpmf.MismatchError, match="nobody may be asked in round 3: of 4 clients that are connected, 0 took part 2"):
        strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START))
    assert not nodes.trained and (tmp_path / "state.npz").read_bytes() == kept and released(tmp_path) == journal
    # It goes on with others.
    result = strategy(tmp_path, mechanism=SEPARATED).start(Nodes(client(), count=9), arrays(START), num_rounds=3)
    assert not np.array_equal(vector(result.arrays), before)


def test_clients_that_all_took_part_often_enough_end_a_run(tmp_path):
    """A third round for the same three clients would be far enough apart, but one too many."""
    mechanism = made("blt", 6, participation="min-separation:1:2")
    strategy(tmp_path, mechanism=mechanism).start(Nodes(client(), count=9), arrays(START), num_rounds=1)
    asked = {int(name) for name in ledger(tmp_path)[0]}

    def same():
        nodes = Nodes(client(), count=9)
        nodes.contexts = {n: c for n, c in nodes.contexts.items() if c.node_config["partition-id"] in asked}
        return nodes

    strategy(tmp_path, mechanism=mechanism).start(same(), arrays(START), num_rounds=2)
    nodes = same()
    with pytest.raises(dpmf.MismatchError, match="nobody may be asked in round 3: of 3 clients that are connected, 3 took part 2"):
        strategy(tmp_path, mechanism=mechanism).start(nodes, arrays(START))
    assert not nodes.trained


@pytest.mark.parametrize("fault", ["lost", "rolled back", "of another run", "ahead", "too soon", "garbled", "other terms"])
def test_a_ledger_that_does_not_match_the_journal_is_refused(tmp_path, fault):
    directory, path = tmp_path / "run", tmp_path / "run" / "ledger.json"
    strategy(directory, mechanism=SEPARATED).start(Nodes(client()), arrays(START), num_rounds=2)
    kept = json.loads(path.read_text())
    match = "ledger.json is damaged"
    if fault == "lost":
        path.unlink()
        match = "ledger.json is missing, and without it clients that took part would be asked again"
    elif fault == "rolled back":
        path.write_text(json.dumps({**kept, "rounds": kept["rounds"][:1]}))
        match = "ends with round 1, but the journal says that 2 were begun"
    elif fault == "of another run":
        strategy(tmp_path / "other", mechanism=SEPARATED).start(Nodes(client()), arrays(START), num_rounds=2)
        shutil.copy(tmp_path / "other" / "ledger.json", path)
        match = "belongs to run .*, but the journal beside it to"
    elif fault == "ahead":
        path.write_text(json.dumps({**kept, "rounds": [*kept["rounds"], ["a"], ["b"]]}))
    elif fault == "too soon":
        path.write_text(json.dumps({**kept, "rounds": [kept["rounds"][0]] * 2}))
        match = "took part in round 2 before it was its turn"
    elif fault == "garbled":
        path.write_bytes(path.read_bytes()[:50])
    else:
        path.write_text(json.dumps({**kept, "participation": "min-separation:1"}))
    nodes = Nodes(client())
    with pytest.raises(dpmf.FormatError, match=match):
        strategy(directory, mechanism=SEPARATED).start(nodes, arrays(START))
    assert not nodes.trained
    # The journal is let go of: it can be opened once the file is back.
    path.write_text(json.dumps(kept))
    strategy(directory, mechanism=SEPARATED).start(Nodes(client()), arrays(START))


def test_a_ledger_is_written_before_anyone_is_asked(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        sent = Nodes.send_and_receive

        def sending(nodes, messages, *, timeout=None):
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "train":
                asked = {str(nodes.contexts[message.metadata.dst_node_id].node_config["partition-id"]) for message in messages}
                assert set(ledger(tmp_path)[-1]) == asked
                raise Crash
            return sent(nodes, messages, timeout=timeout)

        patch.setattr(Nodes, "send_and_receive", sending)
        with pytest.raises(Crash):
            strategy(tmp_path, mechanism=SEPARATED).start(Nodes(client()), arrays(START))
    # Those who were asked are asked again, for the same round, and nobody else.
    (asked,) = ledger(tmp_path)
    nodes = Nodes(client())
    strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START), num_rounds=1)
    assert sorted(str(partition) for _, partition in nodes.trained) == asked


def test_a_client_holds_the_server_to_what_it_said(tmp_path):
    context = Context(1, 5, {"partition-id": 0}, RecordDict(), {})
    app = client()

    def ask(step, separation=3, times=3, run="r"):
        config = ConfigRecord({"dpmf-clip": CLIP, "dpmf-step": step, "dpmf-run": run, "dpmf-separation": separation,
                               "dpmf-times": times})
        content = RecordDict({"arrays": arrays(START), "config": config})
        return app(Message(content, dst_node_id=5, message_type="train"), context)

    assert not ask(0).has_error()
    assert "took part in round 1 and takes part in at most 3 rounds, at least 3 apart: round 3" in ask(2).error.reason
    assert ask(2, separation=1, times=9).has_error(), "the server changed its terms"
    assert not ask(3).has_error() and not ask(3).has_error() and not ask(8).has_error()
    assert "round 1, 4, 9" in ask(12).error.reason
    assert not ask(0, run="another").has_error()


def test_a_client_that_was_drawn_and_is_missing_takes_no_part(tmp_path):
    options = WAYS["banded-toeplitz, cyclic Poisson"]()
    mechanism = options["mechanism"]
    whole = Nodes(client())
    strategy(tmp_path, **options).start(whole, arrays(np.zeros(DIMENSION)), num_rounds=3)
    # Half of them do not come back; others have come that are not of the run.
    nodes = Nodes(client(), count=20)
    nodes.contexts = {n: c for n, c in nodes.contexts.items() if c.node_config["partition-id"] >= 6}
    result = strategy(tmp_path, **options).start(nodes, arrays(START))
    assert all(6 <= partition < 12 for _, partition in nodes.trained)
    sums = np.zeros((6, DIMENSION))
    for step, partition in whole.trained + nodes.trained:
        sums[step] += clipped(partition)
    rows = noisy_sums(tmp_path, sums, mechanism)
    assert close(vector(result.arrays), -(mechanism.workload.matrix() @ rows)[-1] / (12 / 2 * 0.7), mechanism)


def test_mistakes_with_sampling_are_answered(tmp_path):
    mechanism = WAYS["banded-toeplitz, cyclic Poisson"]()["mechanism"]
    with pytest.raises(ValueError, match="cohort is given, but this mechanism relies on sampling"):
        dpmf.flower.PrivateFedAvg(mechanism, tmp_path, cohort=3)
    with pytest.raises(ValueError, match="clients is missing"):
        dpmf.flower.PrivateFedAvg(mechanism, tmp_path)
    with pytest.raises(ValueError, match="clients is 0"):
        dpmf.flower.PrivateFedAvg(mechanism, tmp_path, clients=0)
    with pytest.raises(ValueError, match="does not rely on sampling"):
        strategy(tmp_path, clients=3)
    with pytest.raises(ValueError, match="cohort is missing"):
        strategy(tmp_path, cohort=None)
    with pytest.raises(dpmf.MismatchError, match="7 clients enrolled.*but 12 are planned: pass clients=7"):
        strategy(tmp_path, **sampled(mechanism)).start(Nodes(client(), count=7), arrays(START))
    strategy(tmp_path, **sampled(mechanism)).start(Nodes(client()), arrays(START), num_rounds=1)
    path = tmp_path / "clients.json"
    kept = path.read_text()
    for damaged in ("{}", kept[:30], kept.replace('"1"', '"0"'), json.dumps({**json.loads(kept), "clients": []})):
        path.write_text(damaged)
        with pytest.raises(dpmf.FormatError, match="clients.json is damaged"):
            strategy(tmp_path, **sampled(mechanism)).start(Nodes(client()), arrays(START))
    path.unlink()
    with pytest.raises(dpmf.FormatError, match="clients.json is missing"):
        strategy(tmp_path, **sampled(mechanism)).start(Nodes(client()), arrays(START))


def test_a_plan_says_the_cohort(tmp_path):
    plan = dpmf.plan(examples=12, batch=3, epochs=2, epsilon=8, delta=1e-6, clip=CLIP, unit="user", sampling="none", cache=False)
    nodes = Nodes(client())
    result = dpmf.flower.PrivateFedAvg(plan, tmp_path, enrolment_timeout=0.0).start(nodes, arrays(START))
    assert result.train_metrics_clientapp[8]["clients"] == 3
    assert set(map(len, check_participation(nodes.trained, plan.mechanism).values())) == {2}


# ---------------------------------------------------------------------------------------------------------------------
# Hostile and clumsy clients
# ---------------------------------------------------------------------------------------------------------------------


def replies_of(content):
    """A client whose every reply has the content that a function makes, past any mod."""
    app = ClientApp()
    dpmf.flower.answer_enrolment(app)

    @app.train()
    def on_train(message, context):
        return Message(content(context.node_config["partition-id"]), reply_to=message)

    return app


def declared(shape, values):
    """An Array that says to have a shape, whatever it holds."""
    array = Array(np.asarray(values))
    array.shape = tuple(shape)
    array.dtype = "float32"
    return array


DIFFERENCE = {"dpmf": ConfigRecord({"update": "difference"})}
ZEROS = {"weights": Array(np.zeros((3, 2), np.float32)), "bias": Array(np.zeros(2, np.float32))}
MALFORMED = {
    "one number for all": {**ZEROS, "weights": declared((3, 2), np.float32([100.0]))},
    "a scalar": {**ZEROS, "bias": declared((2,), np.float32(100.0))},
    "more numbers": {**ZEROS, "bias": declared((2,), np.full(8, 100.0, np.float32))},
    "transposed": {**ZEROS, "weights": declared((3, 2), np.full((2, 3), 100.0, np.float32))},
    "integers": {**ZEROS, "bias": declared((2,), np.array([100, 100]))},
    "complex": {**ZEROS, "bias": declared((2,), np.array([1j, 1j]))},
    "other names": {"weights": ZEROS["weights"], "offset": ZEROS["bias"]},
    "not a number": {**ZEROS, "bias": declared((2,), np.float32([np.nan, 1.0]))},
    "no bytes": {**ZEROS, "bias": Array("float32", (2,), "numpy.ndarray", b"")},
    "other bytes": {**ZEROS, "bias": Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY and so on")},
    "another kind": {**ZEROS, "bias": Array("float32", (2,), "pickle", b"")},
}


@pytest.mark.parametrize("fault", MALFORMED)
@pytest.mark.parametrize("marks", [DIFFERENCE, {}], ids=["difference", "model"])
def test_a_malformed_reply_counts_for_nothing_and_stops_nobody(tmp_path, fault, marks):
    """The model is what it would be if the client had not replied."""
    def content(partition):
        record = ArrayRecord(MALFORMED[fault]) if partition % 2 else arrays(START - gradient(partition))
        return RecordDict({"arrays": record, **(marks if partition % 2 else {})})

    nodes = Nodes(replies_of(content))
    result = strategy(tmp_path).start(nodes, arrays(START), num_rounds=1)
    total = clipped_sum(
        [dpmf.flower._vectors.rounded(START) - (START - gradient(partition)).astype(np.float32) for _, partition in nodes.trained
         if partition % 2 == 0], CLIP, DIMENSION)
    row = noisy_sums(tmp_path, [total])[0]
    expected = START - MECHANISM.workload.learning_rates[0] * row / COHORT
    assert close(vector(result.arrays), expected)


def test_an_update_of_another_length_is_no_summand():
    with pytest.raises(ValueError, match="5"):
        clipped_sum([np.ones(1)], 1.0, 5)


def test_a_node_that_does_not_say_who_it_is_is_not_asked(tmp_path, caplog):
    """Known by its number it would be another client after a restart, and take part beside itself."""
    class Silent(Nodes):
        silent, content = (), None

        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            if messages and messages[0].metadata.message_type != "train":
                for number, message in enumerate(messages):
                    if self.contexts[message.metadata.dst_node_id].node_config["partition-id"] in self.silent:
                        replies[number] = Message(self.content or Error(0, "busy"), reply_to=message)
            return replies

    trained = []
    for start in range(1, 7):
        nodes = Silent(client(), count=15)
        nodes.silent = {(3 * start + k) % 15 for k in range(6)}
        nodes.content = [None, RecordDict(), RecordDict({"dpmf": ConfigRecord({"name": 7})})][start % 3]
        strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START), num_rounds=start)
        assert not {partition for _, partition in nodes.trained} & nodes.silent
        trained += nodes.trained
    check_participation(trained, SEPARATED)
    assert not [name for names in ledger(tmp_path) for name in names if name.startswith("node")]
    assert "answer_enrolment(app)" in caplog.text


def test_a_node_that_passes_to_another_user_is_not_booked_to_the_old_one(tmp_path):
    """After every round the machines pass to other users, while they stay connected."""
    class Shared(Nodes):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = super().send_and_receive(messages, timeout=timeout)
            if messages and messages[0].metadata.message_type == "train":
                users = [context.node_config["partition-id"] for context in self.contexts.values()]
                for context, user in zip(self.contexts.values(), users[1:] + users[:1]):
                    context.node_config = {"partition-id": user}
                    context.state = RecordDict()
            return replies

    nodes = Shared(client(), count=18)
    strategy(tmp_path, mechanism=SEPARATED).start(nodes, arrays(START))
    check_participation(nodes.trained, SEPARATED)
    asked = [(round, int(name)) for round, names in enumerate(ledger(tmp_path)) for name in names]
    assert set(nodes.trained) <= set(asked)


def test_a_reply_in_another_name_is_ignored(tmp_path):
    named = RecordDict({"arrays": arrays(START - 100), "dpmf": ConfigRecord({"name": "somebody else"})})
    result = strategy(tmp_path).start(Nodes(replies_of(lambda _: named)), arrays(START), num_rounds=1)
    row = noisy_sums(tmp_path, [np.zeros(DIMENSION)])[0]
    assert close(vector(result.arrays), START - MECHANISM.workload.learning_rates[0] * row / COHORT)


def message_for(run, step, **terms):
    config = {"dpmf-clip": CLIP, "dpmf-step": step, "dpmf-run": run, "dpmf-separation": 1, "dpmf-times": 1, **terms}
    content = RecordDict({"arrays": arrays(START), "config": ConfigRecord(config)})
    return Message(content, dst_node_id=1, message_type="train")


def test_the_mod_remembers_every_run(tmp_path):
    app, context = client(), Context(1, 1, {"partition-id": 1}, RecordDict(), {})
    assert not app(message_for("first", 0), context).has_error()
    assert not app(message_for("second", 0), context).has_error()
    # More often than the first run said when it came first, whatever it says now and whoever came between.
    again = app(message_for("first", 5, **{"dpmf-times": 10}), context)
    assert again.has_error() and "takes part once" in again.error.reason
    assert not app(message_for("first", 0), context).has_error(), "the same round comes again after a crash"


def test_the_mod_sends_nothing_without_terms():
    context = Context(1, 1, {"partition-id": 2}, RecordDict(), {})
    bare = Message(RecordDict({"arrays": arrays(START), "config": ConfigRecord({})}), dst_node_id=1, message_type="train")
    reply = client()(bare, context)
    assert reply.has_error() and "no terms" in reply.error.reason


def test_a_run_of_0_2_goes_on(tmp_path):
    """Its journal is a stream over sums in float64, and its model and cohorts are kept as now."""
    whole, _ = tmp_path / "whole", strategy(tmp_path / "whole").start(Nodes(client()), arrays(START), num_rounds=0)
    directory = tmp_path / "before"
    shutil.copytree(whole, directory)
    key = dpmf.NoiseKey.read(directory / "noise.key")
    total = np.zeros(DIMENSION)
    with np.load(directory / "state.npz") as state:
        kept = dict(state)
    with dpmf.DurableStream.open(MECHANISM, key, directory / "journal", dimension=DIMENSION) as stream:
        stream.release(total)
        kept.update(step=np.int64(1), stream=np.frombuffer(stream.checkpoint_bytes(), np.uint8))
    np.savez(directory / "state.npz", **kept)
    nodes = Nodes(client())
    result = strategy(directory).start(nodes, arrays(START))
    assert sorted({step for step, _ in nodes.trained}) == [1, 2, 3]
    assert result.train_metrics_clientapp[4]["given-up"] == 0


def test_a_round_is_aggregated_once(tmp_path):
    """By a script that calls what start() calls."""
    trained = strategy(tmp_path)
    nodes = Nodes(client())
    aggregate = trained.aggregate_train

    def twice(number, replies):
        replies = list(replies)
        aggregate(number, replies)
        return aggregate(number, replies)

    trained.aggregate_train = twice
    with pytest.raises(dpmf.MismatchError, match="call neither configure_train nor aggregate_train yourself"):
        trained.start(nodes, arrays(START))
