"""Planning: dpmf against jax-privacy's choice of bands, coefficients and noise, in one run.

For every ε the rival's `optimize_coefs_for_amplifications` chooses the number of bands, their coefficients and the noise
(its accountant by default is Rényi; the same with dp-accounting's PLD is shown beside it), and our planner chooses whatever
it likes within the same sampler's trust. Both errors are the root mean squared error of the prefix sums, from the dense
matrices; ours must not be above the rival's. Seconds are those of the whole call, ours of a whole process without its cache.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import dp_accounting
import jax.numpy as jnp
import numpy as np
from dp_accounting.pld import PLDAccountant
from jax_privacy.matrix_factorization import toeplitz


def rmse(coefficients, deviation, steps):
    """Of the prefix sums, for noise of this deviation through a banded Toeplitz encoder."""
    encoder = np.asarray(toeplitz.materialize_lower_triangular(jnp.asarray(coefficients), steps), dtype=np.float64)
    decoder = np.linalg.solve(encoder.T, np.tri(steps).T).T
    return deviation * np.sqrt((decoder**2).sum() / steps)


def rival(arguments, epsilon, accountant):
    start = time.perf_counter()
    helper = toeplitz._AmplifiedBandMFHelper(
        arguments.steps, arguments.examples, arguments.batch, epsilon, arguments.delta, jnp.mean, accountant
    )
    # What `optimize_coefs_for_amplifications` does, with the accountant of our choice.
    best = helper.optimize_bands(max_optimizer_steps=250)["coef"]
    deviation = helper.required_stddev(best)
    seconds = time.perf_counter() - start
    return rmse(best, deviation, arguments.steps), len(best), seconds


def ours(arguments, epsilon, sampling="auto"):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.safetensors"
        start = time.perf_counter()
        command = [arguments.program, "plan", "--examples", arguments.examples, "--batch", arguments.batch,
                   "--epochs", arguments.steps * arguments.batch // arguments.examples, "--epsilon", epsilon,
                   "--delta", arguments.delta, "--no-cache", "--json", "--out", path]
        run = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        plan = json.loads(run.stdout)
        subprocess.run([arguments.program, "verify", str(path)], check=True, capture_output=True)
    return plan, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="target/release/dpmf")
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--accountant", choices=["rdp", "pld"], nargs="+", default=["rdp", "pld"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for epsilon in arguments.epsilon:
        plan, seconds = ours(arguments, epsilon)
        banded = min(
            (row for row in plan["rows"] if row["sampling"].startswith("cyclic-poisson")), key=lambda row: row["rmse"]
        )
        # Its own accountant, which may take minutes, and the tightest there is.
        rdp, rdp_bands, rdp_seconds = (
            rival(arguments, epsilon, dp_accounting.rdp.RdpAccountant)
            if "rdp" in arguments.accountant
            else (float("inf"), None, float("nan"))
        )
        pld, pld_bands, pld_seconds = (
            rival(arguments, epsilon, lambda: PLDAccountant(value_discretization_interval=1e-3))
            if "pld" in arguments.accountant
            else (float("inf"), None, float("nan"))
        )
        result = {
            "epsilon": epsilon,
            "rmse": plan["chosen"]["rmse"],
            "mechanism": plan["chosen"]["selector"],
            "sampling": plan["chosen"]["sampling"],
            "rmse_banded": banded["rmse"],
            "bands": banded["bands"],
            "seconds": seconds,
            "jax_privacy_rmse": rdp,
            "jax_privacy_bands": rdp_bands,
            "jax_privacy_seconds": rdp_seconds,
            "jax_privacy_pld_rmse": pld,
            "jax_privacy_pld_bands": pld_bands,
            "jax_privacy_pld_seconds": pld_seconds,
        }
        results.append(result)
        assert result["rmse"] <= min(rdp, pld), result
        assert result["rmse_banded"] <= min(rdp, pld) * 1.0001, result
        if not arguments.json:
            print(
                f"ε = {epsilon}: {result['rmse']:.3f} by {result['mechanism']} with {result['sampling']} in {seconds:.1f} s"
                f" (banded {banded['rmse']:.3f}, {banded['bands']} bands); jax-privacy {rdp:.3f}, {rdp_bands} bands, in"
                f" {rdp_seconds:.1f} s, with PLD {pld:.3f}, {pld_bands} bands, in {pld_seconds:.1f} s",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"schema": 1, "results": results}))


if __name__ == "__main__":
    main()
