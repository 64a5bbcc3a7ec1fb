"""Hostile and clumsy clients of dpmf.flower, and clumsy servers: one user moves what goes to the noise by at most one clip, in its own
round only, or is refused. With the checks taken out, many of them exceed it."""

import io
import json
import os
import re
import shutil
import types

import pytest

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
pytest.importorskip("flwr", reason="Flower is not installed: pip install -r tests/python/requirements-frameworks.txt")

import dpmf  # noqa: E402
import dpmf.flower  # noqa: E402
import numpy as np  # noqa: E402
from flower_test import CLIP, DIMENSION, ROUNDS, SHAPES, START, Nodes, arrays, client, gradient, strategy  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict  # noqa: E402
from neighbours import Script, exceeding, moved_exactly  # noqa: E402

#: The user whose client does what it should not, and the round in which it is asked.
USER, TURN = 11, 1
SCRIPTS = []


def script(refusal=None):
    """Adds what a client does, of which the server takes no notice but for one clip, or is told something."""
    def add(run):
        SCRIPTS.append(Script(run, refusal, times=0))
        return run

    return add



def content(update, **marks):
    """An update as the mod sends it, which does not depend on the model."""
    record = update if isinstance(update, ArrayRecord) else arrays(update)
    return RecordDict({"arrays": record, "dpmf": ConfigRecord({"update": "difference", **marks})})


def raw(data, shape, dtype="float32"):
    """An Array that declares what it does not hold."""
    file = io.BytesIO()
    np.save(file, data, allow_pickle=data.dtype == object)
    return Array(dtype, shape, "numpy.ndarray", file.getvalue())


LONG = np.full(DIMENSION, 1e6)


class World(Nodes):
    """Honest clients, and one that a script speaks for; none without. A script may also tamper with all replies of a round."""

    def __init__(self, chosen, present):
        super().__init__(client())
        self.chosen, self.present, self.round, self.kept = chosen, present, -1, []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != "train":
            return super().send_and_receive(messages, timeout=timeout)
        self.round += 1
        replies = []
        for message in messages:
            partition = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
            if partition != USER:
                replies.append(Message(content(gradient(partition)), reply_to=message))
            elif self.present:
                replies += self.chosen.run(self, message)
        if self.present:
            # What a client sent before comes again, as on a network that repeats.
            replies += [reply for reply in self.kept if reply not in replies]
        return replies


def answer(*contents):
    return lambda world, message: [Message(each, reply_to=message) for each in contents]


def sends(name, *contents):
    """A client that sends something in its round."""
    run = answer(*contents)
    run.__name__ = name
    script()(run)


BIAS = np.zeros(2, np.float32)
ONES = np.ones((3, 2), np.float32)

sends("as_documented", content(gradient(USER)))
sends("as_long_as_it_may", content(np.full(DIMENSION, 1e3)))
sends("too_long", content(LONG))
sends("a_model_far_away", RecordDict({"arrays": arrays(LONG)}))
sends("the_longest_there_is", content(np.full(DIMENSION, np.finfo(np.float32).max)))
sends("not_a_number", content(np.full(DIMENSION, np.nan)))
sends("infinite", content(np.full(DIMENSION, -np.inf)))
sends("infinite_in_one_place", content(np.where(np.arange(DIMENSION) == 3, np.inf, 1.0)))
double = np.full((3, 2), 1e308)
sends("of_double_precision", content(ArrayRecord({"weights": raw(double, (3, 2), "float64"), "bias": raw(double[0], (2,), "float64")})))
sends("of_half_precision", content(ArrayRecord({"weights": raw(ONES.astype(np.float16) * 60_000, (3, 2)), "bias": raw(BIAS, (2,))})))
sends("of_whole_numbers", content(ArrayRecord({"weights": raw(np.full((3, 2), 10**9), (3, 2)), "bias": raw(BIAS, (2,))})))
sends("one_number_that_is_declared_as_all",
      content(ArrayRecord({"weights": raw(np.float32(1e3).reshape(()), (3, 2)), "bias": raw(np.float32(1e3).reshape(()), (2,))})))
sends("a_row_that_would_be_broadcast", content(ArrayRecord({"weights": raw(1e3 * ONES[:1], (3, 2)), "bias": raw(BIAS, (2,))})))
sends("transposed", content(ArrayRecord({"weights": raw(1e3 * ONES.T.copy(), (3, 2)), "bias": raw(BIAS, (2,))})))
sends("longer_than_the_model",
      content(ArrayRecord({"weights": raw(1e3 * np.ones((3000, 2000), np.float32), (3, 2)), "bias": raw(BIAS, (2,))})))
sends("one_array_less", content(ArrayRecord({"weights": raw(1e3 * ONES, (3, 2))})))
sends("one_array_more", content(ArrayRecord({**arrays(LONG), "another": Array(1e6 * ONES)})))
sends("arrays_of_other_names", content(ArrayRecord({"bias": Array(1e3 * ONES), "weights": Array(BIAS)})))
sends("two_records", RecordDict({"arrays": arrays(LONG), "more": arrays(LONG)}))
sends("no_record", RecordDict())
sends("objects", content(ArrayRecord({"weights": raw(np.full((3, 2), None, object), (3, 2)), "bias": raw(BIAS, (2,))})))
sends("bytes_that_are_no_array",
      content(ArrayRecord({"weights": Array("float32", (3, 2), "numpy.ndarray", b"\x93NUMPY"), "bias": raw(BIAS, (2,))})))
sends("two_replies", content(LONG), content(LONG))
sends("a_hundred_replies", *[content(gradient(USER))] * 100)
sends("a_good_reply_behind_a_bad_one", content(np.full(DIMENSION, np.nan)), content(LONG))
sends("in_another_name", content(LONG, name="1"))
sends("marks_that_are_none", RecordDict({"arrays": arrays(LONG), "dpmf": ConfigRecord({"update": 7, "name": [1, 2]})}))
sends("many_examples", RecordDict({**content(LONG), "metrics": MetricRecord({"num-examples": 10**9})}))


@script()
def an_error(world, message):
    return [Message(Error(0, "out of memory"), reply_to=message)]


@script()
def the_same_reply_in_every_round(world, message):
    reply = Message(content(LONG), reply_to=message)
    world.kept.append(reply)
    return [reply]


@script()
def replies_of_a_stranger_beside_its_own(world, message):
    stranger = Message(content(LONG), reply_to=message)
    stranger.metadata._src_node_id = 12345
    return [Message(content(LONG), reply_to=message), stranger]


@script()
def a_machine_that_passed_to_somebody_else(world, message):
    context = world.contexts[message.metadata.dst_node_id]
    context.node_config = {"partition-id": 99}
    return [Message(content(LONG, name="99"), reply_to=message)]


@script("neither configure_train nor aggregate_train")
def a_server_that_aggregates_twice(world, message):
    world.again = True
    return [Message(content(LONG), reply_to=message)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that has its clients, and has released nothing: copies of it have the same noise and cohorts."""
    directory = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patched:
        # Cohorts by name, so that the user has a round before its own and some after it.
        patched.setattr(dpmf.flower._clients.random, "SystemRandom", lambda: types.SimpleNamespace(shuffle=lambda order: None))
        strategy(directory).start(Nodes(client()), arrays(START), num_rounds=0)
    cohorts = json.loads((directory / "cohorts.json").read_text())["cohorts"]
    assert len(cohorts) == ROUNDS and [str(USER) in names for names in cohorts].index(True) == TURN
    return directory


class Kept:
    """The run of a strategy, of which what goes to the noise is kept."""

    def __init__(self, private, given):
        self.__dict__.update(private=private, given=given)

    def __getattr__(self, name):
        return getattr(self.private, name)

    def __setattr__(self, name, value):
        setattr(self.private, name, value)

    def release(self, total, released):
        values = total * self.private.clip.unit
        step = self.private.release(total, released)
        assert (step, "all") not in self.given, "a row of noise comes twice"
        self.given[step, "all"] = values
        return step


def outcome_of(chosen, present, begun, directory, patch):
    shutil.copytree(begun, directory)
    given, world, opened = {}, World(chosen, present), dpmf.flower.Run._open
    with patch.context() as patched:
        patched.setattr(dpmf.flower.Run, "_open", lambda run, saved: Kept(opened(run, saved), given))
        trained = strategy(directory)
        aggregate = trained.aggregate_train

        def aggregate_train(number, replies):
            replies = list(replies)
            result = aggregate(number, replies)
            return aggregate(number, replies) if getattr(world, "again", False) else result

        trained.aggregate_train = aggregate_train
        try:
            trained.start(world, arrays(START))
        except (dpmf.Error, ValueError) as refused:
            return given, str(refused)
    return given, None


def measure(chosen, begun, folder, patch):
    """What the user moved, and what the server was told."""
    given, refusal = outcome_of(chosen, True, begun, folder / f"{chosen} with", patch)
    absent, _ = outcome_of(chosen, False, begun, folder / f"{chosen} without", patch)
    if refusal is not None:
        absent = {place: vector for place, vector in absent.items() if place in given}
    return moved_exactly(given, absent, CLIP, lambda step: step == TURN), refusal, len(given)


@pytest.mark.parametrize("chosen", SCRIPTS, ids=str)
def test_a_user_counts_once_or_is_refused(chosen, begun, tmp_path, monkeypatch):
    found, refusal, rounds = measure(chosen, begun, tmp_path, monkeypatch)
    assert found.most <= 1 + 1e-9 and found.steps == 0, found
    if chosen.refusal is None:
        assert refusal is None and rounds == ROUNDS, "one client stops nobody else"
    else:
        assert refusal is not None and re.search(chosen.refusal, refusal), refusal
    if str(chosen) in ("as long as it may", "too long"):
        assert found.most > 1 - 1e-6


def test_without_the_checks_they_exceed_the_clip(begun, tmp_path, monkeypatch):
    """The power of the test above: what the checks are for."""
    def every_update(self, replies):
        found = {}
        for number, reply in enumerate(replies):
            if not reply.has_error():
                held = [np.asarray(array.numpy(), np.float64) for array in next(iter(reply.content.array_records.values())).values()]
                shapes = list(SHAPES.values())
                values = [part if part.size == np.prod(shape) else np.broadcast_to(part, shape) for part, shape in zip(held, shapes)]
                found[number] = np.concatenate([part.reshape(-1) for part in values])
        return found

    def release(self, optimizer, updates):
        run = self.private
        self._settle_row()
        run.contribute(0)
        total, noisy = np.zeros(self.dimension, np.int64), np.empty(self.dimension, np.float32)
        for update in updates:
            # Far below the most that a sum holds, and far above the clip.
            total += np.round(np.clip(np.nan_to_num(update), -100, 100) / run.clip.unit).astype(np.int64)
        run.release(total, noisy)
        self._advance(optimizer, noisy.astype(np.float64) / run.denominator)
        return True

    monkeypatch.setattr(dpmf.flower.PrivateFedAvg, "_updates", every_update)
    monkeypatch.setattr(dpmf.flower.Run, "release", release)
    found = exceeding(SCRIPTS, lambda chosen: measure(chosen, begun, tmp_path, monkeypatch)[0])
    print(len(found), "of", len(SCRIPTS), "exceed:", "; ".join(found))
    assert len(found) >= 10, found
