"""
Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), which draws problems and scores answers.

    problems = load_problems("reasoning_gym/countdown", levels=["0", "1"], settings={"size": 2000, "seed": 7})

Problems are drawn in a process of their own, which hashes strings alike every time: some tasks depend on the order of
a set. So all processes of a run, and all runs, get the same problems.
"""

import ast
import contextlib
import functools
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..rewards.boxes import text_of, without_reasoning
from ..rewards.scoring import forbid


PREFIX = "reasoning_gym/"
SCORED = ("task", "entry")  # columns that `gym_reward` reads
INSTRUCTION = "Please reason step by step. Then write only your final answer between <answer> and </answer>."

# Added to the seed for the test split. An entry's own seed is the dataset's plus its index.
TEST_SEED = 2**30


def make_problems(
    name: str, split: str, levels: Sequence[str] | None, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """
    Draw the problems of a task, whose `name` begins with `"reasoning_gym/"`.

    The splits `"train"` and `"test"` have different seeds, but may share problems in tasks with few. `levels` are
    those of the task's curriculum, from `"0"` on: each attribute is set to this level, or to its highest if that is
    lower; `None`: no curriculum. `settings` are those of the task's dataset: `size` (of each level), `seed` (of the
    training split).

    Returns:
        `list[dict]`: rows with the columns `problem`, `solution` (may be `None`), `level`, `task` and `entry`.

    Raises:
        `ValueError`: there is no such task, split, level or setting, or reasoning-gym is not installed.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} of dataset_name={name!r} does not exist. Set it to 'train' or 'test'.")
    seed = int(settings.get("seed", 0))
    if split == "test":
        seed += TEST_SEED
    task = name.removeprefix(PREFIX)
    seeded = {"size": 1, **settings, "seed": seed}
    distinct_levels = dict.fromkeys([None] if levels is None else levels)
    requests = [[task, seeded, level] for level in distinct_levels]
    # In a process of its own, which runs the end of this file: what some tasks draw depends on the hashes of text,
    # which are fixed when Python starts.
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        _, _, last_line = process.stderr.strip().rpartition("\n")  # of a traceback: the error
        raise ValueError(
            f"dataset_name={name!r} with dataset_settings={dict(settings)!r} and levels={levels!r} cannot be drawn: "
            f"{last_line}."
        )
    return json.loads(process.stdout)


def gym_reward(completions: list[Any], task: list[str], entry: list[str], **columns: Any) -> list[float]:
    """
    Score of each final answer by its task's own scorer, `score_answer` of reasoning-gym, in `[0, 1]`: 1 for a right
    one, and in many tasks a part of it for a near miss. `task` and `entry` are columns of [`make_problems`].

    The answer is the text between the last `<answer>` and `</answer>` after the reasoning; without them, all of a
    plain completion, and none of a conversation. What makes the scorer raise an error is not an answer: 0.

    Some scorers evaluate answers as Python. So run it in an [`IsolatedReward`], as recipes do, whose workers are
    restricted by [`rewards.scoring.forbid`].
    """
    scores = []
    for completion, task_of_row, entry_of_row in zip(completions, task, entry, strict=True):
        scorer = _scorer(task_of_row)
        scores.append(_score(_answer(completion), scorer, ast.literal_eval(entry_of_row)))
    return scores


def _answer(completion: Any) -> str | None:
    """
    The final answer of a completion: the text between the last `<answer>` and `</answer>` after its reasoning. Without
    these, all of a completion of text; `None` of a conversation, where a chat prompt has asked for them.
    """
    text = without_reasoning(text_of(completion))
    before, _, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if opened:
        # An earlier `</answer>` ends it: `<answer>1</answer> … </answer>` is 1.
        return answer.partition("</answer>")[0].strip()
    if isinstance(completion, str):
        return text.strip() or None
    return None


@functools.lru_cache
def _scorer(key: str) -> Any:
    """
    The dataset of a task, which scores answers. `key` is a row's column `task`: task, settings and level as JSON, with
    which the row was drawn.
    """
    task, settings, level = json.loads(key)
    return _dataset(task, settings, level)


def _score(answer: str | None, scorer: Any, entry: dict[str, Any]) -> float:
    """
    Score of an answer by the task's dataset, without what this prints; 0 if it raises or is not finite. `entry` is the
    problem as reasoning-gym has drawn it, and `None` as answer is scored, too.
    """
    forbid()  # answers may be run as Python; only now, because the import of the scorer may do what this forbids
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            score = float(scorer.score_answer(answer, entry))
    except BaseException as error:  # an answer that is run may be `exit()`
        if isinstance(error, MemoryError | KeyboardInterrupt):
            raise
        return 0.0
    return score if math.isfinite(score) else 0.0


# In the process that draws, and where answers are scored


def _dataset(task: str, settings: dict[str, Any], level: str | None) -> Any:
    """
    The dataset of a task with these settings; its problems are drawn when they are asked for. With a level, each
    attribute of the task's curriculum is set to it, or to its highest if that is lower.

    A `ValueError` for a level that no attribute has, or settings that the level determines.
    """
    from reasoning_gym.factory import create_curriculum, create_dataset

    if level is None:
        return create_dataset(task, **settings)
    curriculum = create_curriculum(task)
    attributes = curriculum.attributes.values()
    n_levels = max(len(attribute.levels) for attribute in attributes)
    if not 0 <= int(level) < n_levels:
        raise ValueError(f"{task} has the levels 0 to {n_levels - 1}")
    for attribute in attributes:
        highest = len(attribute.levels) - 1
        curriculum.set_attr_level(attribute.name, min(int(level), highest))
    config = vars(curriculum.generate_configuration(settings))
    replaced = [name for name, value in settings.items() if config[name] != value]
    if replaced:
        raise ValueError(f"the levels of {task} determine {', '.join(replaced)}")
    return create_dataset(task, **config)


def _draw(task: str, settings: dict[str, Any], level: str | None) -> Iterator[dict[str, Any]]:
    """The rows of [`make_problems`] of a level; `None`: without a curriculum."""
    dataset = _dataset(task, settings, level)
    key = json.dumps([task, settings, level])  # from which the scorer is made again
    for index in range(len(dataset)):
        entry = _plain(dataset[index])
        solution = entry["answer"]
        yield {
            "problem": entry["question"],
            "solution": solution if solution is None else str(solution),
            "level": level,
            "task": key,
            "entry": repr(entry),  # JSON has no tuples, which some scorers need
        }


def _plain(value: Any) -> Any:
    """A value with Python's own types in place of NumPy's, so that its `repr` can be read."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item) for item in value)
    return value.item() if hasattr(value, "item") else value


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # some tasks print
        rows: list[dict[str, Any]] = []
        for request in json.load(sys.stdin):
            rows += _draw(*request)
    json.dump(rows, sys.stdout)
