"""The final answer of a mathematical completion, and whether the completion keeps the required layout."""

import re

from threepo.types import THINK, THINK_END, final_answer

_BOX = r"\\(?:boxed|fbox|framebox)\s*"
_TOKENS = re.compile(rf"\\{{0,2}}(?P<box>{_BOX}\{{)|\\.|[{{}}]", re.DOTALL)  # JSON doubles the backslash
_BOXED_TOKEN = re.compile(rf"{_BOX}(?P<token>[0-9A-Za-z]|\\[A-Za-z]+)(?![0-9A-Za-z])")
_SENTENCE = r"(?:\\text\s*\{[^{}]*\}|[A-Za-z\s=.:,$])*"
_BOX_IN_SENTENCE = re.compile(rf"{_SENTENCE}{_BOX}\{{(?P<inside>.*)\}}{_SENTENCE}", re.DOTALL)
_ANSWER = re.compile(r"\banswer\*{0,2} ?:\*{0,2}\s*(?P<answer>[^\n]+)", re.IGNORECASE)
_LAYOUT = re.compile(r"\s*<think>.*?</think>\s*(?P<box>\\boxed\s*\{.*\})\s*", re.DOTALL)
_BLANKS = re.compile(r"\s*")


def extract_answer(completion: str) -> str | None:
    r"""The answer given, or None: the last box, or else what follows the last `Answer:`.

    Only the text after the last `</think>` counts (all of it, if there is none), up to a `<think>`: an unfinished
    thought holds no answer.
    """
    final = final_answer(completion).partition(THINK)[0]
    box = last_box(final)
    if box is not None:
        return box
    answers = _ANSWER.findall(final)
    return (answers[-1].strip().strip("*").strip() or None) if answers else None


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...} that is closed and not empty; None where there is none.

    For a box in a box it is the outer one, unless there are only words around the inner one: `The area is \boxed{5}`.
    """
    found = boxes(text)
    if not found:
        tokens = _BOXED_TOKEN.findall(text)  # \boxed 5, which TeX accepts
        return tokens[-1] if tokens else None
    start, end = found[-1]
    inner = _BOX_IN_SENTENCE.fullmatch(text, start, end)
    span = inner.span("inside") if inner and inner.span("inside") in found else (start, end)
    return text[slice(*span)].strip()


def boxes(text: str) -> list[tuple[int, int]]:
    """Where the contents of closed, not empty boxes begin and end, in the order in which they end. One pass."""
    found: list[tuple[int, int]] = []
    opened: list[int | None] = []  # for each open brace: where the box begins, or None if it is not a box's
    first = re.search(_BOX, text)
    for token in _TOKENS.finditer(text, first.start() if first else len(text)):
        if token["box"] or token.group() == "{":
            opened.append(token.end() if token["box"] else None)
        elif token.group() == "}" and opened:
            begin = opened.pop()
            if begin is not None and not _BLANKS.fullmatch(text, begin, token.start()):
                found.append((begin, token.start()))
    return found


def keeps_layout(completion: str) -> bool:
    r"""Whether the whole completion is `<think>...</think>`, blanks, and \boxed{...}: one of each, nothing else."""
    if completion.count(THINK) != 1 or completion.count(THINK_END) != 1:
        return False
    match = _LAYOUT.fullmatch(completion)
    return match is not None and boxes(match["box"])[-1:] == [(match["box"].index("{") + 1, len(match["box"]) - 1)]
