r"""The LaTeX notation of answers: notations of the same meaning are unified, options and words are told apart."""

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction


Replacement = str | Callable[[re.Match[str]], str]

# Longer answers are discarded, because parsing takes too long. The longest in MATH has 159 characters.
MAX_ANSWER_LENGTH = 300


def _repeating_decimal(decimal: re.Match[str]) -> str:
    r"""
    A repeating decimal as a fraction: `0.1\overline{6}` as `\frac{1}{6}`. The groups of the match are the digits
    before the point, those after it that do not repeat, and those that do: here `0`, `1` and `6`.
    """
    whole, before_period, period = decimal.groups()
    # 0.1666… is (16 − 1) / 90.
    digits = (whole or "0") + before_period
    difference = int(digits + period) - int(digits)
    nines = 10 ** len(period) - 1
    value = Fraction(difference, nines * 10 ** len(before_period))
    if value.denominator == 1:
        return str(value.numerator)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _compile(table: Sequence[tuple[str, Replacement]]) -> list[tuple[re.Pattern[str], Replacement]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in table]


def _rewrite(latex: str, rewrites: Sequence[tuple[re.Pattern[str], Replacement]]) -> str:
    """Replace each pattern, in this order."""
    for pattern, replacement in rewrites:
        latex = pattern.sub(replacement, latex)
    return latex


_SYMBOLS = str.maketrans({"−": "-", "–": "-", "°": r"^\circ ", "π": r"\pi ", "∞": r"\infty ", "×": r"\times "})

# One argument without braces: a digit, a letter, or a command without arguments, such as `\pi`.
_TOKEN = r"(\d|[A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+(?![A-Za-z]|\s*\{))"

_DIFFERENTIAL = r"\s*(?:d|\\partial)\s*([A-Za-z])\s*"

# What is in braces, which may hold braces.
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"

# Notation that has no meaning, or that the parser cannot read, in the order in which it is replaced.
_NOTATION: list[tuple[str, Replacement]] = [
    # The ends of a formula, and the distance of rows, as in `\\[2pt]`.
    (r"(?<!\\)(?:\\[()\[\]]|\$)|(?<=\\\\)\[[\d.]+[a-z]{2}\]", ""),
    # Emphasis of Markdown, boldface, colours, labels, and commands of size and space.
    (r"^([*_`]{1,3})([^*`]+)\1$", r"\2"),
    (r"\\(?:mathbf|boldsymbol|bm|ensuremath|(?:text)?color\s*\{[^{}]*\})\s*" + _GROUP, r"\1"),
    (r"\\(?:color|tag\*?|label|[hv]space\*?)\s*\{[^{}]*\}", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?", ""),
    (r"\\(?:displaystyle|textstyle|limits|[lL]arge|LARGE|[hH]uge|bf|rm)(?![A-Za-z])", ""),
    # Text: `\text{e}`, `\text{i}` and `\text{d}` are mathematics, lists of names and numbers need no `\text`.
    (r"\\(?:text|mathrm)\s*(?:\{\s*([eid])\s*\}|\s([eid])(?![A-Za-z]))", r" \1\2"),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|it|sf|tt|cal)|mbox|emph|underline)\s*\{", r"\\text{"),
    (r"^\\text\{([^{}]*[\d,][^{}]*)\}", r"\1"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    # Per cent, and repeating decimals.
    (r"(?<!\\)%|\\text\{\s*percent(?:age)?\s*\}|(?<=\d)\s*(?:percent(?:age)?|pct)(?![a-z])", r"\\%"),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?", _repeating_decimal),
    (r"(\d*)\.(\d*?)(\d+?)\3{2,}\s*(?:\\[lc]?dots|\.{3}|…)", _repeating_decimal),
    # Thousands that cannot be a list: `10,\!000`, `10{,}000`, `10\,000`. For `10,000`, see `without_thousands`.
    (r"(?<=\d)(?:\\!)*(?:,\\!\s*(?=\d)|(?:\{,\}|\\,)(?:\\!)*(?=\d{3}(?!\d)))", ""),
    # `10 000`, mixed numbers, and powers of ten.
    (r"^(-?\d{1,3}) (\d{3})(?: (\d{3}))?$", r"\1\2\3"),
    (r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.\\])(\d*\.?\d+)e([+-]?\d+)(?![\w.])", r"\1E\2"),  # `e` would be Euler's number
    (r"(?<![_^\d.])(\d+\)?)\s*(?=\(\d+\))", r"\1 \\cdot "),  # math-verify reads `2(3)` as 2 + 3
    # As in programming languages: `sqrt(2)`, `2**3`, `2^(1/3)`.
    (r"(?<![A-Za-z\\])(?<!operatorname\{)(sqrt|sin|cos|tan|cot|sec|csc|log|ln|pi)(?![A-Za-z])", r"\\\1 "),
    (r"(?:\^|\*\*)\s*\(([^()]*)\)", r"^{\1}"),
    (r"\*\*", "^"),
    (r"\^\s*(?:T\b|\\top|\\intercal|\{\s*(?:T|\\top|\\intercal|\\text\{T\})\s*\})", "^{t}"),  # the parser ignores `^T`
    (r"\\sqrt\s*(\[[^\[\]]*\]|)\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    # In trigonometric functions; elsewhere the degree sign is a unit.
    (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([\d.]+)\s*\^\s*\{?\s*\\circ\s*\}?", r"\1\\frac{\2\\pi}{180}"),
    (r"(?<!\\)\\[!,;: ]|\\q?quad(?![A-Za-z])|~", " "),  # but `\\ ` starts a row of a matrix
    (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)", ""),
    # Arguments without braces, as in `\frac12` and `\sqrt2`.
    (r"\\[dtc]?frac\s*" + _TOKEN + r"\s*" + _TOKEN, r"\\frac{\1}{\2}"),
    (r"\\[dtc]?frac\s*" + _TOKEN + r"\s*(?=\{)", r"\\frac{\1}"),
    (r"\\[dtc]?frac\s*(\{[^{}]*\})\s*" + _TOKEN, r"\\frac\1{\2}"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\sqrt\s*(\[[^\[\]]*\]|)\s*" + _TOKEN, r"\\sqrt\1{\2}"),
    (r"\\sqrt\{\s*(?:\\frac\{(\d+)\}\{([^{}]*)\}|(\d+)/(\w+))\s*\}", r"\\frac{\\sqrt{\1\3}}{\\sqrt{\2\4}}"),
    # The parser reads a derivative as 0.
    (r"\\frac\{" + _DIFFERENTIAL + r"\}\{" + _DIFFERENTIAL + r"\}", r"\\frac{d_{\1}}{d_{\2}}"),
    (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),  # the parser has words only
    # `\{x \mid x > 0\}` is its condition.
    (r"^\\\{\s*\w\s*(?:\\mid|[:|])\s*([^:|]*(?:[<>]|\\[lg]e).*)\\\}$", r"\1"),
    # Punctuation at the end, and signs of equality at the start.
    (r"[\s.,;:]+(?=\}*$)", ""),
    (r"^(?:\s|(?:[A-Za-z]\s*)?\\approx(?![A-Za-z])|=)+", ""),
    (r"\s*\\approx(?![A-Za-z])[^()\[\]]*$", ""),  # the exact value stands before it
    # `2 = x` is `x = 2`.
    (r"^(?![A-Za-z]\s*=)([^=<>]+)=\s*([A-Za-z])$", r"\2=\1"),
]
_NOTATION_REWRITES = _compile(_NOTATION)

# Differences that remain between equal strings.
_STRING_REWRITES = _compile(
    [
        (r"\\text\{([^{}]*)\}", r"\1"),
        (r"\\[%$]|\$", ""),
        (r"\\frac\{([\d.]+)\\pi\}\{180\}", r"\1"),
        (r"([\^_])\{(\w)\}", r"\1\2"),
        (r"(?<!\d)\s+|\s+(?!\d)", ""),
    ]
)

_SAME_SIGNS = {"neq": "ne", "leq": "le", "geq": "ge", "rightarrow": "to", "implies": "Rightarrow", "wedge": "land"}
_SIGN_NAMES = "|".join(_SAME_SIGNS)


def _same_sign(command: re.Match[str]) -> str:
    r"""`\neq` as `\ne`."""
    return "\\" + _SAME_SIGNS[command[1]]


# Differences that remain between equal texts which are no mathematics to the parser: braces around one sign or number,
# names of the same sign, and how "mod 7" is written.
_TEXT_REWRITES = _compile(
    [
        (r"\\(?:text|operatorname)\s*\{([^{}]*)\}", r"\1"),
        (r"\\[pb]?mod(?![A-Za-z])", " mod "),
        (r"\{\s*(\d+|\\[A-Za-z]+|[^\s{}\\])\s*\}", r" \1 "),
        (r"\(\s*(mod\s[^()]*)\)", r"\1"),
        (rf"\\({_SIGN_NAMES})(?![A-Za-z])", _same_sign),
        ("≡", r"\\equiv "),
    ]
)

# Two words, neither of them a command.
_TWO_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")

# Brackets with all that is between them, or a number with thousands separators.
_BRACKETS = r"[(\[].*[)\]]|\\\{.*\\\}|\\begin\{.*\\end\{"
_WITH_THOUSANDS = r"(?<![\d.,^])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)"
_BRACKETS_OR_THOUSANDS = re.compile(rf"{_BRACKETS}|(?P<number>{_WITH_THOUSANDS})", re.DOTALL)

_OPTION = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?\(?([A-H])(?:\)(?=\s|\d|$)|[.:]\s|$)\s*(?!.*(?:\b[A-H][.:)]|\bor\b|\band\b))(.*)",
    re.DOTALL,
)

# An integer (`5.0`, too) or a fraction, whose groups are numerator and denominator; and a number, which may also be
# decimal, mixed, in per cent or with a power of ten.
_FRACTION = r"(?:\\frac\{\s*-?)?(\d+)\s*(?:\}\{|/)\s*-?(\d+)\s*\}?"
_EXACT = re.compile(rf"\s*(?:[A-Za-z]\s*=)?\s*[+-]?\s*(?:\d+(?:\.0+)?|{_FRACTION})\s*(?:\\%)?")
_NUMBER = re.compile(
    rf"[({{\s]*[+-]?[({{\s]*(?:(?:\d+\s*(?=\\))?{_FRACTION}|\d*\.?\d+(?:E[+-]?\d+)?"
    r"|\d(?:\.\d+)?\s*\\(?:times|cdot)\s*10\s*\^\s*\{?\s*[+-]?\d+\s*\}?)(?:\\%|[)}\s])*"
)
_COMMAND_OR_D = re.compile(r"\\(?:(?:text|begin|end|operatorname)\s*\{[^{}]*\}|[A-Za-z]+)|\band\b|(?P<variable>d)")
_DATE_OR_TIME = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}:\d{2}\s*(?:\\text\{)?\s*[AaPp]\.?[Mm].*")
_PRIME = re.compile(r"(?<=[A-Za-z)'])'|\\prime")

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# A word of two letters may be a product; so may longer ones, but then the answer is written alike.
_WORDS = re.compile(r"(?=.*(?:[^\W\d_]{3}|\bno\b))(?!.*\b(?:and|or)\b)[^\W\d_](?:[^\W\d_]|[ '.-])*", re.IGNORECASE)
_DECIMAL = re.compile(r"-?\d*\.\d+")
_DECIMAL_COMMA = re.compile(r"^(-?\d+),(\d{1,2}|\d{4,})$")  # but `1,234` has a thousands separator


def simplify_notation(latex: str) -> str:
    """Unify the notation of an answer; an empty string if it is longer than [`MAX_ANSWER_LENGTH`]."""
    if len(latex) > MAX_ANSWER_LENGTH:
        return ""
    return _rewrite(latex.translate(_SYMBOLS).strip(), _NOTATION_REWRITES)


def split_option(latex: str) -> tuple[str, str]:
    r"""
    Split a choice from A to H and its text: `\text{(C)} 12` into `C` and `12`, and `C` into `C` and nothing. An answer
    without a choice, or with several (`A or B`), is an empty choice and the whole answer.
    """
    without_text = re.sub(r"^(\(?)\\text\{([^{}]*)\}", r"\1\2", latex)
    match = _OPTION.fullmatch(without_text)
    if match is None:
        return "", latex
    option, rest = match.groups()
    return option, rest


def is_unevaluated(gold: str, answer: str) -> bool:
    """
    Whether the gold answer is an integer or a reduced fraction, and the answer is not one evaluated number, such as
    `2+2` for 4. Only what follows the last `=` of the answer counts.
    """
    right_side = answer.rpartition("=")[2]
    return _is_reduced(_EXACT.fullmatch(gold)) and not _is_reduced(_NUMBER.fullmatch(right_side))


def _is_reduced(number: re.Match[str] | None) -> bool:
    """
    Whether a number is without a fraction, or has one in lowest terms; `3/1` is not. It is given as the match of a
    pattern whose groups are numerator and denominator; `None`, no match, is not reduced.
    """
    if number is None:
        return False
    numerator, denominator = number.groups()
    if not denominator:
        return True
    common_divisor = math.gcd(int(numerator), int(denominator))
    return common_divisor == 1 and int(denominator) != 1


def without_differentials(latex: str) -> str:
    r"""
    Write the variable d as δ: the parser takes `da` for a differential, in `\frac{da}{c}` too. Unchanged with an
    integral, where it is one. A d in a command, in `\text` or in the word "and" is none.
    """
    if r"\int" in latex:
        return latex
    return _COMMAND_OR_D.sub(lambda part: r"\delta " if part["variable"] else part[0], latex)


def without_thousands(latex: str) -> str:
    """Remove the commas of thousands: `10,000x` is `10000x`. In brackets, a comma separates: `(0,100)` is a pair."""
    # A match is a number with such commas or, in brackets, everything, which stays.
    return _BRACKETS_OR_THOUSANDS.sub(lambda part: part[0].replace(",", "") if part["number"] else part[0], latex)


def same_string(gold: str, answer: str) -> bool:
    r"""
    Whether two simplified answers are equal as strings, and not empty. Spaces, `\text`, signs of dollar and per cent,
    and braces around one letter or digit of an exponent or index make no difference.
    """
    gold = _rewrite(gold, _STRING_REWRITES)
    return bool(gold) and gold == _rewrite(answer, _STRING_REWRITES)


def is_text(latex: str) -> bool:
    r"""
    Whether an answer that cannot be parsed is a formula, such as `x \equiv 3 \pmod 7`, or a name: no sentence,
    such as a solution without a box, and no `½`, which answers write in another way.
    """
    is_sentence = _TWO_WORDS.search(_TEXT.sub("", latex))
    return not is_sentence and (latex.isascii() or latex.isalpha())


def same_text(gold: str, answer: str) -> bool:
    r"""Whether two simplified answers that cannot be parsed are equal: `\pmod{7}`, `\bmod 7` and `(mod 7)` are one."""
    return same_string(_rewrite(gold, _TEXT_REWRITES), _rewrite(answer, _TEXT_REWRITES))


def words(latex: str) -> str:
    r"""
    A simplified answer of words, such as `Brian` or `\text{not enough}`, in lower case; empty for any other. "no" and
    words of three letters or more count, as two letters may be a product; a list with "and" or "or" does not.
    """
    unwrapped = _TEXT.sub(r" \1 ", latex)
    text = " ".join(unwrapped.split())
    return text.casefold() if _WORDS.fullmatch(text) else ""


def is_date_or_time(latex: str) -> bool:
    """Whether an answer is `2024-01-31` or `3:15 PM`, which as mathematics are a difference and a ratio."""
    return _DATE_OR_TIME.fullmatch(latex) is not None


def read_decimal_comma(answer: str, gold: str) -> str:
    """Read `0,5` as 0.5 if the gold answer has a decimal point. Otherwise it may be two numbers."""
    return _DECIMAL_COMMA.sub(r"\1.\2", answer) if _DECIMAL.fullmatch(gold) else answer


def count_primes(latex: str) -> int:
    """
    Number of prime marks, `'` or `\\prime`, which math-verify ignores: `E'` is `E` to it. Only the right side of an
    equation counts.
    """
    right_side = latex.rpartition("=")[2]
    return len(_PRIME.findall(right_side))
