r"""Equality of mathematical answers as far as their spelling decides it, without sympy.

    equal(spelling("0.5"), spelling(r"\frac{1}{2}"))     True
    equal(spelling(r"\sqrt{8}"), spelling(r"2\sqrt{2}"))     None: threepo.rewards.algebra decides

`spelling` brings an answer to one form; `equal` compares two such forms, an answer and its reference. What counts as
equal is in docs/rewards.md.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from threepo.rewards.spelling import DECIMAL, NAME, bare

VALUE_DIGITS = 6
"""A decimal with this many decimals and significant digits also stands for what it is cut or rounded from."""
DEEPEST = 40
"""Deepest nesting of brackets in a formula that is read; the parser takes very long for more."""
Compare = Callable[[str, str], bool | None]
"""Compares an answer and a reference that spelling does not settle; None if it cannot decide either."""


class Number(NamedTuple):
    """A number, and for a decimal that may be cut or rounded, one unit in its last digit, with its sign; else 0."""

    value: Fraction
    resolution: Fraction

    def stands_for(self, value: Fraction) -> bool:
        """Whether it is a decimal that is cut or rounded from this value."""
        return self.resolution != 0 and -0.5 <= (value - self.value) / self.resolution < 1


_NUMBER = re.compile(
    rf"(?P<signs>[+-]*)(?:(?P<decimal>{DECIMAL})(?:(?:\\times|\\cdot|\*) ?10\^\{{(?P<exponent>[+-]?[0-9]{{1,3}})\}})?"
    rf"|10\^\{{(?P<power>[+-]?[0-9]{{1,3}})\}}"
    rf"|(?P<whole>[0-9]*)\\frac\{{(?P<top>[+-]?{DECIMAL})\}}\{{(?P<bottom>[+-]?{DECIMAL})\}})"
)


def number(text: str) -> Number | None:
    """The number that an answer in our spelling is: decimal, scientific, fraction or mixed; else None."""
    match = _NUMBER.fullmatch(text) if len(text) < 4000 else None  # Python reads no longer integers
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


def split_unit(text: str) -> tuple[str, str]:
    """An expression without its unit, and the unit: its usual name, "?" for one that is not in our table, or nothing.

    The sign for percent or degrees, the base of a number and a modulus count as units too.
    """
    for name, pattern in _SIGNS:
        if match := pattern.fullmatch(text):
            return match[1], name + match[2]
    match = _IN_TEXT.search(text) if text.count(r"\text") <= 4 else None
    unit = _unit(match[0].replace(r"\text", "")) if match else ""
    if not unit and (match := _IN_WORDS.search(text)):
        words = re.findall("[A-Za-z.]+", match[2])
        known = len(words[0]) > 1 and all(_unit(word) != "?" for word in words)
        if known or (match[1] and all(len(word) > 3 or word in ("of", "per") for word in words)):
            unit = _unit(match[2])
    return (text[: match.start()], unit) if match and unit and match.start() else (text, "")


def _unit(text: str) -> str:
    words = re.findall(r"[a-z]+(?:\.[a-z]+)*|[0-9]", text.lower())
    name = " ".join(word for word in words if word not in _POWER)
    if not name or _NO_UNIT.search(name):
        return ""
    power = next((_POWER[word] for word in words if word in _POWER), "")
    return _UNIT.get(name, _UNIT.get(name.removesuffix("s"), "?")) + power


_UNKNOWN = re.compile(
    r"(?=(?:[^A-Za-z\\]|\\[a-z]++|[ei])*([a-df-hj-zA-Z]))(?:[^A-Za-z\\_|]|\\(?:frac|sqrt)(?![a-z])|[ei]|\1(?!\([0-9]))+"
    rf"|-?(?:(?<=-)|{DECIMAL}|\\frac\{{{DECIMAL}\}}\{{{DECIMAL}\}})(?: |\\cdot ?|\\times ?|\*)?(?![ei]$)"
    r"[A-Za-z']+(?:_\{\w+\})?(?:\^\{\w\})?"
)
"""What makes an equation: an expression with one letter, or a number times a name. `2x = 6` and `x^2 = 4` are equations
for x, and not the value of a quantity, as `BC^2 = 4` is."""
_NUMERIC = re.compile(r"(?=.*[0-9])(?:[^A-Za-z\\%]|\\(?:frac|sqrt|times|cdot|pi|log|ln|binom)(?![A-Za-z]))+")
_RELATION = r"=|\\(?:in|equiv|approx)(?![A-Za-z]) ?"
_COMMA = r"[,;](?!(?<=[0-9],)[0-9]{3}(?![0-9]))"
"""A comma that is not one between thousands."""
_WORDS = r"(?:[ ,./]*(?:\\text\{[^{}]*\}(?![\^_(])|(?<![A-Za-z\\])(?:[A-Za-z]{4,}|R(?=[0-9])|[A-Za-z]+(?= [0-9]))))+"
_BRACKETED = re.compile(r"(\\\{|[(\[])(.+)(\\\}|[)\]])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z]) ?")
_NUMBERED = re.compile(r"(?<![A-Za-z\\])(\\?[A-Za-z]+)_\{[0-9]\}(?==)")
_TUPLES = re.compile(r"\(([^()]+,[^()]+)\)=\(([^()]+,[^()]+)\)")
_NO_NUMBER = re.compile(r"\\text|\\begin|[<>]|\\[lgn]e(?![A-Za-z])|,(?![0-9]{3})")


class Several(NamedTuple):
    """Several quantities, and their brackets: none for a list, `row` for `6 hours 20 minutes`."""

    brackets: str
    members: list[str]


def equal(given: str, reference: str, compare: Compare = lambda given, reference: None) -> bool | None:
    """Whether an answer equals the reference, both in our `spelling`; `compare` decides what spelling does not.

    Equations are compared by their sides, then lists, points and sets by their members, then single quantities.
    """
    given, reference = _assignments(bare(given)), _assignments(bare(reference))
    if given.replace(", ", ",") == reference.replace(", ", ","):
        return True
    if not (_NUMBERED.search(given) and _NUMBERED.search(reference)):  # x_1 = 2, x_2 = 1 are solutions, in any order
        given, reference = _NUMBERED.sub(r"\1", given), _NUMBERED.sub(r"\1", reference)
    if number(given) and number(reference):
        return _same_quantity(given, "", reference, "")
    one, other, several, others = _sides(given), _sides(reference), _several(given), _several(reference)
    if one and _is_numeric(given, one, not other):
        return equal(*one, compare) and equal(one[1], reference, compare)
    if other and (_is_numeric(reference, other) or (not one and not _has_names(several) and NAME.fullmatch(other[0]))):
        return equal(given, other[1], compare)
    if one and other:
        if one[0] == other[0]:
            return equal(one[1], other[1], compare)
        if all(NAME.fullmatch(name) and (number(value) or _several(value)) for name, value in (one, other)):
            return False  # x = 5 is not y = 5
    elif one and not _has_names(others):
        is_equation = not NAME.fullmatch(one[0]) and _UNKNOWN.fullmatch(one[0]) and not split_unit(one[0])[1]
        return False if is_equation else equal(one[1], reference, compare)
    if several and others:
        return _same_members(several, others, compare)
    if any(some and not some.brackets for some in (several, others)):
        return False  # a list is not one thing
    same = _same_quantity(*split_unit(given), *split_unit(reference))
    return compare(given, reference) if same is None else same


def _assignments(text: str) -> str:
    """`x=1, y=2` for `(x,y)=(1,2)`, and other texts as they are."""
    match = _TUPLES.fullmatch(text)
    names, values = (side.split(",") for side in match.groups()) if match else ([], [])
    return ", ".join(map("=".join, zip(names, values, strict=True))) if 0 < len(names) == len(values) else text


def _cut(text: str, separator: str) -> list[str]:
    """Parts and the separators between them, outside of all brackets. One part if the brackets do not pair."""
    pieces, begin, depth = [], 0, 0
    for token in re.finditer(rf"(?P<separator>{separator})|\\?[{{}}]|[()\[\]]", text):
        if token["separator"] is None:
            depth += 1 if token[0][-1] in "{([" else -1
        elif depth == 0:
            pieces += [text[begin : token.start()].strip(), token[0].strip()]
            begin = token.end()
        if depth not in range(DEEPEST):
            return [text]
    return [*pieces, text[begin:].strip()] if depth == 0 else [text]


def _sides(text: str) -> tuple[str, str] | None:
    """The first and last side of an equation, exchanged if only the last is a name; None for other texts.

    `x = 1, 2` and `x = 1, x = 2` are an equation of `x` and the list `1, 2`.
    """
    names, values = set(), []
    for part in _listed(text):
        sides = _cut(part, _RELATION)[::2]
        if len(sides) == 1 or not all(sides):
            return None
        if NAME.fullmatch(sides[-1]) and not NAME.fullmatch(sides[0]):
            sides.reverse()
        names.add(sides[0])
        values.append(sides[-1])
    return (names.pop(), ", ".join(values)) if len(names) == 1 else None


def _listed(text: str) -> list[str]:
    """The members of a list. One without a name has the name before it: `x=1` and `x=2` for `x = 1, 2`."""
    members, name = [], ""
    for part in _cut(text, _COMMA)[::2]:
        sides = _cut(part, _RELATION)
        name = "".join(sides[:2]) if len(sides) > 1 else name
        members.append(part if len(sides) > 1 else name + part)
    return members


def _several(text: str) -> Several | None:
    """The members of a list, a set, a point, an interval or a row of quantities; None for one thing."""
    brackets, members = "", _listed(text)
    if len(members) == 1 and (match := _BRACKETED.fullmatch(text)):
        inside = _cut(match[2], ",")[::2]
        if len(inside) > 1 and (match[1] == r"\{" or not _PLUS_MINUS.search(text)):
            brackets, members = match[1] + match[3], inside
    if brackets in ("", r"\{\}"):
        members = [value for member in members for value in _both_signs(member)]
    if len(members) == 1:
        row = [*_cut(text, _WORDS), ""]
        if sum(bool(re.search("[0-9]", quantity)) for quantity in row[::2]) > 1:
            words = [" ".join(re.findall("[A-Za-z]+", word.replace(r"\text", ""))) for word in row[1::2]]
            members = [one + rf"\text{{{word}}}" * bool(word) for one, word in zip(row[::2], words, strict=True)]
            brackets, members = "row", [member for member in members if member]
    return Several(brackets, members) if len(members) > 1 and all(members) else None


def _both_signs(text: str) -> list[str]:
    """The values of an expression with plus-minus."""
    if not 0 < len(_PLUS_MINUS.findall(text)) < 4:
        return [text]
    return [value for sign in "+-" for value in _both_signs(_PLUS_MINUS.sub(sign, text, count=1))]


def _has_names(several: Several | None) -> bool:
    return several is not None and any(map(_sides, several.members))


def _same_members(given: Several, reference: Several, compare: Compare) -> bool | None:
    """Whether the members agree: in order within brackets, in any order in lists, and as sets if one of them is."""
    kinds, members, others = {given.brackets, reference.brackets}, given.members, reference.members
    if len(kinds) > 1 and kinds not in ({"", "()"}, {"", r"\{\}"}, {"", "row"}):
        return False
    if r"\{\}" in kinds:
        return _all([_each_found(members, others, compare), _each_found(others, members, compare)])
    if len(members) != len(others):
        return False
    if kinds == {""} and _has_names(given) == _has_names(reference):
        if min(len(set(map(_label, side))) for side in (members, others)) == 1:
            return _each_found(members, others, compare, once=True)
        members, others = sorted(members, key=_label), sorted(others, key=_label)
    return _all([equal(*pair, compare) for pair in zip(members, others, strict=True)])


def _label(text: str) -> str:
    """The words after a quantity that are no unit of our table, such as the colors of `3 red, 2 blue`."""
    quantity, unit = split_unit(text)
    return _word(text.removeprefix(quantity)) if unit == OTHER_UNIT else ""


def _each_found(members: list[str], others: list[str], compare: Compare, once: bool = False) -> bool | None:
    """Whether each member equals one of the others, and with `once` a different one each."""
    rest, verdicts = list(others), []
    for member in members:
        same: list[bool | None] = []
        while True not in same and len(same) < len(rest):
            same.append(equal(member, rest[len(same)], compare))
        verdicts.append(True if True in same else None if None in same else False)
        if once and verdicts[-1]:
            del rest[len(same) - 1]
    return _all(verdicts)


def _all(verdicts: list[bool | None]) -> bool | None:
    return False if False in verdicts else None if None in verdicts else True


def _is_numeric(text: str, sides: tuple[str, str], any_right: bool = False) -> bool:
    """Whether an equation has no unknown on its left side, and unless `any_right`, none on its right side."""
    numeric = [bool(_NUMERIC.fullmatch(side)) for side in sides]
    return set(re.findall(_RELATION, text)) == {"="} and numeric[0] and (any_right or numeric[1])


def _same_quantity(given: str, unit: str, reference: str, reference_unit: str) -> bool | None:
    if unit != reference_unit and not {unit.rstrip("23"), reference_unit.rstrip("23")} & {"", "?", "unit"}:
        return False  # both units are known, and they differ
    if given == reference:
        return True
    one, other = number(given), number(reference)
    if one and other:
        percents = (unit == PERCENT) - (reference_unit == PERCENT)  # 50% is 50, and 1/2
        values = other.value, other.value * Fraction(100) ** percents
        return one.value in values or one.stands_for(other.value) or other.stands_for(one.value)
    if (one and _NO_NUMBER.search(reference)) or (other and _NO_NUMBER.search(given)):
        return False
    word, reference_word = _word(given), _word(reference)
    same = bool(word) and word.lower() == reference_word.lower()
    if word and reference_word and r"\text" in given + reference:
        return same
    # Letters without \text may be a product: AB is BA, and Bh is not bh. East is east.
    is_word = len(word) > 2 or word.lower() == "no"
    return True if same and is_word and word[1:] == reference_word[1:] else None


def _word(text: str) -> str:
    words = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split())
    match = re.fullmatch(r"\(?([A-Za-z][A-Za-z' -]*)\)?\.?", words)
    return match[1] if match else ""
