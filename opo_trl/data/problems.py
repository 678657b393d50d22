r"""
Problems with their solutions, by level and fraction: embedded, drawn, from local files or from the Hub.

    problems = load_problems("DigitalLearningGmbH/MATH-lighteval", levels=["Level 3"], fraction=0.1)
    prompts = drop_long_prompts(to_prompts(problems), tokenizer, max_prompt_length=512)

A dataset in a file or on the Hub needs no code: its columns are recognized by the names that public datasets have, and
`columns` maps others. To embed another one in the package, add a function to [`EMBEDDED`].
"""

import logging
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..rewards.boxes import MARK, final_answer, find_boxes
from . import few_shot, gym
from .arithmetic import make_problems
from .files import column, load_rows, local_file
from .prompts import without_space


logger = logging.getLogger(__name__)

# Name → function of split and levels (all of them if `None`) that returns rows with the columns below.
EMBEDDED: dict[str, Callable[[Any, Sequence[str] | None], list[dict[str, str]]]] = {
    "arithmetic": make_problems,
    "few_shot": few_shot.make_problems,
}

COLUMNS = ("problem", "level", "type", "solution")
_PROBLEMS = ("problem", "question", "query", "instruction", "prompt")
_MESSAGES = "messages"  # conversations; they are prompts if there is no other column
# Final answers. A column `solution` holds them too, or text with the answer in a box. The last is verl's.
_ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth")
_NUMBER, _NUMBERS = re.compile(r"-?[1-9]\d{0,2}(,\d{3})+(\.\d+)?"), re.compile(r"\d{3}(,\d{3})+")

Sources = dict[str, str]  # our column → the dataset's


def load_problems(
    dataset_name: str,
    *,
    dataset_config: str | None = None,
    split: str = "train",
    levels: Sequence[str] | None = None,
    fraction: float = 1.0,
    seed: int = 42,
    columns: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Dataset:
    """
    Load problems with their solutions, and select by level and fraction.

    Args:
        dataset_name (`str`):
            A name in [`EMBEDDED`], such as `"arithmetic"`; a task of reasoning-gym, such as
            `"reasoning_gym/countdown"` ([`gym.make_problems`]); or a local file or folder, or a dataset on the Hub,
            such as `"DigitalLearningGmbH/MATH-lighteval"` for MATH ([`files.load_rows`]).
        dataset_config (`str`, *optional*), split (`str`, *optional*, defaults to `"train"`):
            Configuration and split to load.
        levels (`list[str]`, *optional*):
            Levels to keep, such as `["Level 3"]`. All of them if `None`.
        fraction (`float`, *optional*, defaults to `1.0`), seed (`int`, *optional*, defaults to `42`):
            Fraction of the selected levels to keep, in (0, 1]: a random subset of `round(fraction * n)` rows. With the
            same seed, a larger fraction contains a smaller one.
        columns (`dict[str, str]`, *optional*):
            Maps `problem`, `solution`, `level` or `type` to columns of the dataset, such as
            `{"problem": "question", "solution": "answer"}`; a dot leads into a mapping
            (`reward_model.ground_truth`). By default each is the column of the same name or, for problem and solution,
            the first that exists of `question`, `query`, `instruction` and `prompt`, and of `answer`, `final_answer`,
            `expected_answer`, `ground_truth` and `reward_model.ground_truth`, which precede a column `solution`
            without boxes. What was taken is logged if a name differs.
        settings (`dict[str, Any]`, *optional*):
            Settings of a task of reasoning-gym.

    Returns:
        `Dataset`: Rows with the columns `problem`, `level`, `type` and `solution`; level and type are strings, or
        `None` where the dataset has none. A solution from a column of another name is its final answer: what is in the
        last box, the text after the last `####`, or all of it. Rows of reasoning-gym also have what its scorer reads.

    Raises:
        `ValueError`: if the dataset does not exist or cannot be read, a column is missing, a level is unknown, or no
            row is left.
        `ImportError`: if it needs a package that is not installed.
    """
    rows = draw_or_load(dataset_name, dataset_config, split, levels, settings)
    problems, sources = as_problems(dataset_name, rows, columns or {})
    renamed = [f"{theirs!r} for {ours}" for ours, theirs in sources.items() if ours != theirs]
    if renamed:
        logger.warning("dataset_name='%s': took %s.", dataset_name, " and ".join(renamed))
    return select(problems, levels, fraction, seed)


def draw_or_load(
    name: str,
    config: str | None,
    split: str,
    levels: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Dataset:
    """All columns of a dataset; see [`load_problems`] for the arguments. `levels` matter to those that are drawn."""
    drawn = name.startswith(gym.PREFIX)
    made = drawn or name in EMBEDDED
    on_hub = config is None or not (made or local_file(name, split))
    for field, value, fits in (("dataset_settings", settings, drawn), ("dataset_config", config, on_hub)):
        if value is not None and not fits:
            raise ValueError(f"{field}={value!r} has no effect with dataset_name={name!r}. Remove it.")
    if not made:
        return load_rows(name, config, split)
    rows = gym.make_problems(name, split, levels, settings or {}) if drawn else EMBEDDED[name](split, levels)
    return Dataset.from_list(rows)


def has_prompts(rows: Dataset, columns: Mapping[str, str]) -> bool:
    """
    Whether a dataset brings prompts for TRL's trainers: a column `prompt`, unless another is the problem, or
    `messages`, if none is.
    """
    names = {*rows.column_names, *columns}
    return "problem" not in columns and ("prompt" in names or (_MESSAGES in names and names.isdisjoint(_PROBLEMS)))


def as_problems(name: str, rows: Dataset, columns: Mapping[str, str]) -> tuple[Dataset, Sources]:
    """The problems of a dataset, with [`COLUMNS`] only, and which of its columns they are."""
    if columns and name.startswith(gym.PREFIX):
        raise ValueError(f"columns={dict(columns)!r} has no effect with dataset_name={name!r}. Remove `columns`.")
    names = rows.column_names
    if not all(ours in COLUMNS and _leads_somewhere(rows, theirs) for ours, theirs in columns.items()):
        raise _misfit(columns, names)
    found: dict[str, Any] = {ours: ours for ours in ("level", "type") if ours in names}
    found["problem"] = next((theirs for theirs in _PROBLEMS if theirs in names), None)
    found |= {"solution": _answer_column(rows), **columns}
    missing = [ours for ours in ("problem", "solution") if found[ours] is None]
    if missing:
        said = f"{f'dataset_name={name!r}' if name else 'the dataset'} has no column {missing}, only {list(names)}"
        raise ValueError(f"{said}. Rename its columns, or map them: `columns: {{problem: …, solution: …}}`.")
    if name.startswith(gym.PREFIX):
        return rows, found  # with what its scorer reads
    values = {"problem": _values(rows, found["problem"]), "solution": _solutions(rows, found["solution"])}
    for ours in ("level", "type"):
        stored = _values(rows, found[ours]) if ours in found else [None] * len(rows)
        values[ours] = [value if value is None else str(value) for value in stored]
    return Dataset.from_dict({ours: column(values[ours]) for ours in COLUMNS}), found


def as_prompts(rows: Dataset, columns: Mapping[str, str]) -> tuple[Dataset, Sources]:
    """
    A dataset that brings its prompts, with columns renamed (new name → old name), and which of its columns they are.

    A dot leads into a mapping, whose value becomes a further column. A solution from a column of another name is its
    final answer. A dataset without a column `solution`, which rewards read, gets one if it has final answers. A prompt
    from a column `messages` ends with its last user turn: what the assistant answers there is left out.
    """
    names = rows.column_names
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if "prompt" not in {*names, *columns} and _MESSAGES in names:
        columns["prompt"] = _MESSAGES
    if any(not _leads_somewhere(rows, theirs) or ours in names for ours, theirs in columns.items()):
        raise _misfit(columns, names)
    made = {ours: _values(rows, theirs) for ours, theirs in columns.items() if theirs not in names}
    if columns.get("prompt") == _MESSAGES:
        made["prompt"] = [_until_last_question(turns, row) for row, turns in enumerate(rows[_MESSAGES])]
    kept = {theirs: ours for ours, theirs in columns.items() if ours not in (*made, "solution")}
    renamed = rows.rename_columns(kept)
    if "solution" in columns:
        made["solution"] = _solutions(rows, columns["solution"])
    elif "solution" not in names and (answers := _answer_column(renamed)):
        columns["solution"], made["solution"] = answers, _solutions(renamed, answers)
    for ours, values in made.items():
        renamed = renamed.add_column(ours, column(values))
    return renamed.remove_columns([_MESSAGES] if columns.get("prompt") == _MESSAGES else []), columns


def _until_last_question(turns: Any, row: int) -> list[Any]:
    roles = [turn.get("role") for turn in turns] if isinstance(turns, list) else []
    if "user" not in roles:
        said = f"the dataset's column '{_MESSAGES}' holds {str(turns)[:60]!r} in row {row}, which has no user turn"
        raise ValueError(f"{said}. Set it to messages, or map the prompts: `columns: {{prompt: …}}`.")
    return turns[: len(roles) - roles[::-1].index("user")]


def _misfit(columns: Mapping[str, str], names: Sequence[str]) -> ValueError:
    return ValueError(
        f"columns={dict(columns)!r} does not fit the dataset. Set `columns` to a mapping of {', '.join(COLUMNS)} or, "
        f"for its own prompts, of new names to its columns: {', '.join(names)}."
    )


def hold_out(problems: Dataset, size: float, seed: int) -> tuple[Dataset, Dataset]:
    """
    Split problems, rows with a column `problem` or `prompt`, into those for training and held-out ones.

    `size` is the number of problems to hold out or, below 1, their share, rounded up. Returns all rows whose problem
    is not held out, and a row of each problem that is.
    """
    texts = [without_space(problem) for problem in problems["problem" if "problem" in problems.features else "prompt"]]
    first = {text: row for row, text in reversed([*enumerate(texts)])}
    known = sorted(first, key=first.__getitem__)
    random.Random(seed).shuffle(known)
    held_out = sorted(first[text] for text in known[: math.ceil(size * len(known)) if size < 1 else int(size)])
    left_out = {texts[row] for row in held_out}
    kept = [row for row, text in enumerate(texts) if text not in left_out]
    return problems.select(kept), problems.select(held_out)


def select(problems: Dataset, levels: Sequence[str] | None, fraction: float, seed: int) -> Dataset:
    """The rows of some levels, and a fraction of those; see [`load_problems`]."""
    if levels is not None:
        stored = problems["level"] if "level" in problems.features else []
        found = [None if level is None else str(level) for level in stored]
        known = sorted({*found} - {None})
        if not known:
            fix = "Leave `levels` out, or set `columns: {level: …}`"
            raise ValueError(f"levels={levels!r}: the dataset has no levels. {fix}.")
        if isinstance(levels, str) or not levels or not {*levels} <= {*known}:
            raise ValueError(f"levels={levels!r} must be a list of existing levels: {known}.")
        problems = problems.select([index for index, level in enumerate(found) if level in levels])
    size = round(fraction * len(problems))
    if not size:
        raise ValueError(f"fraction={fraction} of {len(problems)} rows leaves none. Use a larger one, or more levels.")
    return problems if size == len(problems) else problems.shuffle(seed=seed).select(range(size))


def _answer_column(rows: Dataset) -> str | None:
    """The column with the solutions: text with boxes, else final answers, else what is called so."""
    names, first = rows.column_names, rows[:10]
    texts = [text for text in first.get("solution", []) if isinstance(text, str)]
    if texts and all(find_boxes(text) for text in texts):
        return "solution"
    for name in _ANSWERS:
        outer, _, inner = name.partition(".")
        if outer in names and (not inner or all(isinstance(v, Mapping) and inner in v for v in first[outer])):
            return name
    return "solution" if "solution" in names else None


def _leads_somewhere(rows: Dataset, path: str) -> bool:
    """Whether there is such a column or, after a dot, such a key in a mapping of any row."""
    return path in rows.column_names or any(value is not None for value in _values(rows, path))


def _values(rows: Dataset, path: str) -> list[Any]:
    """A column; a dot leads into mappings, and to `None` where there are none."""
    outer, *inner = [path] if path in rows.column_names else path.split(".")
    values = rows[outer][:] if outer in rows.column_names else []
    for name in inner:
        values = [value.get(name) if isinstance(value, Mapping) else None for value in values]
    return values


def _solutions(rows: Dataset, path: str) -> list[Any]:
    """Solutions: numbers as text, also the only one of a list; under another name, their final answers."""
    single = [v[0] if isinstance(v, list) and len(v) == 1 else v for v in _values(rows, path)]
    texts = [None if v != v else str(v) if type(v) in (int, float) else v for v in single]  # NaN is no answer
    return texts if path == "solution" else [_final(text) for text in texts]


def _final(answer: Any) -> Any:
    """
    The final answer of a text: what is in its last box, the text after `####`, or all of it. One number loses its
    thousands separators, but without `####`, `100,200` may be a list: it remains as it is, and `accuracy_reward`
    accepts both readings.
    """
    if not isinstance(answer, str):
        return answer
    if find_boxes(answer):
        return final_answer(answer)
    _, mark, final = answer.rpartition(MARK)
    final = final.strip()
    is_number = _NUMBER.fullmatch(final) and (mark or not _NUMBERS.fullmatch(final))
    return final.replace(",", "") if is_number else final
