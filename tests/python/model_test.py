"""Models that the program trained, used from Python and by other readers of their format."""

import json
import os
import random
import subprocess

import numpy as np
import pytest

import dpmf

PROGRAM = os.environ["DPMF"]


def run(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments), "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    # A short training may end with a model that is of no use: status 3, with everything written.
    assert done.returncode == 0 or (arguments[0] == "train" and done.returncode == 3), found
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A classifier, a regressor and a model of texts, each with its table."""
    folder = tmp_path_factory.mktemp("models")
    draw = random.Random(3)
    rows = ["person,age,member,town,bought,rent,text"]
    for person in range(600):
        age, member, town = draw.randint(20, 79), draw.choice(["True", "False"]), draw.choice("ABC")
        bought = "yes" if age + 20 * (member == "True") > 60 else "no"
        rows.append(f"p{person},{age},{member},{town},{bought},{10 * age + draw.randint(0, 9)},hello {town}")
    table = folder / "shop.csv"
    table.write_text("\n".join(rows))
    common = ["train", "--data", table, "--user", "person", "--clients", 50, "--epsilon", 4, "--seed", 1]
    features = ["--features", "age,member,town", "--public-share", 0.1]
    run(*common, "--label", "bought", *features, "--epochs", 3, "--out", folder / "class")
    run(*common, "--label", "rent", *features, "--epochs", 3, "--out", folder / "number")
    run(*common, "--hidden", 8, "--embedding", 4, "--out", folder / "texts")
    return folder, table


def load(folder, name):
    return dpmf.load_model(folder / name / "planned-0" / "model.safetensors")


def test_classes_are_predicted_from_rows_in_any_form(trained):
    folder, table = trained
    model = load(folder, "class")
    assert (model.kind, model.classes, model.vocabulary) == ("logistic", ["no", "yes"], None)
    assert model.privacy["epsilon"] == 4 and "(4, 1e-6)" in model.statement and len(model.plan) == 64
    expected = run("predict", folder / "class", table)
    assert model.predict(table) == expected["predictions"]
    assert np.allclose(model.probabilities(str(table)), expected["probabilities"], atol=1e-12)

    import csv

    with open(table) as file:
        dictionaries = list(csv.DictReader(file))
    assert model.predict(dictionaries) == expected["predictions"]
    typed = {
        "age": np.array([int(row["age"]) for row in dictionaries]),
        "member": [row["member"] == "True" for row in dictionaries],
        "town": [row["town"] for row in dictionaries],
    }
    assert model.predict(typed) == expected["predictions"]
    assert model.predict([{"age": float("nan"), "town": None}]) in (["no"], ["yes"])
    judged = model.evaluate(table)
    assert judged["rows"] == 600 and judged["accuracy"] > 0.8
    assert judged["accuracy"] == run("eval", folder / "class", table)["accuracy"]
    assert "logistic" in repr(model)

    with pytest.raises(ValueError, match="row 1: `age` is \"old\", which is not a number"):
        model.predict([{"age": 3}, {"age": "old"}])
    with pytest.raises(ValueError, match="there is no column \"age\""):
        model.predict({"member": [True]})
    with pytest.raises(ValueError, match="column \"member\" has 1 rows, but other columns have 2"):
        model.predict({"age": [1, 2], "member": [True], "town": ["A", "B"]})
    with pytest.raises(ValueError, match="rows have 2 features, but the model reads 6"):
        model.predict(np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"see Model\.predict"):
        model.sample()


def test_numbers_are_in_the_unit_of_their_label(trained):
    folder, table = trained
    model = load(folder, "number")
    found = model.predict({"age": [20, 70], "member": [True, False], "town": ["A", "C"]})
    assert found.dtype == np.float64 and abs(found[0] - 205) < 80 and abs(found[1] - 705) < 80
    assert model.classes is None and model.evaluate(table)["r2"] > 0.9
    with pytest.raises(ValueError, match="no probabilities"):
        model.probabilities(table)


def test_texts_are_those_of_the_program(trained):
    folder, table = trained
    model = dpmf.load_model(folder / "texts" / "planned-0")
    assert model.kind == "lstm" and len(model.vocabulary) == 95
    texts = model.sample(5, length=9, start="he", temperature=0.5, seed=4)
    program = run("sample", folder / "texts", "--count", 5, "--length", 9, "--start", "he", "--temperature", 0.5, "--seed", 4)
    assert texts == program["texts"] and all(text.startswith("he") for text in texts)
    assert model.evaluate(table)["perplexity"] == run("eval", folder / "texts", table)["perplexity"]
    with pytest.raises(ValueError, match="only a model of classes or numbers predicts rows"):
        model.predict(table)


def test_plain_safetensors_reads_names_shapes_and_everything_said(trained):
    safetensors = pytest.importorskip("safetensors")
    folder, _ = trained
    model = load(folder, "class")
    with safetensors.safe_open(folder / "class" / "planned-0" / "model.safetensors", "numpy") as file:
        header = json.loads(file.metadata()["dpmf"])
        assert set(file.keys()) == set(model.tensors) == {"layer0.weight", "layer0.bias"}
        for name in file.keys():
            assert np.array_equal(file.get_tensor(name), model.tensors[name])
    assert header["model"] == {"kind": "logistic", "features": 6, "classes": 2}
    assert header["privacy"]["epsilon"] == 4 and header["plan"] == model.plan
    # The formula by hand, from the tensors alone.
    features = np.array([[0.5, 1, 0, 0, 1, 0]], np.float32)
    logits = features @ model.tensors["layer0.weight"].T + model.tensors["layer0.bias"]
    expected = np.exp(logits) / np.exp(logits).sum()
    assert np.allclose(model.probabilities(features), expected, atol=1e-6)
    assert np.array_equal(model.probabilities(features.astype(float)), model.probabilities(features))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(dpmf.FormatError, match="not a safetensors file"):
        dpmf.load_model(tmp_path / "x.safetensors")
    with pytest.raises(dpmf.FileError):
        dpmf.load_model(tmp_path / "absent.safetensors")
