"""
Guessing a number: an environment of TRL's `environment_factory`, which needs several turns.

The model knows a range, such as 23 to 36, and has a tool, `guess`, which says whether the number is higher or lower,
and what is left. A player that halves the range always finds it: "Level 4" has four guesses and 8 to 15 numbers,
"Level 5" five and 16 to 31. All numbers are from 10 to 49.

The rows have the four columns of the MATH dataset (`problem`, `level`, `type`, `solution`), so that a recipe's levels,
validation and report work as for any other task.
"""

import random
import re
from collections.abc import Iterable
from typing import Any, Literal

from ..arithmetic.task import check_selection


LEVELS = ("Level 4", "Level 5")
SPLIT_SIZES = {"train": 1024, "test": 400}
SEED = 20
SMALLEST, LARGEST = 10, 49
HIGHER, LOWER, RIGHT, OVER = "higher", "lower", "right", "over"


class Guessing:
    """
    A number to be found by guesses, with a tool; the reward is 1 if it was found, and 0 otherwise.

    It is a function of the row and of the calls, without random numbers of its own.
    """

    def reset(self, prompt: list[dict[str, str]], solution: str, level: str, **row: Any) -> None:
        """
        Begin a game.

        Args:
            prompt (`list[dict[str, str]]`): messages; the first two numbers of the last one are the range.
            solution (`str`): the number.
            level (`str`): such as `"Level 4"`, which has four guesses.
        """
        self.low, self.high = map(int, re.findall(r"\d+", prompt[-1]["content"])[:2])
        self.number, self.left, self.found = int(solution), guesses(level), False

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: your guess.

        Returns:
            Whether the number is higher or lower than the guess, and what is left; "right" if you have found it, and
            "over" if you have no guess left.
        """
        number = int(number)  # a model may write it in quotation marks
        if self.found or not self.left:
            return OVER
        self.left -= 1
        self.found = number == self.number
        if self.found:
            return RIGHT
        if not self.left:
            return OVER
        if self.number > number:
            self.low, said = max(self.low, number + 1), HIGHER
        else:
            self.high, said = min(self.high, number - 1), LOWER
        return f"{said}: {self.low} to {self.high}"

    def get_reward(self) -> float:
        """1.0 if the number was found, 0.0 otherwise."""
        return float(self.found)


def guesses(level: str) -> int:
    """Guesses of a level: 4 of `"Level 4"`."""
    return int(level.rpartition(" ")[2])


def problem(low: int, high: int, level: str) -> str:
    """What the model knows of a game."""
    return f"Find the number from {low} to {high} in {guesses(level)} guesses."


def ranges(split: Literal["train", "test"], level: str) -> list[tuple[int, int]]:
    """Ranges of a split, both ends included: a fifth of a level's are the test split's alone."""
    widths = range(2 ** (guesses(level) - 1), 2 ** guesses(level))
    found = [(low, low + n - 1) for n in widths for low in range(SMALLEST, LARGEST + 2 - n)]
    random.Random(f"{SEED}, {level}").shuffle(found)
    n_test = len(found) // 5
    return found[:n_test] if split == "test" else found[n_test:]


def make_games(split: Literal["train", "test"], levels: Iterable[str] | None = None) -> list[dict[str, str]]:
    """
    Make the games of a split, the same on every call and machine.

    Per level there are 1,024 games in `"train"` and 400 in `"test"`, all distinct, and no range is in both. Otherwise
    as [`arithmetic.task.make_problems`].
    """
    rows = []
    for level in check_selection(split, levels, SPLIT_SIZES, LEVELS):
        rng, known = random.Random(f"{SEED}, {level}, {split}"), ranges(split, level)
        games: dict[tuple[int, int, int], None] = {}  # range and number, distinct, in the order of drawing
        while len(games) < SPLIT_SIZES[split]:
            low, high = rng.choice(known)
            games[low, high, rng.randint(low, high)] = None
        for low, high, number in games:
            row = {"problem": problem(low, high, level), "level": level, "type": "Guessing"}
            rows.append(row | {"solution": f"\\boxed{{{number}}}"})
    return rows
