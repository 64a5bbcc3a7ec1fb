"""A small convolutional network on Fashion-MNIST for ten epochs, as a script for Opacus has it.

    scripts/data/fashion-mnist                        # the data, into data/cache/fashion-mnist
    python examples/python/opacus_mnist.py --epsilon 3

It came from the same script for Opacus by changing one line, the import of the engine:

    - from opacus import PrivacyEngine
    + from dpmf.opacus import PrivacyEngine
"""

import argparse
import gzip
import pathlib
import time

import numpy as np
import torch
from dpmf.opacus import PrivacyEngine
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

DATA = pathlib.Path(__file__).parents[2] / "data" / "cache" / "fashion-mnist"


def load(directory, part, limit=None):
    arrays = []
    for name, header in (("images-idx3", 16), ("labels-idx1", 8)):
        packed = (directory / f"{part}-{name}-ubyte.gz").read_bytes()
        arrays.append(np.frombuffer(gzip.decompress(packed), np.uint8, offset=header))
    images = torch.from_numpy(arrays[0].reshape(-1, 1, 28, 28).astype(np.float32) / 255 - 0.286) / 0.353
    return TensorDataset(images[:limit], torch.from_numpy(arrays[1].astype(np.int64))[:limit])


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 5, stride=2, padding=2),
        torch.nn.Tanh(),
        torch.nn.Conv2d(16, 16, 5, stride=2, padding=2),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 7 * 7, 10),
    )


def train(model, loader, optimizer):
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.nanmean(losses))


@torch.no_grad()
def test(model, loader):
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    arguments = parser.parse_args()

    data = load(arguments.data, "train", arguments.limit)
    train_loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True, num_workers=arguments.workers)
    test_loader = DataLoader(load(arguments.data, "t10k"), batch_size=1000)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=arguments.momentum)
    engine = PrivacyEngine()
    model, optimizer, train_loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_epsilon=arguments.epsilon,
        target_delta=arguments.delta,
        epochs=arguments.epochs,
        max_grad_norm=arguments.clip,
    )
    for epoch in range(1, arguments.epochs + 1):
        started = time.perf_counter()
        loss = train(model, train_loader, optimizer)
        accuracy, epsilon = test(model, test_loader), engine.get_epsilon(arguments.delta)
        print(
            f"epoch {epoch}: loss {loss:.3f}, test accuracy {accuracy:.3f}, ε = {epsilon:.2f}, "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
