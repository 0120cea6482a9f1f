r"""One spelling for the ways to write a mathematical answer: `\frac{1}{2}` for `$\dfrac12$.` and for `1/2`."""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

# One spelling, and the characters of Unicode and the LaTeX commands that mean the same.
_SYNONYMS = {
    "-": "− – — ‐ ﹣", "/": "÷ ⁄ div", "(": "⟨ langle", ")": "⟩ rangle", "[": "lbrack", "]": "rbrack", r"\{": "lbrace",
    r"\}": "rbrace", "|": "lvert rvert vert mid", "'": "′ ’ prime", ":": "colon", ",": "lor", " ": "quad qquad",
    r"^\circ": "° degree", r"\times": "×", r"\cdot": "· ⋅", r"\le": "≤ leq leqslant", r"\ge": "≥ geq geqslant",
    r"\ne": "≠ neq", r"\approx": "≈ simeq", r"\pm": "±", r"\in": "∈", r"\cup": "∪", r"\cap": "∩", r"\infty": "∞",
    r"\emptyset": "∅ varnothing", r"\pi": "π", r"\theta": "θ", r"\sqrt": "√", r"\angle": "∠",
    r"\frac": "dfrac tfrac cfrac", r"\binom": "dbinom tbinom",
    r"\text": "textbf textit textrm textsf textnormal emph mbox hbox mathrm mathit mathsf mathtt operatorname",
    "": "€ £ left right big Big bigl Bigl bigr Bigr bigg Bigg displaystyle textstyle boxed fbox framebox mathbf "
    "boldsymbol",
}  # fmt: skip
_SAME = {name: same for same, names in _SYNONYMS.items() for name in names.split()}
_CHARACTER = str.maketrans({name: same + " " * ("\\" in same) for name, same in _SAME.items() if not name.isascii()})
DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_ARGUMENT = r"([0-9A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+)"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"


def _repeating(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, decimals, period = match.groups()
    top = int(whole + decimals + period) - int(whole + decimals or 0)
    return rf"\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(decimals)}}}"


# Patterns and what replaces them, one after the other.
_STEPS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"(?<=[0-9])(?:, ?\\! ?|\{,\} ?)(?=[0-9]{3}(?![0-9]))", ""),  # thousands: 10,\!000
    (r", ?\\! ?", ","),
    (r"\\(?:left|right) ?\.|\\!|(?<!\\)\\[()\[\]]|\\?\$", ""),  # also the signs of formulas and of dollars
    (rf"\\[hv]?phantom ?{_GROUP}|\\(?:text)?color(?:box)? ?\{{[^{{}}]*\}}", ""),  # invisible, and colors
    (r"(?<!\\)\\[,;:> ]|~|\\[hv]space ?\{[^{}]*\}", " "),
    (r"\\(?:mathbf|boldsymbol|hat|vec) ?\{([ijk])\}", r"\\vec{\1}"),  # unit vectors
    (r"\\(?:mathbf|boldsymbol) ?\{([A-Za-z])\}", r" \1"),
    (r"([0-9]{0,99})\.([0-9]{0,99})\\(?:overline|bar) ?\{([0-9]{1,99})\}", _repeating),
    (r"\\([A-Za-z]+)\*? *", lambda m: _SAME.get(m[1], m[0].rstrip("* ")) + " "),
    (r"\\%", "%"),
    (r"\\text ?\{([^{}^]*)\^ ?\{?(-?[0-9])\}?\}", r"\\text{\1}^{\2}"),  # the power of a unit: \mathrm{cm^2}
    (r"\\text ?\{ ?(e|i|d|[^{}A-Za-z\\]*|\\pi) ?\}", r" \1 "),  # not words
    (r",? ?\\text ?\{ ?,? ?(?:and|or) ?\}|,? (?:and|or)(?= )", ", "),  # a list
    (r"\^ ?\{ ?('[' ]*)\}|\^ ?(?=')", r"\1"),  # primes
    (r"(?<![A-Za-z\\])(sqrt|pi|theta|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
    (r"(\^|\\sqrt) ?\(([^()]*)\)", r"\1{\2}"),
    (r"(?<![\w.\\^])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]+)(?!\w|\.[0-9])", r"\1\\times 10^{\2}"),  # 1e5
    (r"([<>!])=", lambda m: {"<": r"\le ", ">": r"\ge ", "!": r"\ne "}[m[1]]),
    (r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))", r"^\\circ "),
    (rf"\\(sqrt|frac|binom) ?{_ARGUMENT}", r"\\\1{\2}"),  # braces around every argument
    (rf"\\(frac|binom) ?({_GROUP}) ?{_ARGUMENT}", r"\\\1\2{\3}"),
    (r"([\^_]) ?([+-]?[0-9]+|[+-]?[A-Za-z])", r"\1{\2}"),  # 2^10 is 2^{10}, not 2^{1}0
    (r" +", " "),
    (r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", lambda m: m[0].replace(" ", ",")),  # thousands: 1\,000
    (rf"(?<![\w.}})/])({DECIMAL})/({DECIMAL})(?![\w({{\\^]|,[0-9]{{3}})", r"\\frac{\1}{\2}"),
    (r"(?<![A-Za-z0-9,]) | (?![A-Za-z0-9])", ""),  # blanks that keep nothing apart
]


@lru_cache(maxsize=10_000)
def spelling(text: str) -> str:
    r"""One spelling for the ways to write an answer, such as `\frac{1}{2}` for `$\dfrac12$.` and for `1/2`."""
    if not text.isascii():  # superscripts as powers, characters as ASCII or LaTeX, and none that are invisible
        text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
        text = re.sub("[₀-₉]+", lambda m: "_{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
        text = re.sub("[¼-¾⅐-⅞]", lambda m: rf"\frac{{{unicodedata.normalize('NFKC', m[0])}}}".replace("⁄", "}{"), text)
        text = unicodedata.normalize("NFKC", text).translate(_CHARACTER)
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # as JSON writes commands
    text = " ".join(text.split())
    for pattern, replacement in _STEPS:
        text = re.sub(pattern, replacement, text)
    return bare(text)


NAME = re.compile(
    r"(?![ei]$)(?:\\(?!(?:frac|sqrt|times|cdot|pm|mp|sin|cos|tan|log|ln|pi|infty|binom|cup|cap|[lgn]e)(?![A-Za-z]))"
    r"[A-Za-z]++(?:\{[^{}]*\})?|[A-Za-z'| ]|_\{[^{}]*\}|\^\{-1\}|\([^()]*\))+"
)
"""The name of a quantity, such as `x_{1}`, `f(2)` and `\\angle ABC`."""
_GROUPED = re.compile(
    rf"\{{(?P<braces>(?:[^{{}}]|{_GROUP})+)\}}|\((?P<parentheses>(?:[^(),]|\((?:[^(),]|\([^(),]*\))*\))+)\)"
    rf"|\\\{{(?P<set>(?:[^{{}},|:()\[\]]|{_GROUP}|[(\[][^()\[\]{{}}]*[)\]])+)\\\}}"
    r"|\\\{(?P<variable>[a-z])(?:\\in ?\\mathbb\{R\})?[|:](?P<condition>[^{},|:=]*(?P=variable)[^{},|:=]*)\\\}"
)


def bare(text: str) -> str:
    """The text without the punctuation of a sentence, brackets around one thing, and decimals after an exact value."""
    before = None
    while text != before:
        before, text = text, text.strip("* ").rstrip(".,;:\\ ")
        exact = text.partition(r"\approx")[0]
        text = text if NAME.fullmatch(exact) else exact or text
        if match := _GROUPED.fullmatch(text):
            text = match["braces"] or match["parentheses"] or match["set"] or match["condition"]
    return text
