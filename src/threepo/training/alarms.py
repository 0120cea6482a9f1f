"""Warnings about runs that go on without learning: what happened for several steps in a row, and what to do about it.

Each warning comes once per run. The counts are part of the train state, so a resumed run warns as if never stopped.
"""

import warnings
from collections.abc import Mapping

from threepo.config import TrainConfig
from threepo.errors import ThreepoWarning
from threepo.training.rollouts import Rollouts
from threepo.training.update_record import UpdateRecord

FAILED_STEPS = 5
"""Steps in a row in which the verifier always failed, or every completion was cut, before there is a warning."""
CONSTANT_STEPS = 20
"""Steps in a row with equal rewards, or with no chosen token; hard problems can cause a few of these."""

_FAILED = (
    "the verifier has failed on every completion{1}, so no reward means anything: reward.function = {0!r} returns None,"
    " raises an error or exceeds its time; try it on rows of completions/ in the run folder"
)
_CONSTANT = (
    "all completions of a step have earned the same reward (now {:g}), so every advantage is 0: the problems are too "
    "hard or too easy for this policy, or reward.function cannot tell completions apart; change the problems, the "
    "policy or the reward"
)
_ENDLESS = (
    "and so since the run began, every completion was cut at sampling.max_new_tokens = {}: if an answer needs fewer "
    "tokens, the model never generates its end token; check that its tokenizer's eos_token and chat template are those "
    "that it was trained with, or raise sampling.max_new_tokens"
)
_CUT = (
    "every completion was cut at sampling.max_new_tokens = {} and graded unfinished: raise sampling.max_new_tokens, or "
    "see in completions/ of the run folder whether the policy repeats itself"
)
_NOT_FULL = (
    "sampling.dynamic_rounds = {} rounds have not found enough prompts whose completions earn different rewards, and "
    "prompts without a learning signal have filled the batch: the problems are too hard or too easy for this policy; "
    "change them, or raise sampling.dynamic_rounds or sampling.prompts_per_round"
)
_UNCHOSEN = (
    "objective.loss = {!r} has chosen no token, so it does nothing: advantages are all 0, or no covariance "
    "is within objective.clip_cov_bounds (clip_cov); change the problems or the bounds, or set objective.loss = 'ppo'"
)
_UNCHANGED = (
    "the {} correction has masked or truncated nothing: the draws may be too close together to matter (lower "
    "optimizer.ess), or the log-probs of the rollouts are wrong"
)


def watch(
    config: TrainConfig, streaks: Mapping[str, int], step: int, rollouts: Rollouts, record: UpdateRecord
) -> dict[str, int]:
    """Warn if training step `step` made a streak long enough. Returns all streaks after it, by alarm.

    A streak is the number of steps in a row in which something happened. It stays as it is in a step that says nothing
    about it, and after its warning.
    """
    completions = rollouts.completions
    verdicts = [completion.verdict for completion in completions if completion.verdict]
    failed = all(verdict.status == "error" for verdict in verdicts)
    constant = len({verdict.reward for verdict in verdicts}) == 1
    cut = all(completion.finish_reason == "length" for completion in completions)
    reason = next((f" ({verdict.detail})" for verdict in verdicts if verdict.detail), "")
    endless = step + 1 == FAILED_STEPS  # no completion of the run has ended
    correction = record.correction
    alarms = [
        ("verifier", failed, FAILED_STEPS, _FAILED.format(", ".join(config.reward.names), reason)),
        ("reward", None if failed else constant, CONSTANT_STEPS, _CONSTANT.format(verdicts[0].reward)),
        ("length", cut, FAILED_STEPS, (_ENDLESS if endless else _CUT).format(config.sampling.max_new_tokens)),
    ]
    if rounds := config.sampling.dynamic_rounds:
        alarms.append(("dynamic", rollouts.missing > 0, FAILED_STEPS, _NOT_FULL.format(rounds)))
    if record.chose:
        alarms.append(("choice", not any(record.chose), CONSTANT_STEPS, _UNCHOSEN.format(config.objective.loss)))
    if correction:
        unchanged = (correction.kind != "none" and all(r.untouched for r in record.rows)) if record.rows else None
        alarms.append(("correction", unchanged, correction.warn_after, _UNCHANGED.format(correction.kind)))
    after = dict(streaks)
    for name, happened, limit, message in alarms:
        before = streaks.get(name, 0)
        if before < limit and happened is not None:
            after[name] = before + 1 if happened else 0
            if after[name] == limit:
                warnings.warn(f"for {limit} steps in a row, {message}", ThreepoWarning, stacklevel=2)
    return after
