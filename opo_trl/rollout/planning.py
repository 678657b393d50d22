"""
How the rows of an optimizer step are cut into micro-batches, so that the same gradient costs the least.

TRL pads every completion to the longest of the whole rollout. Here the rows of a step are ordered by length, cut where
that leaves the least padding, and each part is trimmed to its own longest row; rows without any effect on the gradient
are left out, and processes exchange rows so that none waits for another. None of this changes which rows an optimizer
step has, nor what they are divided by.
"""

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .rows import MULTIMODAL_KEYS, PROMPT_COLUMNS, take_rows


Rows = dict[str, Any]

# What a pass costs besides its tokens, in tokens: it starts some thousand kernels and reads every parameter. An order
# of magnitude: on a data-center GPU about 100 for 8B parameters, 1,000 for 0.6B.
PASS_TOKENS = 256

# Where every pass communicates, as under ZeRO-2 (gradients), ZeRO-3 and FSDP (parameters as well), the network sets
# its price: from hundreds of tokens within a node to many thousands between nodes. It cannot be known here, so there
# are never more passes than without a plan: this is more than any padding costs.
FEWEST_PASSES = 1e12

# Entries of models with images that have a column per token of prompt and completion together.
_WHOLE_WIDTH = {"token_type_ids", "mm_token_type_ids"}


def row_lengths(rows: Mapping[str, Any]) -> np.ndarray:
    """Tokens of each row, of its prompt and of its completion: `[B, 2]`."""
    return torch.stack([rows[name].sum(dim=1) for name in ("prompt_mask", "completion_mask")], dim=1).cpu().numpy()


def trim(rows: Mapping[str, Any], multiple: int | None = None) -> Rows:
    """
    Remove the columns that are padding in every row; rows of images with types of tokens are left as they are.

    Args:
        rows (`Mapping[str, Any]`):
            Rows of a rollout: prompts padded on the left, completions on the right.
        multiple (`int`, *optional*):
            Number that the remaining columns, of prompts and of completions, are a multiple of, as far as there are
            so many.

    Returns:
        `dict[str, Any]`: the rows; entries that are not by token are left as they are.
    """
    trimmed = dict(rows)
    if rows.keys() & _WHOLE_WIDTH:
        return trimmed
    prompt, completion = (_width(rows[name], multiple) for name in ("prompt_mask", "completion_mask"))
    full = rows["completion_mask"].size(1)
    for name in PROMPT_COLUMNS:
        trimmed[name] = rows[name][:, rows[name].size(1) - prompt :]
    # The others by token are of completions, those of a subclass as well. A weight per sequence has a single column.
    others = rows.keys() - {*PROMPT_COLUMNS, *MULTIMODAL_KEYS, "rewards_per_func"}
    for name in others:
        value = rows[name]
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.size(1) == full:
            trimmed[name] = value[:, :completion]
    return trimmed


def _width(mask: torch.Tensor, multiple: int | None) -> int:
    used = max(int(mask.sum(dim=1).max()), 1)
    if multiple is not None:
        used = math.ceil(used / multiple) * multiple
    return min(used, mask.size(1))


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Order of rows by their tokens, prompt and completion together."""
    return np.argsort(-lengths.sum(axis=1), kind="stable")


def cut(lengths: np.ndarray, *, max_rows: int, max_tokens: int | None, pass_tokens: float = PASS_TOKENS) -> list[int]:
    """
    Cut rows, in their order, into parts that cost the least: padded tokens, and `pass_tokens` a part.

    Dynamic programming over the rows, with `max_rows` choices for each.

    Args:
        lengths (`np.ndarray`):
            Tokens of prompts and of completions, `[B, 2]`, longest first.
        max_rows (`int`):
            Most rows of a part.
        max_tokens (`int`, *optional*):
            Most tokens of a part, with padding; a single longer row is a part of its own.
        pass_tokens (`float`, *optional*, defaults to `PASS_TOKENS`):
            What a part costs besides its tokens. [`FEWEST_PASSES`] gives the fewest parts, and of these the cut with
            the least padding.

    Returns:
        `list[int]`: where each part but the first begins.
    """
    padded = _padded_tokens(lengths, max_rows, max_tokens)
    least, last = np.zeros(len(lengths) + 1), np.zeros(len(lengths) + 1, dtype=int)  # of the first i rows
    for end in range(1, len(lengths) + 1):
        sizes = np.arange(1, min(max_rows, end) + 1)
        costs = least[end - sizes] + padded[sizes - 1, end - sizes] + pass_tokens
        last[end], least[end] = sizes[costs.argmin()], costs.min()
    bounds = [len(lengths)]
    while bounds[-1] > 0:
        bounds.append(bounds[-1] - int(last[bounds[-1]]))
    return bounds[-2:0:-1]


def split_further(lengths: np.ndarray, bounds: list[int], n_parts: int) -> list[int]:
    """
    Split parts until there are `n_parts`, each time where that saves the most padding.

    Args:
        lengths (`np.ndarray`):
            Tokens of prompts and of completions, `[B, 2]`, longest first.
        bounds (`list[int]`):
            Where each part but the first begins, as [`cut`] returns it.
        n_parts (`int`):
            Number of parts wanted, at most B.

    Returns:
        `list[int]`: where each of at least `n_parts` parts but the first begins.
    """
    bounds = list(bounds)
    edges = [0, *bounds, len(lengths)]
    splits = [_best_split(lengths, *part) for part in itertools.pairwise(edges)]
    heapq.heapify(splits)
    while len(bounds) + 1 < n_parts:
        _, start, middle, end = heapq.heappop(splits)
        bounds.append(middle)
        for part in ((start, middle), (middle, end)):
            heapq.heappush(splits, _best_split(lengths, *part))
    return sorted(bounds)


def _best_split(lengths: np.ndarray, start: int, end: int) -> tuple[float, int, int, int]:
    """How many padded tokens more (≤ 0) the best split of a part has; its start, where to split it, its end."""
    if end - start < 2:
        return math.inf, start, start, end
    widths = [np.maximum.accumulate(rows).sum(axis=1) for rows in (lengths[start:end], lengths[start:end][::-1])]
    sizes = np.arange(1, end - start)
    tokens = sizes * widths[0][:-1] + (sizes * widths[1][:-1])[::-1]
    best = int(tokens.argmin())
    return float(tokens[best] - (end - start) * widths[0][-1]), start, start + best + 1, end


def _padded_tokens(lengths: np.ndarray, max_rows: int, max_tokens: int | None) -> np.ndarray:
    """Tokens of a part that begins with each row and has so many, `[max_rows, B]`; infinite where it may not be."""
    n_rows = len(lengths)
    padded = np.full((max_rows, n_rows), np.inf)
    widest = np.zeros_like(lengths)
    for size in range(1, min(max_rows, n_rows) + 1):
        widest = np.maximum(widest[: n_rows - size + 1], lengths[size - 1 :])
        tokens = size * widest.sum(axis=1)
        most = np.inf if max_tokens is None or size == 1 else max_tokens
        padded[size - 1, : len(tokens)] = np.where(tokens <= most, tokens, np.inf)
    return padded


def shares(lengths: np.ndarray, inert: np.ndarray, n_shares: int) -> np.ndarray:
    """
    Deal rows to processes, so that each has equally many, and about as many tokens to compute.

    Args:
        lengths (`np.ndarray`):
            Tokens of prompts and of completions, `[N, 2]`; N is a multiple of `n_shares`.
        inert (`np.ndarray`):
            Which rows have no effect, and are not computed, `[N]`.
        n_shares (`int`):
            Number of processes.

    Returns:
        `np.ndarray`: the rows of each, `[n_shares, N / n_shares]`.
    """
    tokens = np.where(inert, 0, lengths.sum(axis=1))
    dealt: list[list[int]] = [[] for _ in range(n_shares)]
    load = np.zeros(n_shares)
    for row in np.argsort(-tokens, kind="stable"):
        share = int(load.argmin())
        dealt[share].append(int(row))
        load[share] += tokens[row] if len(dealt[share]) < len(lengths) // n_shares else np.inf
    return np.array(dealt)


def best_number(lengths: np.ndarray, **limits: Any) -> int:
    """The number of parts, at least one, that [`cut`] makes of rows of these lengths `[B, 2]`, with these limits."""
    return len(cut(lengths[longest_first(lengths)], **limits)) + 1


def parts_of_rows(rows: Mapping[str, Any], n_parts: int, *, multiple: int | None = None, **limits: Any) -> list[Rows]:
    """Cut rows into `n_parts`, or more where [`cut`] with these limits makes more: rows of like length, trimmed."""
    lengths = row_lengths(rows)
    order = longest_first(lengths)
    bounds = split_further(lengths[order], cut(lengths[order], **limits), n_parts)
    return [trim(take_rows(rows, part), multiple) for part in np.split(order, bounds)]


def spread(parts: list[Rows], n_steps: int) -> list[list[Rows]]:
    """
    Give each of `n_steps` micro-steps its parts, as evenly as possible.

    What is missing is missing in the first ones: the last micro-step of an optimizer step is the one in which
    processes exchange gradients, so it must not be empty.
    """
    bounds = [math.floor(i * len(parts) / n_steps) for i in range(n_steps + 1)]
    return [parts[start:end] for start, end in itertools.pairwise(bounds)]
