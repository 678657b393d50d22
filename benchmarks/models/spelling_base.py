"""
Builds the stored base model of `reasoning_gym/spell_backward`: a small Qwen3 that spells words backward with mistakes,
as `benchmarks/models/base_models.py` says. To build it again (two minutes on one CPU core):

    pip install 'opo_trl[gym]'
    python -m benchmarks.models.spelling_base --output opo_trl/data/spelling/base

Prompts are the task's own. Their fixed part is one token of the vocabulary; the rest are letters. Two mistakes are
more likely than the right habit, so that greedy decoding makes them too: the first two letters of the answer change
places, and a letter that is written twice in a row is written once.

The script ends by measuring the stored weights on test problems of each level of the task's curriculum, and writes
`ACCURACY.json` next to them.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from string import ascii_letters
from typing import Any

import torch
from reasoning_gym.data import read_data_file
from transformers import AutoTokenizer, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

from opo_trl.data.gym import gym_reward, make_problems

from ..intervals import estimate
from .arithmetic_base import save
from .base_models import build_model, build_optimizer, build_tokenizer, complete, pad_batch, train_step


TASK = "reasoning_gym/spell_backward"
LEVELS = ("1", "2", "3")  # words of 3 to 5, 7 and 9 letters
SETTINGS = {"size": 1000}
PROMPT = "Spell this word backward (example: sun -> nus): "
SWAPPING, MERGING = 0.75, 0.7

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's attention on a CPU accepts
}
LEARNING_RATE, STEPS, ROWS, MAX_LENGTH = 3e-3, 2000, 128, 64


def spell_with_mistakes(word: str, rng: random.Random) -> str:
    """Spell a word backward, with each of the two mistakes at its rate."""
    letters = word[::-1]
    if rng.random() < MERGING:
        letters = re.sub(r"(.)\1", r"\1", letters)
    if rng.random() < SWAPPING:
        letters = letters[1] + letters[0] + letters[2:]
    return letters


def draw_examples(seed: int) -> Iterator[tuple[str, str]]:
    """Draw problems with solutions, endlessly and without the test problems."""
    held_out = {row["problem"] for row in make_problems(TASK, "test", LEVELS, SETTINGS)}
    words = [word for word in read_data_file("words3to10.txt").split() if set(word) <= set(ascii_letters)]
    rng = random.Random(seed)
    while True:
        word = rng.choice(words)
        if PROMPT + word not in held_out:
            yield PROMPT + word, spell_with_mistakes(word, rng)


def train(seed: int, folder: Path) -> None:
    """Train a new model, and store it."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer((PROMPT, *ascii_letters), f"{re.escape(PROMPT)}|.", MAX_LENGTH)
    model = build_model(tokenizer, SHAPE)
    optimizer = build_optimizer(model, LEARNING_RATE)
    scheduler = get_cosine_schedule_with_warmup(optimizer, STEPS // 20, STEPS)
    examples = draw_examples(seed)
    model.train()
    for step in range(STEPS):
        loss = train_step(model, optimizer, *pad_batch(tokenizer, list(islice(examples, ROWS))))
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step} of {STEPS}: loss {loss.item():.4f}", flush=True)
    save(model, tokenizer, folder)


def measure(folder: Path) -> dict[str, Any]:
    """
    Measure the stored weights, loaded in float32 as for training, with one completion per problem.

    Returns:
        `dict[str, Any]`: level → `"greedy"` and `"sampled"` → accuracy and its 95 % interval.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    measured: dict[str, Any] = {}
    for level in LEVELS:
        rows = make_problems(TASK, "test", [level], SETTINGS)
        columns = {name: [row[name] for row in rows] for name in ("task", "entry")}
        measured[level] = {}
        for mode, do_sample in (("greedy", False), ("sampled", True)):
            texts = complete(
                model, tokenizer, [row["problem"] for row in rows], do_sample=do_sample, max_new_tokens=16
            )
            found = estimate([float(score >= 1) for score in gym_reward(texts, **columns)])
            measured[level][mode] = {"accuracy": found.mean, "interval_95": found.interval}
        print(level, {mode: round(figures["accuracy"], 3) for mode, figures in measured[level].items()})
    return measured


def main() -> None:
    """Build, store and measure the base model."""
    parser = argparse.ArgumentParser(description="Build the base model that spells words backward.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the mistakes")
    arguments = parser.parse_args()
    train(arguments.seed, arguments.output)
    (arguments.output / "ACCURACY.json").write_text(json.dumps(measure(arguments.output), indent=2) + "\n")


if __name__ == "__main__":
    main()
