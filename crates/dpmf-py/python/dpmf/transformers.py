"""Hugging Face: a Trainer whose training is private.

    - from transformers import Trainer
    + from dpmf.transformers import PrivateTrainer

    - trainer = Trainer(model, arguments, train_dataset=data)
    + trainer = PrivateTrainer(model, arguments, train_dataset=data, epsilon=3, delta=1e-5, clip=1.0)
      trainer.train()
      trainer.save_model()

The plan follows from the TrainingArguments: epochs, batch size times accumulation times ranks, optimizer and learning rates. The
gradient of each example is that of the loss over its own tokens, clipped to clip. A step sums the gradients of the batch that the
plan's sampler draws, and adds one row of noise. Saved models have privacy.txt and privacy.json beside them.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ._requires import require

require("dpmf.transformers", "torch", "transformers")

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss

from ._announce import announced, say
from ._checks import statement_of
from ._core import Mechanism, NoiseKey, Plan, PrivacyStatement, Sampler, _planned_steps
from ._errors import MismatchError
from ._plan import NOISE_DECAY
from .torch import MOST_ROWS, Cohorts, PrivateOptimizer, SampledBatches, UncheckedDataWarning
from .torch._gradients import NotVectorizedError
from .torch._random import random_numbers_kept, seed_all
from .torch._rows import EXAMPLES

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["PrivateTrainer", "UncoveredChoiceWarning"]

#: Where a run keeps its key, journal and mechanism, in output_dir. Uploads to the Hub leave out what begins with an underscore.
FOLDER = "_dpmf"


class UncoveredChoiceWarning(UserWarning):
    """A choice depends on data; ε covers it only if that data is public."""


#: What cannot be private, or is not known to be: a name in TrainingArguments, the values that are right, and what to do.
_REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "train_sampling_strategy",
        ("random",),
        "the guarantee relies on the plan's own sampler, and does not cover batches that are drawn in another way: remove it",
    ),
    ("group_by_length", (False,), "the guarantee relies on the plan's own sampler: remove it"),
    (
        "dataloader_drop_last",
        (False,),
        "batches are drawn from all of the data, and none is dropped: remove it",
    ),
    (
        "auto_find_batch_size",
        (False,),
        "a run that restarts with another batch size would release its first steps twice: set per_device_train_batch_size, which "
        "determines the memory of a step",
    ),
    (
        "fp16",
        (False,),
        "loss scaling makes every gradient too long before it is clipped: train with bf16=True, which needs no scaling",
    ),
    (
        "activation_checkpointing",
        (False,),
        "per-example gradients are computed with torch.func, which does not support activation checkpoints: use a smaller "
        "per_device_train_batch_size",
    ),
    (
        "gradient_checkpointing",
        (False,),
        "per-example gradients are computed with torch.func, which does not support activation checkpoints: use a smaller "
        "per_device_train_batch_size",
    ),
    ("torch_compile", (False,), "per-example gradients are computed from the module itself, which is not compiled: remove it"),
    ("use_liger_kernel", (False,), "its kernels do not support per-example gradients: remove it"),
    ("deepspeed", (), "it sums gradients that are not clipped: remove it, and start several ranks with torchrun"),
    ("fsdp", ([], ""), "it sums gradients that are not clipped: shard with fully_shard and train with dpmf.torch"),
    (
        "include_num_input_tokens_seen",
        ("no", False),
        "the number of tokens depends on which examples were drawn, which is secret: remove it",
    ),
]


def _check_arguments(args: TrainingArguments) -> None:
    """Refuses what would break the guarantee."""
    for name, right, remedy in _REFUSED:
        value = getattr(args, name, None)
        if value is not None and value not in right:
            raise MismatchError(f"{name} is {value!r} in the TrainingArguments, but {remedy}")
    if str(getattr(args.optim, "value", args.optim)).startswith(("lomo", "adalomo")) or "layerwise" in str(args.optim):
        raise MismatchError(
            f"optim is {args.optim!r}, which steps during backward(), on gradients without noise: use adamw_torch or sgd"
        )
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise MismatchError(
            f"lr_scheduler_type is {args.lr_scheduler_type!r}, whose learning rates depend on losses, but a plan needs them in "
            "advance: use linear, cosine or another schedule that is known before training"
        )
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) in ("checkpoint", "all_checkpoints"):
        raise MismatchError(
            f"hub_strategy is {args.hub_strategy!r}, but checkpoints hold losses on the training data that no noise covers: use "
            '"every_save" or "end"'
        )
    if args.load_best_model_at_end:
        warnings.warn(
            "load_best_model_at_end chooses by eval_dataset: ε does not cover that, unless the data is public",
            UncoveredChoiceWarning,
            stacklevel=4,
        )
    if args.max_grad_norm not in (0.0, 1.0, None):
        warnings.warn(
            f"max_grad_norm={args.max_grad_norm} is not used: the gradient of every example is clipped to clip=…",
            stacklevel=4,
        )


def _check_dataset(dataset: Any) -> int:
    """The number of examples."""
    if dataset is None:
        raise ValueError("train_dataset is not given, but the plan needs the number of examples")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise MismatchError(
            f"train_dataset is a {type(dataset).__name__}, which cannot be read by index: pass a data set that has a length and an index"
        )
    return len(dataset)


def _check_collator(dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
    """Refuses a collator that writes something of other examples into the row of one, as mixup does.

    The row of an example is compared with the one that it has beside copies of itself, with the same random numbers.
    """

    def rows(examples: list[Any], seed: int) -> dict[str, torch.Tensor]:
        seed_all(seed)
        made = collate(copy.deepcopy(examples))
        return {name: value for name, value in made.items() if isinstance(value, torch.Tensor) and len(value) == len(examples)}

    with random_numbers_kept():
        some = [dataset[index] for index in range(min(len(dataset), EXAMPLES))]
        last = len(some) - 1
        try:
            once, again, anew = rows(some, 0), rows(some, 0), rows(some, 1)
            if any(not _equal(once[name], again[name]) for name in once):
                warnings.warn(
                    "data_collator draws random numbers of its own, so it could not be checked that each row depends on its own example "
                    "alone, and the guarantee relies on that",
                    UncheckedDataWarning,
                    stacklevel=2,
                )
                return
            # Only the first row is sure to get the same random numbers, whatever the others draw.
            draws = any(not _equal(once[name], anew[name]) for name in once)
            backward = rows(some[::-1], 0)
            for place, own in enumerate(some):
                others = some[:place] + some[place + 1 :]
                copies = {seed: rows([own] * len(some), seed) for seed in range(3 if draws else 1)}
                looks = [(0, rows([own, *others], seed), seed) for seed in copies]
                if not draws:
                    looks += [(place, once, 0), (last - place, backward, 0), (last, rows([*others, own], 0), 0)]
                for row, beside, seed in looks:
                    alone = copies[seed]
                    if draws and any(beside[name].shape != alone[name].shape for name in beside):
                        continue  # others are longer, and more is drawn
                    for name in beside:
                        if not _equal_but_for_padding(beside[name][row], alone[name][row]):
                            raise MismatchError(
                                f"data_collator changes {name} of an example when other examples are in the batch: an example that is in the "
                                "rows of others, as with mixup, counts in each of them. Let every row depend on its own example alone"
                            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as failed:
            if isinstance(failed, MismatchError):
                raise
            warnings.warn(
                f"data_collator fails for copies of one example ({type(failed).__name__}: {failed}), so that it could not be checked that "
                "each row depends on its own example alone: the guarantee counts on that",
                UncheckedDataWarning,
                stacklevel=2,
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _equal_but_for_padding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are equal as far as both go, from the left or from the right."""
    sizes = [min(pair) for pair in zip(one.shape, other.shape)]
    left = tuple(slice(0, size) for size in sizes)
    right = [tuple(slice(length - size, length) for length, size in zip(each.shape, sizes)) for each in (one, other)]
    return one.dim() == other.dim() and (_equal(one[left], other[left]) or _equal(one[right[0]], other[right[1]]))


class PrivateTrainer(Trainer):
    """A transformers.Trainer that trains with (ε, δ)-differential privacy for every example of train_dataset.

    epsilon and delta are the budget of the whole run, and clip the norm to which the gradient of every example is clipped. All other
    arguments are those of Trainer. An example is an entry of train_dataset: if several texts are packed into one, the guarantee
    is for the whole entry.

    The loss of an example is what compute_loss returns for a batch of this example alone, without num_items_in_batch: for models
    of transformers, the mean over its own tokens. Padding does not affect it. Micro-batches of per_device_train_batch_size
    examples are differentiated at once. On average, gradient_accumulation_steps of them make a batch; sampled batches differ in
    size, and means divide by the planned size. max_grad_norm is not used.

    plan is a dpmf.Plan, or a mechanism that was saved from one, and replaces epsilon, delta and clip. With sampling="none", the
    guarantee does not rely on secret draws. noise_decay is as in dpmf.plan.

    clipping is as in dpmf.torch.PrivateOptimizer.accumulate: "auto" computes per-example gradients if those of a micro-batch take
    at most 512 MiB; otherwise it uses ghost clipping, provided that the loss is computed from the model's outputs and the labels.

    A run that saves checkpoints keeps its key, readable by its owner alone, its journal and its mechanism in output_dir/_dpmf.
    train(resume_from_checkpoint=True) continues it, with the same bits as without an interruption. Keep the folder as secret as
    the data. Pass key and journal to keep them elsewhere, and experiment for runs that release nothing; all three are as in
    dpmf.torch.PrivateOptimizer. A trainer trains once.

    Losses on the training data are logged as unprotected_loss: ε does not cover them, nor losses on eval_dataset.

    Guarantee: the statement in privacy, for every example of train_dataset.
    """

    args: TrainingArguments
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        clip: float = 1.0,
        plan: Plan | Mechanism | None = None,
        sampling: Literal["auto", "none"] = "auto",
        noise_decay: float = NOISE_DECAY,
        key: NoiseKey | None = None,
        journal: str | os.PathLike[str] | None = None,
        experiment: str | None = None,
        clipping: Literal["auto", "per-example", "ghost"] = "auto",
        **named: Any,
    ) -> None:
        if clipping not in ("auto", "per-example", "ghost"):
            raise ValueError(f'clipping is {clipping!r}, but it must be "auto", "per-example" or "ghost"')
        if plan is None and (epsilon is None or delta is None):
            raise ValueError("epsilon or delta is missing: pass PrivateTrainer(…, epsilon=…, delta=…), or plan=")
        if plan is not None and (epsilon is not None or delta is not None):
            raise ValueError("plan has its own epsilon and delta: remove epsilon and delta")
        if args is not None:
            _check_arguments(args)
        if named.get("train_dataset") is not None:
            _check_dataset(named["train_dataset"])
        if hasattr(model, "_orig_mod"):
            raise MismatchError(
                "the model was compiled with torch.compile, but per-example gradients need the original module: pass the model that was "
                "not compiled"
            )
        super().__init__(model, args, *arguments, **named)
        if isinstance(self.optimizer, PrivateOptimizer):
            raise MismatchError(
                "optimizers has a PrivateOptimizer, whose noise is not that of this trainer's plan: pass the optimizer inside, as in "
                "optimizers=(torch.optim.AdamW(…), scheduler)"
            )
        if args is None:
            _check_arguments(self.args)
        if self.args.n_gpu > 1:
            raise MismatchError(
                f"there are {self.args.n_gpu} devices in one process, whose gradients would be summed before they are clipped: start one "
                "process a device with torchrun"
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise MismatchError("accelerate is set up for DeepSpeed or FSDP, which sum gradients that are not clipped: leave them out")
        if getattr(self.accelerator, "parallelism_config", None) is not None or getattr(
            self, "is_distributed_loading_by_transformers", False
        ):
            raise MismatchError(
                "the model or its sequences are cut over ranks (tensor, context or sequence parallelism), but every rank has examples of its "
                "own, which would be mixed: leave parallelism_config and distributed_config out"
            )
        if getattr(self.accelerator, "scaler", None) is not None:
            raise MismatchError(
                "accelerate is set up for fp16, where a loss is scaled and makes every gradient too long before it is clipped: train with "
                "bf16=True, which needs no scaling"
            )
        self._budget: dict[str, Any] = dict(epsilon=epsilon, delta=delta, clip=clip)
        self._sampling, self._noise_decay = sampling, noise_decay
        self._key, self._journal, self._experiment = key, journal, experiment
        #: What was planned, or given as plan=; None before training, and for a run that was resumed.
        self.plan: Plan | None = plan if isinstance(plan, Plan) else None
        #: The mechanism in use; None before training.
        self.mechanism: Mechanism | None = plan.mechanism if isinstance(plan, Plan) else plan
        self._told: PrivacyStatement | None = None
        #: The micro-batches of a step on average; what training gives at once is a cohort of them.
        self._accumulation = self.args.gradient_accumulation_steps
        self._resumes = self._begun = False
        self._batches: Cohorts | SampledBatches | None = None
        self._losses: _Loss | None = None
        self._outputs: _Outputs | None = None
        self._clipping = clipping
        #: Whether the loss follows from the outputs and the labels; None before that was seen.
        self._as_outputs: bool | None = None
        self._vectorize = True
        # The loop of Trainer takes one batch a step, which is a whole cohort, begins epochs where the run is, and leaves clipping to us.
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.args.ignore_data_skip = True
        self.args.max_grad_norm = 0.0
        self.add_callback(_Epochs)

    @property
    def privacy(self) -> PrivacyStatement | None:
        """The privacy statement of the run; None before training."""
        return self._told

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The planned size of a cohort, over all ranks."""
        return int(args.per_device_train_batch_size * self._accumulation * args.world_size)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused: every trial would be a run of its own on the same data."""
        raise MismatchError(
            "hyperparameter_search trains on the private data once for each trial, and their ε add up: search on public data, or give "
            "each trial a budget of its own and record it with dpmf.Ledger"
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any) -> Any:
        """As in Trainer. A trainer trains once."""
        if self._begun:
            raise MismatchError(
                "this trainer has already trained: a second run releases more about the same data, so make a new trainer with a new "
                "output_dir and a budget of its own"
            )
        self._resumes = bool(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *arguments, **named)
        finally:
            if isinstance(self.optimizer, PrivateOptimizer):
                self.optimizer.close()

    # ---- The run

    @property
    def _grouped(self) -> bool:
        return bool(self.args.world_size > 1)

    @property
    def _durable(self) -> bool:
        """Whether what is saved can be resumed."""
        saves = str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) != "no"
        return self._journal is not None or (saves and not self.args.save_only_model)

    def _folder(self) -> pathlib.Path:
        return pathlib.Path(self.args.output_dir) / FOLDER

    def _journal_path(self) -> pathlib.Path | None:
        """The journal of this rank."""
        if not self._durable:
            return None
        path = self._folder() / "journal" if self._journal is None else pathlib.Path(self._journal)
        return path.with_name(f"{path.name}-{self.args.process_index}") if self._grouped else path

    def _prepare_run(self) -> None:
        """Key, mechanism and place of the journal of a new run, or of one that goes on; the first rank makes what is new."""
        journal = self._journal_path()
        if self._resumes and (journal is None or not journal.exists()):
            raise MismatchError(
                f"there is no journal at {journal}, and only a journal shows that no noise is released twice: resume with the output_dir "
                "that the run began with, and with checkpoints that hold more than the model"
            )
        if not self._resumes and journal is not None and journal.exists():
            raise MismatchError(
                f"{journal} belongs to a run that has begun: continue it with train(resume_from_checkpoint=True), or choose another "
                "output_dir. Two runs on the same data reveal more than one"
            )
        with self.args.main_process_first():
            if self._durable and self._key is None:
                path = self._folder() / "key"
                if not self._resumes and self.args.process_index == 0 and not path.exists():
                    self._folder().mkdir(parents=True, exist_ok=True, mode=0o700)
                    self._key = NoiseKey.create(path)
                else:
                    self._key = NoiseKey.read(path)
            self._find_mechanism()
        mechanism = self.mechanism
        assert mechanism is not None
        _, _, steps = self._size()
        if mechanism.steps != steps:
            raise MismatchError(
                f"the TrainingArguments ask for {steps} steps, but the mechanism is for {mechanism.steps}: "
                + ("resume with the batch size, epochs and data that the run began with" if self._resumes else "plan for these")
            )
        told = statement_of(mechanism)
        asked = {name: value for name, value in self._budget.items() if self._budget["epsilon"] is not None}
        differs = [f"{name}={value}" for name, value in asked.items() if getattr(told, name) != value]
        if differs and (told.epsilon > asked["epsilon"] or told.delta != asked["delta"] or told.clip != asked["clip"]):
            raise MismatchError(
                f"{', '.join(differs)} differs from what the run began with ({told.epsilon:g}, {told.delta:g}, clip {told.clip:g}): resume with "
                "the same budget"
            )
        self._told = told

    def _size(self) -> tuple[int, int, int]:
        """Batch, epochs and steps, as the arguments say."""
        args, examples = self.args, _check_dataset(self.train_dataset)
        batch = min(self.get_total_train_batch_size(args), examples)
        if args.max_steps > 0:
            per_epoch = _planned_steps(examples, batch, 1)
            epochs, rest = divmod(args.max_steps, per_epoch)
            if rest:
                raise MismatchError(
                    f"max_steps is {args.max_steps}, but an epoch has {per_epoch} steps, and plans are for whole epochs: pass "
                    f"num_train_epochs, or max_steps={max(epochs, 1) * per_epoch}"
                )
        else:
            epochs = int(args.num_train_epochs)
            if epochs != args.num_train_epochs or epochs < 1:
                raise MismatchError(f"num_train_epochs is {args.num_train_epochs}, but plans are for whole epochs: pass a whole number")
        return batch, epochs, _planned_steps(examples, batch, epochs)

    def _find_mechanism(self) -> None:
        """The mechanism of the run: the one that was kept or given, or that of a new plan."""
        kept = self._folder() / "mechanism.safetensors"
        if self.mechanism is None and kept.exists() and self._durable:
            self.mechanism = Mechanism.load(kept)
        if self.mechanism is None:
            batch, epochs, steps = self._size()
            optimizer = super().create_optimizer()
            self.plan = announced(
                examples=len(self.train_dataset),
                batch=batch,
                epochs=epochs,
                optimizer=optimizer,
                schedule=self._scheduler(steps),
                sampling=self._sampling,
                noise_decay=self._noise_decay,
                unit="record",
                **self._budget,
            )
            self.mechanism = self.plan.mechanism
        if self._durable and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.mechanism.save(kept)

    def _scheduler(self, steps: int) -> Any:
        """The scheduler that training will have, for its learning rates."""
        given = self.lr_scheduler
        scheduler = self.create_scheduler(num_training_steps=steps)
        if given is None:
            self.lr_scheduler = None
        return scheduler

    # ---- What Trainer asks for

    def get_train_dataloader(self) -> Any:
        """Cohorts as the plan's sampler draws them, each a list of micro-batches; one loop is an epoch."""
        _check_dataset(self.train_dataset)
        self._prepare_run()
        return _CohortLoader(self)

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer of the TrainingArguments, or the one that was given, with noise."""
        if isinstance(self.optimizer, PrivateOptimizer):
            return self.optimizer
        if self._told is None or self.mechanism is None:
            raise MismatchError(
                "nothing was planned: an optimizer is made by train(), and get_train_dataloader() must return what PrivateTrainer's own does, "
                "because the guarantee relies on the plan's sampler"
            )
        inner = self.optimizer if self.optimizer is not None else super().create_optimizer(model)
        self._begun = True
        self.optimizer = PrivateOptimizer(
            inner,
            self.mechanism,
            key=self._key,
            experiment=self._experiment,
            journal=self._journal_path(),
            group=True if self._grouped else None,
        )
        # For accelerate, which would put it into a wrapper of its own.
        self.optimizer._is_accelerate_prepared, self.optimizer.step_was_skipped = True, False
        if not self._resumes:
            self._told = self.optimizer.privacy
        return self.optimizer

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """The model itself: sums over ranks are the optimizer's, and DistributedDataParallel would add what is not clipped."""
        if training:
            self.accelerator.prepare_model(model, evaluation_mode=True)
        return model

    def _cohorts(self) -> Iterator[_Cohort]:
        """The cohorts of an epoch, or of what is left of it."""
        if not isinstance(self.optimizer, PrivateOptimizer) or self.mechanism is None:
            raise MismatchError(
                "batches are drawn only during training: to look at one before, collate entries of train_dataset, as in "
                "data_collator([train_dataset[0], train_dataset[1]])"
            )
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        args = self.args
        if self._batches is None:
            _check_collator(dataset, collate)
            self._batches = self._made_batches(self.mechanism, self.optimizer)
        loader = DataLoader(
            dataset,
            batch_sampler=self._batches,
            collate_fn=_MicroBatches(collate, args.per_device_train_batch_size),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=args.dataloader_prefetch_factor,
            # Of its own: otherwise every loop would draw from the numbers that dropout uses, and a resumed run has more loops.
            generator=torch.Generator().manual_seed(args.seed + self.optimizer.next_step),
        )
        cohorts: Iterator[_Cohort] = self.optimizer.batches(loader)
        return cohorts

    def _made_batches(self, mechanism: Mechanism, optimizer: PrivateOptimizer) -> Cohorts | SampledBatches:
        args, (batch, epochs, steps) = self.args, self._size()
        ranks = dict(rank=args.process_index, world_size=args.world_size) if self._grouped else {}
        length = len(self.train_dataset)
        if mechanism.sampling == "none":
            # The order need not be secret.
            seed = args.seed if args.data_seed is None else args.data_seed
            return Cohorts(length, batch, epochs=epochs, seed=seed, **ranks)
        sampler = Sampler(mechanism.sampling, optimizer._noise.key, units=length, steps=steps, run=optimizer.run)
        return SampledBatches(sampler, epochs=epochs, **ranks)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Adds the clipped gradients of a cohort to the coming step; returns the mean of its losses, for your eyes only."""
        optimizer = self.optimizer
        if not isinstance(inputs, list) or not all(isinstance(micro, _Micro) for micro in inputs):
            raise MismatchError(
                f"a batch is a {type(inputs).__name__} that PrivateTrainer did not draw, but the guarantee relies on the plan's own sampler: "
                "do not override get_train_dataloader()"
            )
        self.model.train()
        if self._losses is None:
            self._losses, self._outputs = _Loss(self.model, self._loss_of_one), _Outputs(self.model)
        total, examples = 0.0, 0
        for micro in inputs:
            seen = self._accumulate(optimizer, micro.examples, dict(self._prepare_inputs(micro.batch)))
            total, examples = total + seen.unprotected_loss * seen.examples, examples + seen.examples
        if not examples:
            optimizer.add_sum({}, 0)
        return torch.tensor(total / max(examples, 1), device=self.args.device)

    def _accumulate(self, optimizer: PrivateOptimizer, examples: int, batch: dict[str, Any]) -> Any:
        batch = {name: value for name, value in batch.items() if value is not None}
        lengths = {len(value) if isinstance(value, torch.Tensor) and value.dim() else None for value in batch.values()}
        if lengths != {examples}:
            shapes = ", ".join(f"{name} {tuple(getattr(value, 'shape', ()))}" for name, value in batch.items())
            raise MismatchError(
                f"data_collator made {shapes} of {examples} examples, but every tensor needs one entry for each example that comes "
                "from this example alone: use a collator that pads, and neither flattens nor packs"
            )
        assert self._losses is not None and self._outputs is not None
        if self._clips_by_layers(batch):
            labels = batch.pop("labels")
            with self.compute_loss_context_manager():
                return optimizer.accumulate(
                    self._outputs, self._loss_of_outputs, batch, labels, chunk=max(examples, 1), clipping="ghost"
                )
        while True:
            try:
                with self.compute_loss_context_manager():
                    return optimizer.accumulate(
                        self._losses, _as_it_is, batch, chunk=max(examples, 1), vectorize=self._vectorize
                    )
            except NotVectorizedError as failed:
                if not self._simplify():
                    raise
                why = str(failed).partition("(")[2].partition(")")[0]
                if not self._vectorize:
                    say(f"gradients are computed one example at a time, which is slow, because vmap does not support this model ({why})")

    def _clips_by_layers(self, batch: dict[str, Any]) -> bool:
        """Whether gradients of examples are not made: decided once, by sizes that a resumed run has too."""
        if self._clipping == "auto":
            trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            small = 4 * trained * self.args.per_device_train_batch_size <= MOST_ROWS
            self._clipping = "per-example" if small or not self._follows_from_outputs(batch) else "ghost"
        elif self._clipping == "ghost" and not self._follows_from_outputs(batch):
            raise MismatchError(
                'clipping="ghost" needs a loss of the model\'s outputs and the labels, but compute_loss computes another one for an '
                'example: pass compute_loss_func=, or clipping="per-example"'
            )
        return self._clipping == "ghost"

    @torch.no_grad()
    def _follows_from_outputs(self, batch: dict[str, Any]) -> bool:
        """Whether the loss of an example is that of its outputs and labels; seen once, for the first ones."""
        if self._as_outputs is None and "labels" in batch:
            self.model.eval()
            try:
                for index in range(min(len(batch["labels"]), EXAMPLES)):
                    one = {name: value[index : index + 1] for name, value in batch.items()}
                    expected = float(self._loss_of_one(self.model, dict(one)))
                    labels = one.pop("labels")
                    found = float(self._loss_of_outputs(self.model(**one), labels))
                    if math.isfinite(expected):  # otherwise the example has no labels, and tells nothing
                        same = abs(expected - found) <= 1e-4 * max(1.0, abs(expected))
                        self._as_outputs = same and self._as_outputs is not False
            except (AttributeError, KeyError, TypeError, ValueError):
                self._as_outputs = False
            finally:
                self.model.train()
        return self._as_outputs is not False

    def _loss_of_outputs(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """As in compute_loss."""
        loss: torch.Tensor
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        elif self.label_smoother is not None:
            loss = self.label_smoother(outputs, labels, shift_labels=self.model.loss_function is ForCausalLMLoss)
        else:
            logits = outputs["logits"]
            more = dict(pooled_logits=logits, vocab_size=logits.shape[-1], config=self.model.config)
            loss = self.model.loss_function(logits=logits, labels=labels, **more)
        return loss

    def _simplify(self) -> bool:
        """Takes another way to the gradients of single examples, where vmap fails: attention that it knows, then one by one."""
        if not self._vectorize:
            return False
        if _attention(self.model) not in (None, "eager") and hasattr(self.model, "set_attn_implementation"):
            self.model.set_attn_implementation("eager")
            if _attention(self.model) == "eager":
                return True
        self._vectorize = False
        return True

    def _loss_of_one(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        # Without num_items_in_batch, which is of others too.
        loss: torch.Tensor = self.compute_loss(model, inputs, num_items_in_batch=None)
        return loss

    def _get_grad_norm(self, *_: Any, **__: Any) -> None:
        """No gradient of a step is clipped as a whole, so there is nothing to log."""

    def floating_point_ops(self, inputs: Any) -> int:
        """0, because their number depends on who was drawn."""
        return 0

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """As in Trainer, with ε of the whole run, and with losses on the training data named for what they are."""
        for name in ("loss", "train_loss"):
            if name in logs:
                logs[f"unprotected_{name}"] = logs.pop(name)
        if self._told is not None and not any(name.startswith(("eval_", "test_")) for name in logs):
            logs["epsilon"], logs["delta"] = self._told.epsilon, self._told.delta
        super().log(logs, *arguments, **named)

    # ---- What is saved

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self._told is not None and self.args.should_save:
            folder = pathlib.Path(output_dir if output_dir is not None else self.args.output_dir)
            (folder / "privacy.txt").write_text(f"{self._told}\n", encoding="utf-8")
            numbers = json.dumps(self._told.to_dict(), indent=2, ensure_ascii=False)
            (folder / "privacy.json").write_text(f"{numbers}\n", encoding="utf-8")

    def _state_path(self, checkpoint: str) -> pathlib.Path:
        """The state of optimizer and noise of this rank."""
        rank = self.args.process_index
        return pathlib.Path(checkpoint) / (f"optimizer-{rank}.pt" if rank else "optimizer.pt")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank has noise of its own."""
        os.makedirs(output_dir, exist_ok=True)
        torch.save(self.optimizer.state_dict(), self._state_path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), pathlib.Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._state_path(checkpoint)
        if not path.exists():
            raise MismatchError(
                f"{checkpoint} has no {path.name}: a run is resumed from a checkpoint that holds the state of its noise, with as many "
                "ranks as it began with"
            )
        self.optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(pathlib.Path(checkpoint) / "scheduler.pt", weights_only=True))
        self._told = self.optimizer.privacy


def _attention(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def _as_it_is(loss: torch.Tensor, _: Any = None) -> torch.Tensor:
    return loss


class _Loss(torch.nn.Module):
    """A model together with its loss."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any, dict[str, Any]], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.loss(self.model, inputs)


class _Outputs(torch.nn.Module):
    """A model without its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


class _Micro:
    """A collated part of a cohort, and the number of examples that it was made of."""

    def __init__(self, examples: int, batch: Mapping[str, Any]) -> None:
        self.examples, self.batch = examples, batch

    def pin_memory(self) -> _Micro:
        """What DataLoader calls."""
        pinned = {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in self.batch.items()}
        return _Micro(self.examples, pinned)


_Cohort = list[_Micro]


class _MicroBatches:
    """A collate_fn that cuts a cohort into micro-batches; none for a cohort without examples."""

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]], size: int) -> None:
        self.collate, self.size = collate, size

    def __call__(self, examples: list[Any]) -> _Cohort:
        parts = (examples[first : first + self.size] for first in range(0, len(examples), self.size))
        return [_Micro(len(part), self.collate(part)) for part in parts]


class _CohortLoader:
    """What the loop of Trainer goes through: its iterators begin where the run is."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self.trainer, self.dataset = trainer, trainer.train_dataset
        self.batch_size: int = trainer.args.per_device_train_batch_size
        _, self.epochs, self.steps = trainer._size()

    def __len__(self) -> int:
        return self.steps // self.epochs

    def __iter__(self) -> Iterator[_Cohort]:
        return self.trainer._cohorts()


class _Epochs(TrainerCallback):
    """Counts epochs by steps: a run that is resumed within one takes fewer batches of it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        loader = of_trainer.get("train_dataloader")
        if isinstance(loader, _CohortLoader):
            state.epoch = state.global_step / len(loader)
