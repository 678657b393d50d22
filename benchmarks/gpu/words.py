"""
Word problems in several steps: a verifiable task with levels for a model of about 50 million parameters.

"Level 3" means three operations on one running number. From Level 3 on, there may be one or two sentences with an
irrelevant number. A worked solution has one equation per operation and ends in the answer:

    Mara has 14 pears. She buys 9 more and gives 6 to Omar. How many pears has Mara now?
    14+9=23. 23-6=17. Answer: 17

The rows have the four columns of the MATH dataset (`problem`, `level`, `type`, `solution`). To print a few:

    python -c "from benchmarks.gpu.words import *; print(*make_problems('test', ['Level 4'])[:3], sep='\\n')"
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from opo_trl.data.arithmetic import task
from opo_trl.data.arithmetic.task import Calculator, check_selection, draw_split

from .. import base_models
from ..base_models import forget_to_carry


LEVELS = tuple(f"Level {steps}" for steps in range(1, 7))
SPLIT_SIZES = {"train": 2048, "test": 500}
SEED = 30
SMALLEST, LARGEST = 10, 999
MAX_LENGTH = 256  # tokens of a problem with its solution; the longest have about 180

PEOPLE = {
    "Mara": ("She", "her"),
    "Omar": ("He", "his"),
    "Lena": ("She", "her"),
    "Piet": ("He", "his"),
    "Aiko": ("She", "her"),
    "Raul": ("He", "his"),
    "Ines": ("She", "her"),
    "Tomo": ("He", "his"),
}
THINGS = ("pears", "stamps", "marbles", "shells", "coins", "cards", "beads", "buttons")
OPENINGS = ("{name} has {n} {things}.", "{name} starts with {n} {things}.", "{name} owns {n} {things}.")
CHANGES = {
    "+": (
        "buys {n} more",
        "finds {n} {things}",
        "wins {n} in a game",
        "is given {n} by {friend}",
        "gets {n} {things} from {friend}",
    ),
    "-": (
        "gives {n} to {friend}",
        "sells {n} of them",
        "loses {n} {things}",
        "hands {n} {things} to {friend}",
        "throws {n} away",
    ),
    "*2": ("doubles {their} stock",),
    "*3": ("triples {their} stock",),
}
DISTRACTORS = (
    "{friend} has {n} {others}.",
    "{friend} lives at number {n}.",
    "The walk home takes {n} minutes.",
    "It is day {n} of the year.",
)
QUESTIONS = (
    "How many {things} has {name} now?",
    "How many {things} does {name} have in the end?",
    "With how many {things} does {name} end up?",
)

Step = tuple[str, int]  # operator and operand


def calculate(left: int, operator: str, right: int) -> int:
    """Compute one operation exactly; `operator` is `"+"`, `"-"` or `"*"`."""
    return left * right if operator == "*" else task.calculate(left, operator, right)


def slip(left: int, operator: str, right: int) -> int:
    """Compute one operation, dropping the carry from ones to tens; `right` is a digit if `operator` is `"*"`."""
    if operator == "*":
        return 10 * (left // 10 * right) + left % 10 * right % 10
    return forget_to_carry(left, operator, right)


@dataclass(frozen=True)
class Problem:
    """
    A word problem.

    Args:
        text (`str`):
            The prompt. It ends in a line break, which separates it from the solution.
        start (`int`):
            The number that the story begins with.
        steps (`tuple`):
            Operator and operand of each operation.
        distractors (`int`):
            Number of sentences with an irrelevant number.
    """

    text: str
    start: int
    steps: tuple[Step, ...]
    distractors: int

    def results(self, calculator: Calculator = calculate) -> Iterator[int]:
        """Running number after each operation, continuing from slipped results."""
        value = self.start
        for operator, operand in self.steps:
            value = calculator(value, operator, operand)
            yield value

    def work_out(self, calculator: Calculator = calculate) -> str:
        """Worked solution, such as `"14+9=23. 23-6=17. Answer: 17"`."""
        sentences, value = [], self.start
        for (operator, operand), result in zip(self.steps, self.results(calculator), strict=True):
            sentences.append(f"{value}{operator}{operand}={result}.")
            value = result
        return " ".join([*sentences, f"Answer: {value}"])


def draw_problem(level: str, rng: random.Random) -> Problem:
    """Draw a problem of one of `LEVELS`; the k-th has k operations. Its running number stays between 10 and 999."""
    n_steps = LEVELS.index(level) + 1
    start = value = rng.randint(SMALLEST, 199)
    steps: list[Step] = []
    for _ in range(n_steps):
        steps.append(_draw_step(value, rng))
        value = calculate(value, *steps[-1])
    distractors = rng.randint(0, (n_steps - 1) // 2)  # none below Level 3, up to two at Levels 5 and 6
    return Problem(_tell(start, steps, distractors, rng), start, tuple(steps), distractors)


def _draw_step(value: int, rng: random.Random) -> Step:
    room = {"+": min(LARGEST - value, 199), "-": min(value - SMALLEST, 199)}
    steps = [(sign, rng.randint(2, room[sign])) for sign in room if room[sign] >= 2]
    if rng.random() < 0.2:  # factors are rarer: the number would soon leave the range
        steps = [("*", factor) for factor in (2, 3) if value * factor <= LARGEST] or steps
    return rng.choice(steps)


def _tell(start: int, steps: list[Step], distractors: int, rng: random.Random) -> str:
    name, friend = rng.sample(list(PEOPLE), 2)
    things, others = rng.sample(THINGS, 2)
    pronoun, their = PEOPLE[name]
    words = {"name": name, "friend": friend, "things": things, "others": others, "their": their}
    changes = [_fill(CHANGES[f"*{n}" if sign == "*" else sign], rng, words, n) for sign, n in steps]
    sentences = _join(changes, rng)
    for _ in range(distractors):
        place = rng.randrange(len(sentences) + 1)
        sentences.insert(place, _fill(DISTRACTORS, rng, words, rng.randint(2, 199)))
    told = [_fill(OPENINGS, rng, words, start)]
    for sentence in sentences:
        # After a sentence about something else, a pronoun would be ambiguous.
        subject = pronoun if told[-1].startswith((name, pronoun)) else name
        told.append(sentence if sentence.endswith(".") else f"{subject} {sentence}.")
    return " ".join([*told, _fill(QUESTIONS, rng, words, 0)]) + "\n"


def _fill(templates: tuple[str, ...], rng: random.Random, words: dict[str, str], n: int) -> str:
    return rng.choice(templates).format(n=n, **words)


def _join(changes: list[str], rng: random.Random) -> list[str]:
    """Join some changes with the previous one in one sentence."""
    joined: list[str] = []
    for change in changes:
        if joined and " and " not in joined[-1] and rng.random() < 0.5:
            joined[-1] += f" and {change}"
        else:
            joined.append(change)
    return joined


def make_problems(split: Literal["train", "test"], levels: Iterable[str] | None = None) -> list[dict[str, str]]:
    """
    Make the problems of a split, the same on every call and machine.

    Per level there are 2,048 problems in `"train"` and 500 in `"test"`, all distinct, and no problem is in both.

    Args:
        split (`Literal["train", "test"]`):
            The split.
        levels (`Iterable[str]`, *optional*):
            Levels to include, in this order: `"Level 1"` to `"Level 6"`. All of them if `None`.

    Returns:
        `list[dict[str, str]]`: Rows with the keys `problem` (the prompt), `level`, `type` (`"Plain"` or
        `"Distractor"`) and `solution` (the worked solution).

    Raises:
        `ValueError`: if the split or a level is unknown.
    """
    return [
        _row(problem, level)
        for level in check_selection(split, levels, SPLIT_SIZES, LEVELS)
        for problem in draw_split(
            split, level, partial(draw_problem, level), lambda p: p.text, sizes=SPLIT_SIZES, seed=SEED
        )
    ]


def _row(problem: Problem, level: str) -> dict[str, str]:
    kind = "Distractor" if problem.distractors else "Plain"
    return {"problem": problem.text, "level": level, "type": kind, "solution": problem.work_out()}


def word_reward(
    completions: list[str] | list[list[dict[str, str]]], solution: list[str], **kwargs: Any
) -> list[float]:
    """
    Reward 1.0 for a completion that ends in the right answer, and 0.0 for any other.

    The completion must state exactly one answer, at its end and in the solution's form: `Answer: 17`. So
    `Answer: 017`, `Answer: 17.`, `17` and a completion with two answers are wrong. The equations before it are not
    checked. Arguments are those of `opo_trl.data.arithmetic.arithmetic_reward`.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    golds = [_answer(worked) for worked in solution]
    return [float(gold is not None and _answer(text) == gold) for text, gold in zip(texts, golds, strict=True)]


def _answer(text: str) -> str | None:
    stated = re.fullmatch(r"(?:(?!Answer).)*Answer: ([0-9]+)", text, re.DOTALL)
    return stated[1] if stated else None


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token per digit, sign and word of the templates, including the space before a word."""
    templates = (*OPENINGS, *(change for some in CHANGES.values() for change in some), *DISTRACTORS, *QUESTIONS)
    bare = re.sub(r"\{\w+\}", " ", " ".join([*templates, "and Answer", *THINGS, *PEOPLE]))
    words = sorted({*re.findall(r"[A-Za-z]+", bare), *(word for both in PEOPLE.values() for word in both)})
    pieces = [*"0123456789+-*=.:?\n ", *PEOPLE, *(f" {word}" for word in words)]
    return base_models.build_tokenizer(pieces, r" ?[A-Za-z]+|[^A-Za-z]", MAX_LENGTH)
