"""Finding the final answer of a mathematical completion, and whether the completion keeps the layout asked for."""

import re

from threepo.answers import THINK_END, final_answer

_THINK = "<think>"
_BOXES = (r"\boxed", r"\fbox", r"\framebox")
_TOKENS = re.compile(r"\\{1,3}(?P<box>boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
_BOXED_TOKEN = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?P<token>[0-9A-Za-z]|\\[A-Za-z]+)(?![0-9A-Za-z])")
_BLANKS = re.compile(r"\s*")
_ANSWER = re.compile(r"\banswer\*{0,2} ?:\*{0,2}\s*(?P<answer>[^\n]+)", re.IGNORECASE)
_LAYOUT = re.compile(r"\s*<think>(?P<thoughts>.*?)</think>\s*(?P<answer>\\boxed\s*\{.*\})\s*", re.DOTALL)


def extract_answer(completion: str) -> str | None:
    r"""The answer given, or None: the last box, or else what follows the last `Answer:`.

    Only what stands after the last `</think>` counts; where there is none, everything. A box is \boxed{...} or
    \fbox{...} (or \framebox) with balanced braces and something in it; of boxes in boxes it is the outermost.
    """
    final = final_answer(completion)
    box = last_box(final)
    if box is not None:
        return box
    answers = _ANSWER.findall(final)
    return (answers[-1].strip().strip("*").strip() or None) if answers else None


def last_box(text: str) -> str | None:
    """The content of the last box in a text; None where no box is closed, or all are empty."""
    found = boxes(text)
    if found:
        return text[slice(*found[-1])].strip()
    single = [match["token"] for match in _BOXED_TOKEN.finditer(text)]  # \boxed 5, which TeX accepts
    return single[-1] if single else None


def boxes(text: str) -> list[tuple[int, int]]:
    """Where the contents of closed, not empty boxes begin and end, in the order in which they end. One pass."""
    start = min((place for name in _BOXES if (place := text.find(name)) >= 0), default=len(text))
    found: list[tuple[int, int]] = []
    opened: list[int | None] = []  # for each brace that is open: where the box begins, or None if it is no box's
    for token in _TOKENS.finditer(text, start):
        if token["box"]:
            opened.append(token.end())
        elif token.group() == "{":
            opened.append(None)
        elif token.group() == "}" and opened:
            begin = opened.pop()
            if begin is not None and not _BLANKS.fullmatch(text, begin, token.start()):
                found.append((begin, token.start()))
    return found


def keeps_layout(completion: str) -> bool:
    r"""Whether the whole completion is `<think>...</think>`, blanks, and \boxed{...}: one of each, nothing else."""
    if completion.count(_THINK) != 1 or completion.count(THINK_END) != 1:
        return False
    match = _LAYOUT.fullmatch(completion)
    if match is None:
        return False
    answer = match["answer"]
    found = boxes(answer)
    return bool(found) and found[-1][1] == len(answer) - 1 and answer.index("{") + 1 == found[-1][0]
