"""A run in its directory, and the optimizer that its mechanism was planned for."""

from __future__ import annotations

import io
import json
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord

from .._core import Mechanism, NoiseKey, PrivateRun
from .._disk import write_durably
from .._errors import BindingError, FormatError, StepReusedError, UnsupportedError
from .._remedies import remedies
from ._clients import Clients, Drawn
from ._vectors import Vector, flatten, layout_of, unflatten

#: What to do about what a run refuses.
REMEDIES = dict.fromkeys(
    ("no-batch", "other-step", "too-many"),
    "PrivateFedAvg.start() asks and aggregates once a round; call neither configure_train nor aggregate_train yourself",
)


class Optimizer:
    """The step that a mechanism was planned for."""

    def __init__(self, mechanism: Mechanism, learning_rate: float) -> None:
        workload = mechanism.workload
        rates = workload.learning_rates
        if rates is None or workload.average != "none":
            raise UnsupportedError(
                "PrivateFedAvg performs the optimizer's step itself, and supports plans with momentum, weight decay and "
                "schedule, without average and not from a matrix"
            )
        momentum, nesterov, decay = workload.momentum, workload.nesterov, workload.weight_decay
        assert momentum is not None and nesterov is not None and decay is not None
        self.momentum, self.nesterov, self.decay, self.coupled = momentum, nesterov, decay, bool(workload.coupled)
        self.rates = rates * learning_rate
        mechanism.check_optimizer(
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=decay,
            coupled=self.coupled,
            learning_rates=self.rates,
        )

    def advance(self, step: int, model: Vector, velocity: Vector, gradient: Vector) -> None:
        """Moves model and velocity by a step, where they are: new arrays of that size would take longer than the noise."""
        rate = self.rates[step]
        if self.coupled:
            gradient = gradient + self.decay * model
        velocity *= self.momentum
        velocity += gradient
        change = rate * (gradient + self.momentum * velocity if self.nesterov else velocity)
        if self.decay and not self.coupled:
            change += (rate * self.decay) * model
        model -= change


class Run:
    """A run in its directory: mechanism, key, journal, clients, and the model after the last step.

    dpmf.PrivateRun decides which step comes next, how many clients may contribute to it, and what a mean divides by.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        directory: Path,
        initial: ArrayRecord,
        arithmetic: Literal["exact", "float"],
        clients: Clients,
    ) -> None:
        self.mechanism, self.directory, self.clients = mechanism, directory, clients
        self.arithmetic: Literal["exact", "float"] = arithmetic
        self.layout = layout_of(initial)
        self.dimension = sum(int(np.prod(shape)) for _, shape in self.layout)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        stored = directory / "mechanism.safetensors"
        if stored.exists() and Mechanism.load(stored) != mechanism:
            raise BindingError(
                f"{directory} holds a run of another mechanism: resume it with dpmf.Mechanism.load({str(stored)!r}), "
                "or begin a new run in another directory"
            )
        mechanism.save(stored)
        self._check_files()
        #: Steps that the model has made; fewer than the run where some were given up before a restart.
        self.made, self.model = 0, flatten(initial)
        self.velocity = np.zeros(self.dimension)
        # Kept from round to round: to make them anew takes longer than to clip and sum.
        self.total, self.noisy = np.zeros(self.dimension, np.int64), np.zeros(self.dimension, np.float32)
        checkpoint = self._load()
        self.private = self._open(checkpoint)
        #: Makes the noise of a round while its clients train.
        self._thread = ThreadPoolExecutor(1, "dpmf-round")
        self._row: Future[None] | None = None
        try:
            clients.open(self.private.run, self.made, self.private.recorded_steps)
        except BaseException:
            self.private.close()
            raise
        if checkpoint is None:
            self._save()

    def _check_files(self) -> None:
        """Refuses a run that lost a file. They are made in this order, so each shows that those before it were there."""
        made = [("journal", "a noise row could be released twice"), ("state.npz", "the run would begin again")]
        names = [name for name, _ in made] + [self.clients.file]
        for number, (name, harm) in enumerate(made):
            if not (self.directory / name).exists() and any((self.directory / later).exists() for later in names[number:]):
                raise self._missing(self.directory / name, harm)

    @staticmethod
    def _missing(path: Path, harm: str) -> FormatError:
        return FormatError(
            f"{path} is missing, and without it {harm}: restore it, or begin a new run in another directory"
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self.private.close()

    @property
    def step(self) -> int:
        """The coming round, zero-based."""
        return self.private.next_step

    @property
    def arrays(self) -> ArrayRecord:
        """The model as the clients get it."""
        return unflatten(self.model.astype(np.float32), self.layout)

    def follow(self) -> None:
        """Declares what decides the cohorts, once that is settled."""
        sampler = self.clients.sampler if isinstance(self.clients, Drawn) else None
        self.private.denominator = self.clients.denominator
        self.private.follow(f"the clients of {self.clients.file}", by_step=True, sampler=sampler)

    def hand_out(self, clients: int) -> None:
        """Says how many clients are asked in the coming round, whose noise is made from now on."""
        self._settle_row()
        self.private.hand_out(self.step, clients)
        self._row = self._thread.submit(self.private.prepare)

    def _settle_row(self) -> None:
        """Waits for the noise of the round. If it could not be made ahead, the release makes it or raises the error."""
        if self._row is not None:
            wait([self._row])
            self._row = None

    def release(self, optimizer: Optimizer, updates: Collection[Vector]) -> bool:
        """Clips and sums what clients sent, releases it, and does the optimizer's step. False for a round that is given up."""
        run = self.private
        self._settle_row()
        run.clear()
        with remedies(REMEDIES):
            run.contribute(len(updates))
        self.total[:] = 0
        for update in updates:
            run.clip.add_rows([update[None, :]], [self.total])
        released = True
        try:
            run.release(self.total, self.noisy)
        except StepReusedError:
            run.burn()
            released = False
        denominator = run.denominator
        assert denominator is not None
        self._advance(optimizer, self.noisy.astype(np.float64) / denominator if released else None)
        self.catch_up(optimizer)
        return released

    def _advance(self, optimizer: Optimizer, gradient: Vector | None) -> None:
        """Does a step and keeps it; without a gradient for one that was given up."""
        gradient = np.zeros(self.dimension) if gradient is None else gradient
        optimizer.advance(self.made, self.model, self.velocity, gradient)
        self.made += 1
        self._save()

    def catch_up(self, optimizer: Optimizer) -> None:
        """Passes the steps that were given up before a restart."""
        while self.made < self.step:
            self._advance(optimizer, None)

    def _open(self, checkpoint: bytes | None) -> PrivateRun:
        journal, key = self.directory / "journal", self.directory / "noise.key"
        # The row of a round is made from hand_out() on, so that none is in what is saved after the round before it.
        held: dict[str, Any] = dict(dimension=self.dimension, arithmetic=self.arithmetic, ahead=0)
        if journal.exists():
            self.key = NoiseKey.read(key)
            return PrivateRun.open(self.mechanism, self.key, journal, checkpoint=checkpoint, **held)
        self.key = NoiseKey.read(key) if key.exists() else NoiseKey.create(key)
        return PrivateRun(self.mechanism, self.key, journal=journal, **held)

    def _save(self) -> None:
        # Model and stream in one file: a crash leaves both as they were or both as they are.
        file = io.BytesIO()
        np.savez(
            file,
            step=np.int64(self.made),
            layout=np.array(json.dumps(self.layout)),
            model=self.model,
            velocity=self.velocity,
            stream=np.frombuffer(self.private.checkpoint_bytes(), np.uint8),
        )
        write_durably(self.directory / "state.npz", file.getvalue())

    def _load(self) -> bytes | None:
        path = self.directory / "state.npz"
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as state:
                layout = [(name, tuple(shape)) for name, shape in json.loads(str(state["layout"]))]
                self.made = int(state["step"])
                self.model, self.velocity = state["model"], state["velocity"]
                checkpoint: bytes = state["stream"].tobytes()
        except (ValueError, KeyError, OSError, EOFError) as damage:
            raise FormatError(f"{path} is damaged: {damage}") from damage
        if layout != self.layout:
            raise BindingError(f"{path} holds the arrays {layout}, but the model now has {self.layout}")
        return checkpoint
