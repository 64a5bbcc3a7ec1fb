"""The ledger of releases, from Python."""

import json

import dpmf
import pytest


def statement(epsilon=1.0, **keywords):
    mechanism = dpmf.make_mechanism(dpmf.Workload.prefix_sum(16), "tree")
    return mechanism.calibrate(epsilon=epsilon, delta=1e-6, clip=1.0, **keywords).privacy


@pytest.fixture
def ledger(tmp_path):
    return dpmf.Ledger.create(tmp_path / "people.ledger", epsilon=2.0, delta=1e-6, unit="record")


def test_a_first_decision_is_exact_and_later_ones_are_filtered(ledger):
    assert (ledger.epsilon, ledger.delta, ledger.unit) == (2.0, 1e-6, "record")
    assert ledger.spent == 0
    assert ledger.record(statement(), id="a", what="a model") == pytest.approx(1, abs=1e-9)
    assert ledger.record(statement(), id="a") == pytest.approx(1, abs=1e-9)
    spent = ledger.record(statement(), id="b")
    assert ledger.spent_if_fixed < spent < 1.02 * ledger.spent_if_fixed
    assert [release["id"] for release in ledger.releases] == ["a", "b"]


def test_what_is_decided_together_composes_exactly(ledger):
    spent = ledger.record_together([statement(), statement()], id="both")
    assert spent == ledger.spent_if_fixed
    assert [(release["id"], release["group"]) for release in ledger.releases] == [
        ("both/1", "both/1"),
        ("both/2", "both/1"),
    ]


def test_a_budget_holds_and_nothing_is_recorded_beyond_it(ledger):
    ledger.record_stated(0.25, 0.0, id="counts")
    assert ledger.spent == 0.25
    with pytest.raises(dpmf.BudgetError, match="Nothing was recorded") as failure:
        ledger.record(statement(2.0))
    assert failure.value.kind == "budget"
    assert len(ledger.releases) == 1
    with pytest.raises(ValueError, match="guarantee"):
        ledger.record_stated(-1.0, 0.0)
    with pytest.raises(ValueError, match="other unit of privacy"):
        ledger.record(statement(unit="user"))


def test_files_are_opened_and_never_begun_anew(ledger, tmp_path):
    path = tmp_path / "people.ledger"
    ledger.record(statement(), id="a")
    again = dpmf.Ledger(path)
    assert again.spent == ledger.spent
    with pytest.raises(ValueError, match="never overwritten"):
        dpmf.Ledger.create(path, epsilon=9.0, delta=1e-6)
    with pytest.raises(dpmf.FileError):
        dpmf.Ledger(tmp_path / "other.ledger")
    # A file of version 0.2.
    text = json.loads(path.read_text())
    text["schema"] = 1
    path.write_text(json.dumps(text))
    assert again.spent == pytest.approx(1, abs=1e-9)
