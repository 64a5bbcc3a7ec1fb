"""Private models from data frames."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from ._core import Model, train_columns

__all__ = ["train_table"]


def _names(frame: Any) -> list[str]:
    """Names of the columns, in order."""
    if isinstance(frame, Mapping):
        return [str(name) for name in frame]
    # pyarrow, then pandas and polars.
    names = getattr(frame, "column_names", None)
    if names is None:
        names = getattr(frame, "columns", None)
    if names is None:
        raise TypeError(f"frame must be a pandas, polars or Arrow table or a dict of columns (got {type(frame).__name__})")
    return [str(name) for name in names]


def _written(value: Any) -> str | None:
    """A value as a file would have it; None if it is missing."""
    if value is None or value != value:
        return None
    text = str(value)
    return None if text in ("<NA>", "NaT") else text


def _column(values: Any) -> numpy.ndarray[Any, Any] | list[str | None]:
    """Numbers as an array, without a copy where the column allows it; everything else as words."""
    convert = getattr(values, "to_numpy", None)
    try:
        array = convert() if convert is not None else numpy.asarray(values)
    except (TypeError, ValueError):
        array = numpy.asarray(None)
    if array.ndim == 1:
        if array.dtype.kind in "iu" and array.dtype.itemsize <= 8 and array.dtype != numpy.uint64:
            return array.astype(numpy.int64, copy=False)
        if array.dtype.kind == "f":
            return array.astype(numpy.float64, copy=False)
    listed = getattr(values, "to_pylist", None) or getattr(values, "to_list", None) or getattr(values, "tolist", None)
    return [_written(value) for value in (listed() if listed is not None else list(values))]


def train_table(
    frame: Any,
    *,
    label: str,
    epsilon: float,
    delta: float = 1e-6,
    user: str | None = None,
    features: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    task: str | None = None,
    classes: Iterable[str] | None = None,
    schema: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    schema_share: float | None = None,
    public_share: float | None = None,
    model: str | None = None,
    hidden: int = 64,
    learning_rate: float | None = None,
    epochs: int | None = None,
    clients: int | None = None,
    clip: float | None = None,
    examples_per_user: int | None = None,
    hold_out: bool = True,
    seed: int | None = None,
) -> Model:
    """Trains a model that predicts the column `label` of a data frame, with (ε, δ)-differential privacy.

    `frame` is a pandas, polars or Arrow table, or a dict of columns. `user` names the column with the person that a row belongs
    to; the guarantee is then for users. Without it, every row counts as a different person, and the guarantee is for rows.

    Settings that you leave out are rehearsed on made-up tables with the same number of users, columns and classes, as in `dpmf
    train`; this costs no privacy. `model.rehearsed` has the chosen settings, and `model.statement` the guarantee.

    Classes, categories and scales are found privately with a part of the budget: `schema_share` of μ², by default 5 to 40 %. If
    you know them, pass `task` ("classification" or "regression") and `classes`, which then need not be found. `schema` describes
    the columns, as a dict or the path of a JSON file, and costs no privacy. `public_share` treats this share of the users as
    public: classes, categories and scales come from them, and ε does not cover them. `features` names the columns to predict
    from, and `exclude` columns to leave out.

    With `hold_out`, about 15 % of the users are not trained on, and `model.scores` has the scores of the model and of the trivial
    model on them; ε does not cover these scores. `seed` makes the key reproducible, for experiments; leave it out for a release.

    Raises ValueError for an invalid frame or setting.
    """
    names = _names(frame)
    features = None if features is None else list(features)
    wanted = set(names) if features is None else {label, *features, *([user] if user else [])}
    columns = [(name, _column(frame[name])) for name in names if name in wanted]
    temporary: str | None = None
    try:
        given: str | None = None
        if isinstance(schema, Mapping):
            # A schema is public.
            with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
                json.dump(schema, file)
                given = temporary = file.name
        elif schema is not None:
            given = os.fspath(schema)
        return train_columns(
            columns,
            name="frame",
            label=label,
            user=user,
            features=features,
            exclude=list(exclude),
            task=task,
            classes=None if classes is None else [str(name) for name in classes],
            schema=given,
            schema_share=schema_share,
            public_share=public_share,
            model=model,
            hidden=hidden,
            epsilon=epsilon,
            delta=delta,
            learning_rate=learning_rate,
            epochs=epochs,
            clients=clients,
            clip=clip,
            examples_per_user=examples_per_user,
            hold_out=hold_out,
            seed=seed,
        )
    finally:
        if temporary is not None:
            os.unlink(temporary)
