"""The server: plans, and trains with clients that take part several times. Started again, it goes on where it stopped."""

from pathlib import Path

import dpmf
import dpmf.flower
import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from private_app.task import FEATURES, error

app = ServerApp()


def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"error": error(arrays.to_numpy_ndarrays()[0])})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rounds, epochs = int(config["rounds"]), int(config["epochs"])
    # A client takes part in as many rounds as there are epochs, and an epoch apart; which of them is up to who is there.
    mechanism = dpmf.mechanism(
        steps=rounds,
        participation=f"min-separation:{-(-rounds // epochs)}:{epochs}",
        momentum=0.5,
        epsilon=float(config["epsilon"]),
        delta=1e-6,
        clip=0.5,
        unit="user",
    )
    directory = Path(str(config["directory"])).expanduser()
    strategy = dpmf.flower.PrivateFedAvg(mechanism, directory, cohort=int(config["cohort"]), learning_rate=0.5)
    result = strategy.start(
        grid, ArrayRecord([np.zeros(FEATURES, np.float32)]), timeout=60, evaluate_fn=evaluate
    )
    print(f"error after {rounds} rounds: {error(result.arrays.to_numpy_ndarrays()[0]):.4f}", flush=True)
