"""Warnings about runs that go on without learning: what happened for several steps in a row, and what to do about it.

Each warning comes once per run. The counts are part of the train state, so a resumed run warns as if never stopped.
"""

import warnings
from collections.abc import Mapping, Sequence

from threepo.config import TrainConfig
from threepo.errors import ThreepoWarning
from threepo.training.update_record import UpdateRecord
from threepo.types import Completion

FAILED_STEPS = 5
"""Steps in a row in which the verifier always failed, or every completion was cut, before there is a warning."""
CONSTANT_STEPS = 20
"""Steps in a row with equal rewards; hard problems can cause a few of these."""

_FAILED = (
    "the verifier has failed on every completion{1}, so no reward means anything: reward.function = {0!r} has returned "
    "None, failed or exceeded its time; try it on rows of completions/ in the run folder"
)
_CONSTANT = (
    "all completions of a step have earned the same reward (now {:g}), so every advantage is 0: the problems are too "
    "hard or too easy for this policy, or reward.function cannot tell completions apart; change the problems, the "
    "policy or the reward"
)
_CUT = (
    "every completion was cut at sampling.max_new_tokens = {} and graded unfinished: raise it, or see in completions/ "
    "of the run folder whether the policy repeats itself or never generates its end token; then check that its "
    "tokenizer's eos_token and chat template are those that it was trained with"
)
_UNCHANGED = (
    "the {} correction has masked or truncated nothing: the draws may be too close together to matter ({}), or the "
    "log-probs of the rollouts are wrong"
)


def watch(
    config: TrainConfig, streaks: Mapping[str, int], completions: Sequence[Completion], record: UpdateRecord
) -> dict[str, int]:
    """Warn if a training step made a streak long enough. Returns all streaks after it, by alarm.

    A streak is the number of steps in a row in which something happened. It stays as it is in a step that says nothing
    about it, and after its warning.
    """
    verdicts = [completion.verdict for completion in completions if completion.verdict]
    failed = all(verdict.status == "error" for verdict in verdicts)
    compete = config.method.advantage.unlikeliness and any(verdict.correct for verdict in verdicts)
    constant = not compete and len({verdict.reward for verdict in verdicts}) == 1
    cut, longest = all(c.finish_reason == "length" for c in completions), config.sampling.max_new_tokens
    reason = next((f" ({verdict.detail})" for verdict in verdicts if verdict.detail), "")
    alarms = [
        ("verifier", failed, FAILED_STEPS, _FAILED.format(", ".join(config.reward.names), reason)),
        ("reward", None if failed else constant, CONSTANT_STEPS, _CONSTANT.format(verdicts[0].reward)),
        ("length", cut, FAILED_STEPS, _CUT.format(longest)),
    ]
    if correction := record.correction:
        expected = correction.kind != "none" and config.method.draws > 0  # else it waits for a lag, or for rounding
        unchanged = (expected and all(r.untouched for r in record.rows)) if record.rows else None
        louder = "lower optimizer.ess" if config.noise.unit == "posterior" else "raise noise.size"
        alarms.append(("correction", unchanged, correction.warn_after, _UNCHANGED.format(correction.kind, louder)))
    after = dict(streaks)
    for name, happened, limit, message in alarms:
        before = streaks.get(name, 0)
        if before < limit and happened is not None:
            after[name] = before + 1 if happened else 0
            if after[name] == limit:
                warnings.warn(f"for {limit} steps in a row, {message}", ThreepoWarning, stacklevel=2)
    return after
