"""
Problems for a pretrained language model that is too small to answer questions: each prompt is three worked lines and
one to continue, such as

    31 + 46 = 77
    58 + 27 = 85
    64 + 73 = 137
    23 + 45 =

The worked lines are the same in all prompts of a level: accuracy depends strongly on them. What the model writes up to
the end of the line is its answer.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..rewards.boxes import Completion, text_of
from .arithmetic import draw_split


SPLIT_SIZES = {"train": 400, "validation": 150, "test": 150}
SEED = 20

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A level: how problems are drawn, written and solved, and those of the worked lines."""

    draw: Callable[[random.Random], Numbers]
    ask: Callable[[Numbers], str]
    answer: Callable[[Numbers], int]
    worked: Sequence[Numbers]


LEVELS = {
    "addition": Task(
        draw=lambda rng: (rng.randint(10, 99), rng.randint(10, 99)),
        ask=lambda numbers: "{} + {} =".format(*numbers),
        answer=sum,
        worked=((31, 46), (58, 27), (64, 73)),
    ),
    "largest": Task(
        # Numbers of one to three digits, so that often more than one is long.
        draw=lambda rng: tuple(rng.randint(1, 10 ** rng.randint(1, 3) - 1) for _ in range(4)),
        ask=lambda numbers: f"largest of {', '.join(map(str, numbers))}:",
        answer=max,
        worked=((52, 418, 7, 96), (640, 31, 255, 604), (19, 8, 73, 45)),
    ),
}


def make_problems(
    split: str, levels: Iterable[str] | None = None, sizes: Mapping[str, int] = SPLIT_SIZES
) -> list[dict[str, str]]:
    """
    Make the problems of a split, the same on every call and machine, as [`arithmetic.make_problems`].

    Per level there are 400 in `"train"`, 150 in `"validation"`, to tune on, and 150 in `"test"`, or other `sizes`. No
    two have the same numbers, in whatever order, and none has those of a worked line.
    """
    rows = []
    for level in LEVELS if levels is None else levels:
        if level not in LEVELS:
            raise ValueError(f"levels: {level!r} does not exist. Choose from {[*LEVELS]}.")
        task = LEVELS[level]
        worked = "".join(f"{task.ask(numbers)} {task.answer(numbers)}\n" for numbers in task.worked)
        shown = {_key(numbers) for numbers in task.worked}
        for numbers in draw_split(split, level, task.draw, _key, sizes=sizes, seed=SEED, besides=shown):
            solution = str(task.answer(numbers))
            rows.append({"problem": worked + task.ask(numbers), "level": level, "solution": solution})
    return rows


def _key(numbers: Numbers) -> str:
    return str(sorted(numbers))


def first_line_reward(completions: Sequence[Completion], solution: list[str], **columns: Any) -> list[float]:
    """
    Reward 1.0 for a completion whose first line is the solution, apart from white space, and 0.0 for any other.

    What follows the line is not read: a language model goes on with problems of its own.
    """
    pairs = zip(completions, solution, strict=True)
    return [float(text_of(completion).partition("\n")[0].strip() == right) for completion, right in pairs]
