"""
Builds the stored base model of the arithmetic task: a small Qwen3, trained on worked chains in which most carries and
borrows are forgotten (`benchmarks/models/base_models.py` says why). To build it again (about ten minutes on one CPU
core):

    python -m benchmarks.models.arithmetic_base --output opo_trl/data/arithmetic/base

A larger one, for the benchmark of reuse, starts as the stored one made three times as wide, which computes the same,
and trains a little further on the same chains (150 steps), so that the new weights take part:

    python -m benchmarks.models.arithmetic_base --size 5m --output runs/gym/arithmetic_5m

The script ends by measuring the accuracy of the stored weights on the test problems of every level, and writes it to
`ACCURACY.json` next to them. The same seed draws the same chains everywhere; the weights may differ in the last bits
between machines and numbers of threads.
"""

import argparse
import functools
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

from opo_trl.data.arithmetic import (
    LARGEST,
    LEVELS,
    SMALLEST,
    arithmetic_reward,
    base_model_path,
    calculate,
    draw_problem,
    make_problems,
    work_out,
)
from opo_trl.evaluate import wilson_interval

from . import base_models
from .base_models import build_model, build_optimizer, complete, draw_slipping, forget_to_carry, train_step


LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
MAX_LENGTH = 128
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention on a CPU accepts
}


@dataclass(frozen=True)
class Size:
    """
    A size of the base model, with the settings of its training.

    Args:
        shape (`Mapping[str, int]`): part of the model's configuration.
        widened (`bool`): whether it starts from the stored base model.
        learning_rate (`float`): peak of the schedule.
        steps (`int`): optimizer steps.
        tokens_per_batch (`int`): tokens of a batch, prompts included, at least.
    """

    shape: Mapping[str, int]
    widened: bool
    learning_rate: float
    steps: int
    tokens_per_batch: int

    def learning_rate_factor(self, step: int) -> float:
        """Fraction of the peak learning rate at a step: linear warm-up, then cosine decay to zero."""
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (self.steps - WARMUP_STEPS)))


_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES = {
    "0.6m": Size(SHAPE, False, LEARNING_RATE, steps=2000, tokens_per_batch=4096),
    "5m": Size(SHAPE | {name: 3 * SHAPE[name] for name in _WIDTHS}, True, 5e-4, steps=150, tokens_per_batch=2048),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token per character, and only those that the task needs."""
    return base_models.build_tokenizer("0123456789+-=", ".", MAX_LENGTH)


def draw_slipping_chain(problem: str, rng: random.Random) -> str:
    """Work a problem out, sometimes forgetting to carry; see [`draw_slipping`]."""
    write = functools.partial(work_out, problem)
    return draw_slipping(write, rng, right=calculate, slip=forget_to_carry, smallest=SMALLEST, largest=LARGEST)


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, held_out: set[str], rng: random.Random, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draw a batch of problems of one random level, with their slipping chains.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            The tokenizer.
        held_out (`set[str]`):
            Problems to leave out.
        rng (`random.Random`):
            Source of randomness.
        tokens (`int`):
            Tokens of the batch, at least.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Token ids and labels `[B, T]`; the labels leave the prompts out.
    """
    level = rng.choice(LEVELS)
    texts: list[str] = []
    while not texts or len(texts) * len(texts[0]) < tokens:
        problem = draw_problem(level, rng)
        if problem not in held_out:
            texts.append(problem + draw_slipping_chain(problem, rng))
    # All texts of a level have the same length, so neither padding nor a mask is needed.
    ids = torch.tensor(tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"])
    labels = ids.clone()
    labels[:, : texts[0].index("=") + 1] = -100
    return ids, labels


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, size: Size, seed: int) -> None:
    """
    Train the model in place on slipping chains of all levels, without the problems of the test split.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            The tokenizer.
        size ([`Size`]):
            Settings of the training.
        seed (`int`):
            Seed of the chains.
    """
    rng = random.Random(seed)
    held_out = {row["problem"] for row in make_problems("test")}
    optimizer = build_optimizer(model, size.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, size.learning_rate_factor)
    model.train()
    for step in range(size.steps):
        batch = draw_batch(tokenizer, held_out, rng, size.tokens_per_batch)
        loss = train_step(model, optimizer, *batch)
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step} of {size.steps}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def widen(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, shape: Mapping[str, int]) -> Qwen3ForCausalLM:
    """
    Build a wider model that computes what a model computes: its weights are a corner of the new ones.

    What writes to the hidden state is zero outside the corner, so that new heads and neurons have no effect and new
    dimensions are zero; the rest is new, so that gradients reach it. Norms divide by the root of a mean over more
    dimensions, for which their weights make up, up to the epsilon under the root.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model, in float32.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Its tokenizer.
        shape (`Mapping[str, int]`):
            Shape of the wider one, with as many layers and the same `head_dim`.
    """
    wide = build_model(tokenizer, shape)
    own = dict(model.named_parameters())
    scale = math.sqrt(model.config.hidden_size / wide.config.hidden_size)
    for name, weight in wide.named_parameters():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            weight.zero_()
        is_norm = name.endswith(("layernorm.weight", "model.norm.weight"))
        corner = tuple(slice(size) for size in own[name].shape)
        weight[corner] = own[name] * (scale if is_norm else 1)
    return wide


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Store the model, in bfloat16 to keep the package small, and the tokenizer."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Transformers 5 stores a class name that Transformers 4 does not know. Both know this one.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]], *, do_sample: bool
) -> dict[str, Any]:
    """
    Measure the accuracy, one completion per problem.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        rows (`list[dict[str, str]]`):
            Problems, as from [`make_problems`].
        do_sample (`bool`):
            Sample at temperature 1 from the whole vocabulary, rather than greedily.

    Returns:
        `dict[str, Any]`: Number of problems and of right answers, the accuracy and its 95 % Wilson interval.
    """
    completions = complete(model, tokenizer, [row["problem"] for row in rows], do_sample=do_sample)
    right = int(sum(arithmetic_reward(completions, [row["solution"] for row in rows])))
    interval = [round(bound, 4) for bound in wilson_interval(right, len(rows))]
    return {"problems": len(rows), "right": right, "accuracy": right / len(rows), "interval_95": interval}


def measure_stored(folder: Path) -> None:
    """Measure the stored weights, loaded in float32 as for training, and write `ACCURACY.json` next to them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    accuracy = {}
    for level in LEVELS:
        rows = make_problems("test", [level])
        modes = {"sampled": True, "greedy": False}
        accuracy[level] = {
            mode: measure(model, tokenizer, rows, do_sample=do_sample) for mode, do_sample in modes.items()
        }
        print(level, *(f"{mode} {figures['accuracy']:.3f}" for mode, figures in accuracy[level].items()))
    (folder / "ACCURACY.json").write_text(json.dumps(accuracy, indent=2) + "\n")


def main() -> None:
    """Build, store and measure the base model."""
    parser = argparse.ArgumentParser(description="Build the base model of the arithmetic task.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--size", choices=SIZES, default="0.6m", help="parameters of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the chains")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    if size.widened:
        stored = Qwen3ForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32)
        model = widen(stored, tokenizer, size.shape)
    else:
        model = build_model(tokenizer, size.shape)
    train(model, tokenizer, size, arguments.seed)
    save(model, tokenizer, arguments.output)
    measure_stored(arguments.output)


if __name__ == "__main__":
    main()
