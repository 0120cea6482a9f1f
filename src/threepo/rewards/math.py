r"""The verifier of mathematics: is the final answer of a completion equal to the reference?

    >>> from threepo.rewards import math
    >>> math.grade(r"<think>...</think> \boxed{\tfrac{2}{4}}", "0.5").status
    'right'
    >>> math.reward([r"\boxed{5}", r"\boxed{6}"], answer=["5", "5"])
    [1.0, 0.0]

`equality` compares the answer with the reference by its spelling, and where that does not settle it, `algebra` decides
in a process that can be killed. docs/rewards.md says what is an answer, and what counts as equal.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from threepo.config import RewardConfig
from threepo.errors import UserError
from threepo.rewards.equality import equal
from threepo.rewards.spelling import spelling
from threepo.types import THINK, THINK_END, Completion, Verdict, VerdictStatus, final_answer
from threepo.workers import Outcome, WorkerPool

MOST_CHARACTERS = 2000
"""A longer answer counts as wrong unless the reference is about as long."""
IN_PLACE = 200
"""Longest answer that is compared in this process; longer ones go to the processes that can be killed."""
_BOX = r"\\(?:boxed|fbox|framebox)\s*"
_TOKENS = re.compile(rf"[{{}}]|\\{{0,2}}(?P<box>{_BOX}\{{)|\\.", re.DOTALL)  # JSON doubles the backslash
_BOXED_TOKEN = re.compile(rf"{_BOX}(?P<token>[0-9A-Za-z]|\\[A-Za-z]+)(?![0-9A-Za-z])")
_SENTENCE = r"(?:\\text\s*\{[^{}]*\}|[A-Za-z\s=.:,$])*+"
_BEFORE_BOX, _AFTER_BOX = re.compile(rf"{_SENTENCE}{_BOX}\{{"), re.compile(rf"\}}{_SENTENCE}")
_ANSWER = re.compile(r"\banswer\*{0,2} ?:\*{0,2}\s*(?P<answer>[^\n]+)", re.IGNORECASE)
_LAYOUT = re.compile(r"\s*<think>.*?</think>\s*(?P<box>\\boxed\s*\{.*\})\s*", re.DOTALL)
_BLANKS = re.compile(r"\s*")


class MathGrader:
    """Judges completions by their final answers. The processes for algebra start when an answer first needs one."""

    def __init__(self, settings: RewardConfig) -> None:
        self._scoring = settings.scoring
        limits: dict[str, Any] = {name: getattr(settings, name) for name in ("timeout_s", "memory_mib", "workers")}
        self._pool = WorkerPool("threepo.rewards.algebra:judge", **limits)

    def __call__(self, completions: Sequence[Completion]) -> list[Verdict]:
        """A verdict for each completion. What the prompt has opened belongs to the layout."""
        return self.grade([c.opening + c.text for c in completions], [c.problem.answer for c in completions])

    def grade(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """A verdict for each text, with the reference answer of the same index."""
        references = [last_box(answer) or answer for answer in answers]  # a reference may be a whole solution
        if not all(reference.strip() for reference in references):
            raise UserError("answer: is empty; mathematics is graded against a reference answer")
        pairs = [(extract_answer(text) or "", reference) for text, reference in zip(texts, references, strict=True)]
        outcomes = {pair: _settled(*pair) for pair in dict.fromkeys(pairs) if pair[0]}
        unsettled = [pair for pair, outcome in outcomes.items() if outcome is None]
        outcomes |= zip(unsettled, self._pool.map(unsettled), strict=True)
        return [self._verdict(text, pair[0], outcomes.get(pair)) for text, pair in zip(texts, pairs, strict=True)]

    def _verdict(self, text: str, given: str, outcome: Outcome | None) -> Verdict:
        layout = keeps_layout(text)
        penalty = float(self._scoring == "format_penalty" and not layout)
        if outcome is None:
            return Verdict(False, "no_answer", None, 0.0 - penalty, format_ok=layout)  # never -0.0
        right, detail = (False, outcome.failure) if outcome.failure else outcome.value
        status: VerdictStatus = "error" if outcome.failure else "right" if right else "wrong"
        return Verdict(right, status, given[:MOST_CHARACTERS], float(right) - penalty, detail, layout)


def _settled(given: str, reference: str) -> Outcome | None:
    """The outcome of `algebra.judge` where length or spelling decide it; None otherwise."""
    if len(given) > max(MOST_CHARACTERS, 2 * len(reference)):
        return Outcome((False, f"longer than {MOST_CHARACTERS} characters"))
    same = equal(spelling(given), spelling(reference)) if len(given) <= IN_PLACE else None
    return None if same is None else Outcome((same, ""))


def grade(completion: str, answer: str) -> Verdict:
    """The verdict on one completion under the default settings of `[reward]`."""
    return _default_grader().grade([completion], [answer])[0]


def reward(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """A reward function for TRL: 1.0 for each right completion, 0.0 for others, None where the verifier failed.

    A completion is a text, or a list of chat messages whose last one is graded.
    """
    texts = [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]
    for reference in answer:
        if not isinstance(reference, str | int | float):
            kind = type(reference).__name__
            raise UserError(f"answer: is {str(reference)[:40]}, a {kind}; it must be text or a number")
    verdicts = _default_grader().grade(texts, list(map(str, answer)))
    return [None if verdict.status == "error" else verdict.reward for verdict in verdicts]


_default_grader = cache(lambda: MathGrader(RewardConfig(function="math")))


def extract_answer(completion: str) -> str | None:
    r"""The answer given, or None: the last box, or else what follows the last `Answer:`.

    Only the text after the last `</think>` counts (all of it, if there is none), up to a `<think>`: an unfinished
    thought holds no answer.
    """
    final = final_answer(completion).partition(THINK)[0]
    if (box := last_box(final)) is not None:
        return box
    answers = _ANSWER.findall(final)
    return (answers[-1].strip().strip("*").strip() or None) if answers else None


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...} that is closed and not empty; None where there is none.

    For a box in a box it is the outer one, unless there are only words around the inner one: `The area is \boxed{5}`.
    """
    found = boxes(text)
    if not found:
        return next(reversed(_BOXED_TOKEN.findall(text)), None)  # \boxed 5, which TeX accepts
    begin, end = found[-1]
    inner_begin, inner_end = found[-2] if len(found) > 1 else (0, 0)
    if _BEFORE_BOX.fullmatch(text, begin, inner_begin) and _AFTER_BOX.fullmatch(text, inner_end, end):
        begin, end = inner_begin, inner_end
    return text[begin:end].strip()


@lru_cache(maxsize=1)  # for the answer, and then for the layout
def boxes(text: str) -> list[tuple[int, int]]:
    """Begins and ends of the contents of closed, not empty boxes, in the order in which they end. One pass."""
    found: list[tuple[int, int]] = []
    opened: list[tuple[int, int]] = []  # the depth and the beginning of each open box
    depth = 0
    first = re.search(_BOX, text)
    for token in _TOKENS.finditer(text, first.start() if first else len(text)):
        symbol = token[0]
        if symbol == "{":
            depth += 1
        elif symbol == "}":
            depth -= depth > 0
            if opened and opened[-1][0] == depth:
                _, begin = opened.pop()
                if not _BLANKS.fullmatch(text, begin, token.start()):
                    found.append((begin, token.start()))
        elif token["box"]:
            opened.append((depth, token.end()))
            depth += 1
    return found


def keeps_layout(completion: str) -> bool:
    r"""True if the whole completion is `<think>...</think>`, blanks, and \boxed{...}: one of each, nothing else."""
    if not completion.count(THINK) == completion.count(THINK_END) == 1:
        return False
    match = _LAYOUT.fullmatch(completion)
    if match is None:
        return False
    box = match["box"]
    return boxes(box)[-1:] == [(box.index("{") + 1, len(box) - 1)]  # its first brace is closed by its last
