"""`dpmf.train_table` and `dpmf.sklearn`: frames of every kind, the same rehearsal as the command line's, scikit-learn's own checks."""

import json
import os
import subprocess

import numpy
import pandas
import polars
import pyarrow
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

import dpmf

from dpmf.sklearn import EXPECTED_FAILED_CHECKS, PrivateClassifier, PrivateRegressor


PROGRAM = os.environ["DPMF"]


def made(rows=600, seed=0):
    chance = numpy.random.default_rng(seed)
    age, visits = chance.normal(45, 12, rows), chance.integers(0, 20, rows)
    town = chance.choice(["Bonn", "Köln", "Ulm"], rows)
    score = (age - 45) / 12 + (visits - 10) / 6 + (town == "Ulm") + chance.normal(0, 0.3, rows)
    bought = numpy.where(score > 0.3, "yes", "no")
    return pandas.DataFrame({"age": age, "visits": visits, "town": town, "bought": bought, "spent": 50 + 20 * score})


SCHEMA = {
    "features": [
        {"column": "age", "kind": "number", "center": 45, "scale": 12},
        {"column": "visits", "kind": "number", "center": 10, "scale": 6},
        {"column": "town", "kind": "category", "values": ["Bonn", "Köln", "Ulm"]},
    ],
    "label": {"column": "bought", "kind": "class", "values": ["no", "yes"]},
}


def test_frames_of_every_kind_give_the_same_plan_and_a_model_that_is_good():
    frame = made()
    kinds = [frame, polars.from_pandas(frame), pyarrow.Table.from_pandas(frame), {name: list(frame[name]) for name in frame}]
    models = [dpmf.train_table(kind, label="bought", epsilon=4.0, schema=SCHEMA) for kind in kinds]
    assert len({model.plan for model in models}) == 1
    for model in models:
        assert model.scores["test_accuracy"] > 0.85 > 0.7 > model.scores["baseline"]["test_accuracy"]
        assert model.scores["covered_by_epsilon"] is False
        assert model.rehearsed["settings"] > 20 and model.rehearsed["clients"] <= len(frame)
        assert "(4, 1e-6)-differential privacy for every record" in model.statement
    # Noise is new in every call.
    first, second = (model.tensors["layer0.weight"] for model in models[:2])
    assert numpy.abs(first - second).max() > 1e-4


def test_nothing_but_a_label_and_a_budget_is_needed():
    frame = made(4000)
    model = dpmf.train_table(frame, label="bought", epsilon=3.0, exclude=["spent"])
    assert model.scores["test_accuracy"] > 0.85 > 0.7 > model.scores["baseline"]["test_accuracy"]
    assert "(3, 1e-6)-differential privacy for every record" in model.statement
    assert "The schema of the table" in model.statement and model.classes == ["no", "yes"]
    number = dpmf.train_table(frame, label="spent", epsilon=3.0, exclude=["bought"], hold_out=False, schema_share=0.1)
    assert numpy.corrcoef(number.predict(frame), frame["spent"])[0, 1] > 0.9 and number.scores is None
    # What is of no known kind counts as the middle, as it did in training.
    assert len(number.predict({"age": ["n/a?"], "visits": [3], "town": ["Ulm"]})) == 1


def test_numbers_are_learned_and_missing_values_are_filled(tmp_path):
    frame = made()
    frame.loc[:20, "age"] = numpy.nan
    frame.loc[30:40, "town"] = None
    model = dpmf.train_table(frame, label="spent", features=["age", "visits", "town"], epsilon=4.0, public_share=0.2)
    assert model.scores["test_rmse"] < 0.7 * model.scores["baseline"]["test_rmse"]
    predicted = model.predict(frame)
    assert numpy.corrcoef(predicted[50:], frame["spent"][50:])[0, 1] > 0.8
    model.save(tmp_path / "model.safetensors")
    again = dpmf.load_model(tmp_path / "model.safetensors")
    assert (again.predict(frame) == predicted).all()
    assert again.scores is None and again.rehearsed is None


def test_rows_of_a_user_count_together_and_settings_that_are_given_stay():
    frame = made().assign(who=[f"u{row // 3}" for row in range(600)])
    model = dpmf.train_table(
        frame, label="bought", user="who", epsilon=2.0, schema=SCHEMA, epochs=4, clients=50, learning_rate=0.5, clip=1.0, hold_out=False
    )
    assert model.rehearsed is None and model.scores is None
    assert "for every user" in model.statement


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"label": "price"}, "no column `price`"),
        ({"label": "bought", "task": "guess"}, "classification"),
        ({"label": "bought", "model": "tree"}, "logistic"),
        ({"label": "bought", "epsilon": -1.0}, "epsilon"),
        ({"label": "bought", "public_share": 0.9}, "public_share"),
        ({"label": "bought", "schema_share": 0.9, "public_share": None}, "schema_share"),
        ({"label": "bought", "epsilon": 0.1, "public_share": None}, "too few to find classes and scales"),
        ({"label": "bought", "user": "nobody"}, "no column `nobody`"),
    ],
)
def test_what_makes_no_sense_is_said(arguments, words):
    with pytest.raises(ValueError, match=words):
        dpmf.train_table(made(200), **({"epsilon": 2.0, "public_share": 0.1} | arguments))
    with pytest.raises(TypeError, match="pandas"):
        dpmf.train_table(3, label="y", epsilon=1.0)


def test_the_command_line_rehearses_the_same(tmp_path):
    frame = made()
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    command = [PROGRAM, "train", "--data", "t.csv", "--rows-are-users", "--label", "bought", "--schema", "schema.json", "--epsilon", "4",
               "--out", "run", "--json"]
    told = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    model = dpmf.train_table(frame, label="bought", epsilon=4.0, schema=SCHEMA)
    for name in ("learning_rate", "epochs", "clip"):
        assert told["rehearsed"][name] == model.rehearsed[name]


def test_estimators_predict_as_scikit_learn_has_it():
    frame = made(800)
    x = frame[["age", "visits"]].to_numpy()
    classifier = PrivateClassifier(epsilon=6.0, public_share=0.2).fit(x, frame["bought"])
    assert list(classifier.classes_) == ["no", "yes"]
    assert classifier.score(x, frame["bought"]) > 0.75
    chances = classifier.predict_proba(x)
    assert chances.shape == (800, 2) and numpy.allclose(chances.sum(axis=1), 1)
    assert "differential privacy" in classifier.statement_ and classifier.rehearsed_["epochs"] > 0
    plain = PrivateClassifier(epsilon=6.0).fit(x, frame["bought"])
    assert plain.score(x, frame["bought"]) > 0.75 and "The schema of the table" in plain.statement_
    regressor = clone(PrivateRegressor(epsilon=6.0, public_share=0.2)).fit(x, frame["spent"])
    assert regressor.score(x, frame["spent"]) > 0.5
    users = PrivateRegressor(epsilon=6.0, public_share=0.2).fit(x, frame["spent"], users=numpy.arange(800) // 2)
    assert "for every user" in users.statement_


@pytest.mark.skipif("DPMF_SLOW" not in os.environ, reason="takes a minute; scripts/slow runs it")
@pytest.mark.parametrize("estimator", [PrivateClassifier(epsilon=8.0, public_share=0.5), PrivateRegressor(epsilon=8.0, public_share=0.5)])
def test_scikit_learns_checks_pass_but_for_those_with_a_reason(estimator):
    results = check_estimator(estimator, expected_failed_checks=EXPECTED_FAILED_CHECKS, on_fail=None, on_skip=None)
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    assert not failed
    assert sum(result["status"] == "passed" for result in results) > 30
