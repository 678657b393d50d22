"""
Recorded rollouts: completions that somebody has written and perhaps scored already, one per row.

| column | |
|---|---|
| `prompt` | text, or messages that each have a `role` |
| `completion` | text, or messages, of which the assistant's are the policy's; not needed where there are tokens |
| `tools` | that the policy could call, as chat templates take them |
| `completion_ids` | its tokens; without them, those of its text and the token that ends a turn |
| `prompt_ids` | tokens of the prompt; without them, those that the run gives it |
| `completion_mask` | 1 for each token that the policy sampled, 0 for those of somebody else, such as a tool |
| `logprobs` | of each sampled token, under the policy that sampled it: from -104 to 0 |
| `temperature` | at which it was sampled, and for which `logprobs` are |
| `top_p`, `top_k`, `min_p` | by which tokens were left out of sampling |
| `reward` | a number, or null for a completion that could not be scored |
| `group` | the same for the completions of a group; they have the same prompt |

A dataset has each of these in every row or not at all. Further columns, such as `solution`, are passed to the reward
functions. [`reuse.agent_logs`] reads the logs of other programs.
"""

import json
import logging
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..data.prompts import is_chat
from .agent_logs import CUTS, OTHERS, PLACE, READERS, as_chat, misfit, place_of


logger = logging.getLogger(__name__)

# Column of a dataset of groups: for each completion of a group, what differs from the others.
RECORDED = "recorded"

# Columns of a row; there may be others, for the reward functions.
KNOWN = (
    *("prompt", "completion", "tools", "completion_ids", "prompt_ids", "completion_mask", "logprobs"),
    *("temperature", *CUTS, "reward"),
)


# The logarithm of the smallest positive number in float32. Samplers compute probabilities in it, or more coarsely.
_LEAST_LOGP = -104.0


def load_rollouts(source: str, num_generations: int, seed: int = 42) -> Dataset:
    """
    Load recorded rollouts as a dataset with one row per group of `num_generations` completions: `prompt`, the columns
    that are equal in each group, and [`RECORDED`], for each completion a mapping with the other columns and [`PLACE`],
    where it was read.

    `source` is a file or dataset as for [`load_rows`], or a folder of files, as a run with `save_rollouts` writes it.
    Completions of other files are of other policies, and in other groups. If a prompt has more completions than a
    group, `seed` decides which of them are in one; those that are left over are dropped, with a warning.

    Raises:
        `ValueError`: it cannot be read, a row lacks something or contradicts itself, or no group is large enough.
    """
    from ..data.files import column  # not to import a trainer

    rows = _rows(source)
    names = [*dict.fromkeys(name for row in rows for name in row if name != PLACE)]
    if "reward" in names and all(row["reward"] is None for row in rows):
        fix = "Write numbers, or remove the column, so that `reward_funcs` score the completions"
        raise ValueError(f"rollouts={source!r} has no reward: `reward` is null in every row. {fix}.")
    members: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        key = [_rollout_of(row), row.get("group"), row["prompt"]]
        members.setdefault(json.dumps(key, default=str), []).append(row)
    draw, groups, equal, lost = random.Random(seed), [], 0, 0
    for rows_of_prompt in members.values():
        if len(rows_of_prompt) > num_generations:  # in their order, right answers may stand apart from wrong ones
            draw.shuffle(rows_of_prompt)
        starts = range(0, len(rows_of_prompt) - num_generations + 1, num_generations)
        parts = [rows_of_prompt[start : start + num_generations] for start in starts]
        without_signal = sum(map(_have_equal_rewards, parts))
        if _have_equal_rewards(rows_of_prompt):
            equal += without_signal
        else:
            lost += without_signal
        groups += parts
    if not groups:
        most = max(map(len, members.values()))
        said = f"rollouts={source!r} has no group of {num_generations=} completions, only of up to {most}"
        raise ValueError(f"{said}. Lower `num_generations`, or record more completions of each prompt.")
    if dropped := len(rows) - len(groups) * num_generations:
        logger.warning(f"rollouts={source!r}: {dropped:,} of its {len(rows):,} completions are left over from groups.")
    if "reward" in names and (lost or equal == len(groups)):
        said = f"{equal + lost:,} of its {len(groups):,} groups have equal rewards, and no learning signal"
        why = f"{equal:,} already in the file, {lost:,} only after dividing each prompt's completions"
        fix = f"larger groups than {num_generations=}, or other prompts"
        logger.warning(f"rollouts={source!r}: {said}: {why}. Try {fix}.")
    further = [name for name in names if name not in ("group", *KNOWN)]
    shared = [
        name for name in further if all(row.get(name) == group[0].get(name) for group in groups for row in group)
    ]
    of_completion = [name for name in names if name not in ("prompt", "group", *shared)]
    recorded = [
        [{name: row.get(name) for name in of_completion} | {PLACE: place_of(row)} for row in group] for group in groups
    ]
    columns = {name: [group[0].get(name) for group in groups] for name in ("prompt", *shared)} | {RECORDED: recorded}
    return Dataset.from_dict({name: column(values) for name, values in columns.items()})


def _rollout_of(row: Mapping[str, Any]) -> str:
    """What rows of one policy share: their file or, of a run with `save_rollouts`, the files of all processes."""
    return re.sub(r"^(\d+)-\d+\.jsonl$", r"\1", row[PLACE][0])


def _have_equal_rewards(rows: Sequence[Mapping[str, Any]]) -> bool:
    return len({row.get("reward") for row in rows} - {None}) < 2


def is_reserved(name: str) -> bool:
    """Whether a column of this name is not for reward functions: it has a meaning here, or may be a mask."""
    return name in ("group", RECORDED, PLACE, *KNOWN) or name.lower().removesuffix("s").endswith("mask")


def cuts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """By which settings tokens were left out when a row was sampled."""
    return {name: row[name] for name, neutral in CUTS.items() if row.get(name) not in (None, *neutral)}


def text_of(completion: Any) -> str | None:
    """The text of a completion: itself, or that of the assistant's only message; `None` for anything else."""
    if isinstance(completion, list) and len(completion) == 1:
        completion = completion[0]
    if isinstance(completion, Mapping):
        turn = {name: value for name, value in completion.items() if value not in (None, "", [])}
        is_plain = turn.keys() == {"role", "content"} and turn["role"] == "assistant"
        completion = turn["content"] if is_plain else None
    return completion if isinstance(completion, str) else None


def _files(source: str) -> dict[str, str]:
    """The files of a folder of rollouts, by their paths in it; of anything else, the source itself by an empty one."""
    from ..data.files import files_of

    folder = Path(os.path.expanduser(source))
    other = {"effective", "eval", "evals"}  # of prime-rl, whose `effective` repeats some of `all`
    traces = (file for file in folder.rglob("traces.jsonl") if not other & {*file.relative_to(folder).parts})
    of_steps = (file for step in folder.glob("*step*") for file in files_of(step))
    files = files_of(folder) or sorted(traces) or sorted(of_steps)
    if not files and {file.suffix for file in folder.rglob("*") if file.is_file()} - {""} == {".pt"}:
        fix = "Load them in a script of yours, and write their rows as JSON lines, to a file that ends in .jsonl"
        raise ValueError(f"rollouts={source!r} has .pt files only, which are not read. {fix}.")
    return {str(file.relative_to(folder)): str(file) for file in files} or {"": source}


def _rows(source: str) -> list[dict[str, Any]]:
    """The rows of a file or folder with the columns of this module, and their [`PLACE`]."""
    from ..data.files import load_rows

    files = _files(source)
    try:
        parts = {name: [*load_rows(file)] for name, file in files.items()}
    except ValueError as error:
        raise ValueError(str(error).replace("dataset_name=", "rollouts=")) from error
    names = [*next((part[0] for part in parts.values() if part), {})]
    for name, part in parts.items():
        if part and (odd := ({*part[0]} ^ {*names}) & {"traces", "group", *KNOWN}):
            raise ValueError(f"rollouts={source!r}: only one of {next(iter(files))!r} and {name!r} has {min(odd)!r}.")
    rows = [{**row, PLACE: (name, number)} for name, part in parts.items() for number, row in enumerate(part, 1)]
    reader = next((reader for needed, reader in READERS if {*needed} <= {*names}), None)
    if reader and "completion_ids" not in names:
        try:
            rows = reader(rows, source)
        except KeyError as error:
            said = f"a row lacks {error}, unlike those of the versions that are read"
            raise ValueError(f"rollouts={source!r}: {said}. See docs/reuse.md.") from error
        names = [name for name in rows[0] if name != PLACE]
    written = "completion_ids" if "completion_ids" in names else "completion"
    if missing := [name for name in ("prompt", written) if name not in names]:
        raise ValueError(f"rollouts={source!r}{_why_not(source, rows, missing[0])}.")
    # Without tokens, it is not known to which they belong; of other masks, what they mean.
    taken = [name for name in names if is_reserved(name) and name not in ("group", *KNOWN)]
    of_tokens = ("prompt_ids", "logprobs", "completion_mask")
    taken += [name for name in of_tokens if name in names and written == "completion"]
    if taken:
        fix = "Add `completion_ids`, rename it to `completion_mask` if it is one, or remove it"
        fix = "Rename it" if taken[0] == RECORDED else fix
        raise ValueError(f"rollouts={source!r} has a column {taken[0]!r}, which is not used. {fix}.")
    for row in rows:
        at = f"rollouts={source!r}, {place_of(row)}"
        for name in ("prompt", "completion"):
            if is_chat(row.get(name)):
                row[name] = [as_chat(message, at) for message in row[name]]
        for name in KNOWN:
            if name in row and not _fits(name, row):
                raise ValueError(f"{at}: {misfit(name, row[name])}.")
        if impossible := _impossible_logps(row):
            said = f"`logprobs` is {row['logprobs']!r:.60}, where no sampled token can have {impossible[0]!r}"
            fix = f"Record log-probabilities, from {_LEAST_LOGP:g} to 0, or remove them and set `rollouts_model`"
            raise ValueError(f"{at}: {said}. {fix}.")
    return [_without_rest(row) for row in rows]


def _why_not(source: str, rows: Sequence[Mapping[str, Any]], missing: str) -> str:
    """What rows without a needed column are, and what to do: the rest of a sentence."""
    below = (os.path.join(source, name) for name in ("rollouts", "completions"))
    if folder := next((path for path in below if os.path.isdir(os.path.expanduser(path))), None):
        return f" is the folder of a run. Name its {folder!r}, where the completions are"
    if not rows:
        return " has no rows"
    for columns, what, fix in OTHERS:
        if {*columns} <= rows[0].keys():
            return f", {place_of(rows[0])}, is {what}. {fix}"
    names = [name for name in rows[0] if name != PLACE]
    return f" has no column {missing!r}, only {names}. Add it"


def _without_rest(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the tokens after the last sampled one, and with a log-probability of 0 for others' tokens."""
    if "completion_mask" not in row:
        return row
    mask = [int(own) for own in row["completion_mask"]]
    end = len(mask) - mask[::-1].index(1) if any(mask) else len(mask)
    cut: dict[str, Any] = {"completion_ids": row["completion_ids"][:end], "completion_mask": mask[:end]}
    if "logprobs" in row:
        cut["logprobs"] = [logp if own else 0.0 for logp, own in zip(row["logprobs"], mask[:end], strict=False)]
    return row | cut


def _fits(name: str, row: Mapping[str, Any]) -> bool:
    """Whether a column of a row has a value that can be used, if those before it in `KNOWN` have."""
    value, ids = row[name], row.get("completion_ids")
    if name == "prompt":
        return is_chat(value) or (isinstance(value, str) and value != "")
    if name == "completion":
        speaks = is_chat(value) and any(turn["role"] == "assistant" for turn in value) and is_chat(row["prompt"])
        return ids is not None or text_of(value) is not None or speaks
    if name == "tools":
        return not value or (isinstance(value, list) and is_chat(row["prompt"]))
    if name in ("reward", "temperature", *CUTS):
        return value is None or (_is_number(value) and math.isfinite(value))
    if not (isinstance(value, list) and value):
        return False
    if name in ("completion_ids", "prompt_ids"):
        return all(isinstance(token, int) and token >= 0 for token in value)
    if name == "completion_mask":
        return len(value) == len(ids) and all(own in (0, 1) for own in value)
    return len(value) == len(ids)


def _impossible_logps(row: Mapping[str, Any]) -> list[Any]:
    """What a row has as log-probabilities of sampled tokens and cannot be, such as null, NaN or a server's -9999."""
    logps = row.get("logprobs", ())
    sampled = row.get("completion_mask") or [1] * len(logps)
    own = [logp for logp, is_own in zip(logps, sampled, strict=False) if is_own]
    # Rounding may leave a little more than 0.
    return [logp for logp in own if not (_is_number(logp) and _LEAST_LOGP <= logp <= 1e-3)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
