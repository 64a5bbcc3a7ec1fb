"""Runs the app in Flower's simulation engine: python simulate.py [DIRECTORY [ROUNDS [COHORT [EPOCHS]]]]"""

import sys
import tempfile

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from private_app.client_app import app as client_app
from private_app.server_app import main

arguments = sys.argv[1:]
directory = arguments[0] if arguments else tempfile.mkdtemp()
rounds = int(arguments[1]) if len(arguments) > 1 else 10
cohort = int(arguments[2]) if len(arguments) > 2 else 4
epochs = int(arguments[3]) if len(arguments) > 3 else 2

server_app = ServerApp()


@server_app.main()
def run(grid: Grid, context: Context) -> None:
    context.run_config.update(rounds=rounds, cohort=cohort, epochs=epochs, epsilon=8.0, directory=directory)
    main(grid, context)


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=-(-rounds // epochs) * cohort,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
