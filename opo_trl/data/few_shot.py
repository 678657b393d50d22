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


def _draw_summands(rng: random.Random) -> Numbers:
    return rng.randint(10, 99), rng.randint(10, 99)


def _ask_for_sum(numbers: Numbers) -> str:
    left, right = numbers
    return f"{left} + {right} ="


def _draw_four_numbers(rng: random.Random) -> Numbers:
    """Four random numbers of one to three digits."""
    # First the number of digits, or nine of ten numbers would have three.
    numbers = []
    for _ in range(4):
        digits = rng.randint(1, 3)
        numbers.append(rng.randint(1, 10**digits - 1))
    return tuple(numbers)


def _ask_for_largest(numbers: Numbers) -> str:
    return f"largest of {', '.join(map(str, numbers))}:"


LEVELS = {
    "addition": Task(_draw_summands, _ask_for_sum, answer=sum, worked=((31, 46), (58, 27), (64, 73))),
    "largest": Task(
        _draw_four_numbers,
        _ask_for_largest,
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
    two have the same numbers, in whatever order, and none has those of a worked line. `ValueError` for another split
    or level.
    """
    rows = []
    for level in LEVELS if levels is None else levels:
        if level not in LEVELS:
            raise ValueError(f"levels: {level!r} does not exist. Choose from {[*LEVELS]}.")
        task = LEVELS[level]
        # The same for all problems of a level: they stand before each as examples.
        worked_lines = "".join(f"{task.ask(numbers)} {task.answer(numbers)}\n" for numbers in task.worked)
        keys_of_worked = set(map(_key, task.worked))
        problems = draw_split(split, level, task.draw, _key, sizes=sizes, seed=SEED, besides=keys_of_worked)
        for numbers in problems:
            row = {"problem": worked_lines + task.ask(numbers), "level": level, "solution": str(task.answer(numbers))}
            rows.append(row)
    return rows


def _key(numbers: Numbers) -> str:
    """By what two problems are the same: their numbers, in whatever order."""
    return str(sorted(numbers))


def first_line_reward(completions: Sequence[Completion], solution: list[str], **columns: Any) -> list[float]:
    """
    Reward 1.0 for a completion whose first line is the solution, apart from white space, and 0.0 for any other.

    What follows the line is not read: a language model goes on with problems of its own.
    """
    rewards = []
    for completion, right in zip(completions, solution, strict=True):
        line, _, _ = text_of(completion).partition("\n")
        rewards.append(float(line.strip() == right))
    return rewards
