"""Messages as vectors, and the names that their senders claim, which are not trusted."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

Vector = NDArray[np.float64]

#: The names of a model's arrays and their shapes.
Layout = list[tuple[str, tuple[int, ...]]]


def sender(reply: Message) -> str | None:
    """The claimed sender of a message; None if it names none."""
    if not reply.has_content():
        return None
    record = reply.content.config_records.get("dpmf")
    name = None if record is None else record.get("name")
    return name if isinstance(name, str) else None


def layout_of(arrays: ArrayRecord) -> Layout:
    for name, array in arrays.items():
        if array.dtype != "float32":
            raise TypeError(
                f"array {name!r} of the model is {array.dtype}, but private training is of float32 parameters: cast "
                "it, and leave out buffers that are not trained"
            )
    return [(name, tuple(array.shape)) for name, array in arrays.items()]


def flatten(arrays: ArrayRecord) -> Vector:
    return np.concatenate([array.numpy().reshape(-1).astype(np.float64) for array in arrays.values()])


def unflatten(vector: NDArray[np.float32], layout: Layout) -> ArrayRecord:
    ends = np.cumsum([int(np.prod(shape)) for _, shape in layout])[:-1]
    pieces = np.split(vector, ends)
    return ArrayRecord({name: Array(piece.reshape(shape)) for (name, shape), piece in zip(layout, pieces)})


def difference(reply: Message, layout: Layout, model: Vector) -> Vector:
    """What a client's update subtracts from the model, which is its gradient."""
    records = reply.content.array_records
    if len(records) != 1:
        raise ValueError(f"it has {len(records)} ArrayRecords, but one is needed")
    arrays = next(iter(records.values()))
    if list(arrays) != [name for name, _ in layout]:
        raise ValueError("its arrays are not those of the model")
    # What an Array declares of itself is the client's word: only the numbers that it holds have a shape.
    held = [np.asarray(array.numpy()) for array in arrays.values()]
    for (name, shape), values in zip(layout, held):
        if values.shape != shape or values.dtype.kind != "f":
            raise ValueError(f"its array {name!r} holds {values.dtype} of shape {values.shape}, but the model's has {shape}")
    values = np.concatenate([values.reshape(-1).astype(np.float64) for values in held])
    marked = reply.content.config_records.get("dpmf")
    update = values if marked is not None and marked.get("update") == "difference" else rounded(model) - values
    if not np.isfinite(update).all():
        raise ValueError("it is not finite")
    return update


def rounded(model: Vector) -> Vector:
    """The model as the clients got it."""
    return model.astype(np.float32).astype(np.float64)
