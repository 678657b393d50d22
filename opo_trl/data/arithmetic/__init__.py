"""
An embedded task on which reinforcement learning shows an effect within minutes on a CPU: chained integer arithmetic
with levels, and a small base model that writes the chains but mostly forgets to carry (`base/`).

A problem is a prompt such as `47+38-16=`. Its worked solution is the chain of what remains after each operation,
`85-16=69`, one character per token; the number after the last `=` is the answer. "Level 2" means two operations. Every
operand and running result lies between 10 and 99, so that all problems of a level have the same length and no number
needs a sign.
"""

import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...rewards.boxes import Completion, text_of


# Name in `model_name_or_path` → folder with weights, tokenizer and measured accuracy (`ACCURACY.json`), each made by a
# script `benchmarks/models/NAME_base.py`.
_DATA = Path(__file__).parents[1]
EMBEDDED_MODELS = {name: str(_DATA / name / "base") for name in ("arithmetic", "spelling")}

LEVELS = ("Level 1", "Level 2", "Level 3", "Level 4", "Level 5")
SPLIT_SIZES = {"train": 2048, "test": 1000}
SEED = 20
SMALLEST, LARGEST = 10, 99

Calculator = Callable[[int, str, int], int]
T = TypeVar("T")


def calculate(left: int, operator: str, right: int) -> int:
    """Compute one operation, `"+"` or `"-"`."""
    return left + right if operator == "+" else left - right


def draw_problem(level: str, rng: random.Random) -> str:
    """
    Draw a problem such as `"47+38-16="`; the k-th of `LEVELS` has k operations. Every number in it, and every result
    from left to right, lies between 10 and 99.
    """
    if level not in LEVELS:
        raise ValueError(f"levels: {level!r} does not exist. Choose from {LEVELS}.")
    value = rng.randint(SMALLEST, LARGEST)
    problem = str(value)
    for _ in range(LEVELS.index(level) + 1):
        # The most that each operator can add or take away; it needs room for the smallest operand.
        room = {"+": LARGEST - value, "-": value - SMALLEST}
        operator = rng.choice([sign for sign in room if room[sign] >= SMALLEST])
        operand = rng.randint(SMALLEST, room[operator])
        problem += f"{operator}{operand}"
        value = calculate(value, operator, operand)
    return problem + "="


def work_out(problem: str, calculator: Calculator = calculate) -> str:
    """
    Write the chain of what remains after each operation, such as `"85-16=69"` for `"47+38-16="`.

    `calculator` does one operation. Another one than the right one may make mistakes, as for the texts that a base
    model learns from; the chain then continues from its result.
    """
    value, *rest = re.findall(r"\d+|[+-]", problem)
    steps = []
    while rest:
        operator, operand, *rest = rest
        result = calculator(int(value), operator, int(operand))
        value = str(result)
        steps.append(value + "".join(rest))
    return "=".join(steps)


def make_problems(split: Literal["train", "test"], levels: Iterable[str] | None = None) -> list[dict[str, str]]:
    """
    Make the problems of a split, the same on every call and machine, as rows such as
    `{'problem': '14+28-19=', 'level': 'Level 2', 'solution': '42-19=23'}`.

    Per level, in the order of `levels`, there are 2,048 problems in `"train"` and 1,000 in `"test"`, all distinct, and
    no problem is in both. `None` means all levels. `ValueError` for another split or level.
    """
    rows = []
    for level in LEVELS if levels is None else levels:
        draw = partial(draw_problem, level)
        for problem in draw_split(split, level, draw, str, sizes=SPLIT_SIZES, seed=SEED):
            rows.append({"problem": problem, "level": level, "solution": work_out(problem)})
    return rows


def draw_split(
    split: str,
    level: str,
    draw: Callable[[random.Random], T],
    text: Callable[[T], str],
    *,
    sizes: Mapping[str, int],
    seed: int,
    besides: Collection[str] = (),
) -> list[T]:
    """
    Draw the problems of a split, with distinct texts, and none of those in `besides`. All splits come from one stream
    of random problems, so they are disjoint.

    `draw` makes a problem and `text` its key, by which two are the same; `sizes` has the number of problems of each
    split.
    """
    if split not in sizes:
        raise ValueError(f"split={split!r} does not exist. Use one of {list(sizes)}.")
    rng = random.Random(f"{seed}, {level}")
    distinct: dict[str, T] = {}
    while len(distinct) < sum(sizes.values()):
        problem = draw(rng)
        if text(problem) not in besides:
            distinct.setdefault(text(problem), problem)
    # The splits are stretches of the stream in the reverse order of `sizes`: training problems are drawn last, so that
    # the others do not depend on their number.
    names = list(sizes)
    drawn_before = names[names.index(split) + 1 :]
    start = sum(sizes[name] for name in drawn_before)
    problems = list(distinct.values())
    return problems[start : start + sizes[split]]


def arithmetic_reward(completions: Sequence[Completion], solution: list[str], **kwargs: Any) -> list[float]:
    """
    Reward 1.0 for a completion whose final answer is right, and 0.0 for any other.

    The answer is everything after the last `=` of the completion, or all of it, and must equal the last number of the
    solution exactly: `69 `, `+69`, `069` and `69=70` are wrong. The chain before it is not checked.
    """
    rewards = []
    for completion, worked_out in zip(completions, solution, strict=True):
        _, _, answer = text_of(completion).rpartition("=")
        _, _, right_answer = worked_out.rpartition("=")
        rewards.append(float(answer == right_answer))
    return rewards


def base_model_path() -> str:
    """Folder of the stored base model: weights, tokenizer and measured accuracy (`ACCURACY.json`)."""
    return EMBEDDED_MODELS["arithmetic"]
