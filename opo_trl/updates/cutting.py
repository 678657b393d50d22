"""
How the samples of an optimizer step are cut into micro-batches, so that the same gradient costs the least.

TRL pads every completion to the longest of the rollout. Here the samples of a step are sorted by length and cut where
that costs the least, and each micro-batch is trimmed to its longest sample. Zero-gradient samples are left out, and
processes exchange samples so that none waits for another. None of this changes which samples an optimizer step has, or
what their loss is divided by.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from ..batch import resize, take_rows
from .shared_prompts import arrange


Rows = dict[str, Any]

# Cost of a pass besides its tokens, in tokens: it launches thousands of kernels and reads every parameter. Orders of
# magnitude: the forward pass of Qwen3-1.7B's 28 layers takes 0.05 to 0.1 s on an H200 however few its tokens are, in
# which the device could compute some thousands; larger models compute fewer.
PASS_TOKENS = {"cpu": 256, "gpu": 4096}

# Where every pass communicates, as under ZeRO-2 (gradients), ZeRO-3 and FSDP (parameters as well), its cost depends on
# the network: from hundreds of tokens within a node to many thousands between nodes. It is unknown here, so this
# exceeds the cost of any padding: without a bound on their tokens, there are never more passes than without a plan.
FEWEST_PASSES = 1e12

# Share of the tokens that it must save to compute prompts once, since what else it takes is not counted.
WORTH_SHARING = 0.1

# Entries of models with images that have a column per token of prompt and completion together.
_WHOLE_WIDTH = {"token_type_ids", "mm_token_type_ids"}


def row_lengths(rows: Mapping[str, Any]) -> torch.Tensor:
    """Columns that each sample needs, `[B, 2]`: of its prompt from the first token, of its completion to the last."""
    masks = rows["prompt_mask"].flip(1), rows["completion_mask"]
    numbered = [mask.bool() * torch.arange(1, mask.size(1) + 1, device=mask.device) for mask in masks]
    return torch.stack([pad(numbers, (1, 0)).amax(dim=1) for numbers in numbered], dim=1)


def columns(lengths: np.ndarray, most: np.ndarray) -> dict[str, int]:
    """Columns of prompts and completions for samples of these lengths `[B, 2]`: at least one, `most` two numbers."""
    prompt, completion = np.minimum(np.maximum(lengths.max(axis=0), 1), most).tolist()
    return {"prompt": prompt, "completion": completion}


def _cheapest(costs_of_parts: np.ndarray, pass_tokens: float) -> tuple[list[int], float]:
    """
    Bounds of the cheapest cut, and its cost, by the cost of the micro-batch of each size that begins at each sample.

    Dynamic programming over the samples, with a choice for each size. It is worth its lines: on MATH's
    lengths, greedily filled bins cost 2–7 % more, and up to 23 % more tokens with [`FEWEST_PASSES`] and `max_tokens`.
    """
    most, n_rows = costs_of_parts.shape
    least, last = np.zeros(n_rows + 1), np.zeros(n_rows + 1, dtype=int)  # of the first i samples
    for end in range(1, n_rows + 1):
        sizes = np.arange(1, min(most, end) + 1)
        costs = least[end - sizes] + costs_of_parts[sizes - 1, end - sizes] + pass_tokens
        last[end], least[end] = sizes[costs.argmin()], costs.min()
    bounds = [n_rows]
    while bounds[-1] > 0:
        bounds.append(bounds[-1] - int(last[bounds[-1]]))
    return bounds[-2:0:-1], least[-1]


def split_further(lengths: np.ndarray, bounds: list[int], n_parts: int) -> list[int]:
    """
    Split the parts with these `bounds`, of [`best_cut`], until there are `n_parts`, as on other processes: each time
    where it saves the most padding.
    """
    while len(bounds) + 1 < n_parts:
        parts = itertools.pairwise([0, *bounds, len(lengths)])
        bounds = sorted([*bounds, min(_best_split(lengths, *part) for part in parts)[2]])
    return bounds


def _best_split(lengths: np.ndarray, start: int, end: int) -> tuple[float, int, int, int]:
    """Change in padded tokens (≤ 0) by the best split of a part; its start, where to split it, its end."""
    if end - start < 2:
        return math.inf, start, start, end
    widths = [np.maximum.accumulate(rows).sum(axis=1) for rows in (lengths[start:end], lengths[start:end][::-1])]
    sizes = np.arange(1, end - start)
    tokens = sizes * widths[0][:-1] + (sizes * widths[1][:-1])[::-1]
    best = int(tokens.argmin())
    return float(tokens[best] - (end - start) * widths[0][-1]), start, start + best + 1, end


@dataclass(frozen=True)
class Limits:
    """What a part may hold, and what it costs besides its tokens."""

    max_rows: int  # samples
    max_tokens: int | None = None  # with padding; a single longer sample is a part by itself
    fill: bool = False  # whether it may hold more samples with no more tokens than `max_rows` of the longest
    pass_tokens: float = PASS_TOKENS["cpu"]  # cost besides tokens; [`FEWEST_PASSES`] gives the fewest parts

    def costs(self, lengths: np.ndarray, prompts: "Prompts | None" = None) -> np.ndarray:
        """Cost of the part of each size that begins at each sample, `[sizes, B]`; infinite where not allowed."""
        n_rows = len(lengths)
        costs = np.full((n_rows if self.fill else self.max_rows, n_rows), np.inf)
        longest, completion = lengths.sum(axis=1).max(initial=0), lengths[:, 1].max(initial=0)
        for size, (rows, width, scored) in enumerate(prompts.rows(lengths) if prompts else _rows(lengths), 1):
            tokens = rows * width
            is_small = size <= self.max_rows
            fits = is_small | (size * scored <= self.max_rows * completion)
            if prompts or not is_small:
                fits &= tokens <= self.max_rows * longest
            if prompts:  # attention and its mask grow with the square of the width
                fits &= prompts.cost(tokens, width) <= self.max_rows * prompts.cost(longest, longest)
            if self.max_tokens is not None:
                fits &= tokens <= self.max_tokens
            fits |= size == 1
            costs[size - 1, : len(fits)] = np.where(fits, prompts.cost(tokens, width) if prompts else tokens, np.inf)
            if size == len(costs) or (size > self.max_rows and not fits.any()):
                return costs[:size]
        return costs


def _rows(lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Rows, their width, and columns of completions, of the parts of each size, by their first sample."""
    widest = np.zeros_like(lengths)
    for size in range(1, len(lengths) + 1):
        widest = np.maximum(widest[: len(lengths) - size + 1], lengths[size - 1 :])
        yield size, widest.sum(axis=1), widest[:, 1]


def partition(lengths: np.ndarray, zero_gradient: np.ndarray, n_processes: int) -> np.ndarray:
    """
    Partition N samples among processes: the same number each, with about the same number of tokens to compute.

    `lengths` are tokens of prompts and of completions, `[N, 2]`; samples of `zero_gradient`, bool `[N]`, need not be
    computed. Returns the samples of each process, `[n_processes, N / n_processes]`.
    """
    # The longest sample goes to the process with the fewest tokens (LPT scheduling); a full process takes no more.
    tokens = np.where(zero_gradient, 0, lengths.sum(axis=1))
    members: list[list[int]] = [[] for _ in range(n_processes)]
    load = np.zeros(n_processes)
    for sample in np.argsort(-tokens, kind="stable"):
        process = int(load.argmin())
        members[process].append(int(sample))
        load[process] += tokens[sample] if len(members[process]) < len(lengths) // n_processes else np.inf
    return np.array(members)


@dataclass(frozen=True)
class Prompts:
    """Prompts of samples, where a model can compute them once."""

    of_sample: np.ndarray  # the prompt of each, as any number, `[B]`
    # Tokens to which attention costs as much as the rest of a layer: with shared prompts it is computed between all
    # completions of a prompt, and masked.
    balance: float

    def take(self, samples: np.ndarray) -> "Prompts":
        """The prompts of some samples."""
        return Prompts(self.of_sample[samples], self.balance)

    def cost(self, tokens: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Cost of some tokens in rows of this width, in tokens without attention."""
        return tokens * (1 + width / self.balance)

    def order(self, lengths: np.ndarray) -> np.ndarray:
        """Order of samples with those of a prompt together, and prompts by the tokens of all their completions."""
        _, prompt = np.unique(self.of_sample, return_inverse=True)
        tokens = np.bincount(prompt, lengths.sum(axis=1))[prompt]
        return np.lexsort((prompt, -tokens))

    def rows(self, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """As [`_rows`], with a row per prompt."""
        begins = np.append(True, np.diff(self.of_sample) != 0)
        width = widest = number = completion = np.zeros(len(lengths), dtype=int)
        for size in range(1, len(lengths) + 1):
            last = slice(size - 1, None)  # the sample that such a part ends with
            n_parts = len(lengths) - size + 1
            new = begins[last] | (size == 1)
            width = np.where(new, np.maximum(lengths[last, 0] - 1, 0), width[:n_parts]) + 1 + lengths[last, 1]
            widest, number = np.maximum(widest[:n_parts], width), number[:n_parts] + new
            completion = np.maximum(completion[:n_parts], lengths[last, 1])
            yield number, widest, completion


def best_cut(
    lengths: np.ndarray, limits: Limits, prompts: Prompts | None = None
) -> tuple[np.ndarray, list[int], bool, float]:
    """
    The cheapest way to cut samples into parts: padded tokens, plus `pass_tokens` of the limits per part. `lengths` are
    tokens of prompts and of completions, `[B, 2]`.

    Returns:
        `tuple[np.ndarray, list[int], bool, float]`: the samples in order; where each part but the first begins;
        whether parts compute a prompt once for all its completions; what they cost besides attention between tokens,
        or with it where there are `prompts`.
    """
    order = np.argsort(-lengths.sum(axis=1), kind="stable")
    bounds, cost = _cheapest(limits.costs(lengths[order]), limits.pass_tokens)
    if prompts is None:
        return order, bounds, False, cost
    widths = [(len(part), lengths[part].max(axis=0, initial=0).sum()) for part in np.split(order, bounds)]
    tokens = float(sum(prompts.cost(n * width, width) for n, width in widths))
    shared = prompts.order(lengths)
    shared_bounds, shared_cost = _cheapest(limits.costs(lengths[shared], prompts.take(shared)), limits.pass_tokens)
    cost = tokens + limits.pass_tokens * len(widths)
    shared_tokens = shared_cost - limits.pass_tokens * (len(shared_bounds) + 1)
    if shared_cost < cost and shared_tokens < (1 - WORTH_SHARING) * tokens:
        return shared, shared_bounds, True, shared_cost
    return order, bounds, False, cost


def cut_rows(
    rows: Rows, lengths: np.ndarray, samples: np.ndarray, n_parts: int, limits: Limits, prompts: Prompts | None
) -> list[Rows]:
    """
    Cut some `samples` of rows, whose lengths are `[B, 2]`, into `n_parts` micro-batches, or more where the limits need
    more, each without the columns that are padding in all of its samples; those with images and token types keep all.
    Those that compute a prompt once have the entries of [`arrange`].
    """
    most = np.array([rows["prompt_mask"].size(1), rows["completion_mask"].size(1)])
    order, bounds, shared, _ = best_cut(lengths[samples], limits, prompts and prompts.take(samples))
    bounds, order = split_further(lengths[samples][order], bounds, n_parts), samples[order]
    parts = []
    for part in np.split(order, bounds):
        taken = take_rows(rows, part)
        if not rows.keys() & _WHOLE_WIDTH:
            taken = resize(taken, **columns(lengths[part], most))
        placed = arrange(taken, lengths[part], prompts.of_sample[part]) if shared and prompts else {}
        parts.append(taken | placed)
    return parts


def spread(micro_batches: list[Rows], n_calls: int) -> list[list[Rows]]:
    """
    Give each of `n_calls` of `training_step` its micro-batches, as evenly as possible.

    If there are too few, the first ones stay empty: in the last one processes exchange gradients.
    """
    bounds = [math.floor(i * len(micro_batches) / n_calls) for i in range(n_calls + 1)]
    return [micro_batches[start:end] for start, end in itertools.pairwise(bounds)]
