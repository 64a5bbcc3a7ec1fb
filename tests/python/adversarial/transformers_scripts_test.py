"""Scripts that people write around dpmf.transformers: a record counts once, or the script is refused with a sentence."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed: scripts/setup-frameworks has it")

import dpmf  # noqa: E402
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


def trainer_of(directory, absent, trainer=PrivateTrainer, collate=pad, clipping="per-example", **options):
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
        model_of(),
        arguments,
        data_collator=collate,
        train_dataset=Records(absent),
        callbacks=[kept],
        plan=plan(),
        key=dpmf.NoiseKey.from_seed(1),
        experiment="scripts",
        clipping=clipping,
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
    Script(two_trainings, "this trainer has already trained"),
    Script(a_second_run_in_its_folder, "a run that has begun"),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_record_counts_once(script, tmp_path):
    def measure(script):
        runs = [script.run(tmp_path / str(absent), absent, **script.options) for absent in (None, 5)]
        return moved((np.stack(runs[0]), []), (np.stack(runs[1]), []), CLIP)

    judge(script, measure, (dpmf.MismatchError, ValueError))


def test_the_measure_sees_a_collator_that_mixes_examples(tmp_path):
    """A record that is in two rows moves more than one clip: what a collator does with texts is the user's."""
    runs = [as_usual(tmp_path / str(absent), absent, collate=neighbouring, per_device_train_batch_size=4, gradient_accumulation_steps=1) for absent in (None, 5)]
    assert len(runs[0]) == STEPS
    assert moved((np.stack(runs[0]), []), (np.stack(runs[1]), []), CLIP).most > 0.9
