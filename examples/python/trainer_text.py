"""Trains a small language model on names of packages with Hugging Face's Trainer, privately for every account.

    python examples/python/trainer_text.py --epsilon 3

The data is that of the repository: each account is one example, its names after each other. It came from a script for
transformers.Trainer by changing two lines, marked below. Takes a minute on one core.
"""

import argparse
import lzma
import math
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from dpmf.transformers import PrivateTrainer  # instead of: from transformers import Trainer
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

NAMES = pathlib.Path(__file__).parents[2] / "crates" / "dpmf-train" / "data" / "names.txt.xz"
#: Padding is 0, and a name ends with a space.
LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789-_."
LENGTH = 48


def read(limit=None):
    """Texts by set: validation, test, train; each is all names of one account."""
    lines = lzma.open(NAMES, "rt", encoding="utf-8").read().splitlines()[1:]
    sets = {}
    while lines:
        name, count = lines[0].split()[:2]
        sets[name], lines = lines[1 : 1 + int(count)][:limit], lines[1 + int(count) :]
    return sets


class Texts(torch.utils.data.Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        letters = [1 + LETTERS.index(letter) for letter in f" {self.texts[index]} "[:LENGTH]]
        return {"input_ids": torch.tensor(letters)}


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def small_model(width=48, layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1 + len(LETTERS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--accounts", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--output", default="trainer_text_output")
    arguments = parser.parse_args()
    texts = read(arguments.accounts)
    micro = min(50, arguments.batch_size)

    trainer = PrivateTrainer(  # instead of: trainer = Trainer(
        model=small_model(),
        args=TrainingArguments(
            output_dir=arguments.output,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=arguments.batch_size // micro,
            num_train_epochs=arguments.epochs,
            learning_rate=arguments.lr,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        ),
        data_collator=pad,
        train_dataset=Texts(texts["train"]),
        eval_dataset=Texts(texts["validation"]),
        epsilon=arguments.epsilon, delta=1e-5, clip=1.0,  # added
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"perplexity of a letter on held-out accounts: {math.exp(before):.2f} before, {math.exp(after):.2f} after")
    print(f"the model is in {arguments.output}, with what is said of its privacy in privacy.txt")
    print(trainer.privacy)


if __name__ == "__main__":
    main()
