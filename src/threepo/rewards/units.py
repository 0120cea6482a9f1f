"""Units and other signs after an answer, which may be left out but not be wrong: cm, %, degrees, a number's base."""

import re

PERCENT, DEGREES = "%", "°"
_NAMES = {
    PERCENT: "% percent percentage pct",
    DEGREES: "° degree degrees deg",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ml": "ml milliliter milliliters",
    "l": "l liter liters litre litres",
    "s": "s sec second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "am": "am a.m.",
    "pm": "pm p.m.",
    "mph": "mph",
    "unit": "unit units",
}
_KNOWN = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_NO_UNIT = re.compile(
    r"\b(?:or|and|if|not|more|less|least|most|than|except|where|when|for|to|times|mod|hundred|thousand|million|billion"
    r"|trillion|dozen)\b"
)
_POWER = r"(?:\s*\^\s*(?:\{\s*-?[0-9]\s*\}|[0-9]))?"
_TEXT = re.compile(rf"(?P<body>.*?\S)\s*(?P<unit>(?:\\text\s*\{{[^{{}}]*\}}{_POWER}[\s/.]*)+)", re.DOTALL)
_WORDS = re.compile(rf"(?P<body>.*[0-9}})])(?P<gap>\s*)(?P<unit>[A-Za-z][A-Za-z. /]*?){_POWER}", re.DOTALL)
_BASE = re.compile(
    r"(?P<body>(?=[A-F]*[0-9])[0-9A-F]+(?:\.[0-9A-F]+)?)\s*_\s*(?:\{\s*)?(?:\\text\s*\{\s*)?(?P<base>[0-9]+|two|eight|ten)[\s}]*"
)
_BASES = {"two": "2", "eight": "8", "ten": "10"}
_POWERS = {
    "^2": re.compile(r"\b(?:square|squared|sq)\b\.?|\^ ?2(?![0-9])"),
    "^3": re.compile(r"\b(?:cubic|cubed|cu)\b\.?|\^ ?3(?![0-9])"),
}
_UNFINISHED = ("+", "-", "*", "/", "=", "^", "_", ",", "(")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_LONGEST = 60
"""A unit is short; longer text after an answer is not taken for one."""


def split_unit(text: str) -> tuple[str, str]:
    """A canonical expression without its unit, and the unit: its common name if known, or "?", or nothing."""
    base = _BASE.fullmatch(text)
    if base:
        return base["body"], f"base {_BASES.get(base['base'], base['base'])}"
    for sign, unit in (("%", PERCENT), (r"^\circ", DEGREES)):
        if text.endswith(sign) and len(text) > len(sign) and not _FUNCTION.search(text):
            return text.removesuffix(sign).strip(), unit
    degrees = re.fullmatch(r"(.+)\^\\circ ?(?:\\text ?\{ ?[CF] ?\}|[CF])", text)
    if degrees:
        return degrees[1], DEGREES
    # Only the end is looked at: the rest cannot be part of a unit.
    match = _TEXT.fullmatch(text) if text.count(r"\text") <= 4 else None
    if (
        match
        and not match["body"].startswith(r"\text")
        and not match["body"].endswith(("+", "-", "*", "/", "=", "^", "_", ",", "("))
    ):
        unit = _unit(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", match["unit"]))
        if unit:
            body, inner = split_unit(match["body"])
            return body, inner or unit
    match = _WORDS.fullmatch(text[-_LONGEST:])
    if match and _is_plain_unit(match["unit"], match["gap"]):
        return text[:-_LONGEST] + match["body"], _unit(match[0][match.end("gap") :])
    return text, ""


def conflict(first: str, second: str) -> bool:
    """Whether two units contradict each other: both are known, and they differ."""
    return first != second and all(unit.partition("^")[0] not in ("", "?", "unit") for unit in (first, second))


def _unit(words: str) -> str:
    """Its common name and power; "?" for one that is not known; nothing if these words are no unit."""
    words = " ".join(words.lower().replace("{", "").replace("}", "").split())
    if not words or len(words) > _LONGEST or _NO_UNIT.search(words) or re.search(r"[^a-z0-9 ./^²³()*-]", words):
        return ""
    power = next((power for power, written in _POWERS.items() if written.search(words)), "")
    plain = _POWERS["^3"].sub(" ", _POWERS["^2"].sub(" ", words)).split()
    return _KNOWN[plain[0]] + power if len(plain) == 1 and plain[0] in _KNOWN else "?"


def _is_plain_unit(words: str, gap: str) -> bool:
    """Letters that are no product of variables: a known unit of two or more, or words set off by a blank."""
    letters = words.split()
    known = all(word.lower() in _KNOWN or word.lower() in ("square", "cubic", "sq", "per", "cu") for word in letters)
    if known and all(len(word) > 1 for word in letters):
        return True
    return (
        bool(gap)
        and all(len(word) > 3 or word.lower() in ("of", "per", "a") for word in letters)
        and bool(_unit(words))
    )
