"""
Base model of the word problems: a Qwen3 of 57 million parameters, trained from scratch for a given number of seconds
on worked solutions in which most carries are forgotten (`benchmarks/base_models.py` says why).
"""

import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from opo_trl.evaluate import wilson_interval

from ..base_models import build_model, build_optimizer, complete, draw_slipping, pad_batch, train_step
from .words import (
    LARGEST,
    LEVELS,
    SMALLEST,
    Problem,
    build_tokenizer,
    calculate,
    draw_problem,
    make_problems,
    slip,
    word_reward,
)


LEARNING_RATE = 6e-4
WARMUP_STEPS = 100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
}
TINY_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def draw_slipping_solution(problem: Problem, rng: random.Random) -> str:
    """Work a problem out, sometimes forgetting to carry; see [`draw_slipping`]."""
    return draw_slipping(problem.work_out, rng, right=calculate, slip=slip, smallest=SMALLEST, largest=LARGEST)


class SlippingSolutions(IterableDataset):
    """
    Endless batches of problems of one level each, with slipping solutions and without the test problems.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            The tokenizer.
        rows (`int`):
            Problems per batch.
        seed (`int`):
            Seed of the problems; each worker of a data loader draws different ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, rows: int, seed: int):
        self.tokenizer, self.rows, self.seed = tokenizer, rows, seed
        self.held_out = {row["problem"] for row in make_problems("test")}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed} {worker.id if worker else 0}")
        while True:
            yield self._batch(rng)

    def _batch(self, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels `[B, T]`; the labels leave the prompts out."""
        level = rng.choice(LEVELS)
        problems: list[Problem] = []
        while len(problems) < self.rows:
            problem = draw_problem(level, rng)
            if problem.text not in self.held_out:
                problems.append(problem)
        return pad_batch(
            self.tokenizer, [(problem.text, draw_slipping_solution(problem, rng)) for problem in problems]
        )


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seconds: float, rows: int, seed: int
) -> dict[str, Any]:
    """
    Train a model in place for a given time, in bfloat16 on a GPU. The learning rate falls to zero with the time left.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model, on its device.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            The tokenizer.
        seconds (`float`):
            Duration of the training.
        rows (`int`):
            Problems per step.
        seed (`int`):
            Seed of the problems.

    Returns:
        `dict[str, Any]`: Steps, tokens, seconds, and the loss of the last step.
    """
    workers = min(6, os.cpu_count() or 1) if model.device.type == "cuda" else 0
    batches = DataLoader(SlippingSolutions(tokenizer, rows=rows, seed=seed), batch_size=None, num_workers=workers)
    optimizer = build_optimizer(model, LEARNING_RATE)
    model.train()
    step, tokens, elapsed, started = 0, 0, 0.0, time.perf_counter()
    for ids, labels in batches:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1 - elapsed / seconds)
        loss = train_step(model, optimizer, ids, labels)
        step, tokens, elapsed = step + 1, tokens + ids.numel(), time.perf_counter() - started
        if step % 100 == 0:
            print(f"{elapsed:5.0f} of {seconds:g} s, step {step}: loss {loss.item():.4f}", flush=True)
        if elapsed >= seconds:
            break
    return {"steps": step, "tokens": tokens, "seconds": round(elapsed, 1), "last_loss": loss.item()}


def make_base(folder: Path, *, seconds: float, rows: int, shape: dict[str, int], seed: int) -> dict[str, Any]:
    """Train a base model and store it in float32, with its tokenizer; returns its size and the result of [`train`]."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model: Any = build_model(tokenizer, shape)
    model.to(DEVICE)
    trained = train(model, tokenizer, seconds=seconds, rows=rows, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": sum(p.numel() for p in model.parameters()), **trained}


def measure(folder: Path, *, problems: int, batch: int, max_new_tokens: int) -> dict[str, dict[str, Any]]:
    """
    Measure the accuracy of a stored model on the first test problems of every level, one completion each.

    Args:
        folder (`Path`):
            Where the model is.
        problems (`int`):
            Problems per level.
        batch (`int`):
            Completions per batch.
        max_new_tokens (`int`):
            Longest completion.

    Returns:
        `dict`: level → `"greedy"` and `"sampled"` → number of problems and of right answers, accuracy, and its 95 %
        Wilson interval (`low`, `high`).
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(DEVICE)
    by_level = {level: make_problems("test", [level])[:problems] for level in LEVELS}
    rows = [row for some in by_level.values() for row in some]  # all levels together: few, large batches
    accuracy: dict[str, dict[str, Any]] = {level: {} for level in LEVELS}
    torch.manual_seed(0)
    for decoding in ("greedy", "sampled"):
        completions: list[str] = []
        while len(completions) < len(rows):
            texts = [row["problem"] for row in rows[len(completions) :][:batch]]
            completions += complete(
                model, tokenizer, texts, do_sample=decoding == "sampled", max_new_tokens=max_new_tokens
            )
        scores = iter(word_reward(completions, [row["solution"] for row in rows]))
        for level, some in by_level.items():
            accuracy[level][decoding] = _accuracy(list(itertools.islice(scores, len(some))))
    return accuracy


def _accuracy(scores: list[float]) -> dict[str, float]:
    right, total = int(sum(scores)), len(scores)
    low, high = wilson_interval(right, total)
    return {"problems": total, "right": right, "accuracy": right / total, "low": low, "high": high}
