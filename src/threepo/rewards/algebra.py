r"""Equality of answers that takes algebra, such as \sqrt{8} and 2\sqrt{2}. Runs in processes of `threepo.workers`.

math-verify reads the formulas, and never evaluates them as Python. It also compares relations, lists, sets, intervals
and matrices. Two expressions are compared here, by their values: that says no at once where a simplification may run
for minutes, and compares small numbers by their digits (1.6e-19 is not 6.6e-34).
"""

import logging
import re

import mpmath
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify import verify
from sympy import Basic, Derivative, Eq, Expr, Float, I, MatrixBase, Rational, Symbol, nan, pi, zoo
from sympy.core.function import AppliedUndef

from threepo.rewards.equality import DEEPEST, DEGREES, PERCENT, equal, nesting, number, spelling, split_unit

Formula = Basic | MatrixBase
DIGITS = 30
MOST_DIGITS = 400
"""Two numbers that agree in so many digits are equal."""
POINTS = [[Rational(7 + 6 * p + 10 * s, 5 + 4 * s + p) * (-1) ** (p // 2 + s) for s in range(8)] for p in range(5)]
"""Values for up to eight symbols at each of five points, of both signs."""
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_SPELLINGS = [
    (re.compile(r"([0-9.]+)\^\\circ ?"), r"{\\frac{\1\\pi}{180}}"),
    (re.compile(r"([A-Za-z])'(?!')"), r"\1_{prime}"),  # math-verify drops quotation marks
    (re.compile(r"([A-Za-z])''"), r"\1_{second}"),
    (re.compile(r"\\gamma(?![A-Za-z])"), r"g_{small}"),  # not Euler's constant
    (re.compile(r"\\Gamma(?![A-Za-z])"), r"g_{large}"),
    (re.compile(r"(?<=[0-9)])(?=\()"), r"\\cdot "),  # 3(4) is no mixed number
    (re.compile(r"%"), r"\\%"),
]
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(given: str, reference: str) -> tuple[bool, str]:
    """Whether an answer equals a reference, and why not where one of them is no formula."""
    unreadable: list[str] = []
    same = equal(spelling(given), spelling(reference), lambda one, other: _compare(one, other, unreadable))
    return bool(same), "" if same or not unreadable else f"not a formula: {unreadable[0][:80]}"


def _compare(given: str, reference: str, unreadable: list[str]) -> bool:
    (given, unit), (reference, reference_unit) = split_unit(given), split_unit(reference)
    one, other = formula(given), formula(reference)
    if one is None or other is None:
        unreadable += [text for text, read in ((given, one), (reference, other)) if read is None]
        return False
    if not isinstance(one, Expr) or not isinstance(other, Expr):
        starts = {re.match(r"\\\{|[(\[]?", text)[0] for text in (given, reference)}
        return not (r"\{" in starts and starts & {"(", "["}) and _verified(one, other)
    decimals = [number(text) for text in (given, reference)]
    tolerance = Rational(max((decimal.resolution for decimal in decimals if decimal), default=0))
    readings = [(one, other)]
    for sign, factor in ((PERCENT, Rational(1, 100)), (DEGREES, pi / 180)):
        if sign in (unit, reference_unit):  # left out on one side, it may be meant or not
            readings.append((one * factor ** int(unit == sign), other * factor ** int(reference_unit == sign)))
    return any(_same(*reading, tolerance) for reading in readings)


def formula(text: str) -> Formula | None:
    """What an answer in our spelling says: decimals as fractions, i as the imaginary unit; None for no formula."""
    if max(nesting(text), default=0) > DEEPEST or re.search("[0-9] [0-9]", text):
        return None  # such nesting takes the parser very long, and it would add the two numbers
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    try:
        read = latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception:  # the parser's own, and what comes of expressions without a meaning
        return None
    if not isinstance(read, Basic | MatrixBase):
        return None
    changes: dict[Basic, Basic] = {value: Rational(str(value)) for value in read.atoms(Float)}
    changes |= {part: Symbol(str(part), real=True) for part in read.atoms(AppliedUndef, Derivative)}
    changes |= {symbol: I for symbol in read.free_symbols if symbol.name == "i"}
    return read.xreplace(changes) if changes else read


def _verified(given: Formula, reference: Formula) -> bool:
    if isinstance(given, Eq) and isinstance(reference, Eq):  # two equations without a real solution are not equal
        given, reference = (
            one.xreplace({symbol: Symbol(symbol.name) for symbol in one.free_symbols}) for one in (given, reference)
        )
    return bool(
        verify(reference, given, numeric_precision=DIGITS, allow_set_relation_comp=True, timeout_seconds=None)
    )


def _same(given: Expr, reference: Expr, tolerance: Rational) -> bool:
    symbols = sorted(given.free_symbols | reference.free_symbols, key=str)
    if not symbols:
        return _same_number(given, reference, tolerance)
    if len(symbols) > len(POINTS[0]):
        return _verified(given, reference)
    agreeing = 0
    for point in POINTS:
        place = dict(zip(symbols, point, strict=False))
        one, other = _value(given.xreplace(place)), _value(reference.xreplace(place))
        if one is not None and other is not None:
            if abs(one - other) > 1e-22 * max(abs(one), abs(other)):
                return False
            agreeing += 1
    return agreeing > 2 or _verified(given, reference)


def _same_number(given: Expr, reference: Expr, tolerance: Rational) -> bool:
    one, other = _value(given), _value(reference)
    if one is None or other is None:
        return bool(given == reference) and not given.has(zoo, nan)
    gap = abs(one - other)
    if gap > 1e-20 * max(abs(one), abs(other)):
        return bool(gap < mpmath.mpf(tolerance.p) / tolerance.q)
    difference = (given - reference).evalf(5, maxn=MOST_DIGITS)
    return all(_real(part) == 0 for part in difference.as_real_imag())


def _value(expression: Expr) -> mpmath.mpc | None:
    """The value of a number, zero where all its digits cancel; None if it has none, such as infinity."""
    parts = expression.evalf(DIGITS, maxn=MOST_DIGITS).as_real_imag()
    if not all(part.is_Number and part.is_finite for part in parts):
        return None
    return mpmath.mpc(*map(_real, parts))


def _real(value: Expr) -> mpmath.mpf:
    if value == 0 or (isinstance(value, Float) and value._prec <= 2):
        return mpmath.mpf(0)
    with mpmath.workdps(DIGITS + 10):
        return mpmath.mpf(str(value.evalf(DIGITS)))
