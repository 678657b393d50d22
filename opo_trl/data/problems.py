r"""
Problems with their solutions, by level and fraction: embedded, drawn, from local files or from the Hub.

    problems = load_problems("DigitalLearningGmbH/MATH-lighteval", levels=["Level 3"], fraction=0.1)
    prompts = drop_long_prompts(to_prompts(problems), tokenizer, max_prompt_length=512)

A dataset in a file or on the Hub needs no code: its columns are recognized by the names that public datasets have, and
`columns` maps others. To embed another one in the package, add a function to [`EMBEDDED`].
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..rewards.boxes import MARK, final_answer, find_boxes
from . import few_shot, gym
from .arithmetic import make_problems
from .files import column, load_rows


logger = logging.getLogger(__name__)

# Name → function of split and levels (all of them if `None`) that returns rows with the columns below.
EMBEDDED: dict[str, Callable[[Any, Sequence[str] | None], list[dict[str, str]]]] = {
    "arithmetic": make_problems,
    "few_shot": few_shot.make_problems,
}

_PROBLEM_COLUMNS = ("problem", "question", "query", "instruction", "prompt")
# Final answers. A column `solution` holds them too, or text with the answer in a box. The last is verl's.
_FINAL_ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth")
# Parts of a problem that some public datasets keep beside its column
_PARTS_OF_PROBLEM = ("input", "context", "choices", "options")


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
            A name in [`EMBEDDED`]; a task of reasoning-gym, such as `"reasoning_gym/countdown"`, with its `settings`
            ([`gym.make_problems`]); or a local file or folder, or a dataset on the Hub ([`files.load_rows`]).
        dataset_config (`str`, *optional*), split (`str`, *optional*, defaults to `"train"`):
            Configuration and split to load.
        levels (`list[str]`, *optional*):
            Levels to keep, such as `["Level 3"]`. All of them if `None`.
        fraction (`float`, *optional*, defaults to `1.0`), seed (`int`, *optional*, defaults to `42`):
            Fraction of the selected levels to keep, in (0, 1]: a random subset of `round(fraction * n)` rows. With the
            same seed, a larger fraction contains a smaller one.
        columns (`dict[str, str]`, *optional*):
            Maps `problem`, `solution` or `level` to columns of the dataset, such as `{"problem": "question"}`; see
            [`take`]. What was taken is logged if a name differs.
        settings (`dict[str, Any]`, *optional*):
            Settings of a task of reasoning-gym, such as `{"size": 2000, "seed": 7}`; an error with other datasets.

    Returns:
        `Dataset`: Rows with the columns `problem`, `solution` and, if the dataset has it, `level`. Rows of
        reasoning-gym also have what its scorer reads.

    Raises:
        `ValueError`: a file cannot be read, a column is missing, a level is unknown, no row is left, or `settings`
            have no effect.
    """
    rows = draw_or_load(dataset_name, dataset_config, split, levels, settings)
    problems, sources = take(rows, columns or {}, "problem")
    if sources:
        renamed = [f"{theirs!r} for {ours}" for ours, theirs in sources.items()]
        logger.warning("dataset_name='%s': took %s.", dataset_name, " and ".join(renamed))
    return select(problems, levels, fraction, seed)


def draw_or_load(
    name: str,
    config: str | None,
    split: str,
    levels: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Dataset:
    """
    A dataset with all of its columns: of reasoning-gym, embedded, from a file or from the Hub; see [`load_problems`]
    for the arguments. Only the first two kinds are drawn by `levels`; of others, [`select`] takes them.
    """
    if name.startswith(gym.PREFIX):
        return Dataset.from_list(gym.make_problems(name, split, levels, settings or {}))
    if settings is not None:
        raise ValueError(f"dataset_settings={settings!r} has no effect with dataset_name={name!r}. Remove it.")
    if name in EMBEDDED:
        return Dataset.from_list(EMBEDDED[name](split, levels))
    return load_rows(name, config, split)


def has_prompts(rows: Dataset, columns: Mapping[str, str]) -> bool:
    """
    Whether a dataset brings prompts for TRL's trainers: it has a column `prompt`, or `columns` (ours → the dataset's)
    names one, and `columns` does not name the column with the problem.
    """
    return "problem" not in columns and "prompt" in {*rows.column_names, *columns}


def take(rows: Dataset, columns: Mapping[str, str], asked: str) -> tuple[Dataset, dict[str, str]]:
    """
    The columns of a dataset under our names, and which were renamed (new name → old name).

    `columns` maps new names to old ones, where a dot leads into a mapping (`reward_model.ground_truth`). `asked` is
    `"problem"` for problems: this column and `solution` are recognized by the names that public datasets have, and
    others are left out. It is `"prompt"` for prompts that a dataset brings: all columns remain, and one with answers
    is added as `solution`. A solution from a column of another name is its final answer: what is in the last box, the
    text after the last `####`, or all of it.
    """
    if asked == "problem":
        _check_names(columns)
    sources = _sources(rows, columns, asked)
    missing = [str(theirs or ours) for ours, theirs in sources.items() if not _has_column_or_key(rows, theirs)]
    if missing:
        raise ValueError(
            f"the dataset has no column {missing}, only {rows.column_names}. "
            "Rename its columns, or map them: `columns: {problem: …, solution: …}`."
        )
    if asked == "problem" and "problem" not in columns:
        _check_problem_is_whole(rows, sources)
    renamed = {ours: theirs for ours, theirs in sources.items() if ours != theirs}
    new_columns = {}  # those whose values are computed, while others are renamed
    for ours, theirs in renamed.items():
        if theirs not in rows.column_names:  # it leads into a mapping
            new_columns[ours] = _values(rows, theirs)
    if "solution" in renamed or asked == "problem":
        new_columns["solution"] = _solutions(rows, sources["solution"])
    replaced = [name for name in rows.column_names if name in new_columns or name in renamed]
    problems = rows.remove_columns(replaced)
    problems = problems.rename_columns({theirs: ours for ours, theirs in renamed.items() if ours not in new_columns})
    for name, values in new_columns.items():
        problems = problems.add_column(name, column(values))
    if asked == "problem":
        problems = problems.select_columns(list(sources))
    return problems, renamed


def _check_names(columns: Mapping[str, str]) -> None:
    """
    Check that `columns`, ours → the dataset's, does not name the answers as public datasets do: ours are `solution`,
    and another column would be taken for them. A `ValueError` says so.
    """
    for name in _FINAL_ANSWER_COLUMNS:
        if name in columns and "solution" not in columns:
            fix = f"`columns: {{solution: {columns[name]}}}`"
            raise ValueError(f"columns: {name!r} is not the name of the answers, which is 'solution'. Set {fix}.")


def _check_problem_is_whole(rows: Dataset, sources: Mapping[str, str]) -> None:
    """
    Check that the recognized column is all of a problem: a `ValueError` names a column beside it that may be a part,
    such as the `input` of an instruction, unless it is empty or has a name of ours.
    """
    for part in _PARTS_OF_PROBLEM:
        if part in rows.column_names and part not in sources.values() and any(rows[part]):
            problem = sources["problem"]
            raise ValueError(
                f"the column {problem!r} may be only a part of the problem, as there is a column {part!r}, too. Write "
                f"both to one column, or set `columns: {{problem: {problem}}}` to leave {part!r} out."
            )


def _sources(rows: Dataset, columns: Mapping[str, str], asked: str) -> dict[str, Any]:
    """
    Our name → the dataset's column with its values. `rows`, `columns` and `asked` are those of [`take`]; `None`:
    needed, but not there, so `take` raises; prompts need no solution. What `columns` says wins over what is
    recognized.
    """
    names = rows.column_names
    sources: dict[str, Any] = {}
    if asked == "problem":
        sources["problem"] = next((name for name in _PROBLEM_COLUMNS if name in names), None)
        for name in ("level", *gym.SCORED):  # and what reasoning-gym's scorer reads
            if name in names:
                sources[name] = name
        sources["solution"] = _answer_column(rows)
    else:
        sources["prompt"] = "prompt"
        solution = "solution" if "solution" in names else _answer_column(rows)
        if solution is not None:
            sources["solution"] = solution
    return {**sources, **columns}


def select(problems: Dataset, levels: Sequence[str] | None, fraction: float, seed: int) -> Dataset:
    """
    The rows of these levels, or of all if `None`, and of those a random subset of `round(fraction * n)`; with the same
    seed, a larger one contains a smaller one. A `ValueError` if a level is unknown, or no row is left.
    """
    if levels is not None:
        problems = _with_level_in(problems, levels)
    size = round(fraction * len(problems))
    if not size:
        raise ValueError(f"fraction={fraction} of {len(problems)} rows leaves none. Use a larger one, or more levels.")
    if size == len(problems):
        return problems
    return problems.shuffle(seed=seed).select(range(size))


def _with_level_in(problems: Dataset, levels: Sequence[str]) -> Dataset:
    """
    The rows whose `level` is one of these texts; the dataset may have it as a number. A `ValueError` if no row has one
    of the levels, or they are no list.
    """
    stored = problems["level"] if "level" in problems.features else []
    level_of_row = [None if level is None else str(level) for level in stored]
    known = set(level_of_row)
    known.discard(None)
    if isinstance(levels, str) or not known.issuperset(levels):
        raise ValueError(
            f"levels={levels!r} must be a list of the dataset's levels: {sorted(known)}. The same holds for "
            "`report_levels` and `validation_levels`."
        )
    return problems.select([index for index, level in enumerate(level_of_row) if level in levels])


def _answer_column(rows: Dataset) -> str | None:
    """
    The column with the solutions, judged by the first rows: `solution` if all of it has boxes; else the first column
    of final answers in [`_FINAL_ANSWER_COLUMNS`]; else `solution` as it is. `None` if there is none of these.
    """
    n_looked_at = min(10, len(rows))
    first_rows = rows.select(range(n_looked_at))
    texts = [text for text in _values(first_rows, "solution") if isinstance(text, str)]
    if texts and all(map(find_boxes, texts)):
        return "solution"
    for name in (*_FINAL_ANSWER_COLUMNS, "solution"):
        if _has_column_or_key(first_rows, name):
            return name
    return None


def _has_column_or_key(rows: Dataset, path: str | None) -> bool:
    """
    Whether a dataset has this column or, of a path with a dot, a column of mappings with this key in any row; not if
    the path is `None`.
    """
    if path is None:
        return False
    return path in rows.column_names or any(value is not None for value in _values(rows, path))


def _values(rows: Dataset, path: str) -> list[Any]:
    """
    The values of a column, or of a key in a column of mappings (`reward_model.ground_truth`): `None` in rows without
    this key, and an empty list without such a column.
    """
    if path in rows.column_names:
        return rows[path][:]
    outer, *inner = path.split(".")
    values = rows[outer][:] if outer in rows.column_names else []
    for name in inner:
        values = [value.get(name) if isinstance(value, Mapping) else None for value in values]
    return values


def _solutions(rows: Dataset, path: str) -> list[Any]:
    """
    The column of solutions: numbers, and lists of one, as text. If it is not called `solution`, each text is reduced
    to its final answer.
    """
    solutions = map(_number_as_text, _values(rows, path))
    if path == "solution":
        return list(solutions)
    return [_final(text) if isinstance(text, str) else text for text in solutions]


def _number_as_text(solution: Any) -> Any:
    """A number, or the only one of a list, as text; anything else as it is."""
    if isinstance(solution, list) and len(solution) == 1:
        solution = solution[0]
    if solution != solution:  # NaN is no answer.
        return None
    return str(solution) if type(solution) in (int, float) else solution


def _final(answer: str) -> str | None:
    """The final answer of a text: what is in its last box, the text after the last `####`, or all of it."""
    if find_boxes(answer):
        return final_answer(answer)
    _, _, after_mark = answer.rpartition(MARK)
    return after_mark.strip()
