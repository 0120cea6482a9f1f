r"""Equality of answers that takes algebra, such as `\sqrt{8}` and `2\sqrt{2}`. Runs in processes of `threepo.workers`.

math-verify reads the formulas, without evaluating them as Python, and compares relations, lists, sets, intervals and
matrices. Two expressions are compared here, by the digits of their difference: that tells small numbers apart (1.6e-19
and 6.6e-34), and rejects at once what a simplification may take minutes to reject.
"""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from math import prod

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify
from sympy import (
    Add,
    Basic,
    Derivative,
    Eq,
    Expr,
    Float,
    Function,
    I,
    MatrixBase,
    Mul,
    Pow,
    Rational,
    Symbol,
    nan,
    pi,
    zoo,
)
from sympy.core.function import AppliedUndef

from threepo.rewards.equality import DEEPEST, equal
from threepo.rewards.quantities import DEGREES, PERCENT, number, split_unit
from threepo.rewards.spelling import spelling

DIGITS = 400
"""Numbers that agree in this many digits are equal."""
FACTORS = {PERCENT: Rational(1, 100), DEGREES: pi / 180}
MODULI = [
    [prime, prime - 1, prime // 2 - 1, prime // 4 - 1, prime // 8 - 1]
    for prime in (1600000000007145119, 1600000000077897599, 1600000000139418239)
]
"""Primes, and how often the powers modulo the number before repeat (Euler): prime // 2 and so on are primes too. No
number is divisible by a square, so that the powers of every base repeat."""
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_STEPS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"(?<![A-Za-z\\])([eEI])_\{(\w+)\}", r"q_{\1\2}"),  # not Euler's number, nor the imaginary unit
    (r"^(?!.*\\\{)[^()\[\]]*$", lambda m: re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", m[0])),  # thousands
    (r"([0-9.]+)\^\\circ ?", r"{\\frac{\1\\pi}{180}}"),
    (r"([A-Za-z])('+)", lambda m: f"{m[1]}_{{{'prime' * len(m[2])}}}"),  # math-verify drops primes
    (r"\\([gG])amma(?![A-Za-z])", r"\1_{greek}"),  # not Euler's constant
    (r"(?<=[0-9)])(?=\()|(?<=[0-9)}])(?=\\binom)", r"\\cdot "),  # 3(4) is not a mixed number
    (r"(?<=[0-9])\\frac\{([0-9]+)\}\{([0-9]+)\}", lambda m: m[0] if int(m[1]) < int(m[2]) else rf"\cdot {m[0]}"),
    (r"\^\{(\w)\}(?!\w)", r"^\1"),  # the parser reads x^2 faster than x^{2}
]
logging.getLogger("math_verify").setLevel(logging.ERROR)


def _value(point: int, symbol: int) -> Rational:
    """The value of a symbol at a point: above 1 or below it, and from the second point on, of one in four below -1."""
    value = Rational(7 + 6 * point + 10 * symbol, 5 + 4 * symbol + point)
    if symbol % 4 == point - 1:
        return -value
    return 1 / value if point % 2 else value


POINTS = [[_value(point, symbol) for symbol in range(8)] for point in range(5)]
"""Values of up to eight symbols at each of five points."""


class NotAFormula(Exception):
    """A text that the parser cannot read."""


def judge(given: str, reference: str) -> tuple[bool, str]:
    """The verdict, true if an answer equals a reference, and the reason if one of them is not a formula."""
    try:
        return bool(equal(spelling(given), spelling(reference), _compare)), ""
    except NotAFormula as error:
        return False, f"not a formula: {str(error)[:80]}"


def _compare(given: str, reference: str) -> bool:
    (given, unit), (reference, reference_unit) = split_unit(given), split_unit(reference)
    one, other = formula(given), formula(reference)
    if not isinstance(one, Expr) or not isinstance(other, Expr):
        return _verified(one, other)
    resolution = _resolution(reference) - _resolution(given)
    if _same(one, other, resolution):
        return True
    # Where only one side has the sign of percent or degrees, it may be meant on the other: 30 degrees are 30, and pi/6.
    factor, other_factor = FACTORS.get(unit, 1), FACTORS.get(reference_unit, 1)
    return factor != other_factor and _same(one * factor, other * other_factor, resolution)


def _resolution(text: str) -> Rational:
    read = number(text)
    return Rational(read.resolution) if read else Rational(0)


@lru_cache(maxsize=1000)
def formula(text: str) -> Basic | MatrixBase:
    """The formula of an answer in our spelling, with decimals as fractions and i as the imaginary unit."""
    depths = accumulate(_BRACKETS.get(token, 0) for token in re.findall(r"\\.|[()\[\]{}]", text))
    if max(depths, default=0) > DEEPEST or re.search("[0-9] [0-9]", text):  # the parser would add the two numbers
        raise NotAFormula(text)
    tex = text
    for pattern, replacement in _STEPS:
        tex = re.sub(pattern, replacement, tex)
    try:
        read = latex2sympy(tex, is_real=True, normalization_config=None, conversion_config=_CONVERSION)
        assert isinstance(read, Basic | MatrixBase)
        changes: dict[Basic, Basic] = {value: Rational(str(value)) for value in read.atoms(Float)}
        changes |= {part: Symbol(str(part), real=True) for part in read.atoms(AppliedUndef, Derivative)}
        changes |= {symbol: I for symbol in read.free_symbols if symbol.name == "i"}
        changes |= {  # odd roots of negative numbers are real
            power: -((-power.base) ** power.exp)
            for power in read.atoms(Pow)
            if power.base.is_negative and power.exp.is_Rational and power.exp.p == 1 and power.exp.q % 2
        }
        return read.xreplace(changes)
    except MemoryError:
        raise
    except Exception as error:  # of many kinds, the parser's own, and errors of expressions without a meaning
        raise NotAFormula(text) from error


def _verified(given: Basic | MatrixBase, reference: Basic | MatrixBase) -> bool:
    if isinstance(given, Eq) and isinstance(reference, Eq):  # equations without real solutions are not all equal
        complex_ones = {symbol: Symbol(symbol.name) for symbol in given.free_symbols | reference.free_symbols}
        given, reference = given.xreplace(complex_ones), reference.xreplace(complex_ones)
    return bool(verify(reference, given, numeric_precision=30, allow_set_relation_comp=True, timeout_seconds=None))


def _residue(value: Basic, moduli: list[int]) -> int:
    """Residue of an expression of integers and fractions modulo a prime; `ValueError` for other expressions."""
    if isinstance(value, Rational):
        return int(value.p) * pow(int(value.q), -1, moduli[0]) % moduli[0]
    if isinstance(value, Add):
        return sum(_residue(part, moduli) for part in value.args) % moduli[0]
    if isinstance(value, Mul):
        return prod(_residue(part, moduli) for part in value.args) % moduli[0]
    if isinstance(value, Pow) and value.exp.is_Integer:
        return pow(_residue(value.base, moduli), int(value.exp), moduli[0])
    if isinstance(value, Pow) and value.exp.is_integer and len(moduli) > 1:
        return pow(_residue(value.base, moduli), _residue(value.exp, moduli[1:]) + moduli[1], moduli[0])
    raise ValueError(f"{value} is not made of integers, or too deep")


def _same(given: Expr, reference: Expr, resolution: Rational) -> bool:
    """True if the difference of two expressions vanishes: at all points that can be tried, where they have symbols.

    A point is left out where an expression has no value, or differs and is not real: it may not be meant for it. Three
    have to be left. With the `resolution` of a decimal reference, or minus the resolution of a given decimal, it may be
    cut or rounded.
    """
    if not resolution:
        with suppress(ValueError):
            return all(_residue(given, moduli) == _residue(reference, moduli) for moduli in MODULI)
    # No point for the bound variable of an integral. (Alone, a symbol would count as bound.)
    difference, *sides = (side if side.is_Symbol else side.as_dummy() for side in (given - reference, given, reference))
    symbols = sorted(difference.free_symbols, key=str)
    agreeing = differing = 0
    for point in POINTS if symbols else [[]]:
        at = dict(zip(symbols, point, strict=False))
        try:
            value = difference.xreplace(at).evalf(5, maxn=DIGITS)
        except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
            return False  # it has no value, as an integral over x with a number for x
        parts = value.as_real_imag()
        if not all(part.is_Number and part.is_finite for part in parts):
            continue  # 1/0, or more symbols than the point has values
        if not all(_vanishes(part, resolution) for part in parts):
            if not symbols or difference.has(I) or _real_at(sides, at):
                return False
            differing += 1
            continue
        agreeing += 1
        if not symbols:
            return True
    if agreeing >= 3 or differing:
        return agreeing >= 3
    return _verified(given, reference) if symbols else given == reference and not given.has(zoo, nan)


def _real_at(sides: list[Expr], at: dict[Basic, Rational]) -> bool:
    """True if two expressions are real at a point, with all roots and functions in them."""
    parts = {part for side in sides for part in (side, *side.atoms(Pow, Function))}
    with suppress(ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return all(part.xreplace(at).evalf(5).is_real for part in parts)
    return True


def _vanishes(part: Expr, resolution: Rational) -> bool:
    """True if a number is 0, or as small as what cutting or rounding changes."""
    if part == 0 or (resolution and -1 <= 2 * part / resolution < 2):
        return True
    return bool(part.is_Float and part._prec <= 2)  # what evalf returns where all digits cancel
