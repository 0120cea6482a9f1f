r"""Equality of mathematical answers as far as their spelling decides it, without sympy.

    equal(spelling("0.5"), spelling(r"\frac{1}{2}"))     True
    equal(spelling(r"\sqrt{8}"), spelling(r"2\sqrt{2}"))     None: threepo.rewards.algebra decides

`spelling` brings an answer to one form; `equal` compares two such forms, an answer and its reference: equations by
their sides, then lists, points and sets by their members, then single quantities (`quantities`). What counts as equal
is in docs/rewards.md.
"""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from threepo.rewards.quantities import OTHER_UNIT, number, plain_words, same_quantity, split_unit
from threepo.rewards.spelling import DECIMAL, NAME, bare

DEEPEST = 40
"""Deepest nesting of brackets in a formula that is read; the parser takes very long for more."""
Compare = Callable[[str, str], bool | None]
"""Compares an answer and a reference that spelling does not settle; None if it cannot decide either."""

_UNKNOWN = re.compile(
    r"(?=(?:[^A-Za-z\\]|\\[a-z]++|[ei])*([a-df-hj-zA-Z]))(?:[^A-Za-z\\_|]|\\(?:frac|sqrt)(?![a-z])|[ei]|\1(?!\([0-9]))+"
    rf"|-?(?:(?<=-)|{DECIMAL}|\\frac\{{{DECIMAL}\}}\{{{DECIMAL}\}})(?: |\\cdot ?|\\times ?|\*)?(?![ei]$)"
    r"[A-Za-z']+(?:_\{\w+\})?(?:\^\{\w\})?"
)
"""Pattern of the left side of an equation: an expression with one letter, or a number times a name. `2x = 6` and
`x^2 = 4` are equations for x, and not the value of a quantity, as `BC^2 = 4` is."""
_NUMERIC = re.compile(r"(?=.*[0-9])(?:[^A-Za-z\\%]|\\(?:frac|sqrt|times|cdot|pi|log|ln|binom)(?![A-Za-z]))+")
_RELATION = r"=|\\(?:in|equiv|approx)(?![A-Za-z]) ?"
_COMMA = r"[,;](?!(?<=[0-9],)[0-9]{3}(?![0-9]))"
"""A comma that is not one between thousands."""
_WORDS = r"(?:[ ,./]*(?:\\text\{[^{}]*\}(?![\^_(])|(?<![A-Za-z\\])(?:[A-Za-z]{4,}|R(?=[0-9])|[A-Za-z]+(?= [0-9]))))+"
_BRACKETED = re.compile(r"(\\\{|[(\[])(.+)(\\\}|[)\]])")
_SET = r"\{\}"
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z]) ?")
_NUMBERED = re.compile(r"(?<![A-Za-z\\])(\\?[A-Za-z]+)_\{[0-9]\}(?==)")
_TUPLES = re.compile(r"\(([^()]+,[^()]+)\)=\(([^()]+,[^()]+)\)")


class Several(NamedTuple):
    """Several quantities, and their brackets: none for a list, `row` for `6 hours 20 minutes`."""

    brackets: str
    members: list[str]


def equal(given: str, reference: str, compare: Compare = lambda given, reference: None) -> bool | None:
    """True if an answer equals the reference, both in our `spelling`; `compare` decides what spelling does not."""
    given, reference = _assignments(bare(given)), _assignments(bare(reference))
    if given.replace(", ", ",") == reference.replace(", ", ","):
        return True
    if not (_NUMBERED.search(given) and _NUMBERED.search(reference)):  # x_1 = 2, x_2 = 1 are solutions, in any order
        given, reference = _NUMBERED.sub(r"\1", given), _NUMBERED.sub(r"\1", reference)
    if number(given) and number(reference):
        return same_quantity(given, "", reference, "")
    sides, several, other_several = _sides(given), _several(given), _several(reference)
    if sides and _is_numeric(given, sides, any_right=not _sides(reference)):  # 2 + 2 = 4, which must be right itself
        return equal(*sides, compare) and equal(sides[1], reference, compare)
    if (values := _values(given, reference)) is not None:
        return values and equal(*values, compare)
    if several and other_several:
        return _same_members(several, other_several, compare)
    if any(one and not one.brackets for one in (several, other_several)):
        return False  # a list is not one thing
    same = same_quantity(*split_unit(given), *split_unit(reference))
    return compare(given, reference) if same is None else same


def _values(given: str, reference: str) -> tuple[str, str] | Literal[False] | None:
    """The values to compare where one or both are equations: the sides that say something.

    False if they speak of different things; None to compare them whole.
    """
    sides, other_sides = _sides(given), _sides(reference)
    if other_sides:
        name, value = other_sides
        named = not sides and not _has_names(_several(given)) and NAME.fullmatch(name)
        if named or _is_numeric(reference, other_sides):
            return given, value
        if not sides:
            return False if _is_equation(name) else None
        if sides[0] == name:
            return sides[1], value
        if all(NAME.fullmatch(left) and (number(right) or _several(right)) for left, right in (sides, other_sides)):
            return False  # x = 5 is not y = 5
    elif sides and not _has_names(_several(reference)):
        name, value = sides
        return False if _is_equation(name) else (value, reference)
    return None


def _is_equation(side: str) -> bool:
    """True if this left side asks for its unknown, as in `2x = 6`, and is no quantity that has a value."""
    return bool(not NAME.fullmatch(side) and _UNKNOWN.fullmatch(side) and not split_unit(side)[1])


def _has_names(several: Several | None) -> bool:
    """True if one of several members is an equation."""
    return several is not None and any(map(_sides, several.members))


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
    for part in _list_members(text):
        sides = _cut(part, _RELATION)[::2]
        if len(sides) == 1 or not all(sides):
            return None
        if NAME.fullmatch(sides[-1]) and not NAME.fullmatch(sides[0]):
            sides.reverse()
        names.add(sides[0])
        values.append(sides[-1])
    return (names.pop(), ", ".join(values)) if len(names) == 1 else None


def _list_members(text: str) -> list[str]:
    """The members of a list. One without a name has the name before it: `x=1` and `x=2` for `x = 1, 2`."""
    members, name = [], ""
    for part in _cut(text, _COMMA)[::2]:
        sides = _cut(part, _RELATION)
        name = "".join(sides[:2]) if len(sides) > 1 else name
        members.append(part if len(sides) > 1 else name + part)
    return members


def _several(text: str) -> Several | None:
    """The members of a list, a set, a point, an interval or a row of quantities; None for one thing."""
    brackets, members = "", _list_members(text)
    match = _BRACKETED.fullmatch(text) if len(members) == 1 else None
    if match:
        inside = _cut(match[2], ",")[::2]
        if len(inside) > 1 and (match[1] == r"\{" or not _PLUS_MINUS.search(text)):
            brackets, members = match[1] + match[3], inside
    if brackets in ("", _SET):
        members = [value for member in members for value in _both_signs(member)]
    if len(members) == 1 and (row := _row_members(text)):
        brackets, members = "row", row
    return Several(brackets, members) if len(members) > 1 and all(members) else None


def _row_members(text: str) -> list[str]:
    r"""The quantities of `6 hours 20 minutes`: `6\text{hours}` and `20\text{minutes}`; none for other texts."""
    pieces = [*_cut(text, _WORDS), ""]
    quantities, separators = pieces[::2], pieces[1::2]
    if sum(bool(re.search("[0-9]", quantity)) for quantity in quantities) < 2:
        return []
    words = [" ".join(re.findall("[A-Za-z]+", separator.replace(r"\text", ""))) for separator in separators]
    units = [rf"\text{{{word}}}" if word else "" for word in words]
    return [quantity + unit for quantity, unit in zip(quantities, units, strict=True) if quantity + unit]


def _both_signs(text: str) -> list[str]:
    """The values of an expression with plus-minus."""
    if not 0 < len(_PLUS_MINUS.findall(text)) < 4:
        return [text]
    return [value for sign in "+-" for value in _both_signs(_PLUS_MINUS.sub(sign, text, count=1))]


def _same_members(given: Several, reference: Several, compare: Compare) -> bool | None:
    """True if the members agree: in order within brackets, in any order in lists, and as sets if one of them is."""
    kinds, members, others = {given.brackets, reference.brackets}, given.members, reference.members
    if len(kinds) > 1 and kinds not in ({"", "()"}, {"", _SET}, {"", "row"}):
        return False
    if _SET in kinds:
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
    return plain_words(text.removeprefix(quantity)) if unit == OTHER_UNIT else ""


def _each_found(members: list[str], others: list[str], compare: Compare, once: bool = False) -> bool | None:
    """True if each member equals one of the others, and with `once` a different one each."""
    rest, verdicts = list(others), []
    for member in members:
        same: list[bool | None] = []
        while True not in same and len(same) < len(rest):
            same.append(equal(member, rest[len(same)], compare))
        verdicts.append(_any(same))
        if once and verdicts[-1]:
            del rest[len(same) - 1]
    return _all(verdicts)


def _any(verdicts: list[bool | None]) -> bool | None:
    """True if one of them is; None if that cannot be decided."""
    if True in verdicts:
        return True
    return None if None in verdicts else False


def _all(verdicts: list[bool | None]) -> bool | None:
    """True if all of them are; None if that cannot be decided."""
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _is_numeric(equation: str, sides: tuple[str, str], any_right: bool = False) -> bool:
    """True if an equation has no unknown on its left side, and unless `any_right`, none on its right side."""
    left, right = (bool(_NUMERIC.fullmatch(side)) for side in sides)
    return set(re.findall(_RELATION, equation)) == {"="} and left and (any_right or right)
