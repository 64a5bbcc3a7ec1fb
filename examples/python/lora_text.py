"""Fine-tunes a small language model with LoRA, privately: public texts first, then private ones through adapters.

    python examples/python/lora_text.py --epsilon 3

A model made from a config learns to spell names of packages of some accounts, which are taken for public. It is then fine-tuned on
those of others with names of another kind, by adapters alone, with (ε, δ)-differential privacy for every account. The data is that of
the repository. Takes two minutes on one core.
"""

import argparse
import math
import pathlib

import peft
from dpmf.transformers import PrivateTrainer
from trainer_text import Texts, pad, read, small_model
from transformers import Trainer, TrainingArguments


def scoped(text):
    """Names of one word are public here; accounts whose names have parts are fine-tuned on."""
    return "-" in text or "_" in text or "." in text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--accounts", type=int, default=16000, help="public and private ones together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--output", default="lora_text_output")
    arguments = parser.parse_args()
    texts = read(arguments.accounts)
    public = [text for text in texts["train"] if not scoped(text)]
    private = [text for text in texts["train"] if scoped(text)]
    held_out = Texts([text for text in texts["validation"] if scoped(text)][:2000])
    micro = min(50, arguments.batch_size)

    def settings(name, **more):
        return TrainingArguments(
            output_dir=f"{arguments.output}/{name}",
            num_train_epochs=arguments.epochs,
            learning_rate=arguments.lr,
            per_device_train_batch_size=micro,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            **more,
        )

    model = small_model()
    Trainer(model, settings("public"), data_collator=pad, train_dataset=Texts(public)).train()

    adapters = peft.LoraConfig(
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    trainer = PrivateTrainer(
        peft.get_peft_model(model, adapters),
        settings("adapters", gradient_accumulation_steps=arguments.batch_size // micro),
        data_collator=pad,
        train_dataset=Texts(private),
        eval_dataset=held_out,
        epsilon=arguments.epsilon,
        delta=1e-5,
        clip=1.0,
    )
    trainer.model.print_trainable_parameters()
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(pathlib.Path(arguments.output) / "merged")
    print(f"perplexity of a letter on held-out accounts: {math.exp(before):.2f} before, {math.exp(after):.2f} after fine-tuning")
    print(f"{len(public)} public accounts, {len(private)} private ones; adapters and merged model are in {arguments.output}")
    print(trainer.privacy)


if __name__ == "__main__":
    main()
