r"""
A verifiable reward for problems whose answer is in `\boxed{…}`.

An answer is compared with the gold answer in two steps: as strings, after meaningless differences of notation are
removed; if these differ, as mathematics by math-verify. Only the text after the last `</think>` counts. A completion
that opens `<think>` and never closes it has no answer.
"""

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import parent_process
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import ZZ, And, Basic, Eq, Expr, I, Ne, Number, Or, Poly, S, Symbol, lambdify, nsimplify, simplify
from sympy.core import evalf
from sympy.core.relational import Relational
from sympy.sets import FiniteSet, Set

from . import notation
from .boxes import MARK, Completion, final_answer, find_boxes, text_of, without_reasoning


logger = logging.getLogger(__name__)


# math-verify admits older ones, and Hydra and lm_eval pin them. Said once, not in each worker.
parser = version("antlr4-python3-runtime")
if tuple(map(int, parser.split(".")[:2])) < (4, 13) and parent_process() is None:
    logger.warning(
        f"antlr4-python3-runtime={parser} is installed, with which accuracy_reward cannot read some answers, such as "
        r"50\%, and leaves them unscored. Run `pip install 'antlr4-python3-runtime>=4.13'`."
    )

PARSING_LIMIT, VERIFYING_LIMIT = 5.0, 5.0  # seconds of processor time

# math-verify's own removal of units reduces `a + b + c` to `a +`, so units are removed in `notation`.
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

    Example:

    ```python
    >>> accuracy_reward([r"So \boxed{\frac12}.", r"So \boxed{2}.", "So 0.5."], ["0.5", "0.5", "0.5"])
    [1.0, 0.0, 0.0]
    ```
    """
    known = ("" if gold is None or gold != gold else gold for gold in solution)  # NaN differs from itself
    golds = [str(gold) if isinstance(gold, int | float) else gold for gold in known]
    return [score(text_of(completion), gold) for completion, gold in zip(completions, golds, strict=True)]


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
    gold = (final_answer(solution) or "") if find_boxes(solution) else solution.rpartition(MARK)[2]
    gold_option, gold = notation.split_option(notation.simplify_notation(gold))
    answer = notation.simplify_notation(final_answer(without_reasoning(completion)) or "")
    answer_option, answer = notation.split_option(notation.read_decimal_comma(answer, gold))
    if gold_option and answer_option and (gold_option != answer_option or not (gold and answer)):
        return float(gold_option == answer_option)
    gold, answer = gold or gold_option, answer or answer_option
    gold_value, gold_unit = notation.split_unit(gold)
    answer_value, answer_unit = notation.split_unit(answer)
    short, long = sorted((gold_unit, answer_unit), key=len)  # `$` may stand for dollars per hour, `°` for °C
    fits = short in ("", long) or (short in ("dollar", "degree") and long.startswith(short))
    if answer and (notation.same_string(gold, answer) or (fits and notation.same_string(gold_value, answer_value))):
        return 1.0
    gold_words, answer_words = notation.words(gold_value), notation.words(answer_value)
    if gold_words and answer_words and (gold_words == answer_words or not gold_value.isupper()):
        return float(gold_words == answer_words)
    gold_value, answer_value = notation.without_thousands(gold_value), notation.without_thousands(answer_value)
    parsed_gold = _parse(gold_value)
    if gold_words and not parsed_gold:
        return 0.0
    if not parsed_gold:  # such as `x \equiv 3 \pmod 7`
        is_text = parsed_gold is not None and notation.is_text(gold)
        can_be_boxed = notation.same_string(gold, final_answer(f"\\boxed{{{gold}}}") or "")
        return float(notation.same_text(gold, answer)) if is_text and can_be_boxed else None
    if (
        not fits
        or notation.is_unevaluated(gold_value, answer_value)
        or notation.is_date_or_time(gold)
        or _is_set_for_tuple(gold_value, answer_value)
        or notation.count_primes(gold_value) != notation.count_primes(answer_value)
    ):
        return 0.0
    parsed_answer = _parse(answer_value)
    return float(bool(parsed_answer and _or_none(VERIFYING_LIMIT, _same, parsed_gold, parsed_answer)))


def _is_set_for_tuple(gold: str, answer: str) -> bool:
    r"""math-verify does not distinguish `\{1,2\}` from `(1,2)`."""
    return {latex.lstrip("\\")[:1] + latex[-1:] for latex in (gold, answer)} == {"()", "{}"}


def _parse(latex: str) -> list[Any] | None:
    """What the parser reads, which may be nothing; `None` if it fails or takes too long."""
    return _or_none(PARSING_LIMIT, _read, latex) if latex else []


def _read(latex: str) -> list[Any]:
    boxed = f"\\boxed{{{notation.without_differentials(latex)}}}"
    parsed = parse(boxed, [_LATEX], fallback_mode="no_fallback", parsing_timeout=None)
    if parsed and isinstance(parsed[0], FiniteSet) and len(parsed[0].free_symbols) == 1:
        relations = parsed[0].args  # `x < 2 \text{ or } x > 5`, of which math-verify makes a list
        if all(map(_is_solved, relations)) and not all(isinstance(relation, Eq) for relation in relations):
            together = re.search(r"\band\b", latex) or any(isinstance(relation, Ne) for relation in relations)
            solutions = (And if together else Or)(*relations).as_set()
            parsed[0] = parsed[0] if solutions in (S.Reals, S.EmptySet) else solutions
    return parsed


def _same(gold: list[Any], answer: list[Any]) -> bool:
    unsolved = isinstance(answer[0], Relational | And if isinstance(gold[0], Set) else Relational)
    if unsolved and not _is_solved(answer[0]) and (isinstance(gold[0], Set) or _is_solved(gold[0])):
        return False  # `x + 2 = 5` for `x = 3`
    if not answer[0].free_symbols and not all(_relatively_close(*equation.args) for equation in answer[0].atoms(Eq)):
        return False  # `6 = 5` for 5
    same = verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)
    return (same or _equivalent(gold[0], answer[0])) and _relatively_close(gold[0], answer[0])


def _is_solved(relation: Basic) -> bool:
    if isinstance(relation, And):
        return all(map(_is_solved, relation.args))
    if not isinstance(relation, Relational):
        return False
    sides = (relation.lhs, relation.rhs)
    # A side may be a tuple, which cannot be negated: `(p, q) = (3, 2)`.
    return any(
        not other.free_symbols and (not isinstance(one, Expr) or one.is_Symbol or (-one).is_Symbol)
        for one, other in (sides, sides[::-1])
    )


def _equivalent(gold: Basic, answer: Basic) -> bool:
    r"""
    Equivalences that math-verify misses: terms in `i`, which it reads as a variable; a variable and a term; relations
    of which one is a multiple of the other, such as `x - y = 1` and `2y - 2x = -2`.
    """
    # The parser assumes variables to be real, except next to `i`; to SymPy, a real `x` and another `x` differ.
    names = {symbol: Symbol(symbol.name) for symbol in gold.free_symbols | answer.free_symbols}
    units = {symbol: I for symbol in names if symbol.name == "i"}
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        gold, answer = (term.xreplace(names | units) for term in (gold, answer))
        return bool(units or gold.is_Symbol) and simplify(gold - answer) == 0
    if isinstance(gold, And) and isinstance(answer, And):
        pairs = [[_is_multiple(one, other) for other in answer.args] for one in gold.args]
        return len(gold.args) == len(answer.args) and all(map(any, pairs))
    return _is_multiple(gold, answer)


def _is_multiple(gold: Basic, answer: Basic) -> bool:
    if not (isinstance(gold, Relational) and isinstance(answer, Relational) and gold.free_symbols):
        return False
    answer = answer if isinstance(answer, type(gold)) else answer.reversed
    if not isinstance(answer, type(gold)):
        return False
    factor = simplify(nsimplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs), rational=True))
    return bool(factor.is_number and (factor.is_nonzero if isinstance(gold, Eq | Ne) else factor.is_positive))


def _integer_polynomial(n: Symbol, term: Expr) -> Callable[[int], int]:
    r"""
    A polynomial in n as a function, for SymPy's evaluation of series. SymPy itself compiles any term there: it would
    round π to 3, and run the text of a name, so that `\sum \frac{\text{…}^n}{n!}` is a program. On
    `NotImplementedError`, it sums in another way.
    """
    if Poly(term, n).domain != ZZ:
        raise NotImplementedError("not a polynomial with integer coefficients")
    return lambdify(n, term)


_LARGE_EXPONENT = re.compile(r"[Ee][+-]?\d{5}")
_any_number = _Latex2Sympy.parse_number


def _number(parser: _Latex2Sympy, text: str) -> Number:
    """SymPy expands numbers with exponents in native code, for hours if the exponent is large, and no limit works."""
    if _LARGE_EXPONENT.search(text):
        raise ValueError(f"the exponent of {text} has five digits or more")
    return _any_number(parser, text)


_lock = threading.Lock()


@contextmanager
def _guarded() -> Iterator[None]:
    """
    A context, of one thread at a time, in which SymPy neither compiles the text of a completion nor expands huge
    numbers. Outside of it, SymPy and the parser are unchanged.
    """
    guards: list[tuple[Any, str, Any]] = [
        (evalf, "lambdify", _integer_polynomial),
        (_Latex2Sympy, "parse_number", _number),
        # They warn of slow answers, and of missing time limits, which are set here.
        *((logging.getLogger(f"math_verify.{name}"), "disabled", True) for name in ("parser", "grader")),
    ]
    with _lock:
        originals = [getattr(holder, name) for holder, name, _ in guards]
        try:
            for holder, name, guard in guards:
                setattr(holder, name, guard)
            yield
        finally:
            for (holder, name, _), original in zip(guards, originals, strict=True):
                setattr(holder, name, original)


def _relatively_close(gold: Basic, answer: Basic) -> bool:
    """math-verify compares numbers up to an absolute 1e-6, so that all tiny ones are equal."""
    if gold == answer or not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return True
    gold, answer = gold.doit(), answer.doit()
    if not (gold.is_number and answer.is_number):
        return True
    if gold.is_Rational and answer.is_Rational:
        return gold == answer
    return bool(abs((gold - answer).evalf()) <= 1e-4 * abs(gold.evalf()) + 1e-100)


class _OutOfTime(BaseException):
    """Not an `Exception`, which math-verify would catch, to continue with the next comparison without a limit."""


def _or_none(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with _guarded(), _processor_time(seconds):
            return function(*args, **kwargs)
    # On the output of a model, a parser can fail in any way.
    except (Exception, _OutOfTime):
        logger.debug("math-verify failed on %.200r", args, exc_info=True)
        return None


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """math-verify's own limits use the wall clock, and fail right answers when many workers share a processor."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        try:
            # Repeatedly, because some code, such as a destructor, swallows exceptions.
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:  # a last signal may arrive while the timer is being stopped
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
