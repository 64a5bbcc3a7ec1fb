"""`dpmf account` against Google's dp-accounting on a grid of noise multipliers and deltas."""

import json
import os
import subprocess

import dp_accounting
import pytest

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
