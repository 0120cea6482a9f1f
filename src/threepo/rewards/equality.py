r"""Equality of mathematical answers as far as their spelling decides it, without sympy.

    equal(spelling("0.5"), spelling(r"\frac{1}{2}"))     True
    equal(spelling(r"\sqrt{8}"), spelling(r"2\sqrt{2}"))     None: threepo.rewards.algebra decides

`spelling` brings an answer to one form; `equal` compares two such forms, an answer and its reference. What counts as
equal is in docs/rewards.md.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

VALUE_DIGITS = 6
"""A decimal with this many decimals and significant digits also stands for what it is cut or rounded from."""
Compare = Callable[[str, str], bool | None]
"""Compares an answer and a reference that spelling does not settle; None if it cannot decide either."""

_CHARACTERS = {
    "-": "−–—‐﹣", r"\times ": "×", r"\cdot ": "·⋅", "/": "÷⁄", r"\le ": "≤", r"\ge ": "≥", r"\ne ": "≠",
    r"\approx ": "≈", r"\infty ": "∞", r"\pi ": "π", r"\theta ": "θ", r"\sqrt ": "√", r"\pm ": "±", r"\cup ": "∪",
    r"\cap ": "∩", r"\in ": "∈", r"\emptyset ": "∅", r"\angle ": "∠", "(": "⟨", ")": "⟩", r"^\circ ": "°", "'": "′’",
    "": "€£",
}  # fmt: skip
_COMMANDS = {
    r"\frac": "dfrac tfrac cfrac", r"\binom": "dbinom tbinom", r"\le": "leq leqslant", r"\ge": "geq geqslant",
    r"\ne": "neq", r"\approx": "simeq", r"\emptyset": "varnothing", r"\{": "lbrace", r"\}": "rbrace", "(": "langle",
    ")": "rangle", "[": "lbrack", "]": "rbrack", "|": "lvert rvert vert mid", "/": "div", ":": "colon", "'": "prime",
    ",": "lor", r"^\circ": "degree", " ": "quad qquad",
    r"\text": "textbf textit textrm textsf textnormal emph mbox hbox mathrm mathit mathsf mathtt operatorname",
    "": "left right big Big bigl Bigl bigr Bigr bigg Bigg displaystyle textstyle boxed fbox framebox mathbf boldsymbol",
}  # fmt: skip
_CHARACTER = str.maketrans({one: same for same, ones in _CHARACTERS.items() for one in ones})
_COMMAND = {name: same for same, names in _COMMANDS.items() for name in names.split()}
_POWERS_OF_TEN = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_ARGUMENT = r"([0-9A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+)"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
# Patterns and what replaces them, one after the other.
_STEPS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\\\ ?\[[^\[\]]*\]", r"\\\\"),  # the height of a matrix row
    (r", ?\\! ?|(?<=[0-9])\{,\}(?=[0-9]{3})", ","),  # thousands: 10,\!000
    (r"\\(?:left|right) ?\.|\\!|(?<!\\)\\[()\[\]]|\\?\$", ""),  # also the signs of formulas and of dollars
    (r"(?<!\\)\\[,;:> ]|~|\\[hv]space ?\{[^{}]*\}", " "),
    (r"\\([A-Za-z]+)\*? *", lambda m: _COMMAND.get(m[1], m[0].rstrip("* ")) + " "),
    (r"\\%", "%"),
    (r"\\text ?\{ ?(e|i|d|[^{}A-Za-z\\]*|\\pi) ?\}", r" \1 "),  # not words
    (r",? ?\\text ?\{ ?,? ?(?:and|or) ?\}|,? (?:and|or)(?= )", ", "),  # a list
    (
        r"(?<=[0-9]) ?(\\text ?\{)? ?(thousand|million|billion|trillion)\b",
        lambda m: rf"\times 10^{{{_POWERS_OF_TEN[m[2]]}}} {m[1] or ''}",
    ),
    (r"\^ ?\{ ?('[' ]*)\}|\^ ?(?=')", r"\1"),  # primes
    (r"(?<!\\)sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\^ ?\(([^()]*)\)", r"^{\1}"),
    (r"(?<![A-Za-z\\])(sqrt|pi|theta|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
    (r"(?<![\w.\\^])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]+)(?!\w|\.[0-9])", r"\1\\times 10^{\2}"),  # 1e5
    (r"(?<=[\w)}])\*\*(?=[\w({\\])", "^"),
    (r"([<>!])=", lambda m: {"<": r"\le ", ">": r"\ge ", "!": r"\ne "}[m[1]]),
    (r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))", r"^\\circ "),
    (rf"\\(sqrt|frac) ?{_ARGUMENT}", r"\\\1{\2}"),  # braces around every argument
    (rf"\\frac ?({_GROUP}) ?{_ARGUMENT}", r"\\frac\1{\2}"),
    (r"\{([^{}]*)\\choose ([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\log ?_ ?([0-9])", r"\\log_{\1}"),
    (r"([\^_]) ?([+-]?[0-9]+|[+-]?[A-Za-z])", r"\1{\2}"),  # 2^10 is 2^{10}, whatever TeX says
    (r" +", " "),
    (r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", lambda m: m[0].replace(" ", ",")),  # thousands: 1\,000
    (rf"(?<![\w.}})/])({_DECIMAL})/({_DECIMAL})(?![\w({{\\^]|,[0-9]{{3}})", r"\\frac{\1}{\2}"),
    (r"(?<![A-Za-z0-9,]) | (?![A-Za-z0-9])", ""),  # blanks that keep nothing apart
]
_REPLACEMENTS = [(re.compile(pattern), replacement) for pattern, replacement in _STEPS]


@lru_cache(maxsize=10_000)
def spelling(text: str) -> str:
    r"""One spelling for the ways to write an answer, such as `\frac{1}{2}` for `$\dfrac12$.` and for `1/2`."""
    if not text.isascii():
        text = _in_ascii(text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # as JSON writes commands
    text = " ".join(text.split())
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return bare(text)


def _in_ascii(text: str) -> str:
    """Superscripts as powers, characters of Unicode as ASCII or LaTeX, and no invisible characters."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda m: r"\frac{" + unicodedata.normalize("NFKC", m[0]).replace("⁄", "}{") + "}", text)
    text = unicodedata.normalize("NFKC", text).translate(_CHARACTER)
    return "".join(character for character in text if unicodedata.category(character) != "Cf")


# Numbers


class Number(NamedTuple):
    """A number that was written down."""

    value: Fraction
    resolution: Fraction
    """The value of one unit in the last digit, for a decimal that may be cut or rounded; else 0."""

    def equals(self, other: "Number") -> bool:
        """Whether both may be the same: 0.333333 and 1/3, but not 0.33."""
        gap = abs(self.value - other.value)
        return gap == 0 or gap < max(self.resolution, other.resolution)


_NUMBER = re.compile(
    rf"(?P<signs>[+-]*)(?:(?P<decimal>{_DECIMAL})(?:(?:\\times|\\cdot|\*) ?10\^\{{(?P<exponent>[+-]?[0-9]{{1,3}})\}})?"
    rf"|10\^\{{(?P<power>[+-]?[0-9]{{1,3}})\}}"
    rf"|(?P<whole>[0-9]*)\\frac\{{(?P<top>[+-]?{_DECIMAL})\}}\{{(?P<bottom>[+-]?{_DECIMAL})\}}"
    r"|(?P<start>[0-9]*\.[0-9]*)\\(?:overline|bar)\{(?P<period>[0-9]+)\})"
)


def number(text: str) -> Number | None:
    """The number that an answer in our spelling is: decimal, fraction, mixed, repeating, scientific; else None."""
    match = _NUMBER.fullmatch(text) if len(text) < 4000 else None  # Python reads no longer integers
    if match is None:
        return None
    part = match.groupdict("")
    resolution = Fraction(0)
    if part["decimal"]:
        digits, _, decimals = part["decimal"].replace(",", "").partition(".")
        scale = Fraction(10) ** (int(part["exponent"] or 0) - len(decimals))
        value = int(digits + decimals) * scale
        if len(decimals) >= VALUE_DIGITS <= len((digits + decimals).lstrip("0")):
            resolution = scale
    elif part["power"]:
        value = Fraction(10) ** int(part["power"])
    elif part["period"]:
        whole, _, digits = part["start"].partition(".")
        repeated = Fraction(int(part["period"]), 10 ** len(part["period"]) - 1)
        value = int(whole or 0) + (int(digits or 0) + repeated) / 10 ** len(digits)
    else:
        top, bottom = (Fraction(part[name].replace(",", "").rstrip(".")) for name in ("top", "bottom"))
        if bottom == 0 or (part["whole"] and not 0 < top / bottom < 1):
            return None
        value = int(part["whole"] or 0) + top / bottom
    return Number(value * (-1) ** part["signs"].count("-"), resolution)


# Units

PERCENT, DEGREES = "%", "°"
_SIGNS = [
    ("base ", re.compile(r"([0-9][0-9A-F.]*)_\{([0-9]+)\}")),
    ("mod ", re.compile(r"(.+?)\\[pb]?mod ?\{?(\w+)\}?")),
    (PERCENT, re.compile(r"(.+)%()")),
    (DEGREES, re.compile(r"((?:(?!\\(?:sin|cos|tan|cot|sec|csc)).)+)\^\\circ ?(?:\\text\{[CF]\}|[CF])?()")),
]
_UNITS = (
    "% percent percentage pct; ° degree deg; mm millimeter millimetre; cm centimeter centimetre; m meter metre; "
    "km kilometer kilometre; in inch inche; ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; "
    "lb pound; oz ounce; ml milliliter millilitre; l liter litre; s sec second; min minute; h hr hour; day; week; "
    "month; year yr; dollar usd; cent; am a.m; pm p.m; mph; unit"
)
_UNIT = {name: names.split()[0] for names in _UNITS.split("; ") for name in names.split()}
_POWERS = {"2": r"\b(?:square|squared|sq)\b|\^\{?2\}?", "3": r"\b(?:cubic|cubed|cu)\b|\^\{?3\}?"}
_NO_UNIT = re.compile(r"\b(?:or|and|if|not|more|less|least|most|than|except|where|when|for|to|times|hundred|dozen)\b")
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
    unit = _unit(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", match[0])) if match else ""
    if not unit and (match := _IN_WORDS.search(text)):
        words = re.findall("[A-Za-z.]+", match[2])
        known = len(words[0]) > 1 and all(_unit(word) != "?" or word in ("square", "cubic", "sq") for word in words)
        if known or (match[1] and all(len(word) > 3 or word in ("of", "per") for word in words)):
            unit = _unit(match[2])
    return (text[: match.start()], unit) if match and unit and match.start() else (text, "")


def _unit(words: str) -> str:
    words = words.lower()
    if _NO_UNIT.search(words) or not re.search("[a-z]", words):
        return ""
    power = next((power for power, pattern in _POWERS.items() if re.search(pattern, words)), "")
    name = " ".join(re.sub("|".join([*_POWERS.values(), r"[\^{}0-9-]"]), " ", words).split()).rstrip(".")
    return _UNIT.get(name, _UNIT.get(name.removesuffix("s"), "?")) + power


# Answers as wholes

_NAME = re.compile(
    r"(?![ei]$)(?:\\(?!(?:frac|sqrt|times|cdot|pm|mp|sin|cos|tan|log|ln|pi|infty|binom|cup|cap|[lgn]e)(?![A-Za-z]))"
    r"[A-Za-z]++(?:\{[^{}]*\})?|[A-Za-z'| ]|_\{[^{}]*\}|\^\{-1\}|\([^()]*\))+"
)
"""The name of a quantity, such as `x_{1}`, `f(2)` and `\\angle ABC`."""
_RELATION = re.compile(r"=|\\(?:in|equiv|approx)(?![A-Za-z]) ?")
_POINT = re.compile(r"([(\[])([^()\[\]]+,[^()\[\]]+)([)\]])")
_COMMA_INSIDE = re.compile(r"[(\[][^()\[\]]*[)\]]|(?<=[0-9]),(?=[0-9]{3})")
_NO_NUMBER = re.compile(r"\\text|\\begin|[<>]|\\[lgn]e(?![A-Za-z])|,(?![0-9]{3})")
_GROUPED = re.compile(
    rf"\{{(?P<braces>(?:[^{{}}]|{_GROUP})+)\}}|\((?P<parentheses>(?:[^(),]|\((?:[^(),]|\([^(),]*\))*\))+)\)"
    rf"|\\\{{(?P<set>(?:[^{{}},|:]|{_GROUP})+)\\\}}"
)


def equal(given: str, reference: str, compare: Compare = lambda given, reference: None) -> bool | None:
    """Whether an answer equals the reference, both in our `spelling`; `compare` decides what spelling does not."""
    given, reference = bare(given), bare(reference)
    if given.replace(", ", ",") == reference.replace(", ", ","):
        return True
    one, other = _sides(given), _sides(reference)
    if one and other:
        if one[0] == other[0]:
            return equal(one[1], other[1], compare)
        if all(_NAME.fullmatch(name) and number(value) for name, value in (one, other)):
            return False  # x = 5 is not y = 5
    elif one:
        return equal(one[1], reference, compare)
    elif other and _NAME.fullmatch(other[0]):
        return equal(given, other[1], compare)
    points = _POINT.fullmatch(given), _POINT.fullmatch(reference)
    if points[0] and points[1]:
        return _same_points(points[0], points[1], compare)
    same = _same_quantity(*split_unit(given), *split_unit(reference))
    return compare(given, reference) if same is None else same


def _same_points(given: re.Match[str], reference: re.Match[str], compare: Compare) -> bool | None:
    """Points and intervals agree in their brackets, and in their members one by one."""
    members, others = given[2].split(","), reference[2].split(",")
    if (given[1], given[3], len(members)) != (reference[1], reference[3], len(others)):
        return False
    same = [equal(one, other, compare) for one, other in zip(members, others, strict=True)]
    return False if False in same else None if None in same else True


def _sides(text: str) -> tuple[str, str] | None:
    """The first and last side of an equation, exchanged if only the last is a name; None for other texts and lists."""
    sides = [side.strip() for side in _RELATION.split(text)]
    if len(sides) == 1 or not all(sides) or re.search(r"\{[^{}]*=", text) or "," in _COMMA_INSIDE.sub("", text):
        return None
    if _NAME.fullmatch(sides[-1]) and not _NAME.fullmatch(sides[0]):
        sides.reverse()
    return sides[0], sides[-1]


def _same_quantity(given: str, unit: str, reference: str, reference_unit: str) -> bool | None:
    if unit != reference_unit and not {unit.rstrip("23"), reference_unit.rstrip("23")} & {"", "?", "unit"}:
        return False  # both units are known, and they differ
    if given == reference:
        return True
    one, other = number(given), number(reference)
    if one and other:
        percents = (unit == PERCENT) - (reference_unit == PERCENT)  # 50% is 50, and 1/2
        return one.equals(other) or one.value == other.value * Fraction(100) ** percents
    if (one and _NO_NUMBER.search(reference)) or (other and _NO_NUMBER.search(given)):
        return False
    word, reference_word = _word(given), _word(reference)
    if word and reference_word and r"\text" in given + reference:
        return word.lower() == reference_word.lower()
    # Letters without \text may be a product: AB is BA, and Bh is not bh. East is east.
    is_word = len(word) > 2 or word.lower() == "no"
    same_letters = word[:1].lower() + word[1:] == reference_word[:1].lower() + reference_word[1:]
    return True if is_word and same_letters else None


def _word(text: str) -> str:
    words = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split()).rstrip(".")
    match = re.fullmatch(r"\(?([A-Za-z][A-Za-z' -]*)\)?", words)
    return match[1] if match else ""


def bare(text: str) -> str:
    """Without the punctuation of a sentence, brackets around one thing, and the decimals after an exact value."""
    before = None
    while text != before:
        before, text = text, text.strip("* ").rstrip(".,;:\\ ")
        exact = text.partition(r"\approx")[0]
        text = text if _NAME.fullmatch(exact) else exact or text
        if match := _GROUPED.fullmatch(text):
            text = match["braces"] or match["parentheses"] or match["set"]
    return text
