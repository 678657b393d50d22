"""
Chained integer arithmetic: a verifiable task with levels that a small model on a CPU can be taught by reinforcement
learning.

A problem is a prompt such as `47+38-16=`. Its worked solution is the chain of what is left to compute after each
operation, `85-16=69`, one character per token, and the number after the last `=` is the answer. "Level 2" means two
operations. Every operand and every running result lies between 10 and 99, so that all problems of a level are equally
long and no number needs a sign.

The rows carry the four columns of the MATH data set (`problem`, `level`, `type`, `solution`): whatever selects,
formats or reports MATH by level works here too. To print a few:

    python -c "from opo_trl.data.arithmetic import make_problems as m; print(*m('test', ['Level 3'])[:3], sep='\\n')"
"""

import random
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal


LEVELS = ("Level 1", "Level 2", "Level 3", "Level 4", "Level 5")
SPLIT_SIZES = {"train": 2048, "test": 1000}
SEED = 20
SMALLEST, LARGEST = 10, 99

Calculator = Callable[[int, str, int], int]


def calculate(left: int, operator: str, right: int) -> int:
    """
    Compute one operation.

    Args:
        left (`int`), right (`int`):
            The operands.
        operator (`str`):
            `"+"` or `"-"`.

    Returns:
        `int`: The exact sum or difference.
    """
    return left + right if operator == "+" else left - right


def draw_problem(level: str, rng: random.Random) -> str:
    """
    Draw one problem at random.

    Args:
        level (`str`):
            One of `LEVELS`; the k-th has k operations.
        rng (`random.Random`):
            Source of randomness.

    Returns:
        `str`: The prompt, such as `"47+38-16="`.
    """
    value = rng.randint(SMALLEST, LARGEST)
    problem = str(value)
    for _ in range(LEVELS.index(level) + 1):
        # The largest operand that keeps the result in range decides which operators are possible at all.
        room = {"+": LARGEST - value, "-": value - SMALLEST}
        operator = rng.choice([sign for sign in room if room[sign] >= SMALLEST])
        operand = rng.randint(SMALLEST, room[operator])
        problem += f"{operator}{operand}"
        value = calculate(value, operator, operand)
    return problem + "="


def work_out(problem: str, calculator: Calculator = calculate) -> str:
    """
    Write the chain of what is left to compute after each operation.

    Args:
        problem (`str`):
            The prompt, such as `"47+38-16="`.
        calculator (`Callable`, *optional*, defaults to `calculate`):
            Computes one operation. One that slips gives the chain of somebody who goes on from the slipped result.

    Returns:
        `str`: The chain, such as `"85-16=69"`.
    """
    value, *rest = re.findall(r"\d+|[+-]", problem)
    steps = []
    while rest:
        value = str(calculator(int(value), rest[0], int(rest[1])))
        rest = rest[2:]
        steps.append(value + "".join(rest))
    return "=".join(steps)


def make_problems(split: Literal["train", "test"], levels: Iterable[str] | None = None) -> list[dict[str, str]]:
    """
    Make the problems of a split, the same ones on every call and on every machine.

    Per level there are 2,048 problems in `"train"` and 1,000 in `"test"`, all distinct, and no problem is in both.

    Args:
        split (`Literal["train", "test"]`):
            The split.
        levels (`Iterable[str]`, *optional*):
            Levels to include, in this order: `"Level 1"` to `"Level 5"`. All of them if `None`.

    Returns:
        `list[dict[str, str]]`: Rows with the keys `problem` (the prompt), `level`, `type` (`"Addition"`,
        `"Subtraction"` or `"Mixed"`) and `solution` (the worked chain, whose last number is the answer).

    Raises:
        `ValueError`: an unknown split or level.

    Example:

    ```python
    >>> make_problems("train", ["Level 2"])[0]
    {'problem': '14+28-19=', 'level': 'Level 2', 'type': 'Mixed', 'solution': '42-19=23'}
    ```
    """
    if split not in SPLIT_SIZES:
        raise ValueError(f"split={split!r} does not exist. Use one of {list(SPLIT_SIZES)}.")
    levels = LEVELS if levels is None else list(levels)
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"levels={unknown} do not exist. Choose from {list(LEVELS)}.")
    return [
        {"problem": problem, "level": level, "type": _problem_type(problem), "solution": work_out(problem)}
        for level in levels
        for problem in _draw_split(split, level)
    ]


def _draw_split(split: str, level: str) -> list[str]:
    # Both splits come from one stream of distinct problems, which makes them disjoint by construction.
    rng = random.Random(f"{SEED}, {level}")
    distinct: dict[str, None] = {}
    while len(distinct) < sum(SPLIT_SIZES.values()):
        distinct[draw_problem(level, rng)] = None
    problems, n_test = list(distinct), SPLIT_SIZES["test"]
    return problems[:n_test] if split == "test" else problems[n_test:]


def _problem_type(problem: str) -> str:
    if "-" not in problem:
        return "Addition"
    return "Mixed" if "+" in problem else "Subtraction"


def arithmetic_reward(
    completions: list[str] | list[list[dict[str, str]]], solution: list[str], **kwargs: Any
) -> list[float]:
    """
    Reward 1.0 for a completion whose final answer is right and 0.0 for any other.

    The answer is everything after the last `=` of the completion (the whole completion if it has none) and must equal
    the last number of the solution character by character. So anything around the number is wrong (`69 `, `69+`,
    `+69`, `069`), as is a right number with another one behind it (`69=70`).

    As with MATH, only the answer counts: the chain before it is not checked and may be left out. A completion states
    one answer however long it is, so nothing is gained by leaving it out without knowing the answer.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, as plain text or each as a list of messages, of which the last one counts.
        solution (`list[str]`):
            Worked solution of each completion's problem.
        **kwargs:
            The other columns and whatever else the trainer passes; not used.

    Returns:
        `list[float]`: One reward per completion.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(_answer(text) == _answer(worked)) for text, worked in zip(texts, solution, strict=True)]


def _answer(text: str) -> str:
    return text.rpartition("=")[2]
