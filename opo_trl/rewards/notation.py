r"""The LaTeX notation of answers: notations of the same meaning are unified, and units are split off."""

import math
import re
from collections.abc import Callable
from fractions import Fraction


# Longer answers are discarded, because parsing takes too long. The longest in MATH has 159 characters.
MAX_ANSWER_LENGTH = 300

_SYMBOLS = str.maketrans({"−": "-", "–": "-", "°": r"^\circ ", "π": r"\pi ", "∞": r"\infty ", "×": r"\times "})

# One argument without braces: a digit, a letter, or a command without arguments, such as `\pi`.
_TOKEN = r"(\d|[A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+(?![A-Za-z]|\s*\{))"

_DIFFERENTIAL = r"\s*(?:d|\\partial)\s*([A-Za-z])\s*"

# What is in braces, which may hold braces.
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"


def _fraction(decimal: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as `\frac{1}{6}`."""
    start, period = (decimal[1] or "0") + decimal[2], decimal[3]
    value = Fraction(int(start + period) - int(start), (10 ** len(period) - 1) * 10 ** len(decimal[2]))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# Notation that has no meaning, or that the parser cannot read, in the order in which it is replaced.
_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)(?:\\[()\[\]]|\$)|(?<=\\\\)\[[\d.]+[a-z]{2}\]", ""),  # the ends of a formula; `\\[2pt]`
        (r"^([*_`]{1,3})([^*`]+)\1$", r"\2"),
        (r"\\(?:mathbf|boldsymbol|bm|ensuremath|(?:text)?color\s*\{[^{}]*\})\s*" + _GROUP, r"\1"),
        (r"\\(?:color|tag\*?|label|[hv]space\*?)\s*\{[^{}]*\}", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|[lL]arge|LARGE|[hH]uge|bf|rm)(?![A-Za-z])", ""),
        (r"\\(?:text|mathrm)\s*(?:\{\s*([eid])\s*\}|\s([eid])(?![A-Za-z]))", r" \1\2"),  # e, i, differentials
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|it|sf|tt|cal)|mbox|emph|underline)\s*\{", r"\\text{"),
        (r"^\\text\{([^{}]*[\d,][^{}]*)\}", r"\1"),  # unwrap lists of names, and numbers
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"(?<!\\)%|\\text\{\s*percent(?:age)?\s*\}|(?<=\d)\s*(?:percent(?:age)?|pct)(?![a-z])", r"\\%"),
        (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?", _fraction),
        (r"(\d*)\.(\d*?)(\d+?)\3{2,}\s*(?:\\[lc]?dots|\.{3}|…)", _fraction),
        # Thousands that cannot be a list: `10,\!000`, `10{,}000`, `10\,000`. For `10,000`, see `without_thousands`.
        (r"(?<=\d)(?:\\!)*(?:,\\!\s*(?=\d)|(?:\{,\}|\\,)(?:\\!)*(?=\d{3}(?!\d)))", ""),
        (r"^(-?\d{1,3}) (\d{3})(?: (\d{3}))?$", r"\1\2\3"),
        (r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"(?<![\w.\\])(\d*\.?\d+)e([+-]?\d+)(?![\w.])", r"\1E\2"),  # otherwise the letter is Euler's number
        (r"(?<![_^\d.])(\d+\)?)\s*(?=\(\d+\))", r"\1 \\cdot "),  # math-verify reads `2(3)` as 2 + 3
        # As in programming languages: `sqrt(2)`, `2**3`, `2^(1/3)`.
        (r"(?<![A-Za-z\\])(?<!operatorname\{)(sqrt|sin|cos|tan|cot|sec|csc|log|ln|pi)(?![A-Za-z])", r"\\\1 "),
        (r"(?:\^|\*\*)\s*\(([^()]*)\)", r"^{\1}"),
        (r"\*\*", "^"),
        (r"\^\s*(?:T\b|\\top|\\intercal|\{\s*(?:T|\\top|\\intercal|\\text\{T\})\s*\})", "^{t}"),  # else ignored
        (r"\\sqrt\s*(\[[^\[\]]*\]|)\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
        # In trigonometric functions; elsewhere the degree sign is a unit.
        (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([\d.]+)\s*\^\s*\{?\s*\\circ\s*\}?", r"\1\\frac{\2\\pi}{180}"),
        (r"(?<!\\)\\[!,;: ]|\\q?quad(?![A-Za-z])|~", " "),  # but `\\ ` starts a row of a matrix
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)", ""),
        (r"\\[dtc]?frac\s*" + _TOKEN + r"\s*" + _TOKEN, r"\\frac{\1}{\2}"),
        (r"\\[dtc]?frac\s*" + _TOKEN + r"\s*(?=\{)", r"\\frac{\1}"),
        (r"\\[dtc]?frac\s*(\{[^{}]*\})\s*" + _TOKEN, r"\\frac\1{\2}"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\sqrt\s*(\[[^\[\]]*\]|)\s*" + _TOKEN, r"\\sqrt\1{\2}"),
        (r"\\sqrt\{\s*(?:\\frac\{(\d+)\}\{([^{}]*)\}|(\d+)/(\w+))\s*\}", r"\\frac{\\sqrt{\1\3}}{\\sqrt{\2\4}}"),
        (r"\\frac\{" + _DIFFERENTIAL + r"\}\{" + _DIFFERENTIAL + r"\}", r"\\frac{d_{\1}}{d_{\2}}"),  # else 0
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),  # the parser has words only
        (r"^\\\{\s*\w\s*(?:\\mid|[:|])\s*([^:|]*(?:[<>]|\\[lg]e).*)\\\}$", r"\1"),
        (r"[\s.,;:]+(?=\}*$)", ""),
        (r"^(?:\s|(?:[A-Za-z]\s*)?\\approx(?![A-Za-z])|=)+", ""),
        (r"\s*\\approx(?![A-Za-z])[^()\[\]]*$", ""),  # the exact value comes first
        (r"^(?![A-Za-z]\s*=)([^=<>]+)=\s*([A-Za-z])$", r"\2=\1"),
    )
]

# Differences that remain between equal strings.
_KEY_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\text\{([^{}]*)\}", r"\1"),
        (r"\\[%$]|\$", ""),
        (r"\\frac\{([\d.]+)\\pi\}\{180\}", r"\1"),
        (r"([\^_])\{(\w)\}", r"\1\2"),
        (r"(?<!\d)\s+|\s+(?!\d)", ""),
    )
]

# Differences that remain between equal texts which are no mathematics to the parser: braces around one sign or number,
# names of the same sign, and how "mod 7" is written.
_SAME_SIGNS = {"neq": "ne", "leq": "le", "geq": "ge", "rightarrow": "to", "implies": "Rightarrow", "wedge": "land"}
_TEXT_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:text|operatorname)\s*\{([^{}]*)\}", r"\1"),
        (r"\\[pb]?mod(?![A-Za-z])", " mod "),
        (r"\{\s*(\d+|\\[A-Za-z]+|[^\s{}\\])\s*\}", r" \1 "),
        (r"\(\s*(mod\s[^()]*)\)", r"\1"),
        (rf"\\({'|'.join(_SAME_SIGNS)})(?![A-Za-z])", lambda sign: rf"\{_SAME_SIGNS[sign[1]]}"),
        ("≡", r"\\equiv "),
    )
]

_TWO_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")  # neither of them a command

# A number with thousands separators; or, to leave them as they are, brackets with all that is between them.
_THOUSANDS = re.compile(
    r"[(\[].*[)\]]|\\\{.*\\\}|\\begin\{.*\\end\{|(?<![\d.,^])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)", re.DOTALL
)

# Answers in different units of these lists differ; other nouns are ignored. Units of the second are in `\text` only.
_UNIT_NAMES = (
    "mm millimeter, cm centimeter, m meter metre, km kilometer, in inch inche, ft foot feet, yd yard, mi mile, acre, "
    "ml milliliter, l liter litre, gal gallon, mg milligram, g gm gram, kg kilogram, oz ounce, lb pound, "
    "s sec second, min minute, h hr hour, day, week, month, year yr, mi/h mph, km/h kph, m/s, Hz hertz, kHz, "
    "kPa, kWh, degree deg, rad radian, dollar usd, cent, euro, am, pm,"
)
_TEXT_UNITS = (
    "nm nanometer, um micrometer, ms millisecond, ton tonne, N newton, kN, J joule, kJ kilojoule, W watt, kW, "
    "MW, mW, V volt, A ampere amp, ohm, Pa pascal, K kelvin, mol mole, degreeC C celsius, degreeF F fahrenheit"
)
_UNITS = {alias: names.split()[0] for names in (_UNIT_NAMES + _TEXT_UNITS).split(",") for alias in names.split()}
_POWERS = {"": "", "sq": "^2", "square": "^2", "cu": "^3", "cubic": "^3"}
_UNIT = re.compile(r"^\s*(?:degrees?\s+(?=\w))?(square|sq|cubic|cu|)(.*?)\s*(\^[23]|)\s*$", re.DOTALL)
# No unit: text that makes the number another one, one of several, or not the answer.
_NO_UNIT = re.compile(
    r"[^A-Za-z\s/'-]|\b(?:and|or|but|nor|not?|if|unless|either|versus|vs|to|through|than|except|is|are|equals|more|less"
    r"|fewer|least|most|over|under|above|below|between|plus|minus|divided|factorial|squared|cubed|twice|hal(?:f|ves)"
    r"|thirds?|zero|one|two|dozen|(?:three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|hundred|thousand"
    r"|[bmtr]+illion|fif|nin|twelf|eigh|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)(?:th)?s?)\b",
    re.IGNORECASE,
)
# Without `\text`, the words must be known or, as in `8 meals`, one of them long: `2 ab` may be a product. A value
# contains a digit or π and no text: the last word of `\text{A} \text{ and } \text{B}` is not a unit.
_SHORT_UNITS = "|".join(re.findall(r"[\w/]{2,}", _UNIT_NAMES)) + r"|[ap]\.m|[AP]\.?M"
_WITH_UNIT = re.compile(
    r"(?P<value>(?=(?:(?!\\text).)*?(?:\d|\\pi))(?:(?!\\text).)*[\w})])"
    r"(?:\s*(?P<text>\\text\{[^{}]*\}(?:\s*/\s*\\text\{[^{}]*\})?)"
    r"|(?:(?<=[\d})])|(?<=\\pi))(?:\s+(?P<word>(?=[A-Za-z.\s/]*[A-Za-z]{4})[A-Za-z][A-Za-z.\s/]*)"
    rf"|\s*(?P<short>(?:(?:sq|cu)\.?\s*)?(?:{_SHORT_UNITS})s?)))"
    r"\s*(?P<power>\^\s*\{?\s*[23]\s*\}?)?",
    re.DOTALL,
)
_OPTION = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?\(?([A-H])(?:\)(?=\s|\d|$)|[.:]\s|$)\s*(?!.*(?:\b[A-H][.:)]|\bor\b|\band\b))(.*)",
    re.DOTALL,
)
# An integer or a fraction; and a number, which may also be decimal, mixed, in per cent or with a power of ten.
_FRACTION = r"(?:\\frac\{\s*-?)?(\d+)\s*(?:\}\{|/)\s*-?(\d+)\s*\}?"
_EXACT = re.compile(rf"\s*(?:[A-Za-z]\s*=)?\s*[+-]?\s*(?:\d+|{_FRACTION})\s*(?:\\%)?")
_NUMBER = re.compile(
    rf"[({{\s]*[+-]?[({{\s]*(?:(?:\d+\s*(?=\\))?{_FRACTION}|\d*\.?\d+(?:E[+-]?\d+)?"
    r"|\d(?:\.\d+)?\s*\\(?:times|cdot)\s*10\s*\^\s*\{?\s*[+-]?\d+\s*\}?)(?:\\%|[)}\s])*"
)
_COMMAND_OR_D = re.compile(r"\\(?:(?:text|begin|end|operatorname)\s*\{[^{}]*\}|[A-Za-z]+)|\band\b|(d)")
_DATE_OR_TIME = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}:\d{2}\s*(?:\\text\{)?\s*[AaPp]\.?[Mm].*")
# A word of two letters may be a product; so may longer ones, but then the answer is written alike.
_WORDS = re.compile(r"(?=.*(?:[^\W\d_]{3}|\bno\b))(?!.*\b(?:and|or)\b)[^\W\d_](?:[^\W\d_]|[ '.-])*", re.IGNORECASE)
_DECIMAL = re.compile(r"-?\d*\.\d+")
_DECIMAL_COMMA = re.compile(r"^(-?\d+),(\d{1,2}|\d{4,})$")  # but `1,234` has a thousands separator
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?")
_BASE = re.compile(r"(-?[\dA-F.]+)\s*_\s*\{?\s*(\d+)\s*\}?")


def simplify_notation(latex: str) -> str:
    """Unify the notation of an answer; an empty string if it is longer than [`MAX_ANSWER_LENGTH`]."""
    latex = "" if len(latex) > MAX_ANSWER_LENGTH else latex.translate(_SYMBOLS).strip()
    for pattern, replacement in _REWRITES:
        latex = pattern.sub(replacement, latex)
    return latex


def split_option(latex: str) -> tuple[str, str]:
    r"""Split `\text{(C)} 12` into `C` and `12`, and `C` into `C` and nothing; two options are none."""
    match = _OPTION.fullmatch(re.sub(r"^(\(?)\\text\{([^{}]*)\}", r"\1\2", latex))
    return (match[1], match[2]) if match else ("", latex)


def split_unit(latex: str) -> tuple[str, str]:
    r"""Split `5\text{ cm}^2` into `5` and `cm^2`, `101_2` into `101` and `base 2`; an unknown unit is dropped."""
    if match := _BASE.fullmatch(latex):
        return match[1], f"base {match[2]}"
    sign = "dollar" if r"\$" in latex else ""
    latex = latex.replace(r"\$", "")
    if match := _WITH_UNIT.fullmatch(latex):
        unit = _unit((match["text"] or match["word"] or match["short"]) + (match["power"] or ""))
        if unit is not None:
            latex, sign = match["value"], unit or sign
    value, degrees = _DEGREES.subn("", latex)
    return value.strip(), sign or ("degree" if degrees else "")


def _unit(text: str) -> str | None:
    """The name of a unit of the lists; nothing for another noun; `None` for text that is no unit."""
    text = re.sub(r"\\text|[{}.]", "", text).replace(" squared", "^2")
    names = []
    for before, name, power in (_UNIT.findall(part)[0] for part in re.split(r"/|\bper\b", text)):
        name = re.sub(r"[\s-]", "", name)
        name = name if name in _UNITS else name.lower()
        name = _UNITS.get(name) or _UNITS.get(name.removesuffix("s"), "")
        names.append(name and name + (power or _POWERS[before]))
    if all(names):
        return "/".join(names)
    return None if _NO_UNIT.search(text.partition("^")[0]) or not re.search("[A-Za-z]{3}", text) else ""


def is_unevaluated(gold: str, answer: str) -> bool:
    """Whether the gold answer is an integer or a reduced fraction, and the answer is not one evaluated number."""
    return _is_reduced(_EXACT.fullmatch(gold)) and not _is_reduced(_NUMBER.fullmatch(answer.rpartition("=")[2]))


def _is_reduced(number: re.Match[str] | None) -> bool:
    return number is not None and (not number[2] or math.gcd(int(number[1]), int(number[2])) == 1 != int(number[2]))


def without_differentials(latex: str) -> str:
    r"""Write the variable d as δ: the parser takes `da` for a differential, in `\frac{da}{c}` too."""
    return latex if r"\int" in latex else _COMMAND_OR_D.sub(lambda match: r"\delta " if match[1] else match[0], latex)


def without_thousands(latex: str) -> str:
    """Read `10,000x` as 10000x. In brackets, a comma separates: `(0,100)` is a pair."""
    return _THOUSANDS.sub(lambda match: match[0].replace(",", "") if match[0][0].isdigit() else match[0], latex)


def same_string(gold: str, answer: str) -> bool:
    """Whether two simplified answers are equal as strings, and not empty."""
    return bool(_key(gold)) and _key(gold) == _key(answer)


def is_text(latex: str) -> bool:
    r"""
    Whether an answer that cannot be parsed is a formula, such as `x \equiv 3 \pmod 7`, or a name: no sentence,
    such as a solution without a box, and no `½`, which answers write in another way.
    """
    is_sentence = _TWO_WORDS.search(re.sub(r"\\text\{[^{}]*\}", "", latex))
    return not is_sentence and (latex.isascii() or latex.isalpha())


def same_text(gold: str, answer: str) -> bool:
    r"""Whether two simplified answers that cannot be parsed are equal: `\pmod{7}`, `\bmod 7` and `(mod 7)` are one."""
    for pattern, replacement in _TEXT_REWRITES:
        gold, answer = pattern.sub(replacement, gold), pattern.sub(replacement, answer)
    return same_string(gold, answer)


def _key(latex: str) -> str:
    for pattern, replacement in _KEY_REWRITES:
        latex = pattern.sub(replacement, latex)
    return latex


def words(latex: str) -> str:
    r"""A simplified answer of words, such as `Brian` or `\text{not enough}`, in lower case; of others, nothing."""
    text = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", latex).split())
    return text.casefold() if _WORDS.fullmatch(text) else ""


def is_date_or_time(latex: str) -> bool:
    """Whether an answer is `2024-01-31` or `3:15 PM`, which as mathematics are a difference and a ratio."""
    return _DATE_OR_TIME.fullmatch(latex) is not None


def read_decimal_comma(answer: str, gold: str) -> str:
    """Read `0,5` as 0.5 if the gold answer has a decimal point. Otherwise it may be two numbers."""
    return _DECIMAL_COMMA.sub(r"\1.\2", answer) if _DECIMAL.fullmatch(gold) else answer


def count_primes(latex: str) -> int:
    """Count primes, which math-verify ignores: `E'` is `E` to it. Only the right side of an equation counts."""
    return len(re.findall(r"(?<=[A-Za-z)'])'|\\prime", latex.rpartition("=")[2]))
