r"""The verifier of mathematics: is the final answer of a completion equal to the reference?

    >>> from threepo.rewards import math
    >>> math.grade(r"<think>...</think> \boxed{\tfrac{2}{4}}", "0.5").status
    'right'
    >>> math.reward([r"\boxed{5}", r"\boxed{6}"], answer=["5", "5"])
    [1.0, 0.0]

`extraction` finds the answer, `equality` compares it with the reference by its spelling, and where that does not
settle it, `algebra` decides in a process that can be killed. docs/rewards.md says what counts as equal.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from threepo.config import RewardConfig
from threepo.errors import UserError
from threepo.rewards.equality import equal, spelling
from threepo.rewards.extraction import extract_answer, keeps_layout, last_box
from threepo.types import Completion, Verdict, VerdictStatus
from threepo.workers import Outcome, WorkerPool

MOST_CHARACTERS = 2000
"""A longer answer counts as wrong unless the reference is about as long."""


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
        found = [extract_answer(text) for text in texts]
        references = [last_box(answer) or answer for answer in answers]  # a reference may be a whole solution
        if not all(reference.strip() for reference in references):
            raise UserError("answer: is empty; mathematics is graded against a reference answer")
        pairs = [(given, reference) for given, reference in zip(found, references, strict=True) if given is not None]
        judged = self._judged(pairs)
        return [
            self._verdict(text, given, None if given is None else judged[given, reference])
            for text, given, reference in zip(texts, found, references, strict=True)
        ]

    def close(self) -> None:
        """End the processes; they also end with this object."""
        self._pool.close()

    def _judged(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
        """The outcome for each pair of an answer and a reference; its value is as of `algebra.judge`."""
        judged: dict[tuple[str, str], Outcome] = {}
        unsettled = []
        for given, reference in dict.fromkeys(pairs):
            if len(given) > max(MOST_CHARACTERS, 2 * len(reference)):
                judged[given, reference] = Outcome((False, f"longer than {MOST_CHARACTERS} characters"))
            elif (same := equal(spelling(given), spelling(reference))) is None:
                unsettled.append((given, reference))
            else:
                judged[given, reference] = Outcome((same, ""))
        return judged | dict(zip(unsettled, self._pool.map(unsettled), strict=True))

    def _verdict(self, text: str, given: str | None, outcome: Outcome | None) -> Verdict:
        layout = keeps_layout(text)
        penalty = float(self._scoring == "format_penalty" and not layout)
        if given is None or outcome is None:
            return Verdict(False, "no_answer", None, -penalty, format_ok=layout)
        right, detail = (False, outcome.failure) if outcome.failure else outcome.value
        status: VerdictStatus = "error" if outcome.failure else "right" if right else "wrong"
        return Verdict(right, status, given[:MOST_CHARACTERS], right - penalty, detail, layout)


def grade(completion: str, answer: str) -> Verdict:
    """The verdict on one completion under the default settings of `[reward]`."""
    return _default_grader().grade([completion], [answer])[0]


def reward(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """A reward function for TRL: 1.0 for each right completion, 0.0 for others, None where the verifier failed.

    A completion is a text, or a list of chat messages whose last one is graded.
    """
    texts = [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]
    verdicts = _default_grader().grade(texts, answer)
    return [None if verdict.status == "error" else verdict.reward for verdict in verdicts]


@cache
def _default_grader() -> MathGrader:
    return MathGrader(RewardConfig(function="math"))
