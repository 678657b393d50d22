r"""
A verifiable reward for problems whose answer is in `\boxed{…}`.

An answer is compared with the gold answer in two steps: as strings, after meaningless differences of notation are
removed; if these differ, as mathematics by math-verify. Only the text after the last `</think>` counts. A completion
that opens `<think>` and never closes it has no answer.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import parent_process
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import LatexExtractionConfig, parse, verify
from packaging.version import Version
from sympy import ZZ, And, Basic, Eq, Expr, I, Ne, Number, Or, Poly, S, Symbol, lambdify, nsimplify, simplify
from sympy.core import evalf
from sympy.core.relational import Relational
from sympy.sets import FiniteSet, Set

from . import notation, units
from .boxes import MARK, Completion, final_answer, find_boxes, text_of, without_reasoning
from .limits import OutOfTime, processor_time


logger = logging.getLogger(__name__)


def _warn_of_old_antlr() -> None:
    """
    Warn if the installed ANTLR is older than 4.13, so that some answers cannot be read. math-verify admits such
    releases, and Hydra and lm_eval pin them.
    """
    release = version("antlr4-python3-runtime")
    if Version(release) < Version("4.13"):
        logger.warning(
            f"antlr4-python3-runtime={release} is installed, with which accuracy_reward cannot read some answers, "
            r"such as 50\%, and leaves them unscored. Run `pip install 'antlr4-python3-runtime>=4.13'`."
        )


if parent_process() is None:  # each worker imports this module, too
    _warn_of_old_antlr()

# Most seconds of processor time for reading one answer, and for comparing two
PARSING_LIMIT = 5.0
VERIFYING_LIMIT = 5.0

# math-verify's own removal of units reduces `a + b + c` to `a +`, so `units` removes them.
_LATEX = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last"),
)


def accuracy_reward(completions: Sequence[Completion], solution: Sequence[Any], **kwargs: Any) -> list[float | None]:
    r"""
    Reward completions whose final answer is correct, with their [`score`].

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, as text or as conversations, whose last message counts.
        solution (`list[str]`):
            For each completion, the gold answer or a solution with it in its last box. A number counts as text.

    Returns:
        `list[float | None]`: for each completion 1.0 if it is right, 0.0 if it is wrong, and `None` if its gold answer
        cannot be compared.

    Example:

    ```python
    >>> accuracy_reward([r"So \boxed{\frac12}.", r"So \boxed{2}.", "So 0.5."], ["0.5", "0.5", "0.5"])
    [1.0, 0.0, 0.0]
    ```
    """
    golds = [_text_of_gold(gold) for gold in solution]
    return [score(text_of(completion), gold) for completion, gold in zip(completions, golds, strict=True)]


def _text_of_gold(gold: Any) -> str:
    """A gold answer as text, which is empty for one that is missing: `None` or NaN, as in a table with gaps."""
    is_nan = gold != gold
    if gold is None or is_nan:
        return ""
    return str(gold) if isinstance(gold, int | float) else gold


def score(completion: str, solution: str) -> float | None:
    r"""
    Score one completion against one solution. Never raises on any text.

    Parsing and comparison may take 5 seconds of processor time each. This limit works only in the main thread, and not
    in native code, where a pair may take forever. [`IsolatedReward`] also ends these.

    The answer is the content of the completion's last complete box; the gold answer, that of the solution's, or the
    text after the last `####`, as in GSM8K, or all of the solution. Returns 1.0 if the answer is correct; 0.0 if it is
    wrong, cannot be parsed or compared in time, or is not in a box; `None` if the pair cannot be scored, because the
    gold answer is empty, a sentence or characters that cannot be read, no box can hold it, or it takes too long.
    """
    gold = notation.simplify_notation(_gold_answer(solution))
    gold_option, gold = notation.split_option(gold)  # of `(C) 12`, the letter of the choice and its text
    answer = notation.simplify_notation(final_answer(without_reasoning(completion)) or "")
    answer = notation.read_decimal_comma(answer, gold)
    answer_option, answer = notation.split_option(answer)
    if gold_option and answer_option:
        if gold_option != answer_option:
            return 0.0
        if not gold or not answer:  # one of them is the letter alone
            return 1.0
    gold = gold or gold_option
    answer = answer or answer_option
    gold_value, gold_unit = units.split_unit(gold)
    answer_value, answer_unit = units.split_unit(answer)
    is_same_unit = units.same_unit(gold_unit, answer_unit)
    # Compare the answers as strings, with or without their units.
    if answer and notation.same_string(gold, answer):
        return 1.0
    if answer and is_same_unit and notation.same_string(gold_value, answer_value):
        return 1.0
    gold_words = notation.words(gold_value)  # empty if it is not an answer of words
    answer_words = notation.words(answer_value)
    if gold_words and answer_words:
        if gold_words == answer_words:
            return 1.0
        if not gold_value.isupper():  # `ABC` may be a product
            return 0.0
    # Compare the answers as mathematics.
    gold_value = notation.without_thousands(gold_value)
    answer_value = notation.without_thousands(answer_value)
    parsed_gold = _parse(gold_value)
    if parsed_gold is None:  # too long for the limit, or an error of the parser
        return 0.0 if gold_words else None
    if not parsed_gold:  # no mathematics to the parser
        return 0.0 if gold_words else _score_text(gold, answer)
    if not is_same_unit or notation.is_date_or_time(gold):
        return 0.0
    if _has_another_form(gold_value, answer_value):  # such as `2+2` for 4, or a set for a pair
        return 0.0
    parsed_answer = _parse(answer_value)
    if not parsed_answer:
        return 0.0
    is_same = _or_none_in_time(VERIFYING_LIMIT, _same, parsed_gold, parsed_answer)
    return 1.0 if is_same else 0.0


def _gold_answer(solution: str) -> str:
    """The gold answer in a solution: in its last box, after the last `####`, or all of it."""
    if find_boxes(solution):
        return final_answer(solution) or ""
    return solution.rpartition(MARK)[2]


def _score_text(gold: str, answer: str) -> float | None:
    r"""
    Score against a gold answer that is no mathematics to the parser, such as `x \equiv 3 \pmod 7`: 1.0 for the same
    text, 0.0 for another. `None` if the gold answer is empty, a sentence or has characters that answers write in
    another way, or if a box does not give it back (unbalanced braces), so that no completion could be right.
    """
    boxed_gold = final_answer(f"\\boxed{{{gold}}}") or ""
    if not notation.is_text(gold) or not notation.same_string(gold, boxed_gold):
        return None
    return float(notation.same_text(gold, answer))


def _has_another_form(gold: str, answer: str) -> bool:
    r"""
    Whether an answer differs from the gold answer in its form, at which math-verify does not look: `2+2` for 4, a set
    for a pair, or another number of primes, as `f` for `f'`.
    """
    if notation.is_unevaluated(gold, answer):
        return True
    # A set, such as `\{1,2\}`, and a pair, such as `(1,2)`, are different. Other brackets are not looked at here.
    brackets = {_brackets(gold), _brackets(answer)}
    return brackets == {"{}", "()"} or notation.count_primes(gold) != notation.count_primes(answer)


def _brackets(latex: str) -> str:
    """First and last character, without the backslash of `\\{`: `"{}"` of a set, `"()"` of a pair."""
    return latex.lstrip("\\")[:1] + latex[-1:]


def _parse(latex: str) -> list[Any] | None:
    """
    What math-verify's parser makes of an answer: a list that begins with the SymPy object, or an empty one if this is
    no mathematics to it. `None` if it fails or takes more than [`PARSING_LIMIT`].
    """
    return _or_none_in_time(PARSING_LIMIT, _read, latex) if latex else []


def _read(latex: str) -> list[Any]:
    """[`_parse`] without a limit, which may raise any error; inequalities of one variable become their solutions."""
    content = notation.without_differentials(latex)
    parsed = parse(f"\\boxed{{{content}}}", [_LATEX], fallback_mode="no_fallback", parsing_timeout=None)
    if parsed:
        holds_together = re.search(r"\band\b", latex) is not None
        parsed[0] = _as_solution_set(parsed[0], holds_together)
    return parsed


def _as_solution_set(parsed: Basic, holds_together: bool) -> Basic:
    r"""
    The numbers that solve `x < 2 \text{ or } x > 5`, of which math-verify makes a set of relations; anything else as
    it is: equations, relations of several variables or not solved for one, and what all numbers or none solve.

    `holds_together`: all relations hold ("and"), not only one of them.
    """
    if not isinstance(parsed, FiniteSet) or len(parsed.free_symbols) != 1:
        return parsed
    relations = parsed.args
    are_equations = all(isinstance(relation, Eq) for relation in relations)
    if are_equations or not all(map(_is_solved, relations)):
        return parsed
    # `x ≠ 1, x ≠ 2` is meant together: every number differs from one of them.
    if holds_together or any(isinstance(relation, Ne) for relation in relations):
        solutions = And(*relations).as_set()
    else:
        solutions = Or(*relations).as_set()
    return parsed if solutions in (S.Reals, S.EmptySet) else solutions


def _same(parsed_gold: list[Any], parsed_answer: list[Any]) -> bool:
    """
    Whether two answers are equal as mathematics, by math-verify or an equivalence that it misses. They are not if the
    answer is still to be solved or states a false equation, or if they are numbers whose relative difference is too
    large. The lists are the parser's, and begin with the SymPy object.
    """
    gold = parsed_gold[0]
    answer = parsed_answer[0]
    if _leaves_unsolved(gold, answer) or _has_equation_of_unequal_numbers(answer):
        return False
    is_same = verify(parsed_gold, parsed_answer, allow_set_relation_comp=True, timeout_seconds=None)
    return (is_same or _equivalent(gold, answer)) and _relatively_close(gold, answer)


def _leaves_unsolved(gold: Basic, answer: Basic) -> bool:
    """
    Whether an answer is a relation that is still to be solved, such as `x + 2 = 5` for `x = 3`, where the gold answer
    is solved or a set.
    """
    asks_for_set = isinstance(gold, Set)
    relations = (Relational, And) if asks_for_set else Relational
    if not isinstance(answer, relations) or _is_solved(answer):
        return False
    return asks_for_set or _is_solved(gold)


def _has_equation_of_unequal_numbers(answer: Basic) -> bool:
    """Whether an answer has an equation of two numbers that differ, such as `6 = 5` for 5."""
    if answer.free_symbols:
        return False
    return not all(_relatively_close(equation.lhs, equation.rhs) for equation in answer.atoms(Eq))


def _is_solved(relation: Basic) -> bool:
    """Whether a relation, or each one joined by "and", has a lone variable on one side: `x = 3` or `x < 2`."""
    if isinstance(relation, And):
        return all(map(_is_solved, relation.args))
    if not isinstance(relation, Relational):
        return False
    return _isolates_variable(relation.lhs, relation.rhs) or _isolates_variable(relation.rhs, relation.lhs)


def _isolates_variable(side: Basic, other_side: Basic) -> bool:
    """
    Whether this side of a relation is a variable, or the negative of one, and the other is without variables. A side
    that is no term, such as a tuple, counts as one variable.
    """
    if other_side.free_symbols:
        return False
    # A side may be a tuple, which cannot be negated: `(p, q) = (3, 2)`.
    return not isinstance(side, Expr) or side.is_Symbol or (-side).is_Symbol


def _equivalent(gold: Basic, answer: Basic) -> bool:
    r"""
    Equivalences that math-verify misses: terms in `i`, which it reads as a variable; a gold answer that is a lone
    variable, and a term; relations of which one is a multiple of the other, such as `x - y = 1` and `2y - 2x = -2`.
    """
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        # The parser assumes variables to be real, except next to `i`; to SymPy, a real `x` and another `x` differ.
        names = {symbol: Symbol(symbol.name) for symbol in gold.free_symbols | answer.free_symbols}
        imaginary = {symbol: I for symbol in names if symbol.name == "i"}
        gold = gold.xreplace(names | imaginary)
        answer = answer.xreplace(names | imaginary)
        may_be_missed = bool(imaginary) or gold.is_Symbol  # of all other terms, math-verify's answer stands
        return may_be_missed and simplify(gold - answer) == 0
    if isinstance(gold, And) and isinstance(answer, And):
        return len(gold.args) == len(answer.args) and all(_has_multiple(part, answer) for part in gold.args)
    return _is_multiple(gold, answer)


def _has_multiple(gold: Basic, answers: And) -> bool:
    """Whether one of the answer's relations, joined by "and", is a multiple of this relation of the gold answer."""
    are_multiples = [_is_multiple(gold, answer) for answer in answers.args]
    return any(are_multiples)


def _is_multiple(gold: Basic, answer: Basic) -> bool:
    """Whether one relation is the other times a number: for `<`, `≤`, `>` and `≥` a positive one."""
    if not (isinstance(gold, Relational) and isinstance(answer, Relational) and gold.free_symbols):
        return False
    if not isinstance(answer, type(gold)):  # `x > 2` is `2 < x`
        answer = answer.reversed
    if not isinstance(answer, type(gold)):
        return False
    # The factor between the relations, if each is written as `… = 0`, `… < 0` and so on.
    ratio = (gold.lhs - gold.rhs) / (answer.lhs - answer.rhs)
    factor = simplify(nsimplify(ratio, rational=True))
    if not factor.is_number:
        return False
    return bool(factor.is_nonzero if isinstance(gold, Eq | Ne) else factor.is_positive)


def _integer_polynomial(n: Symbol, term: Expr) -> Callable[[int], int]:
    r"""
    A polynomial in n with integer coefficients as a function, in place of `lambdify` in SymPy's evaluation of series.
    SymPy itself compiles any term there: it would round π to 3, and run the text of a name, so that
    `\sum \frac{\text{…}^n}{n!}` is a program. On the `NotImplementedError` of other terms, it sums in another way.
    """
    if Poly(term, n).domain != ZZ:
        raise NotImplementedError("not a polynomial with integer coefficients")
    return lambdify(n, term)


_LARGE_EXPONENT = re.compile(r"[Ee][+-]?\d{5}")
_any_number = _Latex2Sympy.parse_number


def _number(parser: _Latex2Sympy, text: str) -> Number:
    """
    The parser's own reading of a number, but a `ValueError` for an exponent of five digits or more: SymPy expands such
    numbers in native code, for hours, and no limit works there.
    """
    if _LARGE_EXPONENT.search(text):
        raise ValueError(f"the exponent of {text} has five digits or more")
    return _any_number(parser, text)


_one_thread = threading.Lock()


@contextmanager
def _guarded() -> Iterator[None]:
    """
    A context, of one thread at a time, in which SymPy neither compiles the text of a completion nor expands huge
    numbers. Outside of it, SymPy and the parser are unchanged.
    """
    guards: list[tuple[Any, str, Any]] = [  # holder, its attribute, and the value that this has within the context
        (evalf, "lambdify", _integer_polynomial),
        (_Latex2Sympy, "parse_number", _number),
        # math-verify's loggers warn of slow answers, and of missing time limits: these are set by our caller.
        (logging.getLogger("math_verify.parser"), "disabled", True),
        (logging.getLogger("math_verify.grader"), "disabled", True),
    ]
    with _one_thread:
        originals = [getattr(holder, name) for holder, name, _ in guards]
        try:
            for holder, name, guard in guards:
                setattr(holder, name, guard)
            yield
        finally:
            for (holder, name, _), original in zip(guards, originals, strict=True):
                setattr(holder, name, original)


def _relatively_close(gold: Basic, answer: Basic) -> bool:
    """
    Whether two numbers differ by a relative 1e-4 at most, and rational ones not at all; true if one is not a number,
    as of terms with variables. To math-verify, which compares up to an absolute 1e-6, all tiny numbers are equal.
    """
    if gold == answer or not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return True
    gold = gold.doit()
    answer = answer.doit()
    if not (gold.is_number and answer.is_number):
        return True
    if gold.is_Rational and answer.is_Rational:
        return gold == answer
    distance = abs((gold - answer).evalf())
    allowed = 1e-4 * abs(gold.evalf()) + 1e-100
    return bool(distance <= allowed)


def _or_none_in_time(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """
    What a function returns; `None` if it raises an error or takes more than these seconds of processor time, which are
    counted in the main thread only. The guards against code and huge numbers are on while it runs.
    """
    try:
        with _guarded(), processor_time(seconds):
            return function(*args)
    # On the output of a model, a parser can fail in any way.
    except (Exception, OutOfTime):
        logger.debug("math-verify failed on %.200r", args, exc_info=True)
        return None
