"""`dpmf account` against Google's dp-accounting on a grid of noise multipliers and deltas."""

import json
import math
import os
import statistics
import subprocess

import dp_accounting
import dpmf
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

PROGRAM = os.environ["DPMF"]
SIGMAS = [0.1, 0.2, 0.341, 0.5, 0.682, 0.9, 1.364, 2.0, 2.728, 4.0, 5.456, 8.0, 11.0, 16.0, 25.0, 50.0]
DELTAS = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-13, 1e-14, 1e-15]


def run(*arguments):
    """One command with --json; the object it prints."""
    done = subprocess.run([PROGRAM, *arguments, "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def account(sigma, delta):
    return run("account", "--noise-multiplier", repr(sigma), "--delta", repr(delta))


def test_the_grid_is_as_large_as_promised():
    assert len(SIGMAS) * len(DELTAS) >= 200


@pytest.mark.parametrize("sigma", SIGMAS)
def test_exact_epsilon(sigma):
    for delta in DELTAS:
        ours = account(sigma, delta)["epsilon_exact"]
        theirs = dp_accounting.get_epsilon_gaussian(sigma, delta, tol=1e-12)
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-11), (sigma, delta)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_epsilon_from_integer_renyi_orders(sigma):
    accountant = dp_accounting.rdp.RdpAccountant(orders=list(range(2, 513)))
    accountant.compose(dp_accounting.GaussianDpEvent(sigma))
    for delta in DELTAS:
        ours = account(sigma, delta)["epsilon_rdp"]
        assert ours == pytest.approx(accountant.get_epsilon(delta), rel=1e-9), (sigma, delta)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
def test_calibrated_sigma(epsilon):
    for delta in (1e-5, 1e-6, 1e-8):
        ours = run("calibrate", "--steps", "2", "--mechanism", "independent", "--clip", "1",
                   "--epsilon", repr(epsilon), "--delta", repr(delta))["noise_multiplier"]
        assert ours == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-6)


def test_the_column_of_the_paper():
    for sigma, rdp, exact in [(0.341, 18.853, 17.648), (0.682, 8.155, 7.601), (1.364, 3.693, 3.444),
                              (2.728, 1.726, 1.606), (5.456, 0.820, 0.759)]:
        found = account(sigma, 1e-6)
        assert round(found["epsilon_rdp"], 3) == rdp
        assert round(found["epsilon_exact"], 3) == exact


SAMPLED = [(1.0, 0.01, 1000, 1e-5), (0.7, 0.1, 20, 1e-6), (5.0, 0.5, 300, 1e-8), (0.5, 1e-3, 2000, 1e-5), (1.2, 0.2, 1, 1e-4)]


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), SAMPLED)
def test_sampled_steps(sigma, rate, steps, delta):
    """Our bracket meets dp-accounting's, and the program and the package agree."""
    above, below = (
        pld.from_gaussian_mechanism(sigma, pessimistic_estimate=side, value_discretization_interval=1e-3, sampling_prob=rate,
                                    use_connect_dots=side)
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for side in (True, False)
    )
    lower, upper = dpmf.poisson_epsilon(sigma, rate, steps, delta)
    assert upper - lower <= 1e-3
    assert lower <= above + 1e-6 and below <= upper + 1e-6
    # Dots connected at 1e-3 are near the truth.
    assert upper == pytest.approx(above, abs=1e-2)
    found = run("account", "--noise-multiplier", repr(sigma), "--sampling", f"cyclic-poisson:1:{rate!r}",
                "--steps", str(steps), "--delta", repr(delta))
    assert (found["epsilon_pld_lower"], found["epsilon_pld"]) == (lower, upper)
    assert found["epsilon_exact"] is None and found["mu"] is None
    deltas = run("account", "--phase", f"{sigma!r}:{rate!r}:{steps}", "--epsilon", repr(upper))
    assert deltas["delta_pld_lower"] <= delta
    assert (deltas["delta_pld_lower"], deltas["delta_pld"]) == dpmf.poisson_delta(sigma, rate, steps, upper)


def test_groups_that_take_turns():
    arguments = ["account", "--noise-multiplier", "0.8", "--delta", "1e-5"]
    banded = run(*arguments, "--sampling", "cyclic-poisson:4:0.1", "--steps", "1001")
    assert banded["rounds"] == 251
    assert banded["epsilon_pld"] == dpmf.poisson_epsilon(0.8, 0.1, 251, 1e-5)[1]


def test_noise_of_sampled_steps():
    sigma = dpmf.poisson_noise_multiplier(2.0, 1e-5, 0.01, 1000)
    lower, upper = dpmf.poisson_epsilon(sigma, 0.01, 1000, 1e-5, width=1e-4)
    assert upper <= 2 + 1e-4 and lower > 1.999
    found = run("account", "--epsilon", "2", "--delta", "1e-5", "--sampling", "cyclic-poisson:1:0.01", "--steps", "1000")
    assert found["noise_multiplier"] == sigma
    both = dpmf.phases_epsilon([(sigma, 0.01, 500), (sigma, 0.01, 500)], 1e-5, width=1e-4)
    assert both == (lower, upper)
    assert dpmf.phases_delta([(sigma, 0.01, 1000)], 2.0)[1] <= 1.001e-5


def test_delta_of_a_gaussian():
    found = run("account", "--noise-multiplier", "1", "--epsilon", "4")
    tail = statistics.NormalDist().cdf
    assert found["delta_exact"] == pytest.approx(tail(-3.5) - math.exp(4) * tail(-4.5), rel=1e-9)
    assert found["delta_exact"] <= found["delta_zcdp"] <= found["delta_rdp"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--noise-multiplier", "1", "--sampling", "balls-in-bins:10", "--steps", "5", "--delta", "1e-5"], "depends on the mechanism"),
    (["--noise-multiplier", "1", "--sampling", "cyclic-poisson:1:0.1", "--delta", "1e-5"], "--steps is needed"),
    (["--noise-multiplier", "1", "--delta", "1e-5", "--epsilon", "1"], "remove one of the two"),
    (["--phase", "1:0.1:10", "--delta", "1e-5", "--adjacency", "replace-one"], "with sampling"),
    (["--phase", "1:0.1", "--delta", "1e-5"], "as 1.1:0.01:1000"),
])
def test_what_is_refused(arguments, words):
    done = subprocess.run([PROGRAM, "account", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and words in done.stderr, done.stderr


def test_bad_arguments_of_the_package():
    with pytest.raises(ValueError, match="rate is 2"):
        dpmf.poisson_epsilon(1.0, 2.0, 10, 1e-5)
    with pytest.raises(ValueError, match="delta is 0"):
        dpmf.phases_epsilon([(1.0, 0.5, 10)], 0.0)
