"""A run that dpmf 0.2 began goes on: same journal, same state, same bits."""

import base64
import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

BEGUN = json.loads((pathlib.Path(__file__).parents[2] / "golden" / "run-0.2.json").read_text())


def resumed(folder, data=None):
    """The optimizer, model and loader of the run after its first two steps."""
    (folder / "mechanism").write_bytes(base64.b64decode(BEGUN["mechanism"]))
    (folder / "journal").write_bytes(base64.b64decode(BEGUN["journal"]))
    mechanism = dpmf.Mechanism.load(folder / "mechanism")
    model = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(BEGUN["weights"][1]).view(2, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = dpmf.torch.PrivateOptimizer(
        sgd, mechanism, denominator=2, key=dpmf.NoiseKey.from_seed(BEGUN["seed"]), journal=folder / "journal"
    )
    state = sgd.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.tensor(BEGUN["momentum"]).view(2, 3)}}
    noise = torch.frombuffer(bytearray(base64.b64decode(BEGUN["noise"])), dtype=torch.uint8)
    state["dpmf"] = {**BEGUN["state"], "noise": noise}
    optimizer.load_state_dict(state)
    rows = torch.tensor(BEGUN["data"]).reshape(-1, 3) if data is None else data
    cohorts = dpmf.torch.Cohorts(len(rows), 2, shuffle=False, seed=1, start=2)
    return optimizer, model, DataLoader(TensorDataset(rows), batch_sampler=cohorts)


def test_it_goes_on_to_the_bit(tmp_path):
    optimizer, model, loader = resumed(tmp_path)
    assert optimizer.next_step == 2 and optimizer.denominator == 2
    for (inputs,), expected in zip(optimizer.batches(loader), BEGUN["weights"][2:], strict=True):
        optimizer.accumulate(model, lambda outputs, _: outputs.sum(), inputs)
        optimizer.step()
        found = model.weight.detach().numpy().reshape(-1)
        assert found.tobytes() == np.array(expected, np.float32).tobytes()


def test_what_it_was_begun_with_stays(tmp_path):
    optimizer, _, loader = resumed(tmp_path)
    with pytest.raises(dpmf.MismatchError, match="the denominator was 2 in the first step"):
        optimizer.denominator = 3
    other = DataLoader(loader.dataset, batch_sampler=dpmf.torch.Cohorts(8, 2, seed=5, start=2))
    with pytest.raises(dpmf.MismatchError, match="seed 5.*but the run began with .*seed 1"):
        optimizer.batches(other)
