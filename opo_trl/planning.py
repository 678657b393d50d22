"""
How the rows of an optimizer step are cut into micro-batches, so that the same gradient costs the least.

TRL pads every completion to the longest of the whole rollout. Here the rows of a step are ordered by length, cut, and
each part is trimmed to its own longest row; rows without any effect on the gradient are left out. None of this changes
which rows an optimizer step has, nor what they are divided by.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .rollout import COMPLETION_COLUMNS, PROMPT_COLUMNS, take_rows


Rows = dict[str, Any]

# Entries of models with images that have a column per token of prompt and completion together.
_WHOLE_WIDTH = {"token_type_ids", "mm_token_type_ids"}


def row_lengths(rows: Mapping[str, Any]) -> np.ndarray:
    """Tokens of each row, prompt and completion: `[B]`."""
    return (rows["prompt_mask"].sum(dim=1) + rows["completion_mask"].sum(dim=1)).cpu().numpy()


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


def parts_needed(lengths: np.ndarray, *, max_rows: int, max_tokens: int | None) -> int:
    """
    The least number of parts of a step's rows, at least one: none has more than `max_rows` rows or `max_tokens` padded
    tokens.

    A single row longer than `max_tokens` is a part of its own.
    """
    n_parts = max(math.ceil(len(lengths) / max_rows), 1)
    descending = np.sort(lengths)[::-1]

    def widest() -> int:
        return max((len(part) * part[0] for part in np.array_split(descending, n_parts) if len(part) > 1), default=0)

    while max_tokens is not None and widest() > max_tokens:
        n_parts += 1
    return n_parts


def parts_of_rows(rows: Mapping[str, Any], n_parts: int, multiple: int | None = None) -> list[Rows]:
    """Cut rows into parts of about equally many, long ones with long ones, each trimmed to its longest."""
    order = np.argsort(-row_lengths(rows), kind="stable")
    return [trim(take_rows(rows, part), multiple) for part in np.array_split(order, n_parts)]


def spread(parts: list[Rows], n_steps: int) -> list[list[Rows]]:
    """
    Give each of `n_steps` micro-steps its parts, as evenly as possible.

    What is missing is missing in the first ones: the last micro-step of an optimizer step is the one in which
    processes exchange gradients, so it must not be empty.
    """
    bounds = [math.floor(i * len(parts) / n_steps) for i in range(n_steps + 1)]
    return [parts[start:end] for start, end in itertools.pairwise(bounds)]
