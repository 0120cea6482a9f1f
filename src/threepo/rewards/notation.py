r"""One spelling for answers: LaTeX and plain text reduced to common forms, without changing what they say.

`canonical` makes one text of the many ways to write it, and `squeezed` takes the blanks out, so that equal texts are
equal answers. `read_number` is what a text says as a number, exactly. Nothing here imports more than Python has.
"""

import re

_SPELLED_BY_CHARACTER = {
    "-": "−–—‐‑﹣－",
    " ": "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\t\n\r\f\v",
    # Signs that are not seen: joiners, directions of writing, soft hyphens; and currencies, which come before a number.
    "": "\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff\u00ad\0€£",
    r"\times ": "×",
    r"\cdot ": "·⋅",
    "/": "÷／",
    r"\le ": "≤",
    r"\ge ": "≥",
    r"\ne ": "≠",
    r"\approx ": "≈",
    r"\infty ": "∞",
    r"\pi ": "π",
    r"\theta ": "θ",
    r"\sqrt ": "√",
    r"\pm ": "±",
    r"\cup ": "∪",
    r"\cap ": "∩",
    r"\in ": "∈",
    r"\emptyset ": "∅",
    r"\angle ": "∠",
    r"\langle ": "⟨",
    r"\rangle ": "⟩",
    r"^\circ ": "°",
    "^2": "²",
    "^3": "³",
    "'": "′’",
    r"\frac{1}{2}": "½",
    r"\frac{1}{4}": "¼",
    r"\frac{3}{4}": "¾",
}
_WIDE = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
"""Characters as wide as Chinese ones, and the ASCII ones that they are."""
_CHARACTERS = str.maketrans(
    _WIDE | {character: same for same, characters in _SPELLED_BY_CHARACTER.items() for character in characters}
)
_SPELLED_BY_COMMAND = {
    r"\frac": "dfrac tfrac cfrac",
    r"\binom": "dbinom tbinom",
    r"\le": "leq leqslant",
    r"\ge": "geq geqslant",
    r"\ne": "neq",
    r"\approx": "simeq",
    r"\emptyset": "varnothing",
    r"\ldots": "dots cdots",
    r"\{": "lbrace",
    r"\}": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    "|": "lvert rvert vert mid",
    "/": "div",
    ":": "colon",
    "'": "prime",
    r"^\circ": "degree textdegree",
    r"\text": "textbf textit textrm textsf texttt textnormal textup emph mbox hbox mathrm mathit mathsf mathtt mathup",
    " ": "quad qquad enspace thinspace hfill",
    # Bold symbols are the symbols; sizes, styles and boxes are nothing.
    "": "mathbf boldsymbol bm boxed fbox framebox mathop limits nolimits displaystyle textstyle scriptstyle left right "
    "mleft mright big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr textdollar",
}
_COMMANDS = {command: same for same, commands in _SPELLED_BY_COMMAND.items() for command in commands.split()}
_ROW = "\ue000"
"""Stands for the end of a matrix row while other backslashes are looked at."""
_MOST_BRACES = 8
_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")
_FUNCTIONS = {*_TRIGONOMETRIC, "ln", "log", "exp", "gcd", "max", "min"}
_POWERS_OF_TEN = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PLAIN_WORDS = {"sqrt": r"\sqrt", "pi": r"\pi", "infinity": r"\infty", "theta": r"\theta"}
_WORD = re.compile(r"\\text\s*\{[^{}]*\}|(?P<word>\\?[A-Za-z]+)(?P<applied>(?=\s*[({^\\]|\s+[A-Za-z0-9]))?")
_ARGUMENT = r"(?:[0-9A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+)"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9.\\^_])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]+)(?![A-Za-z0-9]|\.[0-9])")
_TOKEN = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|[0-9.]+|\S", re.DOTALL)
_BRACKET = re.compile(r"\\(?:begin|end|langle|rangle)(?![A-Za-z])|\\.|[()\[\]{}]")


def canonical(text: str) -> str:
    """The text with one spelling for each command, character and kind of argument, and single blanks."""
    text = text.translate(_CHARACTERS)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # as JSON writes them
    text = text.replace("\\\\", _ROW)
    text = re.sub(r"\\(?:left|right)\s*\.", " ", text)
    text = re.sub(r",\s*\\!\s*", ",", text).replace(r"\!", "")  # thousands: 10,\!000
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9]{3})", ",", text)
    text = re.sub(r"\\[,;:> ]|~|\\(?:hspace|vspace)\s*\{[^{}]*\}", " ", text)
    text = re.sub(r"\\[()\[\]]|\\?\$", "", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: _COMMANDS.get(m[1], m[0]) + " ", text).replace(r"\%", "%")
    text = re.sub(r"\\operatorname\s*\*?\s*\{\s*([A-Za-z]*)\s*\}", _operator, text)
    text = re.sub(r"\\text\s*\{\s*(e|i|d|\\pi|[0-9.,/+ -]*[0-9]|\([0-9.,/+ -]*[0-9] *\))\s*\}", r" \1 ", text)
    text = re.sub(r"(?<=[0-9])\s*(\\text\s*\{)?\s*(thousand|million|billion|trillion)\b", _multiplier, text)
    text = re.sub(r"\\text\s*\{\s*\}|\{\s*\}(?=\s*\^)", "", text)
    text = re.sub(r"\^\s*(?:\{\s*('[' ]*)\}|(?='))", r"\1", text)  # primes
    text = _WORD.sub(_plain_word, text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text).replace("**", "^")
    text = re.sub(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", r"^\\circ ", text)
    text = " ".join(_arguments_in_braces(text).split())
    # A blank before groups of three digits separates thousands: 1\,000.
    text = re.sub(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", lambda m: m[0].replace(" ", ","), text)
    return text.replace(_ROW, r"\\")


def squeezed(text: str) -> str:
    r"""A canonical text without blanks, but for those that keep apart: `\pi r`, and `1 1/2`."""
    before, parts = "", []
    for token in _TOKEN.findall(text):
        letters = before.startswith("\\") and before[-1:].isalpha() and token[0].isalpha()
        digits = before[-1:].isdigit() and token[0].isdigit()
        parts.append(f" {token}" if letters or digits else token)
        before = token
    joined = re.sub(r"([\^_])\{([0-9A-Za-z])\}", r"\1\2", "".join(parts))
    for _ in range(_MOST_BRACES):
        joined = joined[1:-1] if wraps(joined, "{", "}") else joined
    return joined


def wraps(text: str, opening: str, closing: str) -> bool:
    """Whether a text is one group: the bracket that it begins with is closed at its end."""
    return text.startswith(opening) and text.endswith(closing) and closing_bracket(text, 0) == len(text) - len(closing)


def closing_bracket(text: str, start: int) -> int:
    """Where the bracket at `start` is closed, by one of any kind; -1 if it is not."""
    depth = 0
    for token in _BRACKET.finditer(text, start):
        depth += bracket_step(token.group())
        if depth == 0 and bracket_step(token.group()):
            return token.start()
    return -1


def nesting(text: str) -> int:
    """How many brackets are open at most."""
    depth = deepest = 0
    for token in _BRACKET.finditer(text):
        depth += bracket_step(token.group())
        deepest = max(deepest, depth)
    return deepest


def bracket_step(token: str) -> int:
    """1 for a bracket that opens, -1 for one that closes, 0 for anything else."""
    if token in ("(", "[", "{", r"\{", r"\langle", r"\begin"):
        return 1
    return -1 if token in (")", "]", "}", r"\}", r"\rangle", r"\end") else 0


def _multiplier(match: re.Match[str]) -> str:
    return rf" \times 10^{{{_POWERS_OF_TEN[match[2]]}}} {match[1] or ''}"


def _operator(match: re.Match[str]) -> str:
    return rf"\{match[1]} " if match[1] in _FUNCTIONS else rf"\text{{{match[1]}}}"


def _plain_word(match: re.Match[str]) -> str:
    r"""`sqrt`, `pi` and, before an argument, `sin` are the commands of that name."""
    word = match["word"]
    if word in _FUNCTIONS and match["applied"] is not None:
        return rf"\{word} "
    return _PLAIN_WORDS[word] + " " if word in _PLAIN_WORDS else match[0]


def _arguments_in_braces(text: str) -> str:
    r"""`\frac12`, `\sqrt3`, `sqrt(3)`, `2^(1/2)` and `2^10` (in TeX this is 2^1 0, which nobody means), with braces."""
    for command in (r"\sqrt", "^"):
        text = _bracket_as_braces(text, command)
    text = re.sub(rf"\\sqrt\s*({_ARGUMENT})", r"\\sqrt{\1}", text)
    text = re.sub(rf"\\frac\s*({_ARGUMENT})", r"\\frac{\1}", text)
    text = re.sub(r"\\frac\s*(?=\{)", r"\\frac", text)
    for _ in range(3):  # fractions in fractions
        text = re.sub(rf"(\\frac\s*{_GROUP})\s*({_ARGUMENT})", r"\1{\2}", text)
    return re.sub(r"\^\s*([+-]?[0-9]{2,}|-[0-9])", r"^{\1}", text)


def _bracket_as_braces(text: str, command: str) -> str:
    start = 0
    while (place := text.find(command, start)) >= 0:
        start = place + len(command)
        opening = start + len(text[start:]) - len(text[start:].lstrip())
        if text[opening : opening + 1] == "(":
            end = closing_bracket(text, opening)
            if end > 0 and text[end] == ")":
                text = f"{text[:start]}{{{text[opening + 1 : end]}}}{text[end + 1 :]}"
    return text
