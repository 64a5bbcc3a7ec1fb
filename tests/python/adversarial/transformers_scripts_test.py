"""Scripts that people write around dpmf.transformers: a record counts once, or the script is refused with a sentence."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed: scripts/setup-frameworks has it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from dpmf.transformers import PrivateTrainer  # noqa: E402
from neighbours import Script, judge, moved  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments  # noqa: E402
from watching import watch  # noqa: E402

RECORDS, BATCH, EPOCHS, LETTERS, CLIP = 12, 4, 2, 10, 0.01
STEPS = EPOCHS * RECORDS // BATCH


@functools.cache
def plan():
    return dpmf.plan(examples=RECORDS, batch=BATCH, epochs=EPOCHS, epsilon=4, delta=1e-5, clip=CLIP, cache=False)


class Records(torch.utils.data.Dataset):
    """Rows of letters, of which one may be absent: its loss is of no tokens then, so that it counts as zero."""

    def __init__(self, absent=None):
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(1, LETTERS, (3 + number % 4,), generator=generator) for number in range(RECORDS)]
        self.absent = absent

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        labels = self.rows[index] if index != self.absent else torch.full_like(self.rows[index], -100)
        return {"input_ids": self.rows[index], "labels": labels}


def pad(rows):
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in (("input_ids", 0), ("labels", -100))
    }
    return {**padded, "attention_mask": (padded["input_ids"] > 0).long()}


def twice(rows):
    """Two rows of every example, as for augmentation."""
    return {name: torch.cat([value, value]) for name, value in pad(rows).items()}


def flat(rows):
    """One row of all examples, as collators that flatten make it."""
    return {name: torch.cat([row[name] for row in rows])[None] for name in ("input_ids", "labels")}


def neighbouring(rows):
    """Every row with the letters of the one before it."""
    batch = pad(rows)
    return {**batch, "labels": batch["labels"].roll(1, 0)}


def mixed(rows):
    """Half of the letters of each row are those of another."""
    batch = pad(rows)
    others, kept = torch.randperm(len(rows)), torch.rand(batch["labels"].shape) < 0.5
    return {name: torch.where(kept, value, value[others]) for name, value in batch.items()}


class Kept(TrainerCallback):
    """The sums that go to the noise."""

    def __init__(self):
        self.run = None

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        self.run = watch(optimizer)  # once the sampler has the name of the run


def model_of():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def trainer_of(
    directory, absent, trainer=PrivateTrainer, collate=pad, clipping="per-example", model=None, optimizers=(None, None), **options
):
    # Learning rates that change no bit of the model, so that only the record differs from step to step.
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "no", **options}
    arguments = TrainingArguments(
        output_dir=str(directory),
        num_train_epochs=EPOCHS,
        learning_rate=1e-30,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    kept = Kept()
    made = trainer(
        model_of() if model is None else model,
        arguments,
        data_collator=collate,
        train_dataset=Records(absent),
        callbacks=[kept],
        plan=plan(),
        key=dpmf.NoiseKey.from_seed(1),
        experiment="scripts",
        clipping=clipping,
        optimizers=optimizers,
    )
    return made, kept


def as_usual(directory, absent, **options):
    trainer, kept = trainer_of(directory, absent, **options)
    trainer.train()
    return kept.run.sums


class LossOfAll(PrivateTrainer):
    """The loss of every token counts as often as there are examples in the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * 100 * len(inputs["input_ids"])


class SeveralSteps(PrivateTrainer):
    """Two losses of one cohort."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        super().training_step(model, inputs, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)


class RunningMean(PrivateTrainer):
    """Divides each loss by a running mean of all; its gradients are shorter than the clip."""

    mean = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.mean = 0.5 * self.mean + 0.5 * float(loss.detach().nan_to_num())
        return 1e-4 * loss / self.mean


class OwnLoader(PrivateTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=pad)


class Wrapped(PrivateTrainer):
    """Batches as a dictionary, after they were drawn."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs[0].batch, num_items_in_batch)


class LooksAtABatch(PrivateTrainer):
    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        next(iter(loader))
        return loader


class Evaluates(TrainerCallback):
    """On all records, in the middle of training, and leaves the model in another mode."""

    def on_step_end(self, args, state, control, model=None, **_):
        self.trainer.evaluate(Records())
        model.eval()
        model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2)


class Backward(TrainerCallback):
    """A gradient of one record that nobody clipped."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        row = self.trainer.train_dataset[5]
        (1e3 * model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.nan_to_num()).backward()


class Thaws(TrainerCallback):
    """Trains some layers first, then all of them."""

    def on_step_begin(self, args, state, control, model=None, **_):
        for name, p in model.named_parameters():
            p.requires_grad_(state.global_step > 2 or "mlp" in name)


class Resizes(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            model.resize_token_embeddings(LETTERS + 4)


class Joins(TrainerCallback):
    """A parameter that comes later, given to the optimizer inside."""

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        if state.global_step == 2:
            optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def with_callback(directory, absent, callback, **options):
    trainer, kept = trainer_of(directory, absent, **options)
    made = callback()
    made.trainer = trainer
    trainer.add_callback(made)
    trainer.train()
    return kept.run.sums


def with_model(directory, absent, change, **options):
    return as_usual(directory, absent, model=change(model_of()), **options)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def checkpointed(model, **options):
    model.gradient_checkpointing_enable(options)
    model.enable_input_require_grads()
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def a_record_that_is_in_the_list_twice(directory, absent):
    trainer, kept = trainer_of(directory, absent)
    trainer.train_dataset = [trainer.train_dataset[index] for index in range(RECORDS // 2)] * 2
    trainer.train()
    return kept.run.sums


def an_optimizer_with_its_own_noise(directory, absent):
    """Of a plan for a larger budget."""
    model = model_of()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-30)
    loud = dpmf.mechanism(steps=STEPS, epsilon=400, delta=1e-5, clip=1.0)
    optimizer = dpmf.torch.PrivateOptimizer(adam, loud, denominator=BATCH, check=False)
    trainer, kept = trainer_of(directory, absent, model=model, optimizers=(optimizer, None))
    trainer.train()
    return kept.run.sums


def filled_up(rows):
    """A copy of the first row in place of the last, as for examples that cannot be read."""
    return pad([*rows[:-1], rows[0]])


def in_the_middle(rows):
    """A copy of one row in place of another, neither of them at an end of the batch."""
    return pad([*rows[:2], rows[1], *rows[3:]] if len(rows) > 3 else rows)


def two_trainings(directory, absent):
    trainer, kept = trainer_of(directory, absent)
    trainer.train()
    trainer.train()
    return kept.run.sums


def a_second_run_in_its_folder(directory, absent):
    first, _ = trainer_of(directory, absent, save_strategy="steps", save_steps=100)
    first.remove_callback(Kept)  # what is watched cannot be saved
    first.train()
    return as_usual(directory, absent, save_strategy="steps", save_steps=100)


SCRIPTS = [
    Script(as_usual, times=EPOCHS),
    Script(as_usual, times=EPOCHS, options=dict(clipping="ghost"), name="clipped by layers"),
    Script(as_usual, times=EPOCHS, options=dict(per_device_train_batch_size=1, gradient_accumulation_steps=4), name="one by one"),
    Script(as_usual, times=EPOCHS, options=dict(dataloader_num_workers=1), name="workers"),
    Script(as_usual, times=EPOCHS, options=dict(trainer=LossOfAll), name="a loss of its own"),
    Script(as_usual, "data_collator made input_ids.*one entry for each example", options=dict(collate=twice), name="rows twice"),
    Script(as_usual, "data_collator made input_ids.*one entry for each example", options=dict(collate=flat), name="rows in one"),
    Script(as_usual, "has [0-9]+ contributions|more contributions|contributions", options=dict(trainer=SeveralSteps), name="two losses"),
    *(
        Script(run, times=EPOCHS, options={**options, "clipping": clipping}, name=f"{name}, {clipping}")
        for clipping in ("per-example", "ghost")
        for name, run, options in (
            ("evaluates and generates", with_callback, dict(callback=Evaluates)),
            ("a gradient of its own", with_callback, dict(callback=Backward)),
            ("thaws layers", with_callback, dict(callback=Thaws)),
            ("tied weights", with_model, dict(change=tied)),
            ("checkpoints", with_model, dict(change=functools.partial(checkpointed, use_reentrant=False))),
            ("label smoothing", as_usual, dict(label_smoothing_factor=0.1)),
            ("noisy embeddings", as_usual, dict(neftune_noise_alpha=5.0)),
        )
    ),
    Script(as_usual, "data_collator changes labels", options=dict(collate=neighbouring), name="labels of others"),
    Script(as_usual, "data_collator changes", options=dict(collate=mixed), name="mixup"),
    Script(as_usual, "data_collator changes", options=dict(collate=filled_up), name="copies of a row"),
    Script(as_usual, "data_collator changes", options=dict(collate=in_the_middle), name="copies in the middle"),
    Script(as_usual, "remembers examples", options=dict(trainer=RunningMean), name="a running mean in the loss"),
    Script(as_usual, "plan's sampler", options=dict(trainer=OwnLoader), name="a loader of its own"),
    Script(as_usual, "that PrivateTrainer did not draw", options=dict(trainer=Wrapped), name="a batch of its own"),
    Script(as_usual, "only during training", options=dict(trainer=LooksAtABatch), name="looks at a batch"),
    Script(with_callback, "resize the model before it is trained", options=dict(callback=Resizes), name="resizes embeddings"),
    Script(with_callback, "would move without noise", options=dict(callback=Joins), name="a new parameter"),
    Script(with_model, "compiled with torch.compile", options=dict(change=compiled), name="compiled"),
    Script(
        with_model,
        "use_reentrant=True",
        options=dict(change=functools.partial(checkpointed, use_reentrant=True), clipping="ghost"),
        name="reentrant checkpoints",
    ),
    Script(a_record_that_is_in_the_list_twice, "entries of the list are the same object"),
    Script(an_optimizer_with_its_own_noise, "optimizers has a PrivateOptimizer"),
    Script(two_trainings, "this trainer has already trained"),
    Script(a_second_run_in_its_folder, "a run that has begun"),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_record_counts_once(script, tmp_path):
    def measure(script):
        runs = [script.run(tmp_path / str(absent), absent, **script.options) for absent in (None, 5)]
        return moved((np.stack(runs[0]), []), (np.stack(runs[1]), []), CLIP)

    judge(script, measure, (dpmf.MismatchError, ValueError))


def test_without_the_checks_a_record_counts_more_than_once(tmp_path, monkeypatch):
    """The power of the test above: what its refusals are for."""
    monkeypatch.setattr(dpmf.transformers, "_check_collator", lambda *_: None)
    monkeypatch.setattr(dpmf.torch._data, "_check_distinct", lambda _: None)
    monkeypatch.setattr(dpmf.torch._gradients.torch, "isclose", lambda *_, **__: True)
    found = {}
    for name, run, options in (
        ("copies", as_usual, dict(collate=filled_up)),
        ("twice", a_record_that_is_in_the_list_twice, {}),
        ("a running mean", as_usual, dict(trainer=RunningMean)),
    ):
        runs = [np.stack(run(tmp_path / f"{name} {absent}", absent, **options)) for absent in (None, 5)]
        found[name] = moved((runs[0], []), (runs[1], []), CLIP)
    assert found["copies"].most > 1.9 and found["twice"].most > 1.9 and found["a running mean"].steps > EPOCHS, found


def test_collators_that_pad_or_draw_random_numbers_are_fine(recwarn):
    """Masks of each row's own; only what is drawn by a generator of the collator's own cannot be checked."""
    own = torch.Generator().manual_seed(0)

    def masking(rows, generator=None):
        batch = pad(rows)
        return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape, generator=generator) < 0.2, -100)}

    before = torch.get_rng_state()
    for collate in (pad, masking):
        dpmf.transformers._check_collator(Records(), collate)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.warns(dpmf.torch.UncheckedDataWarning, match="random numbers of its own"):
        dpmf.transformers._check_collator(Records(), functools.partial(masking, generator=own))


def test_a_collator_that_fails_for_copies_is_warned_of():
    def mixes(rows):
        if all(torch.equal(row["input_ids"], rows[0]["input_ids"]) for row in rows):
            raise ValueError("no negatives")
        return pad(rows)

    with pytest.warns(dpmf.torch.UncheckedDataWarning, match="fails for copies of one example .*no negatives"):
        dpmf.transformers._check_collator(Records(), mixes)
