r"""
Verifiable rewards for problems whose answer stands in `\boxed{…}`.

An answer is compared with the gold answer in two steps: as strings, after differences of notation that mean nothing
have been removed; then, if these differ, as mathematics by math-verify. Both rewards look only at the answer proper:
what follows the last `</think>`. A completion that opens `<think>` and never closes it has not answered yet.
"""

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import And, Basic, Eq, Expr, I, Ne, nsimplify, simplify
from sympy.core.relational import Relational

from .boxes import final_answer, find_boxes


logger = logging.getLogger(__name__)

# It warns of answers that take long, and that it does not limit the time, which is done here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

Completion = str | list[dict[str, str]]

PARSING_LIMIT, VERIFYING_LIMIT = 5.0, 5.0  # seconds of processor time

# A longer answer counts as none, since the parser takes long on it. The longest one in MATH has 159 characters.
MAX_ANSWER_LENGTH = 300

# math-verify's own removal of units cuts `a + b + c` down to `a +`, so units are removed here.
_LATEX = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last"),
)

_SYMBOLS = str.maketrans({"−": "-", "–": "-", "°": r"^\circ ", "π": r"\pi ", "∞": r"\infty ", "×": r"\times "})

# One argument without braces: a digit, a letter, or a command that takes no argument itself, such as `\pi`.
_TOKEN = r"(\d|[A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+(?![A-Za-z]|\s*\{))"

# Notation that means nothing, or that the parser does not read, in the order in which it is replaced.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf|mathit|mathcal)\s*\{", r"\\text{"),
        (r"^\\text\{([^{}]*[\d,][^{}]*)\}", r"\1"),  # a list of names is a list, a number is a number
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"(?<!\\)%|\\text\{\s*percent(?:age)?\s*\}|(?<=\d)\s*(?:percent(?:age)?|pct)(?![a-z])", r"\\%"),
        (r"^\(?([A-H])[.:)]\s+(?!.*\b[A-H][.:)]).*", r"\1"),  # an option and what it says
        # Thousands: `10,\!000`, `10{,}000`, `10\,000`, `10,000(1 + x)`, `x + 10,000`. math-verify reads `10,000`, and
        # knows the pair in `(10,000)`.
        (r"(?<=\d)(?:\\!)*(?:,\\!\s*(?=\d)|(?:\{,\}|\\,)(?:\\!)*(?=\d{3}(?!\d)))", ""),
        (
            r"(?<![\d.,^])(\d{1,3}),(\d{3})(?=\s*(?:[=(]|\\cdot|\\times))|(?<=\+)\s*(\d{1,3}),(\d{3})(?!\d)",
            r"\1\2\3\4",
        ),
        (r"^(-?\d{1,3}) (\d{3})(?: (\d{3}))?$", r"\1\2\3"),
        (r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        # As in a programming language: `sqrt(2)`, `2**3`, `2^(1/3)`.
        (r"(?<![A-Za-z\\])(?<!operatorname\{)(sqrt|sin|cos|tan|cot|sec|csc|log|ln|pi)(?![A-Za-z])", r"\\\1 "),
        (r"(?:\^|\*\*)\s*\(([^()]*)\)", r"^{\1}"),
        (r"\*\*", "^"),
        (r"\\sqrt\s*(\[[^\[\]]*\]|)\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([\d.]+)\s*\^\s*\{?\s*\\circ\s*\}?", r"\1\\frac{\2\\pi}{180}"),
        (r"(?<!\\)\\[!,;: ]|\\q?quad(?![A-Za-z])|~", " "),  # but `\\ ` starts a row of a matrix
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)", ""),
        (r"\\[dtc]?frac\s*" + _TOKEN + r"\s*" + _TOKEN, r"\\frac{\1}{\2}"),
        (r"\\[dtc]?frac\s*" + _TOKEN + r"\s*(?=\{)", r"\\frac{\1}"),
        (r"\\[dtc]?frac\s*(\{[^{}]*\})\s*" + _TOKEN, r"\\frac\1{\2}"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\sqrt\s*(\[[^\[\]]*\]|)\s*" + _TOKEN, r"\\sqrt\1{\2}"),
        (r"[\s.,;:]+(?=\}*$)", ""),
        (r"^(?:\s|(?:[A-Za-z]\s*)?\\approx(?![A-Za-z])|=)+", ""),
        (r"\s*\\approx(?![A-Za-z])[^()\[\]]*$", ""),  # the exact value comes first
        (r"^(?![A-Za-z]\s*=)([^=<>]+)=\s*([A-Za-z])$", r"\2=\1"),
    )
]

# What may differ between two equal strings after that.
_KEY_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\text\{([^{}]*)\}", r"\1"),
        (r"\\[%$]|\$", ""),
        (r"([\^_])\{(\w)\}", r"\1\2"),
        (r"(?<!\d)\s+|\s+(?!\d)", ""),
    )
]

# Two answers in different units of this list are different; a unit that is not in it is ignored.
_UNIT_NAMES = (
    "mm millimeter, cm centimeter, m meter metre, km kilometer, in inch inche, ft foot feet, yd yard, mi mile, "
    "acre, ml milliliter, l liter litre, gal gallon, mg milligram, g gm gram, kg kilogram, oz ounce, lb pound, "
    "s sec second, min minute, h hr hour, day, week, month, year yr, mph milesperhour, kph kilometersperhour, "
    "degree deg, rad radian, dollar usd, cent, euro, am, pm"
)
_UNITS = {alias: names.split()[0] for names in _UNIT_NAMES.split(",") for alias in names.split()}
_POWERS = {"": "", "sq": "^2", "square": "^2", "cu": "^3", "cubic": "^3"}
_UNIT = re.compile(r"(?P<power>square|sq|cubic|cu|)(?P<name>[a-z]+)")
# Without `\text`, the word must be known or, as in `8 meals`, long: `2 ab` may be a product. A value has a digit or π
# in it and no text: the last word of `\text{A} \text{ and } \text{B}` is no unit.
_SHORT_UNITS = "|".join(alias for alias in _UNITS if len(alias) > 1) + r"|[ap]\.m"
_WITH_UNIT = re.compile(
    r"(?P<value>(?=(?:(?!\\text).)*?(?:\d|\\pi))(?:(?!\\text).)*[\w})])"
    r"(?:\s*\\text\{(?P<text>[^{}]*)\}"
    r"|(?:(?<=[\d})])|(?<=\\pi))(?:\s+(?P<word>(?:sq\.?\s+)?[A-Za-z]{4}[A-Za-z.\s]*)"
    rf"|\s*(?P<short>(?:(?:sq|cu)\.?\s*)?(?:{_SHORT_UNITS})s?)))"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?",
    re.DOTALL,
)
# A comma is a decimal point only where the gold answer has one: `0,5` may be two numbers, and `1,234` is one thousand.
_DECIMAL, _DECIMAL_COMMA = re.compile(r"-?\d*\.\d+"), re.compile(r"^(-?\d+),(\d{1,2}|\d{4,})$")
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?")
_BASE = re.compile(r"(-?[\dA-F.]+)\s*_\s*\{?\s*(\d+)\s*\}?")

# What may stand between the box and the end of a completion: the end of the formula, of bold type, of the sentence.
_AFTER_BOX = re.compile(r"(?:[\s$*.!。]|\\[\])]|\\end\{[A-Za-z]+\*?\})*")


def accuracy_reward(completions: Sequence[Completion], solution: Sequence[str], **kwargs: Any) -> list[float | None]:
    r"""
    Reward completions whose final answer is right.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, plain or as conversations, of which the last message counts. B of them.
        solution (`list[str]`):
            For each completion the gold answer, or a solution with the gold answer in its last box.
        **kwargs:
            Other columns and what else the trainer passes; not used.

    Returns:
        `list[float | None]`: For each completion what [`score`] returns.

    Raises:
        `ValueError`: if `completions` and `solution` differ in length.

    Example:

    ```python
    >>> accuracy_reward([r"So \boxed{\frac12}.", r"So \boxed{2}.", "So 0.5."], ["0.5", "0.5", "0.5"])
    [1.0, 0.0, 0.0]
    ```
    """
    return [score(_text(completion), gold) for completion, gold in zip(completions, solution, strict=True)]


def format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    r"""
    Reward completions that end in their final answer.

    The answer proper, what follows the last `</think>`, must hold exactly one box, complete and not empty. Behind it
    may stand only what closes the formula (`$`, `\)`, `\]`, `\end{…}`), bold type (`**`) and the sentence.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, plain or as conversations, of which the last message counts. B of them.
        **kwargs:
            Columns and what else the trainer passes; not used.

    Returns:
        `list[float]`: For each completion 1.0 or 0.0.
    """
    return [float(_ends_in_box(_answer_proper(_text(completion)))) for completion in completions]


def score(completion: str, solution: str) -> float | None:
    r"""
    Score one completion against one solution. Never raises on any text.

    Parsing and comparison may take 5 seconds of processor time each. Only the main thread can limit them: in any other
    one, and in native code, a pair that takes forever takes forever. [`IsolatedReward`] ends these as well.

    Args:
        completion (`str`):
            Completion; its answer is what stands in its last complete box.
        solution (`str`):
            Gold answer, or a solution with the gold answer in its last box.

    Returns:
        `float` or `None`: 1.0 if the answer is right; 0.0 if it is wrong, cannot be parsed or compared in time, or is
        not in a box; `None` if the pair cannot be scored, because the gold answer is empty, or is not simply equal
        and cannot be parsed.
    """
    gold = _simplify((final_answer(solution) or "") if find_boxes(solution) else solution)
    answer = _simplify(final_answer(_answer_proper(completion)) or "")
    if _DECIMAL.fullmatch(gold):
        answer = _DECIMAL_COMMA.sub(r"\1.\2", answer)
    gold_value, gold_unit = _split_unit(gold)
    answer_value, answer_unit = _split_unit(answer)
    same_unit = gold_unit == answer_unit or not gold_unit or not answer_unit
    if answer and same_unit and _same_string(gold_value, answer_value):
        return 1.0
    parsed_gold = _parse(gold_value)
    if not parsed_gold:
        return None
    if not same_unit or _is_set_for_tuple(gold_value, answer_value) or _primes(gold_value) != _primes(answer_value):
        return 0.0
    parsed_answer = _parse(answer_value)
    return float(bool(parsed_answer and _verify(parsed_gold, parsed_answer)))


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def _answer_proper(completion: str) -> str:
    if "</think>" in completion:
        return completion.rpartition("</think>")[2]
    return "" if "<think>" in completion else completion


def _ends_in_box(text: str) -> bool:
    boxes = find_boxes(text)
    return len(boxes) == 1 and bool(boxes[0].content) and _AFTER_BOX.fullmatch(text, boxes[0].end) is not None


def _simplify(latex: str) -> str:
    latex = "" if len(latex) > MAX_ANSWER_LENGTH else latex.translate(_SYMBOLS).strip()
    for pattern, replacement in _REWRITES:
        latex = pattern.sub(replacement, latex)
    return latex


def _split_unit(latex: str) -> tuple[str, str]:
    r"""Split `5\text{ cm}^2` into `5` and `cm^2`, `101_2` into `101` and `base 2`; an unknown unit is dropped."""
    if match := _BASE.fullmatch(latex):
        return match[1], f"base {match[2]}"
    unit = "dollar" if r"\$" in latex else ""
    latex = latex.replace(r"\$", "")
    if match := _WITH_UNIT.fullmatch(latex):
        words = match["text"] or match["word"] or match["short"] or ""
        latex, unit = match["value"], _unit(words, match["power"]) or unit
    value, degrees = _DEGREES.subn("", latex)
    return value.strip(), unit or ("degree" if degrees else "")


def _unit(words: str, power: str | None) -> str:
    match = _UNIT.fullmatch(re.sub(r"[\s.]", "", words.lower()))
    name = match and (_UNITS.get(match["name"]) or _UNITS.get(match["name"].removesuffix("s")))
    if not match or not name:
        return ""
    return f"{name}^{power}" if power else name + _POWERS[match["power"]]


def _same_string(gold: str, answer: str) -> bool:
    return bool(_key(gold)) and _key(gold) == _key(answer)


def _key(latex: str) -> str:
    for pattern, replacement in _KEY_REWRITES:
        latex = pattern.sub(replacement, latex)
    return latex


def _is_set_for_tuple(gold: str, answer: str) -> bool:
    r"""math-verify takes `\{1,2\}` for `(1,2)`."""
    return {latex.lstrip("\\")[:1] + latex[-1:] for latex in (gold, answer)} == {"()", "{}"}


def _primes(latex: str) -> int:
    """math-verify takes `E'` for `E`. The left side of an equation may be missing."""
    return len(re.findall(r"[A-Za-z)]\s*(?:'|\^\s*\{?\s*\\prime)", latex.rpartition("=")[2]))


def _parse(latex: str) -> list[Any]:
    if not latex:
        return []
    boxed = f"\\boxed{{{latex}}}"
    return _or_none(PARSING_LIMIT, parse, boxed, [_LATEX], fallback_mode="no_fallback", parsing_timeout=None) or []


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    return bool(_or_none(VERIFYING_LIMIT, _same, gold, answer))


def _same(gold: list[Any], answer: list[Any]) -> bool:
    same = verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)
    return (same or _equivalent(gold[0], answer[0])) and _relatively_close(gold[0], answer[0])


def _equivalent(gold: Basic, answer: Basic) -> bool:
    r"""
    Find equal what math-verify does not: terms in `i`, which it reads as a variable; a variable and a term; relations
    of which one is a multiple of the other, such as `x - y = 1` and `2y - 2x = -2`.
    """
    units = {symbol: I for symbol in gold.free_symbols | answer.free_symbols if symbol.name == "i"}
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        return bool(units or gold.is_Symbol) and simplify(gold.xreplace(units) - answer.xreplace(units)) == 0
    if isinstance(gold, And) and isinstance(answer, And):
        pairs = [[_is_multiple(one, other) for other in answer.args] for one in gold.args]
        return len(gold.args) == len(answer.args) and all(map(any, pairs))
    return _is_multiple(gold, answer)


def _is_multiple(gold: Basic, answer: Basic) -> bool:
    # `x + 2 = 5` is no answer where `x = 3` is the gold answer.
    if not (isinstance(gold, Relational) and isinstance(answer, Relational)) or _is_solved(gold) > _is_solved(answer):
        return False
    answer = answer if isinstance(answer, type(gold)) else answer.reversed
    if not isinstance(answer, type(gold)) or not gold.free_symbols:
        return False
    factor = simplify(nsimplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs), rational=True))
    return bool(factor.is_nonzero if isinstance(gold, Eq | Ne) else factor.is_positive) and factor.is_number


def _is_solved(relation: Relational) -> bool:
    sides = (relation.lhs, relation.rhs)
    return any(one.is_Symbol and not other.free_symbols for one, other in (sides, sides[::-1]))


def _relatively_close(gold: Basic, answer: Basic) -> bool:
    """math-verify compares numbers up to 1e-6, whatever their size, which makes all tiny ones equal."""
    if gold == answer or not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return True
    gold, answer = gold.doit(), answer.doit()
    if not (gold.is_number and answer.is_number):
        return True
    if gold.is_Rational and answer.is_Rational:
        return gold == answer
    return bool(abs((gold - answer).evalf()) <= 1e-4 * abs(gold.evalf()) + 1e-100)


def _or_none(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with _processor_time(seconds):
            return function(*args, **kwargs)
    # A parser that meets whatever a model writes can fail in any way. The time-out is not an `Exception`.
    except (Exception, TimeoutException):
        logger.debug("math-verify failed on %.200r", args, exc_info=True)
        return None


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """math-verify's own limits are on the wall clock, and fail right answers where many workers share a processor."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutException

    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
