"""
How the rows of an optimizer step are cut into micro-batches, so that the same gradient costs the least.

TRL pads every completion to the longest of the whole rollout. Here the rows of a step are ordered by length, cut where
that leaves the least padding, and each part is trimmed to its own longest row; rows without any effect on the gradient
are left out, and processes exchange rows so that none waits for another. None of this changes which rows an optimizer
step has, nor what they are divided by.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .rollout import COMPLETION_COLUMNS, PROMPT_COLUMNS, take_rows


Rows = dict[str, Any]

# What a pass costs beside its tokens, in tokens: it starts some thousand kernels and reads every parameter. An order
# of magnitude: on a data-center GPU about 100 for 8B parameters, 1,000 for 0.6B.
_PASS_TOKENS = 256

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
    for name in (*COMPLETION_COLUMNS, "opo_steering"):
        if name in rows and rows[name].size(1) == full:  # a weight per sequence has a single column
            trimmed[name] = rows[name][:, :completion]
    return trimmed


def _width(mask: torch.Tensor, multiple: int | None) -> int:
    used = max(int(mask.sum(dim=1).max()), 1)
    if multiple is not None:
        used = math.ceil(used / multiple) * multiple
    return min(used, mask.size(1))


def best_number(lengths: np.ndarray, *, max_rows: int, max_tokens: int | None) -> int:
    """
    The number of parts of a step's rows, at least one, that costs the least: padded tokens, and passes.

    Args:
        lengths (`np.ndarray`):
            Tokens of prompts and of completions, `[B, 2]`.
        max_rows (`int`):
            Most rows of a part.
        max_tokens (`int`, *optional*):
            Most tokens of a part, with padding; a single longer row is a part of its own.
    """
    lengths = lengths[longest_first(lengths)]
    padded = _padded_tokens(lengths, max_rows, max_tokens)
    least, n_parts = np.zeros(len(lengths) + 1), np.zeros(len(lengths) + 1, dtype=int)  # for the first i rows
    for end in range(1, len(lengths) + 1):
        sizes = np.arange(1, min(max_rows, end) + 1)
        costs = least[end - sizes] + padded[sizes - 1, end - sizes] + _PASS_TOKENS
        last = sizes[costs.argmin()]
        least[end], n_parts[end] = costs.min(), n_parts[end - last] + 1
    return max(int(n_parts[-1]), 1)


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Order of rows by their tokens, prompt and completion together."""
    return np.argsort(-lengths.sum(axis=1), kind="stable")


def cut(lengths: np.ndarray, n_parts: int, *, max_rows: int, max_tokens: int | None) -> list[int]:
    """
    Cut rows, as they are ordered, into parts with the fewest padded tokens in all, by dynamic programming.

    Args:
        lengths (`np.ndarray`):
            Tokens of prompts and of completions, `[B, 2]`, longest first.
        n_parts (`int`):
            Number of parts, from [`best_number`] to B.
        max_rows (`int`), max_tokens (`int`, *optional*):
            As in [`best_number`].

    Returns:
        `list[int]`: where each part but the first begins.
    """
    n_rows = len(lengths)
    padded = _padded_tokens(lengths, max_rows, max_tokens)
    # The fewest padded tokens of the first i rows in so many parts, and the size of the last of these.
    fewest = np.full(n_rows + 1, np.inf)
    fewest[0] = 0
    last = []
    for _ in range(n_parts):
        options = np.full((max_rows, n_rows + 1), np.inf)
        for size in range(1, min(max_rows, n_rows) + 1):
            options[size - 1, size:] = (fewest[:-1] + padded[size - 1])[: n_rows + 1 - size]
        last.append(options.argmin(axis=0) + 1)
        fewest = options.min(axis=0)
    bounds = [n_rows]
    for sizes in reversed(last):
        bounds.append(bounds[-1] - int(sizes[bounds[-1]]))
    return bounds[-2:0:-1]


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


def parts_of_rows(
    rows: Mapping[str, Any], n_parts: int, *, max_rows: int, max_tokens: int | None, multiple: int | None = None
) -> list[Rows]:
    """Cut rows into parts, long ones with long ones, each trimmed to its longest; see [`cut`] and [`trim`]."""
    lengths = row_lengths(rows)
    order = longest_first(lengths)
    bounds = cut(lengths[order], n_parts, max_rows=max_rows, max_tokens=max_tokens)
    return [trim(take_rows(rows, part), multiple) for part in np.split(order, bounds)]


def spread(parts: list[Rows], n_steps: int) -> list[list[Rows]]:
    """
    Give each of `n_steps` micro-steps its parts, as evenly as possible.

    What is missing is missing in the first ones: the last micro-step of an optimizer step is the one in which
    processes exchange gradients, so it must not be empty.
    """
    bounds = [math.floor(i * len(parts) / n_steps) for i in range(n_steps + 1)]
    return [parts[start:end] for start, end in itertools.pairwise(bounds)]
