"""
Recorded rollouts: completions that somebody has written and perhaps scored already, one per row.

| column | |
|---|---|
| `prompt` | text, or messages |
| `completion` | text, or the message of the assistant; not needed where there are tokens |
| `completion_ids` | its tokens; without them, those of its text and the token that ends a turn |
| `logprobs` | of each token, under the policy that wrote it |
| `completion_mask` | 1 for each token to train on, 0 for those of somebody else, such as a tool |
| `temperature` | at which it was sampled, and for which `logprobs` are |
| `reward` | a number, or null for a completion that could not be scored |
| `group` | the same for the completions of a group; they have the same prompt |

A dataset has each of these in every row or not at all. Further columns, such as `solution`, are passed to the reward
functions.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from .prompts import is_chat, not_of_chat


logger = logging.getLogger(__name__)

# Column of a dataset of groups: for each completion of a group, what differs from the others.
RECORDED = "recorded"
KNOWN = ("completion", "completion_ids", "logprobs", "completion_mask", "temperature", "reward")  # of a completion

_LARGEST = 1e15  # of a reward: squares are summed in float32


def load_rollouts(source: str, num_generations: int) -> Dataset:
    """
    Load recorded rollouts as a dataset with one row per group of `num_generations` completions: `prompt`, the columns
    that are equal in each group, and [`RECORDED`], for each completion a mapping with the other columns.

    `source` is a file or dataset as for [`load_rows`], or a folder of files, as a run with `save_rollouts` writes it.
    A group with more completions is divided; those that are left over are dropped, with a warning.

    Raises:
        `ValueError`: it cannot be read, a row lacks something or contradicts itself, or no group is large enough.
    """
    rows = _rows(source)
    names = [*rows[0]]
    if unscored := sum(row["reward"] is None for row in rows) if "reward" in names else 0:
        if unscored == len(rows):
            fix = "Write numbers, or remove the column, so that `reward_funcs` score the completions"
            raise ValueError(f"rollouts={source!r} has no reward: `reward` is null in every row. {fix}.")
        logger.warning(f"rollouts={source!r}: {unscored:,} of its {len(rows):,} completions have no reward.")
    members: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        members.setdefault(json.dumps([row.get("group"), row["prompt"]], default=str), []).append(row)
    # Not one after the other: a file may have the right answers of each prompt first.
    divided = ((group, len(group) // num_generations) for group in members.values())
    groups = [group[part::parts][:num_generations] for group, parts in divided for part in range(parts)]
    if not groups:
        raise ValueError(
            f"rollouts={source!r} has no group of num_generations={num_generations} completions: its "
            f"{len(members):,} groups have up to {max(map(len, members.values()))}. Lower `num_generations`, or "
            "record more completions of each prompt."
        )
    if dropped := len(rows) - len(groups) * num_generations:
        logger.warning(
            f"rollouts={source!r}: {dropped:,} of its {len(rows):,} completions are left over after dividing them "
            f"into groups of num_generations={num_generations}, and are not used."
        )
    further = [name for name in names if name not in ("prompt", "group", *KNOWN)]
    shared = [name for name in further if all(row[name] == group[0][name] for group in groups for row in group)]
    of_completion = [name for name in names if name not in ("prompt", "group", *shared)]
    try:
        return Dataset.from_list(
            [
                {"prompt": group[0]["prompt"]}
                | {name: group[0][name] for name in shared}
                | {RECORDED: [{name: row[name] for name in of_completion} for row in group]}
                for group in groups
            ]
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        fix = "Give each column one type"
        raise ValueError(f"rollouts={source!r} has values of several types in one column: {error}. {fix}.") from error


def text_of(completion: Any) -> str | None:
    """The text of a completion: itself, or that of the assistant's message; `None` for anything else."""
    if isinstance(completion, Mapping):
        completion = [completion]
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        turn = {name: value for name, value in completion[0].items() if value}
        completion = turn.get("content") if turn.keys() == {"role", "content"} else None
        completion = completion if turn.get("role") == "assistant" else None
    return completion if isinstance(completion, str) else None


def _rows(source: str) -> list[dict[str, Any]]:
    from .files import files_of, load_rows  # not to import a trainer

    try:
        files = [*map(str, files_of(Path(os.path.expanduser(source))))] or [source]
        parts = {file: [*load_rows(file)] for file in files}
    except ValueError as error:
        said = str(error).replace("dataset_name=", "rollouts=").replace("`dataset_name`", "`rollouts`")
        raise ValueError(said) from error
    names = [*next(iter(row for rows in parts.values() for row in rows), {})]
    written = "completion_ids" if "completion_ids" in names else "completion"
    if missing := [name for name in ("prompt", written) if name not in names]:
        raise ValueError(f"rollouts={source!r} has no column {missing[0]!r}, only {names}. Add it.")
    # Without tokens, it is not known to which they belong; of other masks, what they mean.
    masks = [name for name in names if name.lower().removesuffix("s").endswith("mask") and name != "completion_mask"]
    of_tokens = [name for name in ("logprobs", "completion_mask") if name in names and written == "completion"]
    if taken := [*masks, *of_tokens, *({RECORDED} & {*names})]:
        fix = "Add `completion_ids`, or remove it" if of_tokens else "Rename it to `completion_mask` if it is one"
        raise ValueError(f"rollouts={source!r} has a column {taken[0]!r}, which is not used. {fix}.")
    for file, rows in parts.items():
        for number, row in enumerate(rows, 1):
            other = f"it has the columns {[*row]}, and the first row {names}. Give all rows the same"
            if wrong := other if row.keys() ^ {*names} else _wrong(row, written):
                raise ValueError(f"rollouts={file!r}, row {number}: {wrong}.")
    return [row for rows in parts.values() for row in rows]


def _wrong(row: Mapping[str, Any], written: str) -> str:
    """What is wrong with a row, and what to do; nothing if it can be used."""
    ids, reward = row.get("completion_ids"), row.get("reward")
    if not (is_chat(row["prompt"]) or (isinstance(row["prompt"], str) and row["prompt"])):
        said = f"`prompt` has {not_of_chat(row['prompt'])!r:.60}"
        return f"{said}. Write text, or messages that each have a `role` and `content`"
    if written == "completion" and text_of(row["completion"]) is None:
        said = f"`completion` is {str(row['completion'])[:60]!r}"
        return f"{said}. Write text, or one message of the assistant with nothing but `content`"
    if written == "completion_ids" and not (_are(int, ids) and ids and min(ids) >= 0):
        return f"`completion_ids` is {str(ids)[:60]}. Write token ids, integers of at least 0, at least one"
    for name, fits, said in (
        ("logprobs", lambda logp: -math.inf < logp <= 1e-3, "the logarithm of a probability, finite and at most 0,"),
        ("completion_mask", lambda kept: kept in (0, 1), "0 or 1"),
    ):
        values = row.get(name)
        if name in row and not (_are(int | float, values) and len(values) == len(ids) and all(map(fits, values))):
            return f"`{name}` is {str(values)[:60]}. Write {said} for each of the {len(ids)} tokens"
    if not (reward is None or (_are(int | float, [reward]) and abs(reward) <= _LARGEST)):
        said = f"`reward` is {reward!r}. Write a number from −1e15 to 1e15, or null if it could not be scored"
        return f"{said}. In CSV, all values are text: use JSON lines" if isinstance(reward, str) else said
    if "temperature" in row and not (_are(int | float, [row["temperature"]]) and 0 < row["temperature"] < math.inf):
        return f"`temperature` is {row['temperature']!r}. Write a number above 0, or remove the column"
    return ""


def _are(kind: Any, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in values)
