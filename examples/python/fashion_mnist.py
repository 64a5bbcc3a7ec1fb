"""Fashion-MNIST, with Opacus' independent noise or with correlated noise.

    scripts/data/fashion-mnist                        # the data, into data/cache/fashion-mnist
    python examples/python/fashion_mnist.py --engine opacus --epsilon 3 --epochs 5
    python examples/python/fashion_mnist.py --engine dpmf --epsilon 3 --epochs 5

From one to the other, a script that trains with Opacus changes in one import:

    - from opacus import PrivacyEngine
    + from dpmf.opacus import PrivacyEngine
"""

import argparse
import gzip
import json
import pathlib
import time
import warnings

import dpmf.opacus
import numpy as np
import opacus
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

DATA = pathlib.Path(__file__).parents[2] / "data" / "cache" / "fashion-mnist"


def load(directory, part):
    """Images scaled to mean 0 and unit deviation, by constants of the public task, and labels."""

    def read(name, header):
        path = directory / f"{part}-{name}-ubyte.gz"
        if not path.exists():
            raise SystemExit(f"{path} is missing: run scripts/data/fashion-mnist, or give --data DIRECTORY")
        return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)

    images = torch.from_numpy(read("images-idx3", 16).reshape(-1, 1, 28, 28).astype(np.float32))
    labels = torch.from_numpy(read("labels-idx1", 8).astype(np.int64))
    return TensorDataset((images / 255 - 0.286) / 0.353, labels)


def perceptron():
    """50 890 parameters."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)
    )


def train(engine, data, epsilon, *, lr, momentum=0.9, batch_size=512, epochs=1, clip=1.0, delta=1e-5, seed=0):
    """Private passes over the data; returns the model."""
    torch.manual_seed(seed)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch_size, shuffle=True),
        target_epsilon=epsilon,
        target_delta=delta,
        epochs=epochs,
        max_grad_norm=clip,
    )
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    images, labels = data[:]
    return (model(images).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["opacus", "dpmf"], default="dpmf")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.1], help="several are tried in turn")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[512])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--validate", action="store_true", help="hold out 10 000 training images and test on those")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    arguments = parser.parse_args()
    # Opacus 1.4 uses hooks that PyTorch 1.13 would rather not have, and warns of its own generator.
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", module="opacus")

    data, test = load(arguments.data, "train"), load(arguments.data, "t10k")
    if arguments.validate:
        data, test = TensorDataset(*data[:50_000]), TensorDataset(*data[50_000:])
    if arguments.limit:
        data = TensorDataset(*data[: arguments.limit])
    for epsilon in arguments.epsilon:
        for batch_size in arguments.batch_size:
            for lr in arguments.lr:
                for seed in range(arguments.seeds):
                    started = time.perf_counter()
                    engine = opacus.PrivacyEngine() if arguments.engine == "opacus" else dpmf.opacus.PrivacyEngine()
                    options = dict(lr=lr, momentum=arguments.momentum, batch_size=batch_size, epochs=arguments.epochs, seed=seed)
                    model = train(engine, data, epsilon, **options)
                    result = dict(engine=arguments.engine, epsilon=epsilon, spent=engine.get_epsilon(1e-5), **options)
                    result.update(accuracy=accuracy(model, test), seconds=time.perf_counter() - started)
                    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
