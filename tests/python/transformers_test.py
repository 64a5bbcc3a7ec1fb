"""dpmf.transformers on the real Trainer, with models made from configs."""

import copy
import difflib
import json
import math
import os
import pathlib
import socket
import stat

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed: scripts/setup-frameworks has it")

import dpmf  # noqa: E402
import dpmf.transformers  # noqa: E402
import torch.multiprocessing  # noqa: E402
from dpmf.transformers import PrivateTrainer  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from watching import watch  # noqa: E402

EXAMPLES, BATCH, EPOCHS, LETTERS = 48, 8, 2, 20
PER_EPOCH = EXAMPLES // BATCH
STEPS = EPOCHS * PER_EPOCH
KEY = dpmf.NoiseKey.from_seed(8)


class Texts(torch.utils.data.Dataset):
    """Rows of letters, of different lengths unless they are even."""

    def __init__(self, length=EXAMPLES, even=False, seed=1):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(4, 10, (length,), generator=generator).tolist()
        self.rows = [torch.randint(1, LETTERS, (8 if even else size,), generator=generator) for size in sizes]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def pad(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row["input_ids"])] = row["input_ids"]
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def model_of(seed=0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=LETTERS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        use_cache=False,
        **options,
    )
    return LlamaForCausalLM(config)


def arguments_of(directory, **options):
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "save_steps": 4,
        "logging_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return TrainingArguments(output_dir=str(directory), **options)


@pytest.fixture(scope="module")
def plan():
    """For the arguments as they are; noise of experiments."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.AdamW([parameter], lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(adam, 2, STEPS)
    budget = dict(epsilon=4, delta=1e-5, clip=0.5, noise_decay=0.03, cache=False)
    return dpmf.plan(examples=EXAMPLES, batch=BATCH, epochs=EPOCHS, optimizer=adam, schedule=schedule, **budget)


def trainer_of(plan, directory, model=None, even=False, callbacks=None, **options):
    """Noise that is the same at every start."""
    return PrivateTrainer(
        model_of() if model is None else model,
        arguments_of(directory, **options),
        data_collator=pad,
        train_dataset=Texts(even=even),
        eval_dataset=Texts(6, seed=2),
        callbacks=callbacks,
        plan=plan,
        key=KEY,
        experiment="trainer",
    )


def one_by_one(trainer):
    """Gradients that do not depend on what is beside them."""
    trainer._vectorize = False
    return trainer


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


PLAIN = """
import torch
from transformers import Trainer, TrainingArguments

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
    ),
    data_collator=collate,
    train_dataset=data,
    eval_dataset=held_out,
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
trainer.save_model()
"""
PRIVATE = (
    PLAIN.replace("from transformers import Trainer, TrainingArguments", "from dpmf.transformers import PrivateTrainer\nfrom transformers import TrainingArguments")
    .replace("trainer = Trainer(", "trainer = PrivateTrainer(")
    .replace("    eval_dataset=held_out,\n", "    eval_dataset=held_out, epsilon=4, delta=1e-5, clip=0.5,\n")
)


def test_a_plain_script_changes_in_four_lines(tmp_path):
    changed = [line for line in difflib.ndiff(PLAIN.splitlines(), PRIVATE.splitlines()) if line.startswith("+ ")]
    assert len(changed) <= 4
    names = dict(model=model_of(), output=str(tmp_path / "plain"), collate=pad, data=Texts(), held_out=Texts(6, seed=2))
    exec(PLAIN, names)
    assert math.isfinite(names["loss"])
    names.update(model=model_of(), output=str(tmp_path / "private"))
    exec(PRIVATE, names)
    trainer = names["trainer"]
    assert math.isfinite(names["loss"]) and trainer.state.global_step == STEPS == trainer.plan.steps
    assert (trainer.plan.batch, trainer.plan.epochs, trainer.plan.examples) == (BATCH, EPOCHS, EXAMPLES)
    assert trainer.privacy.epsilon <= 4 and trainer.privacy.delta == 1e-5 and trainer.privacy.clip == 0.5
    # The rates of the schedule are what was planned for.
    rates = trainer.mechanism.workload.learning_rates
    assert rates == pytest.approx([1e-2 * (1 - step / STEPS) for step in range(STEPS)])
    # What is said of privacy is logged and beside the model.
    logs = trainer.state.log_history
    assert all(line["epsilon"] == trainer.privacy.epsilon for line in logs if "eval_loss" not in line)
    assert "unprotected_train_loss" in logs[-2] and not any("loss" in line or "train_loss" in line for line in logs)
    assert (tmp_path / "private" / "privacy.txt").read_text() == f"{trainer.privacy}\n"
    assert json.loads((tmp_path / "private" / "privacy.json").read_text())["epsilon"] == trainer.privacy.epsilon
    assert stat.S_IMODE((tmp_path / "private" / "_dpmf" / "key").stat().st_mode) == 0o600
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "private")
    assert same(saved, trainer.model)
    with pytest.raises(dpmf.MismatchError, match="this trainer has already trained"):
        trainer.train()
    names.update(model=model_of())
    with pytest.raises(dpmf.MismatchError, match="a run that has begun.*resume_from_checkpoint=True"):
        exec(PRIVATE, names)


class Killed(BaseException):
    pass


class Kill(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Killed


def test_killed_and_resumed_bit_for_bit(plan, tmp_path):
    """With dropout, and two steps after the last checkpoint that come again."""
    dropout = dict(attention_dropout=0.3)
    whole = trainer_of(plan, tmp_path / "whole", model_of(**dropout))
    whole.train()
    directory = tmp_path / "killed"
    with pytest.raises(Killed):
        trainer_of(plan, directory, model_of(**dropout), callbacks=[Kill(6)]).train()
    with pytest.raises(Killed):
        trainer_of(plan, directory, model_of(seed=5, **dropout), callbacks=[Kill(9)]).train(resume_from_checkpoint=True)
    resumed = trainer_of(plan, directory, model_of(seed=6, **dropout))
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model, whole.model) and not same(whole.model, model_of())
    assert resumed.privacy == whole.privacy
    logs = [[(line["step"], line["epoch"], line["learning_rate"]) for line in one.state.log_history[:-1]] for one in (whole, resumed)]
    assert logs[0] == logs[1] and len(logs[0]) == STEPS // 3


@pytest.mark.parametrize("clipping", ["per-example", "ghost"])
def test_a_model_in_bfloat16_is_trained_through_masters(plan, tmp_path, clipping):
    """Killed and resumed bit for bit; a checkpoint holds the float32 masters, and what is saved is rounded."""

    def trainer(directory, seed=0, **named):
        made = trainer_of(plan, directory, model_of(seed=seed).bfloat16(), **named)
        made._clipping = clipping
        return made

    with torch.backends.mkldnn.flags(enabled=False):
        whole = trainer(tmp_path / "whole")
        whole.train()
        with pytest.raises(Killed):
            trainer(tmp_path / "killed", callbacks=[Kill(6)]).train()
        resumed = trainer(tmp_path / "killed", seed=5)
        resumed.train(resume_from_checkpoint=True)
    masters = [[p for group in one.optimizer.param_groups for p in group["params"]] for one in (whole, resumed)]
    assert all(p.dtype == torch.float32 for p in masters[0]) and all(map(torch.equal, *masters))
    assert same(resumed.model, whole.model) and not same(whole.model, model_of().bfloat16())
    assert all(torch.equal(p, master.bfloat16()) for p, master in whole.optimizer._masters.pairs)
    assert any(not torch.equal(p.float(), master) for p, master in whole.optimizer._masters.pairs)
    saved = torch.load(tmp_path / "killed" / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)["dpmf"]["masters"]
    assert all(map(torch.equal, saved, (master for _, master in whole.optimizer._masters.pairs)))
    whole.save_model()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    assert loaded.dtype == torch.bfloat16 and same(loaded, whole.model)


@pytest.mark.parametrize("clipping", ["per-example", "ghost"])
def test_autocast_in_bfloat16(plan, tmp_path, clipping):
    """bf16=True computes in bfloat16, and trains in float32."""
    sums = []
    for half in (False, True):
        trainer = trainer_of(plan, tmp_path / str(half), bf16=half)
        trainer._clipping = clipping
        with torch.backends.mkldnn.flags(enabled=False):
            sums.append(sums_of(trainer, 1)[0])
    assert trainer.model.dtype == torch.float32 and not trainer.optimizer._masters.pairs
    difference = abs(sums[0] - sums[1])
    assert 1e-4 < (difference**2).sum() ** 0.5 < 0.05 * (sums[0] ** 2).sum() ** 0.5


def test_a_run_is_resumed_with_its_own_settings(plan, tmp_path):
    trainer_of(plan, tmp_path, max_steps=PER_EPOCH * EPOCHS).train()
    with pytest.raises(dpmf.MismatchError, match="ask for 6 steps, but the mechanism is for 12"):
        trainer_of(plan, tmp_path, num_train_epochs=1).train(resume_from_checkpoint=True)
    (tmp_path / "_dpmf" / "journal").unlink()
    with pytest.raises(dpmf.MismatchError, match="there is no journal at"):
        trainer_of(plan, tmp_path).train(resume_from_checkpoint=True)


def test_accumulation_equals_one_large_batch_bit_for_bit(plan, tmp_path):
    models = []
    for micro, times in ((2, 4), (8, 1)):
        sizes = dict(per_device_train_batch_size=micro, gradient_accumulation_steps=times, save_strategy="no")
        trainer = one_by_one(trainer_of(plan, tmp_path / str(micro), even=True, **sizes))
        trainer.train()
        assert trainer.get_total_train_batch_size(trainer.args) == BATCH
        models.append(trainer.model)
    assert same(*models)
    assert not (tmp_path / "2" / "_dpmf").exists()  # nothing to resume, so no key on disk


def test_padding_changes_no_gradient(plan, tmp_path):
    """The sums of a cohort, in micro-batches of one, which are not padded, and of many, which are."""
    sums = []
    for micro in (1, 8):
        trainer = trainer_of(plan, tmp_path / str(micro), per_device_train_batch_size=micro, gradient_accumulation_steps=8 // micro)
        sums.append(sums_of(trainer, 1)[0])
    assert sums[0] == pytest.approx(sums[1], abs=1e-5) and abs(sums[0]).max() > 0.1


def sums_of(trainer, steps):
    """The sums that go to the noise in the first steps, in units of the clip."""
    kept = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            self.run = watch(trainer.optimizer)  # once the sampler has the name of the run

        def on_step_end(self, args, state, control, **_):
            if state.global_step == steps:
                kept.extend(self.run.sums)
                raise Killed

    trainer.add_callback(Watch)
    with pytest.raises(Killed):
        trainer.train()
    return [one / trainer.privacy.clip for one in kept]


def of_rank(rank, port, plan_file, directory):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    mechanism = dpmf.Mechanism.load(plan_file)
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, ddp_backend="gloo")
    with pytest.raises(Killed):
        one_by_one(trainer_of(mechanism, directory, even=True, callbacks=[Kill(6)], **options)).train()
    trainer = one_by_one(trainer_of(mechanism, directory, model_of(seed=3), even=True, **options))
    trainer.train(resume_from_checkpoint=True)
    torch.save(trainer.model.state_dict(), directory / f"model-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_that_are_killed_and_resumed_equal_one_process(plan, tmp_path):
    alone = one_by_one(trainer_of(plan, tmp_path / "alone", even=True))
    alone.train()
    plan.save(tmp_path / "plan.safetensors")
    (tmp_path / "ranks").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(of_rank, args=(port, tmp_path / "plan.safetensors", tmp_path / "ranks"), nprocs=2)
    for rank in range(2):
        state = torch.load(tmp_path / "ranks" / f"model-{rank}.pt")
        assert all(torch.equal(state[name], value) for name, value in alone.model.state_dict().items())


def test_lora_trains_and_saves_adapters_only(plan, tmp_path):
    peft = pytest.importorskip("peft")
    base = model_of()
    before = copy.deepcopy(base.state_dict())
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = trainer_of(plan, tmp_path, peft.get_peft_model(base, config))
    trainer.train()
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all("lora_" in name for name in trained)
    assert sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"]) == trainer.optimizer._noise.dimension
    assert trainer.optimizer._noise.dimension == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists() and (tmp_path / "privacy.txt").exists()
    loaded = peft.PeftModel.from_pretrained(model_of(), tmp_path)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        # Attention is computed by another kernel.
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected)
    moved = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qv"}
    merged.save_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.parametrize("cast", [True, False])
def test_lora_on_a_model_in_bfloat16(plan, tmp_path, cast):
    """peft makes adapters in float32 for it, or in bfloat16, which have masters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = model_of().bfloat16()
    before = copy.deepcopy(base.state_dict())
    trainer = trainer_of(plan, tmp_path, peft.get_peft_model(base, config, autocast_adapter_dtype=cast))
    with torch.backends.mkldnn.flags(enabled=False):
        trainer.train()
    assert len(trainer.optimizer._masters.pairs) == (0 if cast else 4)
    adapters = [p for p in trainer.model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.float32 if cast else torch.bfloat16} and all(bool(p.any()) for p in adapters)
    frozen = {name.replace(".base_layer", ""): value for name, value in trainer.model.base_model.model.state_dict().items()}
    assert all(torch.equal(frozen[name], value) for name, value in before.items())


class Branching(torch.nn.Module):
    """A model that vmap does not go through."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(LETTERS, LETTERS)

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.table(input_ids)
        if bool(input_ids.sum() < 0):
            logits = -logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100)
        return {"loss": loss, "logits": logits}


def test_ways_around_what_vmap_does_not_know(plan, tmp_path, caplog):
    trainer = trainer_of(plan, tmp_path / "attention", model_of(attn_implementation="sdpa"), save_strategy="no")
    trainer.train()
    assert trainer._vectorize and trainer.model.config._attn_implementation == "eager"
    torch.manual_seed(0)
    trainer = trainer_of(plan, tmp_path / "branching", Branching(), save_strategy="no", label_smoothing_factor=0.0)
    with caplog.at_level("INFO", logger="dpmf"):
        trainer.train()
    assert not trainer._vectorize and "one example at a time" in caplog.text


@pytest.mark.parametrize("options", [dict(label_smoothing_factor=0.1), dict(optim="sgd", weight_decay=0.0)], ids=str)
def test_other_arguments_work(options, tmp_path):
    trainer = PrivateTrainer(
        model_of(),
        arguments_of(tmp_path, save_strategy="no", warmup_steps=0, lr_scheduler_type="cosine", **options),
        data_collator=pad,
        train_dataset=Texts(),
        epsilon=4,
        delta=1e-5,
        sampling="none",
    )
    trainer.train()
    assert trainer.state.global_step == STEPS and not same(trainer.model, model_of())
    assert trainer.mechanism.sampling == "none"


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(train_sampling_strategy="group_by_length"), "train_sampling_strategy is 'group_by_length'.*the plan's own sampler"),
        (dict(dataloader_drop_last=True), "dataloader_drop_last is True.*none is dropped"),
        (dict(activation_checkpointing=True), "checkpointing is True.*torch.func"),
        (dict(auto_find_batch_size=True), "auto_find_batch_size is True.*release its first steps twice"),
        (dict(include_num_input_tokens_seen="all"), "include_num_input_tokens_seen is 'all'.*which examples were drawn"),
        (dict(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=4), "learning rates depend on losses"),
        (dict(optim="lomo"), "optim is .*steps during backward"),
        (dict(push_to_hub=True, hub_strategy="checkpoint"), "hub_strategy is .*no noise covers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_would_break_the_guarantee_is_refused(options, sentence, plan, tmp_path):
    with pytest.raises(dpmf.MismatchError, match=sentence):
        trainer_of(plan, tmp_path, **options)
    assert not (tmp_path / "_dpmf").exists()


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("fp16", "fp16 is True.*bf16=True"),
        ("torch_compile", "torch_compile is True.*not compiled"),
        ("use_liger_kernel", "use_liger_kernel is True"),
        ("fsdp", "fsdp is True.*fully_shard"),
        ("deepspeed", "deepspeed is True.*torchrun"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_too(name, sentence, plan, tmp_path):
    arguments = arguments_of(tmp_path)
    # TrainingArguments would ask for a GPU or a package, or change the environment.
    setattr(arguments, name, True)
    with pytest.raises(dpmf.MismatchError, match=sentence):
        PrivateTrainer(model_of(), arguments, train_dataset=Texts(), plan=plan)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(max_steps=7), "max_steps is 7, but an epoch has 6 steps.*max_steps=6"),
        (dict(num_train_epochs=1.5), "num_train_epochs is 1.5, but plans are for whole epochs"),
        (dict(gradient_accumulation_steps=1), "ask for 24 steps, but the mechanism is for 12: plan for these"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_runs_that_were_not_planned_are_refused(options, sentence, plan, tmp_path):
    with pytest.raises(dpmf.MismatchError, match=sentence):
        trainer_of(plan, tmp_path, **options).train()


def test_budgets_and_data(plan, tmp_path):
    def make(**options):
        options = {"train_dataset": Texts(), "plan": plan, **options}
        return PrivateTrainer(model_of(), arguments_of(tmp_path, save_strategy="no"), data_collator=pad, **options)

    with pytest.raises(ValueError, match="epsilon or delta is missing"):
        make(plan=None, epsilon=3)
    with pytest.raises(ValueError, match="plan has its own epsilon"):
        make(epsilon=3)
    stream = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self: iter(())})()
    with pytest.raises(dpmf.MismatchError, match="train_dataset is a Stream, which cannot be read by index"):
        make(train_dataset=stream)
    with pytest.raises(dpmf.MismatchError, match="trains on the private data once for each trial"):
        make().hyperparameter_search()
    with pytest.warns(dpmf.transformers.UncoveredChoiceWarning, match="chooses by eval_dataset"):
        PrivateTrainer(
            model_of(),
            arguments_of(tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4),
            eval_dataset=Texts(6),
            train_dataset=Texts(),
            plan=plan,
        )
    with pytest.warns(UserWarning, match="max_grad_norm=0.3 is not used"):
        PrivateTrainer(model_of(), arguments_of(tmp_path, max_grad_norm=0.3), train_dataset=Texts(), plan=plan)
