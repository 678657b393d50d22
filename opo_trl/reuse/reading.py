"""
Recorded rollouts: completions that somebody has written and perhaps scored already, one per row.

| column | |
|---|---|
| `prompt` | text, or messages that each have a `role`; not needed with `prompt_ids` |
| `completion` | text, or messages, of which the assistant's are the policy's; not needed where there are tokens |
| `tools` | that the policy could call, as chat templates take them |
| `completion_ids` | its tokens; without them, those of its text and the token that ends a turn |
| `prompt_ids` | tokens of the prompt; without them, those that the run gives it |
| `completion_mask` | 1 for each token that the policy sampled, 0 for those of somebody else, such as a tool |
| `logprobs` | of each sampled token, under the policy that sampled it: from -104 to 0 |
| `temperature` | at which it was sampled, and for which `logprobs` are |
| `top_p`, `top_k`, `min_p` | by which tokens were left out of sampling |
| `reward` | a number, or null for a completion that could not be scored |
| `group` | the same for the completions of a group; without it, those of a file with the same prompt are one |

A dataset has each of these in every row or not at all. Further columns, such as `solution`, are passed to the reward
functions. Tokens may have other names (`OTHER_NAMES`). [`reuse.agent_logs`] reads the logs of other programs.
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
from trl.trainer.utils import remove_none_values

from ..data.files import column, files_of, load_rows
from ..data.prompts import is_chat
from .agent_logs import OTHERS, PLACE, READERS, TRUNCATIONS, Row, Rows, as_chat, misfit, place_of


logger = logging.getLogger(__name__)

# Column of a dataset of groups: for each completion of a group, what differs from the others.
RECORDED = "recorded"

# Columns of a row; there may be others, for the reward functions.
KNOWN = (
    "prompt",
    "completion",
    "tools",
    "completion_ids",
    "prompt_ids",
    "completion_mask",
    "logprobs",
    "temperature",
    *TRUNCATIONS,
    "reward",
)

# Names of other programs for the columns of tokens, where a row has them.
OTHER_NAMES = {
    "completion_ids": ("completion_token_ids", "generation_token_ids", "response_ids"),
    "prompt_ids": ("prompt_token_ids",),
    "logprobs": ("completion_logprobs", "generation_log_probs", "inference_logprobs"),
    "completion_mask": ("loss_mask", "response_mask"),
}
# Columns whose names say that they have tokens or their log-probabilities.
_NAMES_OF_TOKENS = re.compile(r"token|logp|log_p|(^|_)ids$")

# The prompt of a row that has only its tokens, until the tokenizer is known.
ONLY_TOKENS = "[recorded as tokens]"

# Columns whose values belong to tokens, so that they say nothing without `completion_ids`.
_OF_TOKENS = ("prompt_ids", "logprobs", "completion_mask")

# Columns whose mappings are rendered by chat templates, and the files that keep these mappings as they were written.
_RENDERED = ("prompt", "completion", "messages", "tools", "input", "output", "responses_create_params", "response")
_EXACT_FILES = (".jsonl", ".jsonl.gz", ".json")

# Folders of prime-rl whose traces are not trained on, or, in `effective`, repeat some of those in `all`.
_NOT_TRAINED_ON = {"effective", "eval", "evals"}

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
    rows = load_conversations(source)
    names = _column_names(rows)
    has_rewards = "reward" in names
    if has_rewards and all(row["reward"] is None for row in rows):
        raise ValueError(
            f"rollouts={source!r} has no reward: `reward` is null in every row. "
            "Write numbers, or remove the column, so that `reward_funcs` score the completions."
        )
    generator = random.Random(seed)
    rows_by_prompt = _by_group_or_prompt(rows)
    groups: list[Rows] = []
    # Groups without a learning signal: because all completions of their prompt have the same reward, or only because
    # those that differ have come into other groups.
    equal_in_file = 0
    equal_by_division = 0
    for rows_of_prompt in rows_by_prompt:
        # In the order of the file, right answers may stand apart from wrong ones, and groups would have equal rewards.
        if len(rows_of_prompt) > num_generations:
            generator.shuffle(rows_of_prompt)
        groups_of_prompt = _divide(rows_of_prompt, num_generations)
        groups += groups_of_prompt
        n_equal = sum(map(_have_equal_rewards, groups_of_prompt))
        if _have_equal_rewards(rows_of_prompt):
            equal_in_file += n_equal
        else:
            equal_by_division += n_equal
    if not groups:
        largest = max(map(len, rows_by_prompt))
        raise ValueError(
            f"rollouts={source!r} has no group of {num_generations=} completions, only of up to {largest}. "
            "Lower `num_generations`, or record more completions of each prompt."
        )
    left_over = len(rows) - len(groups) * num_generations
    if left_over:
        logger.warning(
            f"rollouts={source!r}: {left_over:,} of its {len(rows):,} completions are left over from groups."
        )
    if has_rewards and (equal_by_division or equal_in_file == len(groups)):
        logger.warning(
            f"rollouts={source!r}: {equal_in_file + equal_by_division:,} of its {len(groups):,} groups have equal "
            f"rewards, and no learning signal: {equal_in_file:,} already in the file, {equal_by_division:,} only "
            f"after dividing each prompt's completions. Try larger groups than {num_generations=}, or other prompts."
        )
    return _dataset_of_groups(groups, names)


def _by_group_or_prompt(rows: Rows) -> list[Rows]:
    """
    The rows that may be put into one group: of one policy, and with the same `group` or, where a row names none, the
    same prompt.
    """
    rows_by_key: dict[str, Rows] = {}
    for row in rows:
        group = row.get("group")
        # Rows that were recorded with the tokens of the prompt alone have this placeholder as their prompt.
        prompt = row.get("prompt_ids") if row["prompt"] == ONLY_TOKENS else row["prompt"]
        key = json.dumps([_name_of_policy(row), group, prompt if group is None else None], default=str)
        rows_by_key.setdefault(key, []).append(row)
    return list(rows_by_key.values())


def _name_of_policy(row: Row) -> str:
    """
    What the rows of one policy have in common: the name of their file. A run with `save_rollouts` writes a file for
    each process, such as `000000064-0.jsonl`; the name without the process, `000000064`, is common to these.
    """
    file, _ = row[PLACE]
    return re.sub(r"^(\d+)-\d+\.jsonl$", r"\1", file)


def _divide(rows: Rows, size: int) -> list[Rows]:
    """Groups of this size, in order; rows that do not fill one are left over."""
    n_groups = len(rows) // size
    return [rows[number * size : (number + 1) * size] for number in range(n_groups)]


def _have_equal_rewards(rows: Rows) -> bool:
    """Whether no two rewards of the rows differ; unscored rows, whose reward is `None`, do not count."""
    rewards = {row.get("reward") for row in rows}
    rewards.discard(None)
    return len(rewards) < 2


def _dataset_of_groups(groups: Sequence[Rows], names: Sequence[str]) -> Dataset:
    """
    The groups as rows of a dataset. `names` are the columns that their rows have.

    A column is the group's, with one value, if it is the prompt (its first row's), or one for reward functions that is
    equal within every group. All others, and the prompt where it differs within a group, are the completions': they go
    into the column `RECORDED`, which has for each completion a mapping of its values and the place where it was read.
    """
    of_group = ["prompt"]
    of_completion = [] if _is_equal_in_groups("prompt", groups) else ["prompt"]
    for name in names:
        if name in ("prompt", "group"):  # The prompt is placed above; the groups are made, so their names are dropped.
            continue
        is_for_rewards = name not in KNOWN  # `KNOWN` are the columns that the package itself reads, such as tokens.
        if is_for_rewards and _is_equal_in_groups(name, groups):
            of_group.append(name)
        else:
            of_completion.append(name)
    columns: dict[str, list[Any]] = {}
    for name in of_group:
        columns[name] = [group[0].get(name) for group in groups]
    columns[RECORDED] = []
    for group in groups:
        completions = []
        for row in group:
            completion = {name: row.get(name) for name in of_completion}
            completions.append(completion | {PLACE: place_of(row)})
        columns[RECORDED].append(completions)
    # `column` keeps values as they are: Arrow would give the arguments of all calls the same names, in one order.
    return Dataset.from_dict({name: column(values) for name, values in columns.items()})


def _is_equal_in_groups(name: str, groups: Sequence[Rows]) -> bool:
    """Whether the rows of every group have the same value in this column; groups may differ."""
    for group in groups:
        value = group[0].get(name)
        if any(row.get(name) != value for row in group):
            return False
    return True


def is_reserved(name: str) -> bool:
    """
    Whether a column of this name is not for reward functions: it has a meaning in recorded rollouts, or may be a mask
    of tokens, such as `attention_masks`.
    """
    if name in KNOWN or name in ("group", RECORDED, PLACE):
        return True
    singular = name.lower().removesuffix("s")
    return singular.endswith("mask")


def truncation_of(row: Mapping[str, Any]) -> dict[str, float]:
    """
    The settings, such as `{"top_p": 0.9}`, by which tokens were left out when a completion was sampled; those that are
    not recorded, or have a value that leaves none out, are not in it.
    """
    settings = {}
    for name, values_without_effect in TRUNCATIONS.items():  # `top_p`, `top_k` and `min_p`
        value = row.get(name)
        if value is not None and value not in values_without_effect:
            settings[name] = value
    return settings


def text_of(completion: Any) -> str | None:
    """
    The text of a completion: itself, or that of its only message, if this is the assistant's and has nothing besides,
    such as calls or a thought. `None` for anything else.
    """
    if isinstance(completion, list) and len(completion) == 1:
        completion = completion[0]
    if isinstance(completion, Mapping):
        turn = {name: value for name, value in completion.items() if value not in (None, "", [])}  # no empty fields
        is_plain = turn.keys() == {"role", "content"} and turn["role"] == "assistant"
        completion = turn["content"] if is_plain else None
    return completion if isinstance(completion, str) else None


# Reading rows


def load_conversations(source: str) -> Rows:
    """
    Read the rows of recorded rollouts, or of a log of another program, not yet in groups. They get the column names of
    recorded rollouts, their values are checked, and each has its [`PLACE`]: the file in a folder (else "") and the
    number there, which several rows made of one conversation share.

    Raises:
        `ValueError`: it cannot be read, or a row lacks something or contradicts itself.
    """
    rows_by_file = load_files(source)
    _check_same_columns(rows_by_file, source)
    rows = [
        {**row, PLACE: (file, number)}
        for file, rows_of_file in rows_by_file.items()
        for number, row in enumerate(rows_of_file, 1)
    ]
    rows = _with_renamed_columns(rows)
    rows = _from_other_program(rows, source)
    names = _column_names(rows[:1])
    if "prompt" not in names and {"prompt_ids", "completion_ids"} <= set(names):
        names.append("prompt")
        for row in rows:
            row["prompt"] = ONLY_TOKENS  # a placeholder, until there is a tokenizer to decode them
    _warn_of_unused(names, source)
    _check_columns(rows, names, source)
    for row in rows:
        _check_row(row, f"rollouts={source!r}, {place_of(row)}")
    return [_as_trained(row) for row in rows]


def _with_renamed_columns(rows: Rows) -> Rows:
    """
    Rows whose columns of tokens have the names of recorded rollouts, such as `completion_ids` where another program
    writes `response_ids`. Rows without the tokens of completions stay as they are: the others mean nothing then.
    """
    columns = set(_column_names(rows[:1]))
    renamed = {}  # from the name in the file to that of recorded rollouts
    for name, other_names in OTHER_NAMES.items():
        in_file = [other_name for other_name in other_names if other_name in columns]
        if name not in columns and in_file:
            renamed[in_file[0]] = name
    if "completion_ids" not in columns.union(renamed.values()):
        return rows
    return [{renamed.get(name, name): value for name, value in row.items()} for row in rows]


def _warn_of_unused(names: Sequence[str], source: str) -> None:
    """
    Warn of the columns (`names`) that, by their names, have tokens or log-probabilities, but under a name that is not
    known, so that they are not used. `source`, the setting `rollouts`, is for the message.
    """
    unused = [name for name in names if name not in KNOWN and _NAMES_OF_TOKENS.search(name.lower())]
    if unused:
        logger.warning(
            f"rollouts={source!r}: the columns {unused} are not used, and go to reward functions. If they have the "
            "tokens or log-probabilities of completions, rename them as in docs/reuse.md."
        )


def _column_names(rows: Rows) -> list[str]:
    """The columns that some row has, in the order in which they come, without the one that says where a row is."""
    names = dict.fromkeys(name for row in rows for name in row)
    names.pop(PLACE, None)
    return list(names)


def load_files(source: str) -> dict[str, Rows]:
    """
    The rows of each file of a folder, by the file's path in the folder. A source that is not a folder of such files,
    such as one file or a dataset on the Hub, has all its rows under the key "".
    """
    files = _files_by_path(source)
    try:
        return {path: _rows_of_file(file) for path, file in files.items()}
    except ValueError as error:
        message = str(error).replace("dataset_name=", "rollouts=")  # the setting that the user has written
        raise ValueError(message) from error


def _rows_of_file(file: str) -> Rows:
    """
    The rows of a file or dataset. In a table, each mapping has the names of all others, as `None`: these are removed
    from messages, calls and tools. In a JSON file, such as the argument `{"limit": null}` of a call, `None` is there.
    """
    rows: Rows = list(load_rows(file))
    if file.endswith(_EXACT_FILES):
        return rows
    for row in rows:
        for name in _RENDERED:
            if isinstance(row.get(name), dict | list):
                row[name] = remove_none_values(row[name])
    return rows


def _files_by_path(source: str) -> dict[str, str]:
    """
    The files of a folder of rollouts, by their paths in the folder; of anything else, the source itself under "".

    In a folder, the files are those directly in it or, if there are none, traces of verifiers in the folders below it,
    or else the files in folders of steps.
    """
    folder = Path(os.path.expanduser(source))
    files = files_of(folder) or _trace_files(folder) or _files_of_steps(folder)
    if files:
        return {str(file.relative_to(folder)): str(file) for file in files}
    endings = {file.suffix for file in folder.rglob("*") if file.is_file()}
    endings.discard("")
    if endings == {".pt"}:
        raise ValueError(
            f"rollouts={source!r} has .pt files only, which are not read. Load them in a script of yours, and write "
            "their rows as JSON lines, to a file that ends in .jsonl."
        )
    return {"": source}


def _trace_files(folder: Path) -> list[Path]:
    """
    The files with traces of verifiers or prime-rl in the folders below this one, without those in folders whose traces
    are of evaluations or repeat others.
    """
    files = []
    for file in folder.rglob("traces.jsonl"):
        folders = file.relative_to(folder).parts
        if _NOT_TRAINED_ON.isdisjoint(folders):
            files.append(file)
    return sorted(files)


def _files_of_steps(folder: Path) -> list[Path]:
    """The files in those folders of this one that are named after a step, such as `global_step_1`."""
    files = []
    for step_folder in folder.glob("*step*"):
        files += files_of(step_folder)
    return sorted(files)


def _check_same_columns(rows_by_file: Mapping[str, Rows], source: str) -> None:
    """
    Check, by the first row of each, that the files of a folder have the same columns. Those that go to reward
    functions may differ. `source`, the setting `rollouts`, is for the message.
    """
    first_file = ""
    relevant = {"traces", "group", *KNOWN}.union(*OTHER_NAMES.values())
    names: set[str] | None = None
    for file, rows in rows_by_file.items():
        if not rows:
            continue
        names_of_file = set(rows[0])
        if names is None:
            first_file = file
            names = names_of_file
        differing = (names_of_file ^ names) & relevant  # in one of the two files, but not in both
        if differing:
            raise ValueError(f"rollouts={source!r}: only one of {first_file!r} and {file!r} has {min(differing)!r}.")


def _from_other_program(rows: Rows, source: str) -> Rows:
    """
    Rows that another program has written, with the columns of recorded rollouts; those that no program's columns fit,
    or that have tokens already, stay as they are.
    """
    names = set(_column_names(rows[:1]))
    # `READERS` has pairs of the columns by which a program's rows are known, and the function that converts them.
    readers = [reader for columns, reader in READERS if names >= set(columns)]
    if not readers or "completion_ids" in names:
        return rows
    try:
        return readers[0](rows, source)
    except KeyError as error:
        raise ValueError(
            f"rollouts={source!r}: a row lacks {error}, which the versions that are read have. See docs/reuse.md."
        ) from error


def _check_columns(rows: Rows, names: Sequence[str], source: str) -> None:
    """
    Check that the rows, whose columns are `names`, have those that are needed, and none that seems to mean something
    for the completions but would not be used, such as a mask under another name.
    """
    has_tokens = "completion_ids" in names
    for name in ("prompt", "completion_ids" if has_tokens else "completion"):
        if name not in names:
            raise ValueError(f"rollouts={source!r}{_why_lacking(source, rows, name)}.")
    # Columns with a reserved name that are not read: of other masks, it is not known what they mean.
    unused = [name for name in names if is_reserved(name) and name not in ("group", *KNOWN)]
    if not has_tokens:  # Then log-probabilities or a mask belong to no tokens.
        unused += [name for name in _OF_TOKENS if name in names]
    if unused:
        fix = "Add `completion_ids`, rename it to `completion_mask` if it is one, or remove it"
        if unused[0] == RECORDED:  # the package's own column, under whose name the user has something else
            fix = "Rename it"
        raise ValueError(f"rollouts={source!r} has a column {unused[0]!r}, which is not used. {fix}.")


def _why_lacking(source: str, rows: Rows, missing: str) -> str:
    """
    Why the rows lack the column `missing`, and what to do, as the rest of a sentence that begins with the source: it
    is a run's folder, it is empty, its rows are of a known kind that is not read, or else only the column is missing.
    """
    for name in ("rollouts", "completions"):  # subfolders of a run's folder
        folder = os.path.join(source, name)
        if os.path.isdir(os.path.expanduser(folder)):
            return f" is the folder of a run. Name its {folder!r}, where the completions are"
    if not rows:
        return " has no rows"
    for columns, what, fix in OTHERS:  # kinds of rows that are not read: their columns, what they are, what to do
        if rows[0].keys() >= set(columns):
            return f", {place_of(rows[0])}, is {what}. {fix}"
    return f" has no column {missing!r}, only {_column_names(rows[:1])}. Add it"


def _check_row(row: Row, place: str) -> None:
    """
    Bring the messages of a row, in place, into the form that chat templates take, and check that its values can be
    used. `place` says where the row is, for errors.
    """
    for name in ("prompt", "completion"):
        if is_chat(row.get(name)):
            row[name] = [as_chat(message, place) for message in row[name]]
    for name in KNOWN:
        if name in row and not _is_usable(name, row):
            raise ValueError(f"{place}: {misfit(name, row[name])}.")
    impossible = _impossible_logps(row)  # such as null or NaN
    if impossible:
        raise ValueError(
            f"{place}: `logprobs` is {row['logprobs']!r:.60}, where no sampled token can have {impossible[0]!r}. "
            f"Record log-probabilities, from {_LEAST_LOGP:g} to 0, or remove them and set `rollouts_model`."
        )


def _is_usable(name: str, row: Row) -> bool:
    """
    Whether the value of a column in a row can be used. Those of the prompt, the completion and its tokens, to which
    others are compared, have been checked before.
    """
    value = row[name]
    if name == "prompt":
        return is_chat(value) or (isinstance(value, str) and value != "")
    if name == "completion":
        has_tokens = row.get("completion_ids") is not None  # Then the completion itself is not needed.
        return has_tokens or text_of(value) is not None or _are_messages_with_answer(value, row["prompt"])
    if name == "tools":
        are_tools = isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)
        return not value or (are_tools and is_chat(row["prompt"]))
    if name in ("reward", "temperature", *TRUNCATIONS):
        return value is None or (_is_number(value) and math.isfinite(value))
    # The columns that are left, of tokens, log-probabilities and masks, are lists with an entry for each token.
    if not isinstance(value, list) or not value:
        return False
    if name in ("completion_ids", "prompt_ids"):
        return all(isinstance(token, int) and token >= 0 for token in value)
    if len(value) != len(row["completion_ids"]):
        return False
    if name == "logprobs":
        return True  # Its numbers are checked with the mask, as those of tokens that were not sampled do not matter.
    return all(is_sampled in (0, 1) for is_sampled in value)  # `completion_mask`


def _are_messages_with_answer(completion: Any, prompt: Any) -> bool:
    """Whether prompt and completion are lists of messages, and some message of the completion is the assistant's."""
    if not (is_chat(prompt) and is_chat(completion)):
        return False
    return any(message["role"] == "assistant" for message in completion)


def _impossible_logps(row: Row) -> list[Any]:
    """
    The entries of a row's `logprobs`, at tokens that were sampled, that are no log-probabilities, such as null, NaN or
    a server's -9999. Entries at other tokens may be anything.
    """
    logps = row.get("logprobs", ())
    mask = row.get("completion_mask") or [1] * len(logps)  # Without a mask, all tokens were sampled.
    return [
        logp for logp, is_sampled in zip(logps, mask, strict=False) if is_sampled and not _is_log_probability(logp)
    ]


def _is_log_probability(value: Any) -> bool:
    # Rounding may leave a little more than 0.
    return _is_number(value) and _LEAST_LOGP <= value <= 1e-3


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_trained(row: Row) -> Row:
    """
    A row without the tokens after the last one that the policy sampled, and with a log-probability of 0 for the tokens
    of others. The mask is 1 for sampled tokens; a row without a mask stays as it is, as all its tokens were sampled.
    If none was sampled, all stay, as a completion needs tokens.
    """
    if "completion_mask" not in row:
        return row
    mask = [int(is_sampled) for is_sampled in row["completion_mask"]]
    if any(mask):
        while not mask[-1]:
            mask.pop()
    row = {**row, "completion_ids": row["completion_ids"][: len(mask)], "completion_mask": mask}
    if "logprobs" in row:
        pairs = zip(row["logprobs"], mask, strict=False)
        row["logprobs"] = [logp if is_sampled else 0.0 for logp, is_sampled in pairs]
    return row
