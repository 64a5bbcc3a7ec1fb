"""The library in Rust behind dpmf; import dpmf instead."""

import os
import pathlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, final

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

__all__ = [
    "__version__",
    "Certificate",
    "DurableStream",
    "Ledger",
    "Mechanism",
    "Model",
    "NoiseKey",
    "NoiseStream",
    "Optimum",
    "Plan",
    "PrivacyStatement",
    "PrivateRun",
    "Progress",
    "Sampler",
    "Workload",
    "_BUFFERS",
    "_Clip",
    "_ComingRow",
    "_PULL",
    "_cache_folder",
    "_load_mechanism",
    "_load_workload",
    "_make_plan",
    "_planned_steps",
    "_white_noise",
    "account",
    "audit",
    "calibrate_noise",
    "compare",
    "compose",
    "factorize",
    "load_model",
    "make_mechanism",
    "new_run",
    "phases_delta",
    "phases_epsilon",
    "poisson_delta",
    "poisson_epsilon",
    "poisson_noise_multiplier",
    "train_columns",
]

_Path: TypeAlias = str | os.PathLike[str]
_Unit: TypeAlias = Literal["record", "user"]
_Adjacency: TypeAlias = Literal["replace-with-zero", "add-or-remove", "replace-one"]
_Accountant: TypeAlias = Literal["exact", "zcdp", "rdp", "paper"]
_Arithmetic: TypeAlias = Literal["exact", "float"]
_Output: TypeAlias = Literal["gradient", "iterate"]
_Solver: TypeAlias = Literal["linear", "dense", "newton", "gradient"]
_Origin: TypeAlias = Literal["system", "seeded"]
_Form: TypeAlias = Literal["banded", "blt", "dense", "recall", "state-space", "structured", "toeplitz", "tree"]
_Listener: TypeAlias = Callable[[Progress], Any] | bool | None

__version__: str

_BUFFERS: int
_PULL: float

@final
class Workload:
    """The linear map A from clipped gradients to released iterates.

    >>> import dpmf
    >>> dpmf.Workload.sgd(100, momentum=0.9).steps
    100
    """

    @staticmethod
    def prefix_sum(steps: int) -> Workload:
        """Running sums: SGD with unit step size, or counts over time."""
    @staticmethod
    def sgd(
        steps: int | None = None,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        coupled: bool = False,
        schedule: str | Sequence[float] | ArrayLike | None = None,
        learning_rate: float = 1.0,
        average: str | None = None,
    ) -> Workload:
        """The iterates of SGD.

        m = momentum * m + g, theta = theta - rate * m; nesterov looks ahead; weight_decay is decoupled, or as in
        torch.optim.SGD with coupled=True. schedule is text ("constant", "cooldown:0.25:0.05", "warmup:100+cosine:0.1",
        ...), or one step size for every step, and then steps may be None. Every step size is multiplied by
        learning_rate, which matters only beside weight decay. average is None, "uniform" or "ema:decay".
        """
    @staticmethod
    def from_matrix(matrix: ArrayLike) -> Workload:
        """Any lower-triangular matrix whose diagonal has no zeros."""
    @property
    def steps(self) -> int:
        """Number of steps n."""
    @property
    def is_prefix_sum(self) -> bool:
        """Whether A is the prefix sum."""
    @property
    def momentum(self) -> float | None:
        """Momentum; None for a matrix."""
    @property
    def nesterov(self) -> bool | None:
        """Whether momentum looks ahead; None for a matrix."""
    @property
    def weight_decay(self) -> float | None:
        """Weight decay; None for a matrix."""
    @property
    def coupled(self) -> bool | None:
        """Whether weight decay joins the gradient, as in torch.optim.SGD; None for a matrix."""
    @property
    def average(self) -> str | None:
        """"none", "uniform" or "ema:decay"; None for a matrix."""
    @property
    def learning_rates(self) -> NDArray[np.float64] | None:
        """The step size of every step; None for a matrix."""
    def matrix(self) -> NDArray[np.float64]:
        """A as an array. Cost: n^2 numbers."""
    def apply(self, x: ArrayLike) -> NDArray[np.float64]:
        """A x: the optimizer run on scalar gradients x."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Certificate:
    """Proof of near-optimality: no factorization of the workload has a loss below lower_bound."""

    @property
    def loss(self) -> float:
        """Total squared loss of this factorization, at clip 1 and noise multiplier 1."""
    @property
    def lower_bound(self) -> float:
        """Lower bound on the loss of every factorization."""
    @property
    def gap(self) -> float:
        """loss / lower_bound - 1."""
    @property
    def ratio_to_bound(self) -> float:
        """sqrt(loss / lower_bound)."""
    @property
    def iterations(self) -> int:
        """Evaluations that the solver needed."""
    def __eq__(self, other: object, /) -> bool: ...

@final
class Progress:
    """The state of a solver, which progress callbacks receive."""

    @property
    def stage(self) -> Literal["solving", "fitting"]:
        """What is being done: "solving" for the optimum, or "fitting" a mechanism of few coefficients."""
    @property
    def share(self) -> float | None:
        """The completed share of the current pass over the steps, between 0 and 1; None if there is none."""
    @property
    def iteration(self) -> int:
        """Evaluations so far, of this stage."""
    @property
    def loss(self) -> float:
        """Loss of the best iterate so far."""
    @property
    def lower_bound(self) -> float:
        """Best lower bound so far."""
    @property
    def gap(self) -> float:
        """loss / lower_bound - 1."""
    @property
    def seconds(self) -> float:
        """Time since the start."""

@final
class Optimum:
    """The factorization of least loss, in its dual form."""

    @property
    def v(self) -> NDArray[np.float64]:
        """The dual variable, which proves the lower bound. With several participations, this is one number for each phase, a part of
        the dual variable.
        """
    @property
    def certificate(self) -> Certificate:
        """Loss, lower bound and gap."""
    @property
    def workload(self) -> Workload:
        """The workload."""
    @property
    def solver(self) -> _Solver:
        """The solver that found it: "linear", "dense", "newton" or "gradient"."""
    def dense(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The canonical factorization A = B C in double precision, lower triangular, C of sensitivity 1, as (B, C).

        Cost: O(n^3) time; at most 16384 steps.
        """
    def state_space(
        self, *, buffers: int | None = None, tolerance: float | None = None, progress: _Listener = None
    ) -> Mechanism:
        """The optimum as a stream of a few model-sized buffers: as many as given, or as few as keep the root loss within
        tolerance of the lower bound, 1e-4 by default. progress is as for factorize.
        """
    def dense_mechanism(self) -> Mechanism:
        """The optimum as a dense matrix: no buffers, but every step costs as much as all steps before it.

        Cost: O(n^3) time; at most 16384 steps.
        """

@final
class Ledger:
    """A file that records all releases about the same people, and the (ε, δ) that they must not exceed together.

    You may decide on each release after looking at the earlier ones: a privacy filter keeps to the budget even then.
    record_together is for releases that are decided before any of them is seen, which cost less. Record a release before it is
    made. The file is that of `dpmf ledger`; it is read again in every call, and locked only while it is written.
    """

    def __new__(cls, path: str | os.PathLike[str]) -> Self: ...
    @staticmethod
    def create(
        path: str | os.PathLike[str],
        *,
        epsilon: float,
        delta: float,
        unit: _Unit = "user",
        adjacency: _Adjacency = "replace-with-zero",
    ) -> Ledger:
        """Creates a ledger in a new file. unit is "user" or "record"; adjacency is as for Mechanism.calibrate."""
    def record(self, statement: PrivacyStatement, *, id: str | None = None, what: str = "") -> float:
        """Records one release: a statement such as mechanism.privacy or plan.statement. id is its name, and recording the same id
        again does not count twice; without an id, it gets a name of its own. Raises BudgetError, and records nothing, if it
        exceeds the budget. Returns the ε spent so far.
        """
    def record_together(
        self, statements: Sequence[PrivacyStatement], *, id: str | None = None, what: str = ""
    ) -> float:
        """Records releases that were decided together, before any of them was seen: they compose exactly. None of them may depend on
        another in any way. Their names are id/1, id/2, … Returns the ε spent so far.
        """
    def record_stated(self, epsilon: float, delta: float, *, id: str | None = None, what: str = "") -> float:
        """Records a release that was made by other means, of which only ε and δ are known. Returns the ε spent so far."""
    @property
    def epsilon(self) -> float:
        """ε of the budget."""
    @property
    def delta(self) -> float:
        """δ of the budget."""
    @property
    def unit(self) -> _Unit:
        """The unit of privacy: "user" or "record"."""
    @property
    def adjacency(self) -> _Adjacency:
        """Which data sets are neighbours."""
    @property
    def spent(self) -> float:
        """How much of the budget's ε is used."""
    @property
    def spent_if_fixed(self) -> float:
        """The ε that all releases would have cost if they had been decided beforehand, by exact composition. It does not hold for
        releases that were decided one after another.
        """
    @property
    def releases(self) -> list[dict[str, Any]]:
        """What was recorded, as in the file."""

@final
class PrivacyStatement:
    """A guarantee with everything it depends on; str() gives it in words."""

    @property
    def epsilon(self) -> float:
        """ε."""
    @property
    def delta(self) -> float:
        """δ."""
    @property
    def mu(self) -> float | None:
        """μ of Gaussian differential privacy; None where the mechanism is not Gaussian."""
    @property
    def rho(self) -> float | None:
        """ρ of zero-concentrated differential privacy; None where the mechanism is not Gaussian."""
    @property
    def noise_multiplier(self) -> float:
        """σ: standard deviation of the noise in units of sensitivity times clip."""
    @property
    def noise_std(self) -> float:
        """Standard deviation of the white noise: noise multiplier times sensitivity times clip."""
    @property
    def sensitivity(self) -> float:
        """Sensitivity of the mechanism as deployed."""
    @property
    def clip(self) -> float:
        """Clipping norm of one contribution."""
    @property
    def adjacency(self) -> _Adjacency:
        """Which data sets are neighbours."""
    @property
    def accountant(self) -> _Accountant:
        """How ε follows from the noise."""
    @property
    def unit(self) -> _Unit:
        """The unit of privacy: "user" or "record"."""
    @property
    def participation(self) -> str:
        """How often one unit takes part, in words; to_dict() has the numbers."""
    @property
    def steps(self) -> int:
        """Number of steps."""
    @property
    def key(self) -> _Origin:
        """"system", or "seeded" if the guarantee holds only while a seed is secret."""
    @property
    def covers(self) -> list[str]:
        """What (ε, δ) covers, one sentence each."""
    @property
    def does_not_cover(self) -> list[str]:
        """What (ε, δ) does not cover or assumes, one sentence each."""
    def to_dict(self) -> dict[str, Any]:
        """Everything, as in the JSON of the command line."""
    def __eq__(self, other: object, /) -> bool: ...

@final
class Mechanism:
    """A validated mechanism: its workload, its form as deployed, its participation, and what is known about them.

    Made by dpmf.plan, dpmf.make_mechanism, Optimum.state_space or Mechanism.load. It never changes: calibrate and with_noise
    return a new one. Two mechanisms are equal if their files are equal: the same noise (identity), name, certificate and privacy
    statement.
    """

    @staticmethod
    def load(path: _Path) -> Mechanism:
        """Reads a mechanism file, or the mechanism of a plan, recomputes sensitivity and ε and refuses a file that
        understates them.
        """
    @staticmethod
    def from_bytes(data: bytes) -> Mechanism:
        """Reads what to_bytes wrote, with the checks of load."""
    def save(self, path: _Path) -> None:
        """Writes a safetensors file, completely or not at all."""
    def to_bytes(self) -> bytes:
        """The bytes of the mechanism file."""
    @property
    def identity(self) -> str:
        """What its noise is bound to, 64 hexadecimal digits: the SHA-256 of everything that determines the noise, and of nothing else.

        Streams of one key and run have the same noise if their mechanisms have the same identity.
        """
    @property
    def workload(self) -> Workload:
        """The workload that it was made for."""
    @property
    def steps(self) -> int:
        """Number of steps."""
    @property
    def mechanism(self) -> str | None:
        """Its name with its options, such as "optimal" or "state-space:buffers=4"; None if it has none."""
    @property
    def form(self) -> _Form:
        """How the noise is generated: "banded", "blt", "dense", "recall", "state-space", "structured", "toeplitz" or "tree"."""
    @property
    def participation(self) -> str:
        """The participation that the sensitivity covers, as plan and make_mechanism take it: "single"."""
    @property
    def _participation(self) -> tuple[int, int]:
        """The minimum distance between two steps of one unit, and the largest number of steps that it takes part in."""
    @property
    def sampling(self) -> str:
        """The sampling that the guarantee relies on, in the format of dpmf.Sampler; "none" if it relies on none."""
    @property
    def loss(self) -> float:
        """Total squared loss over all steps, at clip 1 and noise multiplier 1."""
    @property
    def sqrt_loss(self) -> float:
        """Root of the loss."""
    @property
    def max_sqrt_loss(self) -> float:
        """Root of the largest step's loss."""
    @property
    def final_sqrt_loss(self) -> float:
        """Root of the last step's loss."""
    @property
    def sensitivity(self) -> float:
        """Sensitivity of the encoder as deployed, for contributions of unit norm."""
    @property
    def buffers(self) -> int | None:
        """Model-sized float32 arrays that a stream keeps from one step to the next; None for dense rows, which regenerate all earlier noise."""
    @property
    def recalls(self) -> int | None:
        """Earlier rows of noise that a step regenerates; None for dense rows."""
    @property
    def work(self) -> float:
        """Mean number of model-sized multiply-adds a step."""
    @property
    def certificate(self) -> Certificate | None:
        """Loss as deployed against the lower bound for every factorization; None if none was proved."""
    @property
    def privacy(self) -> PrivacyStatement | None:
        """The privacy statement; None before calibration."""
    def per_step_error(self) -> NDArray[np.float64]:
        """Expected squared error of a coordinate in every step, at clip 1 and noise multiplier 1."""
    def matrices(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The factorization as deployed, A = B C, as (B, C). Cost: O(n^2) memory and more time."""
    def coloring(self) -> NDArray[np.float64]:
        """N, the matrix that turns white noise into the noise of the gradients: N C = I and B = A N."""
    def calibrate(
        self,
        epsilon: float,
        delta: float,
        clip: float = 1.0,
        *,
        unit: _Unit = "record",
        adjacency: _Adjacency = "replace-with-zero",
        accountant: _Accountant = "exact",
    ) -> Mechanism:
        """The mechanism with the least noise that gives (ε, δ) when every contribution is clipped to norm clip.

        unit is "user" or "record"; adjacency is "replace-with-zero", "add-or-remove" or "replace-one"; accountant is
        "exact", "zcdp", "rdp" or "paper".
        """
    def with_noise(
        self,
        noise_multiplier: float,
        delta: float,
        clip: float = 1.0,
        *,
        unit: _Unit = "record",
        adjacency: _Adjacency = "replace-with-zero",
        accountant: _Accountant = "exact",
    ) -> Mechanism:
        """The mechanism with a given noise multiplier, and the ε that this gives at δ. Other arguments are as for calibrate."""
    def with_sampling(self, sampling: str) -> Mechanism:
        """The mechanism for units that are sampled in secret: "cyclic-poisson:G:Q", "balls-in-bins:B",
        "reshuffled-bins:B" or "none".

        cyclic-poisson needs an encoder with at most G diagonals. Bins need an encoder that is known to be non-negative, such as
        those of banded, blt and banded-inverse mechanisms. The participation follows from the sampling. An earlier calibration
        and lower bound are dropped: calibrate the result.
        """
    def verify(self) -> Certificate | None:
        """Evaluates the lower bound again from its dual variable, and returns the certificate with it.

        Raises FormatError if the stored bound claims more. None if the mechanism has no bound.
        """
    def check_optimizer(
        self,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        coupled: bool = False,
        learning_rates: Sequence[float] | ArrayLike | None = None,
    ) -> None:
        """Refuses an optimizer other than the one that this mechanism was made for.

        learning_rates are those of the first steps, as many as are known, up to a common factor unless there is weight
        decay. Privacy does not depend on the optimizer; the size of the noise in its iterates does.

        Raises MismatchError, which says how to plan for this optimizer.
        """
    def check_learning_rate(self, step: int, learning_rate: float, first_learning_rate: float) -> None:
        """Refuses a step after the last one, or a learning rate that does not follow the schedule. Steps are counted from zero;
        first_learning_rate is that of the first step.
        """
    def check_steps(self, steps: int) -> None:
        """Refuses a run of more steps than the mechanism has noise for; fewer are always allowed."""
    def check_sampling(self, sampler: str, *, epochs: int = 1) -> None:
        """Refuses a sampler other than the one that the guarantee relies on. If it relies on none, refuses a sampler under which a
        user or record could take part more often than the mechanism covers.

        sampler is "single-epoch" (each takes part in at most one step), "epochs" (each takes part once in every epoch),
        "poisson", "with-replacement", or that of a dpmf.Sampler: "cyclic-poisson:G:Q", "balls-in-bins:B" or "reshuffled-bins:B".
        """
    def plot_error(self, ax: Axes | None = None, **line: Any) -> Axes:
        """Draws the standard deviation of every iterate's error with matplotlib and returns the axes.

        It is for one coordinate, the root of per_step_error, in units of noise multiplier times clip. Pass ax to draw several
        mechanisms into one figure; line goes to matplotlib's plot.
        """
    def _repr_html_(self) -> str:
        """A table of what is known and the curve of the error, for notebooks."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Plan:
    """The mechanism and the sampler with the least error for a budget, and all candidates; made by dpmf.plan.

    Errors are root mean squared errors of an iterate at clip 1: noise multiplier times sensitivity times ‖A N‖_F/√n.
    """

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism to train with, calibrated, with its sampling."""
    @property
    def sampling(self) -> str:
        """The sampling that the guarantee relies on, in the format of dpmf.Sampler; "none" if it relies on none."""
    @property
    def chosen(self) -> dict[str, Any]:
        """What was chosen, as a row: a dictionary with "mechanism", "sampling", "bands", "buffers", "recalls",
        "noise_multiplier", "rmse", "ratio_to_bound" (None where no bound exists), "selector", "estimated", "excluded",
        "reason" and "words".
        """
    @property
    def rows(self) -> list[dict[str, Any]]:
        """All candidates by error, then those that could not be compared: their "rmse" is None, and "reason" says why.

        "excluded" says why a row may not be chosen. The noise of a row with "estimated" is not proved, because the row was not chosen.
        """
    @property
    def dp_sgd(self) -> dict[str, Any]:
        """DP-SGD, independent noise under Poisson sampling, as a row."""
    @property
    def rmse(self) -> float:
        """Root mean squared error of an iterate at clip 1."""
    @property
    def lower_bound_rmse(self) -> float | None:
        """A lower bound on the error of every mechanism without sampling; None if no bound is known."""
    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement."""
    @property
    def steps(self) -> int:
        """Number of steps of all epochs."""
    @property
    def examples(self) -> int:
        """Number of examples, or users, that it was made for."""
    @property
    def batch(self) -> int:
        """Examples, or users, in a batch, on average."""
    @property
    def epochs(self) -> int:
        """Passes over the data."""
    def per_step(self) -> NDArray[np.float64]:
        """Noise of every step's iterate, as a standard deviation at clip 1."""
    def save(self, path: _Path) -> None:
        """Writes the mechanism with its sampling to a safetensors file, completely or not at all; Mechanism.load reads it."""
    def sampler(
        self, key: NoiseKey, *, units: int | None = None, run: str | None = None, start: int = 0
    ) -> Sampler:
        """The sampler that the guarantee relies on.

        key and run are those of the noise. units is the number of examples by default; start is the first step that it yields.

        Raises MismatchError if the plan does not rely on sampling.
        """
    def _repr_html_(self) -> str:
        """Tables of the chosen mechanism and all candidates, and the curve of the error, for notebooks."""

@final
class Model:
    """A model that dpmf trained, with everything that is needed to use it; dpmf.load_model reads one.

    The file is in the safetensors format: its tensors have names and shapes, and one entry of metadata, "dpmf", holds the rest as
    JSON. Anything computed from a private model is as private as the model.
    """

    @property
    def kind(self) -> Literal["lstm", "mlp", "logistic", "regressor"]:
        """Kind of the model: "lstm", "mlp", "logistic" or "regressor"."""
    @property
    def card(self) -> dict[str, Any]:
        """Sizes, input and data of the model, as the file has them."""
    @property
    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The tensors by name, as arrays of float32."""
    @property
    def classes(self) -> list[str] | None:
        """Its classes, in the order of predicted probabilities; None for texts and numbers."""
    @property
    def vocabulary(self) -> list[str] | None:
        """The symbols of a text model; None for others."""
    @property
    def privacy(self) -> dict[str, Any] | None:
        """The privacy statement as a dictionary; None if the model was trained without privacy."""
    @property
    def rehearsed(self) -> dict[str, Any] | None:
        """The settings that the rehearsal on made-up tables chose, as a dictionary; None for a model that was read from a file, or
        if all settings were given.
        """
    @property
    def scores(self) -> dict[str, Any] | None:
        """Scores on the rows that train_table held out, and the trivial model's, as a dictionary; ε does not cover them, and they are
        not saved with the model. None for a model that was read from a file, or if no row was held out.
        """
    def save(self, path: _Path) -> None:
        """Writes the model to a file, which load_model reads."""
    @property
    def statement(self) -> str:
        """The privacy statement as text."""
    @property
    def plan(self) -> str:
        """SHA-256 of the plan it was trained with."""
    def sample(
        self, count: int = 10, *, length: int = 40, start: str = "", temperature: float = 1.0, seed: int = 0
    ) -> list[str]:
        """New texts, drawn token by token; the same for the same seed."""
    def predict(self, rows: Any) -> list[str] | NDArray[np.float64]:
        """The class of every row, or the number as an array.

        `rows` is a data frame or a dictionary of columns, a list of dictionaries, the path of a table, or an array with the
        features as the model reads them.
        """
    def probabilities(self, rows: Any) -> NDArray[np.float64]:
        """Probabilities of every class, a row each, in the order of `classes`; `rows` as for `predict`."""
    def evaluate(self, data: _Path, *, text: str | None = None) -> dict[str, Any]:
        """How good the model is on a table with its label, as a dictionary: accuracy, loss and confusions of classes, errors of
        numbers, or the perplexity of texts, whose column is `text`.

        The figures are of those rows: ε does not cover them.
        """

@final
class NoiseKey:
    """The secret from which all noise of a run is derived.

    Anyone who has it can subtract the noise; without it a run cannot be resumed. It cannot be printed, copied or pickled.
    """

    @staticmethod
    def generate() -> NoiseKey:
        """A new key from the operating system, kept in memory only: the run cannot be resumed after this process."""
    @staticmethod
    def from_seed(seed: int) -> NoiseKey:
        """A key derived from a number, for experiments: private only while the number is secret. To repeat an experiment, also
        pass a name as run= to the stream; without a name, every stream has its own noise.
        """
    @staticmethod
    def create(path: _Path) -> NoiseKey:
        """A new key from the operating system, written to a new file that only its owner may read."""
    @staticmethod
    def read(path: _Path) -> NoiseKey:
        """Reads a key file; refuses one that others may read."""
    @property
    def fingerprint(self) -> str:
        """A name for the key that is safe to publish."""
    @property
    def origin(self) -> _Origin:
        """"system" or "seeded"."""
    def __reduce__(self) -> NoReturn: ...

@final
class NoiseStream:
    """Generates the rows of noise for a model, or for a shard of its coordinates: each row once, in order.

    Row i of coordinate j depends on key, run, mechanism, i and j alone, so shards of any size have the noise that one process
    would have. run is the name of the run: None for a new one, or 32 hexadecimal digits (another stream's .run) for its
    shards or a restored checkpoint. Never use one key and run for two sets of data. With a key from a seed, run may be any
    words, for experiments: every start then has the same noise. output is "gradient" for noise to add to clipped, summed
    gradients, or "iterate" for the noise that results in the iterates. unit_noise=True leaves out the scale.

    arithmetic is "exact", the default for gradient noise, or "float". With "exact", a release is the given sum plus ideal,
    real-valued noise, correctly rounded to a multiple of grid, so the guarantee covers every bit. With "float", noise is made
    and added in single precision, which is faster, but the guarantee does not cover the lowest bits of a release.

    A stream alone does not survive a crash safely; a DurableStream does.

    >>> import dpmf, numpy
    >>> mechanism = dpmf.mechanism(steps=10, epsilon=8, delta=1e-6)
    >>> stream = dpmf.NoiseStream(mechanism, dpmf.NoiseKey.generate(), dimension=1000)
    >>> gradient = numpy.zeros(1000, numpy.float32)
    >>> stream.add_to(gradient)
    0
    """

    def __new__(
        cls,
        mechanism: Mechanism,
        key: NoiseKey,
        *,
        run: str | None = None,
        dimension: int | None = None,
        coordinates: range | None = None,
        output: _Output = "gradient",
        arithmetic: _Arithmetic | None = None,
        unit_noise: bool = False,
    ) -> Self: ...
    def add_to(self, array: NDArray[np.float32] | NDArray[np.float64]) -> int:
        """Adds the next row of noise in place and returns its number, zero-based.

        array is a C-contiguous, writable vector of float32 or float64, as long as the stream has coordinates; it is not
        copied. In exact arithmetic it is taken as the sum that it is, and becomes sum plus noise, correctly rounded to grid.
        """
    def next_row(self) -> NDArray[np.float32]:
        """The next row of noise as a new array."""
    def skip(self) -> int:
        """Skips the next row without releasing it, and returns its number."""
    def skip_to(self, step: int) -> None:
        """Moves forward to a later row; the rows between are never released."""
    @property
    def next_step(self) -> int:
        """The next row, zero-based; equal to steps at the end."""
    @property
    def steps(self) -> int:
        """Number of rows in all."""
    @property
    def coordinates(self) -> range:
        """The coordinates that it makes noise for."""
    @property
    def memory(self) -> int:
        """Bytes of state that it keeps from one step to the next."""
    @property
    def scale(self) -> float:
        """The factor of every row: noise multiplier times sensitivity times clip, or 1."""
    @property
    def arithmetic(self) -> _Arithmetic:
        """"exact" or "float"."""
    @property
    def grid(self) -> float | None:
        """Releases are multiples of it; None in float arithmetic."""
    @property
    def run(self) -> str:
        """The name of the run, 32 hexadecimal digits."""
    @property
    def mechanism(self) -> Mechanism:
        """The mechanism."""
    @property
    def privacy(self) -> PrivacyStatement | None:
        """The privacy statement, with the origin of the key in use; None for unit noise, which promises nothing."""
    def checkpoint(self, path: _Path) -> None:
        """Writes the state, encrypted under the key, to a file, completely or not at all."""
    def checkpoint_bytes(self) -> bytes:
        """The bytes of a checkpoint, for a state dictionary."""
    def restore(self, checkpoint: bytes | _Path) -> None:
        """Continues from a checkpoint, a path or bytes, of the same mechanism, key, run, coordinates and output.

        Only a stream at its first step can be restored: one that has moved would release rows twice.
        """
    def __reduce__(self) -> NoReturn: ...

@final
class PrivateRun:
    """One run of private training: which step comes next, whose batch was handed out for it, how many contributions it has, what a
    mean divides by, and its noise. The adapters for PyTorch, Opacus, JAX and Flower go through it.

        run.follow("what decides the batches", by_step=True)
        run.denominator = 256
        run.hand_out(step, members=len(batch))
        run.contribute(len(batch))              # as often as the batch comes in parts
        run.clip.add_rows([gradients], [sum])   # int64, in units of run.clip.unit
        run.release(sum, released)              # float32: the noisy sum, not divided

    Anything that would let one example count more than the guarantee allows is refused with MismatchError, whose fault is a
    word for programs: more contributions than members ("too-many"), a batch whose step is over, or no batch ("no-batch"), a
    batch of another step ("other-step"), batches in another order than at first ("other-order"), a sampler of another run
    ("sampler-in-use"), no sampler although the guarantee relies on one ("not-sampled"), another denominator
    ("other-denominator"), nothing to release ("nothing").

    Begins a run. dimension is that of the whole model; coordinates is the range whose sums are released here, or ranges has
    several of them. ranks is the number of ranks, whose contributions are added up. With journal, a path where no file
    exists, open() can continue the run.

    ahead is the number of threads that make the noise of the coming step while its gradient is computed, which takes 8 bytes
    per coordinate (4 in float arithmetic); by default half of the machine's, and none for fewer than 32,768 coordinates. With
    0, the noise is made when it is released, with the same bits.

    part says that several ranks hold parts of the model, each with ranges of its own, and release every step together with
    one digest: any of them can then open the journal of any other, also if the model is divided differently.

    Where rows are data, like a batch, ship coming_row(), call hand_over() to record that it leaves, and settle(step, mark) to
    say which sum it was used with. Contributions are counted for the step that is settled next.
    """

    def __new__(
        cls,
        mechanism: Mechanism,
        key: NoiseKey,
        *,
        dimension: int,
        coordinates: range | None = None,
        ranges: Sequence[range] | None = None,
        run: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        arithmetic: Literal["exact", "float"] = "exact",
        ranks: int = 1,
        ahead: int | None = None,
        part: bool = False,
    ) -> Self: ...
    @staticmethod
    def open(
        mechanism: Mechanism,
        key: NoiseKey,
        journal: str | os.PathLike[str],
        *,
        dimension: int,
        coordinates: range | None = None,
        ranges: Sequence[range] | None = None,
        checkpoint: bytes | str | os.PathLike[str] | None = None,
        at: int | None = None,
        arithmetic: Literal["exact", "float"] = "exact",
        ranks: int = 1,
        ahead: int | None = None,
        part: bool = False,
    ) -> PrivateRun:
        """Continues the run of a journal, from a checkpoint (a path or bytes), from the step at, or from the first step.

        Steps in the journal after the checkpoint are repeated with the same sum only; burn() skips one.
        """
    @staticmethod
    def of_journal(journal: str | os.PathLike[str]) -> str:
        """The name of the run that a journal belongs to."""
    def recall(self, order: str | None = None, denominator: float | None = None) -> None:
        """Restores what a saved state holds of the run besides its noise: what decides its batches, and its denominator. Both
        stay as they were.
        """
    def follow(self, order: str, *, by_step: bool, sampler: Sampler | None = None, fresh: bool = False) -> None:
        """Declares what decides the batches, in words that are saved with the run and compared when it is resumed.

        by_step says that each batch belongs to a step, and the guarantee is for it in that step only; otherwise each example comes
        once in all. sampler is the one that draws them, for this run and no other; fresh says that nobody but the caller can have
        named it, so that no earlier run had its draws.
        """
    @property
    def order(self) -> str | None:
        """What decides the batches; None until it is declared."""
    def hand_out(self, step: int, members: int | None = None) -> None:
        """Hands out the batch of a step, or this rank's part of it. members is its size; None if the size is not known."""
    def contribute(self, count: int) -> None:
        """Counts contributions of the batch that was handed out last to the coming step."""
    @property
    def contributions(self) -> int | None:
        """Contributions to the coming step; None if none were counted since the last one."""
    def clear(self) -> None:
        """Forgets the contributions to the coming step, whose sum must be forgotten too."""
    @property
    def denominator(self) -> float | None:
        """What a mean divides by, the planned size of a batch: fixed by the first release. None while nobody said."""
    @denominator.setter
    def denominator(self, value: float) -> None:
        """What a mean divides by, the planned size of a batch: fixed by the first release. None while nobody said."""
    def check_release(self) -> None:
        """Refuses what release() would refuse, before ranks add up their sums."""
    def release(
        self, sum: NDArray[np.int64], released: NDArray[np.float32], digest: Sequence[int] | None = None
    ) -> int:
        """Adds the next row of noise to the sum of all contributions, int64 in units of clip.unit, and writes the noisy sum into
        released, float32. The sum becomes zero. Returns the step, zero-based.

        digest is that of the sums of all ranks, where each holds a part of the model: what digest() gives of each, added up modulo
        2**61 - 1.

        If it is refused, both are as they were.
        """
    def digest(self, sum: NDArray[np.int64]) -> list[int]:
        """Two numbers that identify the sum, and reveal nothing about it without the key."""
    def hand_over(self) -> tuple[int, list[int] | None]:
        """Takes the coming row out of the run: it is on record as handed over, and does not come again. Returns its step, and the mark that
        its sum must have, four words, where the journal has one. Ship it before, and pass it on afterwards.
        """
    def settle(self, step: int, mark: Sequence[int]) -> None:
        """Says which sum the row of a step was used with, by a mark of four words. Steps are settled in order; one that was settled with
        another mark ends the run.
        """
    def give_up(self) -> int:
        """Burns the first step whose row is outstanding; returns it."""
    @property
    def outstanding(self) -> list[int]:
        """Steps whose rows were handed over and which are not settled."""
    def split_row(self) -> tuple[float, int, float]:
        """How the coming row is added to a sum on a device of 32 bits: (unit, shift, grid). With S = G·2**shift + F and the words A and R of
        the row, what is released is (A + G + [F + R >= 2**(shift-1)])·grid; sums are in this unit.
        """
    def mark_salt(self) -> list[int]:
        """Four words of 32 bits by which devices mark their sums; as secret as the key."""
    def fixed_row(self) -> tuple[int, int, int, float]:
        """How the coming row is added to a sum on a device, in integers: (lift, shift, doubt, grid). With T = S·2**lift + W, what is
        released is round(T / 2**shift)·grid, unless T is within doubt of a tie.
        """
    def coming_row(self, threads: int | None = None) -> _ComingRow:
        """The coming row of noise, to be shipped to devices by any thread. threads is the number of threads that ship it beside other
        work; without it, all threads of the machine do.
        """
    def prepare(self) -> None:
        """Makes all of the coming row that is not made yet."""
    def release_elsewhere(
        self, digest: Sequence[int] | None = None, doubtful: Sequence[tuple[int, int]] = ...
    ) -> tuple[int, list[int]]:
        """Releases a step whose sum lies on devices: digest is that of the sum, which a run with a journal needs, and doubtful has
        (coordinate, sum) of each that is in doubt. Returns the step, and what these become in units of the grid.

        Nothing of the step may leave the program before.
        """
    @property
    def needs_sum(self) -> bool:
        """Whether the coming step can be repeated only with the sum itself: a journal of version 0.2 has it."""
    def digest_keys(self, blocks: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys of the digest of a sum: for the places of a block of coordinates, and for some blocks, two numbers below 2**61 each. As
        secret as the key.
        """
    @property
    def ahead(self) -> int:
        """Threads that make the noise of the coming step while its gradient is computed."""
    @property
    def scale(self) -> float:
        """What rows in float arithmetic are multiplied by."""
    @property
    def memory(self) -> int:
        """Bytes of noise that it keeps from one step to the next."""
    def burn(self) -> int:
        """Gives up the coming step, whose contributions are lost: its noise is never used. Returns the step."""
    @property
    def next_step(self) -> int:
        """The step of the next release, counted from zero; equal to steps at the end."""
    @property
    def steps(self) -> int:
        """Number of steps in all."""
    @property
    def recorded_steps(self) -> int:
        """Number of steps in the journal; an earlier step can only be repeated with the same sum, or burned."""
    @property
    def burned(self) -> list[int]:
        """Steps that were burned, in order."""
    @property
    def durable(self) -> bool:
        """Whether it has a journal, and can be resumed."""
    @property
    def coordinates(self) -> range:
        """The coordinates whose sums are released here."""
    @property
    def clip(self) -> _Clip:
        """Clipping as the guarantee counts on it."""
    @property
    def arithmetic(self) -> Literal["exact", "float"]:
        """"exact" or "float"."""
    @property
    def run(self) -> str:
        """The name of the run, 32 hexadecimal digits."""
    @property
    def mechanism(self) -> Mechanism:
        """The mechanism."""
    @property
    def privacy(self) -> PrivacyStatement:
        """The privacy statement, with the origin of the key in use."""
    def checkpoint_bytes(self) -> bytes:
        """The state of the noise, encrypted under the key, for a state dictionary; open() goes on from it beside the journal."""
    def close(self) -> None:
        """Closes the journal, so that another process may open it."""
    def __reduce__(self) -> NoReturn: ...

@final
class _ComingRow:
    """The row of noise of one step, as it is shipped to devices."""

    @property
    def step(self) -> int:
        """The step that it is for."""
    def ship_split(self, place: int, whole: NDArray[np.int32], rest: NDArray[np.uint32]) -> None:
        """Writes numbers of the row from a place on as the two words of split_row(), int32 and uint32. Every tie is decided here, with as
        many digits as it takes.
        """
    def ship(self, place: int, array: NDArray[np.int64] | NDArray[np.float32]) -> None:
        """Writes numbers of the row from a place on, as many as array has: int64 for a run in exact arithmetic, float32 in float.

        Raises StepReusedError where the run has passed the step.
        """

@final
class _Clip:
    """Contributions as whole numbers, in units of a power of two, whose norm is at most the clip.

    Sums of up to most_contributions of them are the same in any order, and one contribution moves them by at most the clip, as
    real numbers. One that is not finite counts as zero.
    """

    most_contributions: ClassVar[int]
    most_charged: ClassVar[float]
    def __new__(cls, norm: float, dimension: int) -> Self: ...
    @property
    def norm(self) -> float:
        """The clip."""
    @property
    def unit(self) -> float:
        """What one stands for in a sum, a power of two."""
    @property
    def target(self) -> float:
        """The norm that longer contributions are scaled to, slightly below the clip."""
    @staticmethod
    def charge(contributions: int, dimension: int, unit: float) -> float:
        """Share of the clip by which to scale down a sum of this many contributions that was computed elsewhere, in arithmetic
        with this relative error, so that one contribution moves the sum by at most the clip.
        """
    def add_rows(
        self, rows: Sequence[NDArray[np.floating[Any]]], sums: Sequence[NDArray[np.int64]], share: float = 1.0
    ) -> NDArray[np.bool_]:
        """Adds clipped contributions to sums in place; returns which were longer than target or not finite.

        rows has one array for each part of the model, of float32 or float64: a contribution a row. sums has one of int64 for each.
        share is the part of the target that these parts are scaled to, where groups of parts are clipped each by itself.
        """

@final
class Sampler:
    """Draws in secret which units take part in which step.

    sampling is "cyclic-poisson:G:Q" (units are put into G parts that take turns, and each unit of the current part takes part
    with probability Q; G = 1 is Poisson sampling), "balls-in-bins:B" (each unit has one of B phases, and takes part at every B-th
    step) or "reshuffled-bins:B" (each unit draws one of B phases anew in every epoch). Key and run are those of the noise; the
    draws are independent of the noise, and must stay as secret. run is None for a new run, or a stream's .run. You can choose a
    name only with a key from a seed.

    The members of a step are a function of key, run, sampling, unit and step alone. So a run can resume at any step (start), and
    a unit that joins or leaves does not affect the others. Iterating yields the members of each step once, from next_step on.
    Divide a mean by expected_batch, never by the number of members.

    >>> import dpmf
    >>> key = dpmf.NoiseKey.generate()
    >>> sampler = dpmf.Sampler("balls-in-bins:60", key, units=60_000, steps=600)
    >>> sampler.expected_batch
    1000.0
    >>> all(700 < len(members) < 1300 for members in sampler)  # nine deviations
    True
    """

    def __new__(
        cls,
        sampling: str,
        key: NoiseKey,
        *,
        units: int,
        steps: int,
        run: str | None = None,
        start: int = 0,
    ) -> Self: ...
    def members(self, step: int) -> NDArray[np.int64]:
        """The members of a step, counted from zero: indices of units in order, perhaps none."""
    def turns(self, unit: int) -> list[int]:
        """The steps in which one unit takes part."""
    @property
    def expected_batch(self) -> float:
        """Mean number of members of a step: divide means by it."""
    @property
    def sampling(self) -> str:
        """The sampling that it draws."""
    @property
    def units(self) -> int:
        """Number of units."""
    @property
    def steps(self) -> int:
        """Number of steps."""
    @property
    def next_step(self) -> int:
        """The next step to be drawn; equal to steps at the end."""
    @property
    def run(self) -> str:
        """The name of the run, 32 hexadecimal digits."""
    def state_dict(self) -> dict[str, str | int]:
        """What load_state_dict() needs to continue; nothing in it is secret."""
    def load_state_dict(self, state: dict[str, str | int]) -> None:
        """Continues where another sampler with the same key, run, sampling, units and steps stopped."""
    def __iter__(self) -> Self: ...
    def __next__(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def __reduce__(self) -> NoReturn: ...

@final
class DurableStream:
    """A NoiseStream with a journal, for training that may crash.

    Before a row is released, its step and a keyed digest of the clipped input are synced to the journal. After a crash, a step in
    the journal is released again only for exactly the same input; burn() gives up a step whose input is lost.

    create() begins a journal, open() continues one.
    """

    @staticmethod
    def create(
        mechanism: Mechanism,
        key: NoiseKey,
        journal: _Path,
        *,
        run: str | None = None,
        dimension: int | None = None,
        coordinates: range | None = None,
        output: _Output = "gradient",
        arithmetic: _Arithmetic | None = None,
    ) -> DurableStream:
        """Begins a journal at a path where none exists."""
    @staticmethod
    def open(
        mechanism: Mechanism,
        key: NoiseKey,
        journal: _Path,
        *,
        checkpoint: bytes | _Path | None = None,
        dimension: int | None = None,
        coordinates: range | None = None,
        output: _Output = "gradient",
        arithmetic: _Arithmetic | None = None,
    ) -> DurableStream:
        """Continues a journal, from a checkpoint (a path or bytes) or from the first step.

        The run is the one in the journal. Steps in the journal after the checkpoint are repeated with the same input only; burn()
        skips one.
        """
    def release(self, array: NDArray[np.float32] | NDArray[np.float64]) -> int:
        """Journals the clipped sum, then adds the next row of noise to it in place; returns the step, zero-based.

        The array is as for NoiseStream.add_to. A step that is repeated after a crash needs the sum as it was before the noise,
        bit for bit.
        """
    def burn(self) -> int:
        """Gives up the next step: its noise is never used, and the stream continues with the step after it."""
    @property
    def next_step(self) -> int:
        """The step of the next release, counted from zero."""
    @property
    def recorded_steps(self) -> int:
        """Number of steps in the journal; an earlier step can only be repeated with the same input, or burned."""
    @property
    def burned(self) -> list[int]:
        """Steps that were burned, in order."""
    @property
    def steps(self) -> int:
        """Number of rows in all."""
    @property
    def coordinates(self) -> range:
        """The coordinates that it makes noise for."""
    @property
    def memory(self) -> int:
        """Bytes of state that it keeps from one step to the next."""
    @property
    def scale(self) -> float:
        """The factor of every row: noise multiplier times sensitivity times clip."""
    @property
    def arithmetic(self) -> _Arithmetic:
        """"exact" or "float"."""
    @property
    def grid(self) -> float | None:
        """Releases are multiples of it; None in float arithmetic."""
    @property
    def run(self) -> str:
        """The name of the run, 32 hexadecimal digits."""
    @property
    def mechanism(self) -> Mechanism:
        """The mechanism."""
    @property
    def privacy(self) -> PrivacyStatement | None:
        """The privacy statement, with the origin of the key in use."""
    def checkpoint(self, path: _Path) -> None:
        """Writes the state, encrypted under the key, to a file, completely or not at all."""
    def checkpoint_bytes(self) -> bytes:
        """The bytes of a checkpoint, for a state dictionary."""
    def close(self) -> None:
        """Closes the journal, so that another process may open it."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: type[BaseException] | BaseException | TracebackType | None) -> None: ...
    def __reduce__(self) -> NoReturn: ...

def factorize(
    workload: Workload,
    *,
    gap: float = 1e-6,
    solver: Literal["auto"] | _Solver = "auto",
    iteration: Literal["anderson", "relaxed", "plain"] = "anderson",
    max_iterations: int = 20000,
    participation: str = "single",
    progress: _Listener = None,
) -> Optimum:
    """Finds the factorization with the least loss, to a certified relative gap.

    solver is "linear" (in the number of steps), "dense" (cubic, for any matrix), "newton" or "gradient" (rivals), or "auto" for the one
    that suits the workload; iteration is "anderson" (accelerated), "relaxed" or "plain". participation says in which steps one user
    or record may take part: "single" for at most one, "epochs:K" for one in each of K epochs, "min-separation:B:K" for at most
    K, any two of them B or more apart.

    progress is called with a Progress after every iteration, on the calling thread; returning False stops the solver
    with StoppedError. Ctrl-C stops it too. Other Python threads continue meanwhile. By default, work of more than two seconds
    shows a line on standard error in a terminal or notebook; True shows it everywhere, False nowhere.

    >>> import dpmf
    >>> optimum = dpmf.factorize(dpmf.Workload.prefix_sum(512))
    >>> optimum.certificate.gap <= 1e-6
    True
    """
def train_columns(
    columns: list[tuple[str, Any]],
    *,
    name: str,
    label: str,
    user: str | None,
    features: list[str] | None,
    exclude: list[str],
    task: str | None,
    classes: list[str] | None,
    schema: _Path | None,
    schema_share: float | None,
    public_share: float | None,
    model: str | None,
    hidden: int,
    epsilon: float,
    delta: float,
    learning_rate: float | None,
    epochs: int | None,
    clients: int | None,
    clip: float | None,
    examples_per_user: int | None,
    hold_out: bool,
    seed: int | None,
) -> Model:
    """Trains a model on columns by name; dpmf.train_table is what people call."""

def load_model(path: _Path) -> Model:
    """Reads a model that `dpmf train` made: its file model.safetensors, or the directory of its run.

    Raises FormatError for a file that is something else or damaged, FileError for one that cannot be read.
    """
def make_mechanism(
    workload: Workload,
    mechanism: str = "optimal",
    *,
    buffers: int | None = None,
    tolerance: float | None = None,
    dense: bool = False,
    gap: float = 1e-6,
    participation: str = "single",
    progress: _Listener = None,
) -> Mechanism:
    """The mechanism with this name, as deployed, with the lower bound for its workload; not calibrated yet.

    mechanism is a name, or a name with options: "optimal", "optimal:dense", "state-space:buffers=4", "tree". "optimal" is
    the optimum as a stream of few buffers, or dense rows where the workload is a matrix.

    For mechanisms that leave the choice, pass one of: buffers, the number of model-sized buffers; tolerance, to use as few as
    keep the root loss within this relative distance of the lower bound (1e-4 by default); or dense, for dense rows that keep no
    buffers but regenerate all earlier noise in every step.

    participation and progress are as for factorize; the stage of a Progress is "solving" and then "fitting".
    """
def compare(
    workload: Workload,
    mechanisms: Sequence[str] | None = None,
    *,
    buffers: Sequence[int] = [2, 3, 4, 6, 8],
    gap: float = 1e-6,
    participation: str = "single",
    progress: _Listener = None,
) -> list[dict[str, Any]]:
    """Compares mechanisms for a workload, each as it would be deployed: a list of dictionaries with
    "mechanism", "sqrt_loss", "max_sqrt_loss", "final_sqrt_loss", "ratio_to_bound", "buffers" (None for dense rows) and
    "work".

    mechanisms are names as for make_mechanism; by default, all of them. Without options, "optimal" and "optimal-prefix" are dense
    rows, and "state-space" is shown with the given numbers of buffers, and with as many as a tolerance of 1e-4 needs. If a
    mechanism cannot be made, such as dense rows for very many steps, it is left out with a warning. participation and progress
    are as for factorize.
    """
def account(
    noise_multiplier: float, delta: float, *, adjacency: _Adjacency = "replace-with-zero"
) -> dict[str, Any]:
    """The ε of a noise multiplier at δ by every accountant, rounded up: a dictionary with "epsilon_exact",
    "epsilon_zcdp", "epsilon_rdp", "epsilon_paper", "mu" and "rho", beside "noise_multiplier", "delta" and "adjacency".
    adjacency is as for Mechanism.calibrate.

    >>> import dpmf
    >>> round(dpmf.account(0.341, 1e-6)["epsilon_exact"], 3)
    17.648
    """
def calibrate_noise(
    epsilon: float, delta: float, *, adjacency: _Adjacency = "replace-with-zero", accountant: _Accountant = "exact"
) -> float:
    """The smallest noise multiplier that gives (ε, δ), rounded up. adjacency and accountant are as for Mechanism.calibrate."""
def compose(noise_multipliers: Sequence[float]) -> float:
    """The noise multiplier of one mechanism that is as private as all the given ones together, rounded down."""
def poisson_epsilon(
    noise_multiplier: float, rate: float, steps: int, delta: float, *, width: float = 0.001
) -> tuple[float, float]:
    """ε at δ of steps that draw each record in secret with probability rate, as in DP-SGD. Returns a pair (lower, upper), no further
    apart than width if the arithmetic allows it; the upper end is the guarantee.

    It holds for records added, removed, or replaced with zero. A rate of 1 is the Gaussian mechanism.

    >>> import dpmf
    >>> lower, upper = dpmf.poisson_epsilon(1.0, 0.01, 1000, 1e-5)
    >>> round(upper, 2)
    1.83
    """
def poisson_delta(
    noise_multiplier: float, rate: float, steps: int, epsilon: float, *, width: float = 0.001
) -> tuple[float, float]:
    """δ at ε of steps that draw each record in secret with probability rate: a pair (lower, upper), as narrow as a width in ε allows."""
def poisson_noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The smallest noise multiplier that gives (ε, δ) in steps that draw each record in secret with probability rate, rounded up by
    about 1e-5 of it.

    >>> import dpmf
    >>> round(dpmf.poisson_noise_multiplier(1.0, 1e-5, 1 / 60, 600), 3)
    1.738
    """
def phases_epsilon(
    phases: Sequence[tuple[float, float, int]], delta: float, *, width: float = 0.001
) -> tuple[float, float]:
    """ε at δ of phases of sampled steps together, each a triple of noise multiplier, rate and number of steps: a pair
    (lower, upper) as of poisson_epsilon.
    """
def phases_delta(
    phases: Sequence[tuple[float, float, int]], epsilon: float, *, width: float = 0.001
) -> tuple[float, float]:
    """δ at ε of phases of sampled steps together: a pair (lower, upper) as of poisson_delta."""
def audit(
    mechanism: Mechanism,
    *,
    trials: int = 100000,
    adversary: Literal["worst-column", "adaptive", "paper"] = "worst-column",
    delta: float | None = None,
    dimension: int = 2,
    confidence: float = 0.999,
    seed: int = 0,
) -> dict[str, Any]:
    """Plays the adaptive privacy game against a calibrated mechanism and bounds its ε from below.

    Returns a dictionary with "epsilon_lower" (for a Gaussian trade-off), "epsilon_assumption_free", "promise",
    "refuted" and more. An audit can refute a guarantee, but never prove one.

    adversary is "worst-column", "adaptive" or "paper".

    If a mechanism relies on sampling, several points of the promised curve are tested with the deployed sampler: "rows" has
    "epsilon", "delta" and "delta_lower" of each. adversary, delta and dimension are then not used.
    """
def new_run() -> str:
    """A new name for a run, 32 hexadecimal digits from the operating system."""
def _load_mechanism(data: bytes) -> Mechanism:
    """What pickle calls."""
def _load_workload(optimizer: str | None, values: ArrayLike) -> Workload:
    """What pickle calls."""
def _make_plan(
    workload: Workload,
    *,
    examples: int,
    batch: int,
    epochs: int,
    epsilon: float,
    delta: float,
    clip: float,
    buffers: int,
    trusted: bool,
    unit: _Unit,
    adjacency: _Adjacency,
    pull: float = 0.0,
    folder: _Path | None = None,
    progress: Callable[[str], Any] | bool | None = None,
) -> Plan:
    """The call behind dpmf.plan."""
def _cache_folder() -> pathlib.Path | None:
    """The user's folder for the fits of plans; None where neither XDG_CACHE_HOME nor HOME names one."""
def _planned_steps(examples: int, batch: int, epochs: int) -> int:
    """Steps of all epochs."""
def _white_noise(stream: NoiseStream, row: int) -> NDArray[np.float32] | NDArray[np.float64]:
    """Row `row` of the white noise Z behind a stream, without scale, for those who check it."""
