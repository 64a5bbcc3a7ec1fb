"""What runs in the app of a client."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from .._core import _Clip
from ._vectors import Vector, difference, flatten, layout_of, unflatten

#: The query by which the server learns who a node is.
ENROLMENT = "dpmf_enrolment"

#: Code of the error by which a client declines to take part again.
DECLINED = 8001


def clipping_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Sends only the clipped difference from the received model, and takes part only as often as the run first said.

    The server clips too, so its guarantee does not rely on this mod. With it, only clipped updates leave the
    client. A client declines to take part more often, or sooner again, than it was told when it first took part in the
    run, whatever the server asks. It keeps the terms of every run, and does not train without terms.
    """
    if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    config = next((record for record in message.content.config_records.values() if "dpmf-clip" in record), None)
    if config is None:
        reason = "the message has no terms of private training (dpmf-clip and others), and this client only takes part in private training"
        return Message(Error(DECLINED, reason), reply_to=message)
    run, step, clip = cast(str, config["dpmf-run"]), cast(int, config["dpmf-step"]), cast(float, config["dpmf-clip"])
    separation, times = cast(int, config.get("dpmf-separation", 1)), cast(int, config.get("dpmf-times", 1))
    # A record for each run, so that a run that comes back after another one finds what it was told.
    before = context.state.config_records.get(f"dpmf {run}")
    last = context.state.config_records.get("dpmf")
    if before is None and last is not None and last["run"] == run:
        before = last  # kept by 0.2
    taken: list[int] = []
    if before is not None:
        taken = list(cast("list[int]", before["steps"]))
        separation, times = cast(int, before["separation"]), cast(int, before["times"])
    # The same round comes again after a crash of the server.
    if step not in taken:
        if len(taken) >= times or any(abs(step - other) < separation for other in taken):
            rounds = ", ".join(str(other + 1) for other in taken)
            often = "once" if times == 1 else f"in at most {times} rounds, at least {separation} apart"
            reason = f"this client took part in round {rounds} and takes part {often}: round {step + 1} is declined"
            return Message(Error(DECLINED, reason), reply_to=message)
        taken.append(step)
    context.state[f"dpmf {run}"] = ConfigRecord(dict(run=run, steps=taken, separation=separation, times=times))
    model = next(iter(message.content.array_records.values()))
    layout, start = layout_of(model), flatten(model)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    update = clipped(difference(reply, layout, start), clip)
    key = next(iter(reply.content.array_records))
    marks = {"update": "difference"}
    if (known := context.state.config_records.get("dpmf-name")) is not None:
        marks["name"] = cast(str, known["name"])
    reply.content = RecordDict({key: unflatten(update, layout), "dpmf": ConfigRecord(dict(marks))})
    return reply


def answer_enrolment(app: ClientApp, name: Callable[[Context], str] | None = None) -> None:
    """Lets a ClientApp tell the server who its user is, under a name that outlives restarts.

    By default, the name is "participant" in the node's configuration, or else "partition-id", or else the number of the node,
    which is stable if SuperNodes authenticate.
    """

    @app.query(ENROLMENT)
    def enrol(message: Message, context: Context) -> Message:
        if name is not None:
            known = name(context)
        else:
            node = context.node_config
            known = str(node.get("participant", node.get("partition-id", f"node {context.node_id}")))
        context.state["dpmf-name"] = ConfigRecord({"name": known})
        return Message(RecordDict({"dpmf": ConfigRecord({"name": known})}), reply_to=message)


def clipped(update: Vector, clip: float) -> NDArray[np.float32]:
    """Guarantee: the result has norm at most clip, rounding to float32, which adds at most 2⁻²⁴ of it, included."""
    shorter = _Clip(clip * (1.0 - 2.0**-23), update.size)
    whole = np.zeros(update.size, np.int64)
    shorter.add_rows([update[None, :]], [whole])
    return (whole * shorter.unit).astype(np.float32)
