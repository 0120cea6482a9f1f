r"""One quantity of an answer: its number, its unit, its words.

    number(r"2\frac{1}{2}").value     Fraction(5, 2)
    split_unit(r"5\text{ km}")        ("5", "km")

All texts are in our `spelling`. What counts as the same quantity is in docs/rewards.md.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from threepo.rewards.spelling import DECIMAL

VALUE_DIGITS = 6
"""A decimal with this many decimals and significant digits also stands for what it is cut or rounded from."""
LONGEST_NUMBER = 4000
"""Characters of the longest number that is read; Python reads no longer integers."""


class Number(NamedTuple):
    """A number, and for a decimal that may be cut or rounded, one unit in its last digit, with its sign; else 0."""

    value: Fraction
    resolution: Fraction

    def stands_for(self, value: Fraction) -> bool:
        """True if it is a decimal that is cut or rounded from this value."""
        return self.resolution != 0 and -0.5 <= (value - self.value) / self.resolution < 1


_NUMBER = re.compile(
    rf"(?P<signs>[+-]*)(?:(?P<decimal>{DECIMAL})(?:(?:\\times|\\cdot|\*) ?10\^\{{(?P<exponent>[+-]?[0-9]{{1,3}})\}})?"
    rf"|10\^\{{(?P<power>[+-]?[0-9]{{1,3}})\}}"
    rf"|(?P<whole>[0-9]*)\\frac\{{(?P<top>[+-]?{DECIMAL})\}}\{{(?P<bottom>[+-]?{DECIMAL})\}})"
)


def number(text: str) -> Number | None:
    """The number that a text is: decimal, scientific, fraction or mixed; None for other texts."""
    match = _NUMBER.fullmatch(text) if len(text) < LONGEST_NUMBER else None
    if match is None:
        return None
    part = {name: digits.replace(",", "") for name, digits in match.groupdict("").items()}
    sign, resolution = (-1) ** part["signs"].count("-"), Fraction(0)
    if part["top"]:
        top, bottom = Fraction(part["top"]), Fraction(part["bottom"])
        if bottom == 0 or (part["whole"] and not 0 < top / bottom < 1):
            return None
        value = int(part["whole"] or 0) + top / bottom
    else:
        decimal, exponent = part["decimal"] or "1", int(part["exponent"] or part["power"] or 0)
        value, decimals = Fraction(f"{decimal}e{exponent}"), len(decimal.partition(".")[2])
        if decimals >= VALUE_DIGITS <= len(decimal.replace(".", "").lstrip("0")):
            resolution = Fraction(10) ** (exponent - decimals)
    return Number(value * sign, resolution * sign)


PERCENT, DEGREES, OTHER_UNIT = "%", "°", "?"
_RAISED = r"\^?\{?(?:\\text\{)?"
_ORDINAL = rf"[0-9]*(?:1(?={_RAISED}st)|2(?={_RAISED}nd)|3(?={_RAISED}rd)|[0-9](?={_RAISED}th))"
_SIGNS = [
    ("base ", re.compile(r"([0-9][0-9A-F.]*)_\{([0-9]+)\}")),
    ("mod ", re.compile(r"(.+?)\\[pb]?mod ?\{?(\w+)\}?")),
    (PERCENT, re.compile(r"(.+)%()")),
    (DEGREES, re.compile(r"((?:(?!\\(?:sin|cos|tan|cot|sec|csc)).)+)\^\\circ ?(?:\\text\{[CF]\}|[CF])?()")),
    (OTHER_UNIT, re.compile(rf"({_ORDINAL}){_RAISED}[a-z]{{2}}\}}*()")),
]
"""Signs that count as units, and a pattern of an expression with each: the expression, and what names the unit."""
_UNITS = (
    "% percent percentage pct; ° degree deg; mm millimeter millimetre; cm centimeter centimetre; m meter metre; "
    "km kilometer kilometre; in inch inche; ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; "
    "lb pound; oz ounce; ml milliliter millilitre; l liter litre; s sec second; min minute; h hr hour; day; week; "
    "month; year yr; dollar usd; cent; am a.m; pm p.m; mph; unit"
)
_UNIT = {name: names.split()[0] for names in _UNITS.split("; ") for name in names.split()}
_POWER = {"square": "2", "squared": "2", "sq": "2", "2": "2", "cubic": "3", "cubed": "3", "cu": "3", "3": "3"}
_NO_UNIT = re.compile(
    r"\b(?:or|and|if|not|more|less|least|most|than|except|where|when|for|to|dozen|hundred|thousand|[mbt]r?illion"
    r"|plus|minus|over|by|divided|multiplied|remainder|choose|factorial|mod|modulo|(?:times|point)(?= )"
    r"|halves|half|thirds?|(?:four|fif|six|seven|eigh|nin|ten)ths?)\b"
)
_IN_TEXT = re.compile(r"[/ ]*(?:\\text\{[^{}]*\}(?:\^\{-?[0-9]\})?[/ ]*){1,4}$")
_IN_WORDS = re.compile(r"(?<=[0-9})%])( ?)([A-Za-z][A-Za-z ./]*(?:\^\{[0-9]\})?)$")
_FRACTION = re.compile(r"\\frac\{[0-9]+\}\{[0-9]+\}$")
_FACTOR = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|theta|kappa|lambda|sigma|omega|(?:cos|sin|tan)h|[cs](?:ec|sc)h"
)
"""A factor after a fraction, rather than a unit."""


def split_unit(text: str) -> tuple[str, str]:
    """An expression without its unit, and the unit: its usual name, "?" for one that is not in our table, or nothing.

    The sign for percent or degrees, the base of a number and a modulus count as units too.
    """
    for name, pattern in _SIGNS:
        if match := pattern.fullmatch(text):
            return match[1], name + match[2]
    match = _IN_TEXT.search(text) if text.count(r"\text") <= 4 else None
    unit = _unit(match[0].replace(r"\text", "")) if match else ""
    if not unit:
        match = _IN_WORDS.search(text)
        # A spelling has no blank after a fraction, so the words there are taken as standing apart.
        apart = bool(
            match and (match[1] or (_FRACTION.search(text[: match.start()]) and not _FACTOR.fullmatch(match[2])))
        )
        unit = _unit(match[2]) if match and _are_unit_words(match[2], apart=apart) else ""
    return (text[: match.start()], unit) if match and unit and match.start() else (text, "")


def _are_unit_words(text: str, *, apart: bool) -> bool:
    """True if words after a number, without `\\text`, are a unit rather than names in a product: 5 miles, not 5ab."""
    words = re.findall("[A-Za-z.]+", text)
    known = len(words[0]) > 1 and all(_unit(word) != OTHER_UNIT for word in words)
    return known or (apart and all(len(word) > 3 or word in ("of", "per") for word in words))


def _unit(text: str) -> str:
    """The usual name of a unit with its power, "?" for one that is not in our table; empty for what is no unit."""
    words = re.findall(r"[a-z]+(?:\.[a-z]+)*|[0-9]", text.lower())
    name = " ".join(word for word in words if word not in _POWER)
    if not name or _NO_UNIT.search(name):
        return ""
    power = next((_POWER[word] for word in words if word in _POWER), "")
    return _UNIT.get(name, _UNIT.get(name.removesuffix("s"), OTHER_UNIT)) + power


_NO_NUMBER = re.compile(r"\\text|\\begin|[<>]|\\[lgn]e(?![A-Za-z])|,(?![0-9]{3})")


def same_quantity(given: str, unit: str, reference: str, reference_unit: str) -> bool | None:
    """True if two expressions with their units are the same quantity; None if their spelling does not decide it."""
    if unit != reference_unit and not {unit.rstrip("23"), reference_unit.rstrip("23")} & {"", OTHER_UNIT, "unit"}:
        return False  # both units are known, and they differ
    if given == reference:
        return True
    value, reference_value = number(given), number(reference)
    if value and reference_value:
        percents = (unit == PERCENT) - (reference_unit == PERCENT)  # 50% is 50, and 1/2
        if value.value in (reference_value.value, reference_value.value * Fraction(100) ** percents):
            return True
        return value.stands_for(reference_value.value) or reference_value.stands_for(value.value)
    if (value and _NO_NUMBER.search(reference)) or (reference_value and _NO_NUMBER.search(given)):
        return False
    word, reference_word = plain_words(given), plain_words(reference)
    same = word.lower() == reference_word.lower()
    if word and reference_word and r"\text" in given + reference:
        return same
    # Letters without \text may be a product: AB is BA, and Bh is not bh. East is east.
    is_word = len(word) > 2 or word.lower() == "no"
    return True if same and is_word and word[1:] == reference_word[1:] else None


def plain_words(text: str) -> str:
    """The words of a text that is nothing else; empty for other texts."""
    words = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split())
    match = re.fullmatch(r"\(?([A-Za-z][A-Za-z' -]*)\)?\.?", words)
    return match[1] if match else ""
