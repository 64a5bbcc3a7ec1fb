"""The parts of scripts/reproduce that decide what is compared: clipped sums, the search, pairs and intervals."""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "reproduce"))


@pytest.fixture(scope="module")
def fashion():
    pytest.importorskip("opacus", reason="Opacus is not installed: scripts/setup-torch makes an environment with it")
    import fashion

    return fashion


@pytest.fixture(scope="module")
def epochs():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    import epochs

    return epochs


@pytest.mark.parametrize("name", ["perceptron", "convolutional"])
def test_clipped_sums_are_those_of_one_example_after_another(fashion, name):
    import torch
    from torch.nn.functional import cross_entropy

    network = fashion.NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    # Two parts of a batch for the convolutions, and lengths on both sides of the clip.
    images = torch.randn(300, 784, generator=generator) * torch.linspace(0.01, 1, 300)[:, None]
    labels = torch.randint(10, (300,), generator=generator)
    theta, shapes = fashion.initial(network, 0)
    module = network.module()
    torch.nn.utils.vector_to_parameters(theta, module.parameters())
    wanted, longer = torch.zeros_like(theta), 0
    for image, label in zip(images, labels):
        gradients = torch.autograd.grad(cross_entropy(module(image.view(1, 1, 28, 28)), label[None]), list(module.parameters()))
        gradient = torch.cat([part.flatten() for part in gradients])
        longer += bool(gradient.norm() > 3)
        wanted += gradient * min(1.0, 3 / float(gradient.norm()))
    assert 30 < longer < 290
    found = torch.full_like(theta, float("nan"))
    with torch.no_grad():
        network.clipped_sum(fashion.split(theta, shapes), network.prepare(images), labels, 3.0, fashion.split(found, shapes))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_both_arms_search_with_the_same_number_of_runs(fashion):
    from dataclasses import replace

    peak = fashion.Settings(5, 25, 0.0, "constant", None)

    def runs_until(start, peak):
        tried = []

        def score(point, seed):
            tried.append((point, seed))
            far = abs(point.log2_distance - peak.log2_distance)
            far += abs(fashion.BATCHES.index(point.batches) - fashion.BATCHES.index(peak.batches))
            far += (point.momentum != peak.momentum) + (point.schedule != peak.schedule)
            return -far - (0 if point.pull is None else 10 * abs(point.pull - peak.pull))

        return fashion.search(score, start, fashion.Effort(40, 3, 5)), tried

    chosen, tried = runs_until(fashion.START, peak)
    with_pull, more = runs_until(replace(fashion.START, pull=fashion.START_PULL), replace(peak, pull=0.0))
    assert chosen == peak and with_pull == replace(peak, pull=0.0)
    assert len(tried) == len(set(tried)) == len(more) == len(set(more)) == 40 + 2 * 3


def test_an_interrupted_file_goes_on(fashion, tmp_path):
    path = tmp_path / "results.jsonl"
    row = {"kind": "test", "network": "perceptron", "seed": 1}
    fashion.Results(path).once(row, lambda: {"accuracy": 0.5})
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    fashion.end_last_line(path)
    results = fashion.Results(path)
    assert results.once(row, lambda: pytest.fail("it is there"))["accuracy"] == 0.5
    results.once({**row, "seed": 2}, lambda: {"accuracy": 0.6})
    assert {seed for *_, seed in fashion.Results(path).known} == {1, 2}


def lines_of(scores):
    settings = {"log2_distance": 8, "batches": 100, "momentum": 0.9, "schedule": "constant"}
    for arm, of_arm in scores.items():
        head = {"network": "perceptron", "epochs": 5, "epsilon": 2.0, "arm": arm, **settings, "pull": None}
        yield {"kind": "chosen", **head, "learning_rate": 0.25, "tuning_runs": 9}
        for seed, score in enumerate(of_arm):
            yield {"kind": "test", **head, "seed": seed, "accuracy": score, "noise_multiplier": 1.0}
        # At other settings: not the result.
        yield {"kind": "test", **head, "batches": 50, "seed": 0, "accuracy": 0.1, "noise_multiplier": 1.0}


def test_differences_are_paired_by_seed(epochs):
    pytest.importorskip("scipy")
    from scipy.stats import t, ttest_rel

    ours, theirs = [0.80, 0.84, 0.82, 0.90, 0.86], [0.79, 0.82, 0.815, 0.88, 0.83]
    (cell,) = epochs.summarise(list(lines_of({"opacus": theirs, "dpmf": ours})))["cells"]
    wanted = ttest_rel(ours, theirs).confidence_interval(0.95)
    assert cell["difference"] - cell["difference_half"] == pytest.approx(100 * wanted.low, abs=1e-3)
    assert cell["difference"] + cell["difference_half"] == pytest.approx(100 * wanted.high, abs=1e-3)
    for freedom, quantile in epochs.STUDENT.items():
        assert quantile == pytest.approx(t.ppf(0.975, freedom), abs=6e-4)


def test_verdicts_can_fail(epochs):
    better, worse = [0.84, 0.85, 0.86], [0.80, 0.81, 0.82]
    for ours, theirs, holds in ((better, worse, True), (worse, better, False)):
        summary = epochs.summarise(list(lines_of({"opacus": theirs, "dpmf": ours})))
        assert [found for found, _ in epochs.verdicts(summary, judged=True)] == [holds] * 3
        assert [found for found, _ in epochs.verdicts(summary, judged=False)] == [None] * 3


def test_the_figure_of_the_documentation_is_drawn_from_its_numbers(epochs):
    summary = json.loads((ROOT / "docs" / "figures" / "accuracy.json").read_text())
    assert {(cell["epochs"], cell["epsilon"]) for cell in summary["cells"] if cell["network"] == "perceptron"} == {
        (count, epsilon) for count in (1, 5, 20) for epsilon in (0.5, 1, 2, 4, 8)
    }
    page = (ROOT / "docs" / "explanation" / "experiments.md").read_text()
    for network in ("perceptron", "convolutional"):
        assert epochs.markdown(*epochs.table(summary, network)) in page
    assert (ROOT / "docs" / "figures" / "accuracy.svg").stat().st_size < 60_000


def test_clipped_sums_of_the_language_model_are_those_of_autograd(fashion):
    import language
    import torch

    generator = torch.Generator().manual_seed(0)
    # Few words, so that they come again in a context; some are nothing to learn.
    contexts = torch.randint(5, (6, language.LENGTH, language.CONTEXT), generator=generator)
    targets = torch.randint(-1, 5, (6, language.LENGTH), generator=generator)
    assert language.check((contexts, targets)) < 1e-9


def test_convergence_judges_the_papers_iteration_and_its_acceleration(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    import reproduce
    from page import Page

    def drawn(*_):
        (tmp_path / "convergence-128.svg").write_text("<svg></svg>")
        ends = {"dense, Anderson": 1, "dense, plain (the paper's)": 5, "Newton directions": 3, "projected gradients": 9}
        series = [{"label": f"{name}, 7 iterations", "points": [[0.1, 1e-2], [x, 1e-6]]} for name, x in ends.items()]
        return {"panels": [{"series": series}]}

    drawn.out = tmp_path
    page = Page(tmp_path, "title")
    reproduce.solvers(page, drawn, reproduce.SCALES["quick"])
    (plain, paper), (accelerated, ours) = page.verdicts
    assert (plain, accelerated) == (False, True)
    assert "plain" in paper and "Anderson" in ours
