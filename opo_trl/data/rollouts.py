"""
Recorded rollouts: completions that somebody has written and perhaps scored already, one per row.

| column | |
|---|---|
| `prompt` | text, or messages |
| `completion` | text, or the message of the assistant; not needed where there are tokens |
| `completion_ids` | its tokens; by default those of its text, and the end of a sequence |
| `logprobs` | of each token, under the policy that wrote it, at the `temperature` of the run |
| `reward` | a number, or null for a completion that could not be scored |
| `group` | the same for the completions of a group; by default, for those with the same prompt |

Each of the last four has a value in every row or in none; `reward` may be null. Any further columns, such as
`solution`, are passed to the reward functions.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets

from .files import load_rows


logger = logging.getLogger(__name__)

RECORDED = (
    "recorded"  # column of a dataset of groups: what differs between the completions of a group, for each of them
)

_COLUMNS = ("completion", "completion_ids", "logprobs", "reward")


def load_rollouts(source: str, num_generations: int) -> Dataset:
    """
    Load recorded rollouts as a dataset with one row per group of `num_generations` completions.

    A group with more of them is divided; those that are left over are dropped, and counted by a warning.

    Args:
        source (`str`): a file or dataset as for [`load_rows`], or a folder of `.jsonl` files, as a run with
            `save_rollouts` writes it.
        num_generations (`int`): completions per group.

    Returns:
        `Dataset`: `prompt`, the columns that are equal in each group, and [`RECORDED`]: for each completion a mapping
        with the other columns.

    Raises:
        `ValueError`: it cannot be read, a row lacks something or contradicts itself, or no group is large enough.
    """
    try:
        files = sorted(Path(source).expanduser().glob("*.jsonl"))
        loaded = concatenate_datasets([load_rows(str(file)) for file in files]) if files else load_rows(source)
    except ValueError as error:
        said = str(error).replace("dataset_name=", "rollouts=").replace("`dataset_name`", "`rollouts`")
        raise ValueError(said) from error
    rows: list[dict[str, Any]] = [*loaded]
    _check(source, rows, loaded.column_names)
    members: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        members.setdefault(json.dumps(row.get("group", row["prompt"]), default=str), []).append(row)
    groups = [
        group[start : start + num_generations]
        for group in members.values()
        for start in range(0, len(group) - num_generations + 1, num_generations)
    ]
    sizes = sorted({len(group) for group in members.values()})
    if not groups:
        raise ValueError(
            f"rollouts={source!r} has no group of num_generations={num_generations} completions: its "
            f"{len(members):,} groups have up to {sizes[-1]}. Lower `num_generations`, or give the completions of a "
            "prompt the same `group`."
        )
    if dropped := len(rows) - len(groups) * num_generations:
        logger.warning(
            f"rollouts={source!r}: {dropped:,} of its {len(rows):,} completions do not fill a group of "
            f"num_generations={num_generations}, and are not used."
        )
    further = [name for name in loaded.column_names if name not in ("prompt", "group", *_COLUMNS)]
    shared = [name for name in further if all(row[name] == group[0][name] for group in groups for row in group)]
    of_completion = [name for name in loaded.column_names if name not in ("prompt", "group", *shared)]
    return Dataset.from_list(
        [
            {"prompt": group[0]["prompt"]}
            | {name: group[0][name] for name in shared}
            | {RECORDED: [{name: row[name] for name in of_completion} for row in group]}
            for group in groups
        ]
    )


def text_of(completion: Any) -> str | None:
    """The text of a completion: itself, or that of the assistant's message; `None` for anything else."""
    if isinstance(completion, Mapping):
        completion = [completion]
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        turn = completion[0]
        completion = turn.get("content") if turn.get("role") == "assistant" and not turn.get("tool_calls") else None
    return completion if isinstance(completion, str) else None


def _check(source: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    written = "completion_ids" if "completion_ids" in names else "completion"
    for name in ("prompt", written):
        if name not in names:
            raise ValueError(f"rollouts={source!r} has no column {name!r}, only {names}. Add it.")
    if "logprobs" in names and written == "completion":
        raise ValueError(
            f"rollouts={source!r} has `logprobs` but no `completion_ids`: which token each belongs to is not known. "
            "Add the tokens, or remove `logprobs` and name the model that wrote them in `rollouts_model`."
        )
    for number, row in enumerate(rows, 1):
        if wrong := _wrong(row, written):
            raise ValueError(f"rollouts={source!r}, row {number}: {wrong}.")


def _wrong(row: Mapping[str, Any], written: str) -> str:
    """What is wrong with a row, and what to do; nothing if it can be used."""
    ids, logps, reward = row.get("completion_ids"), row.get("logprobs"), row.get("reward")
    if not isinstance(row["prompt"], str | list) or not row["prompt"]:
        return f"`prompt` is {row['prompt']!r}. Write text, or a list of messages"
    if written == "completion" and text_of(row["completion"]) is None:
        return f"`completion` is {str(row['completion'])[:60]!r}. Write text, or one message of the assistant"
    if written == "completion_ids" and not (_are(int, ids) and ids and min(ids) >= 0):
        return f"`completion_ids` is {str(ids)[:60]}. Write the tokens of the completion, at least one"
    if "logprobs" in row:
        if not _are(int | float, logps) or len(logps) != len(ids or ()):
            return f"`logprobs` is {str(logps)[:60]}. Write one number for each of the {len(ids or ())} tokens"
        if not all(-math.inf < logp <= 1e-3 for logp in logps):
            return f"`logprobs` has {max(logps)!r}. Write logarithms of probabilities, finite and at most 0"
    if not (reward is None or (isinstance(reward, int | float) and math.isfinite(reward))):
        return f"`reward` is {reward!r}. Write a finite number, or null if it could not be scored"
    if "group" in row and row["group"] is None:
        return "`group` is null. Give each row one, or remove the column"
    return ""


def _are(kind: Any, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in values)
