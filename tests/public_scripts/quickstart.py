"""GRPO with TRL's defaults: a model, a dataset of prompts and a reward function."""

from datasets import load_dataset
from trl import GRPOTrainer


def variety(completions, **columns):
    return [len(set(text)) / 100 for text in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=variety,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
