r"""Units of answers: `5\text{ cm}` is a value and a unit, and so is `101_2`."""

import re
from typing import NamedTuple


# Answers in different units of these lists differ; other nouns are ignored. Each unit is followed by its other names.
_UNIT_NAMES = (
    "mm millimeter, cm centimeter, m meter metre, km kilometer, in inch inche, ft foot feet, yd yard, mi mile, acre, "
    "ml milliliter, l liter litre, gal gallon, mg milligram, g gm gram, kg kilogram, oz ounce, lb pound, "
    "s sec second, min minute, h hr hour, day, week, month, year yr, mi/h mph, km/h kph, m/s, Hz hertz, kHz, "
    "kPa, kWh, degree deg, rad radian, dollar usd, cent, euro, am, pm,"
)
# These count in `\text` only; elsewhere, `5 N` is a product.
_TEXT_UNITS = (
    "nm nanometer, um micrometer, ms millisecond, ton tonne, N newton, kN, J joule, kJ kilojoule, W watt, kW, "
    "MW, mW, V volt, A ampere amp, ohm, Pa pascal, K kelvin, mol mole, degreeC C celsius, degreeF F fahrenheit"
)


def _units_by_name() -> dict[str, str]:
    """Each name of a unit → the unit."""
    units = {}
    for entry in (_UNIT_NAMES + _TEXT_UNITS).split(","):
        names = entry.split()
        for name in names:
            units[name] = names[0]
    return units


_UNITS = _units_by_name()
_POWERS = {"": "", "sq": "^2", "square": "^2", "cu": "^3", "cubic": "^3"}
_POWER_NAME_POWER = re.compile(r"^\s*(?:degrees?\s+(?=\w))?(square|sq|cubic|cu|)(.*?)\s*(\^[23]|)\s*$", re.DOTALL)
# No unit: text that makes the number another one, one of several, or not the answer.
_NO_UNIT = re.compile(
    r"[^A-Za-z\s/'-]|\b(?:and|or|but|nor|not?|if|unless|either|versus|vs|to|through|than|except|is|are|equals|more|less"
    r"|fewer|least|most|over|under|above|below|between|plus|minus|divided|factorial|squared|cubed|twice|hal(?:f|ves)"
    r"|thirds?|zero|one|two|dozen|(?:three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|hundred|thousand"
    r"|[bmtr]+illion|fif|nin|twelf|eigh|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)(?:th)?s?)\b",
    re.IGNORECASE,
)

# A value contains a digit or π and no text: the last word of `\text{A} \text{ and } \text{B}` is not a unit.
_VALUE = r"(?P<value>(?=(?:(?!\\text).)*?(?:\d|\\pi))(?:(?!\\text).)*[\w})])"
_IN_TEXT = r"\s*(?P<text>\\text\{[^{}]*\}(?:\s*/\s*\\text\{[^{}]*\})?)"
# Without `\text`, the words must be known or, as in `8 meals`, one of them long: `2 ab` may be a product.
_LONG_WORD = r"\s+(?P<word>(?=[A-Za-z.\s/]*[A-Za-z]{4})[A-Za-z][A-Za-z.\s/]*)"
_SHORT_NAMES = "|".join(re.findall(r"[\w/]{2,}", _UNIT_NAMES)) + r"|[ap]\.m|[AP]\.?M"
_SHORT_WORD = rf"\s*(?P<short>(?:(?:sq|cu)\.?\s*)?(?:{_SHORT_NAMES})s?)"
_POWER = r"\s*(?P<power>\^\s*\{?\s*[23]\s*\}?)?"
_WITH_UNIT = re.compile(
    rf"{_VALUE}(?:{_IN_TEXT}|(?:(?<=[\d}})])|(?<=\\pi))(?:{_LONG_WORD}|{_SHORT_WORD})){_POWER}", re.DOTALL
)
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?")
_BASE = re.compile(r"(-?[\dA-F.]+)\s*_\s*\{?\s*(\d+)\s*\}?")


class Quantity(NamedTuple):
    """A value in LaTeX, and its unit; the unit is empty if there is none, or if it is of no importance."""

    value: str
    unit: str


def split_unit(latex: str) -> Quantity:
    r"""
    Split `5\text{ cm}^2` into `5` and `cm^2`, `101_2` into `101` and `base 2`, `\$5` and `5^\circ` into `5` and
    `dollar` or `degree`. A noun that is no known unit, as in `8 meals`, is dropped; text that is neither stays.
    """
    if numeral := _BASE.fullmatch(latex):
        digits, base = numeral.groups()
        return Quantity(digits, f"base {base}")
    unit = "dollar" if r"\$" in latex else ""
    latex = latex.replace(r"\$", "")
    if match := _WITH_UNIT.fullmatch(latex):
        noun = match["text"] or match["word"] or match["short"]
        name = _unit_of(noun + (match["power"] or ""))  # empty for a noun that is no unit
        if name is not None:
            latex = match["value"]
            unit = name or unit
    value, degree_signs = _DEGREES.subn("", latex)
    if degree_signs and not unit:
        unit = "degree"
    return Quantity(value.strip(), unit)


def same_unit(gold: str, answer: str) -> bool:
    """
    Whether two units, as [`split_unit`] names them, are the same or one is missing. A sign without more may stand for
    a longer unit: `$` for dollars per hour, `°` for °C.
    """
    short, long = sorted((gold, answer), key=len)
    if short in ("dollar", "degree"):
        return long.startswith(short)
    return short in ("", long)


def _unit_of(text: str) -> str | None:
    """
    The known unit that a text names, such as `mi/h` of `miles per hour`; empty for another noun, whose number is the
    answer (`meals`). `None` for text that is no unit: too short, or changing the number (`and`, `more`, `dozen`).
    """
    text = re.sub(r"\\text|[{}.]", "", text).replace(" squared", "^2")
    parts = re.split(r"/|\bper\b", text)
    units = [_known_unit(part) for part in parts]
    if all(units):
        return "/".join(units)
    noun, _, _ = text.partition("^")
    is_noun = re.search("[A-Za-z]{3}", text) and not _NO_UNIT.search(noun)
    return "" if is_noun else None


def _known_unit(text: str) -> str:
    """The short name of a unit and its power: `square feet` as `ft^2`; empty if it is not a unit of the lists."""
    # A word of power (square, cubic), the name, and a written power (`^2`); any text matches, with empty parts.
    [(power_word, words, power)] = _POWER_NAME_POWER.findall(text)
    name = re.sub(r"[\s-]", "", words)
    if name not in _UNITS:
        name = name.lower()
    unit = _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
    return unit + (power or _POWERS[power_word]) if unit else ""
