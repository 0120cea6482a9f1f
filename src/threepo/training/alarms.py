"""Warnings about runs that go on without learning: what was seen for several steps in a row, and what to do about it.

Each warning comes once per run. The counts are part of the train state, so a resumed run warns as if never stopped.
"""

import warnings
from collections.abc import Mapping, Sequence

from threepo.config import TrainConfig
from threepo.errors import ThreepoWarning
from threepo.training.metrics import corrects_nothing
from threepo.training.update import UpdateRecord
from threepo.types import Group

FAILED_STEPS = 5
"""Steps in a row in which the verifier always failed, or every completion was cut, before there is a warning."""
CONSTANT_STEPS = 20
"""The same for rewards that are all equal, which hard problems can cause for a few steps."""


def watch(
    config: TrainConfig, streaks: Mapping[str, int], step: int, groups: Sequence[Group], record: UpdateRecord
) -> dict[str, int]:
    """Warn if training step `step` made a streak long enough. Returns all streaks after it, by alarm.

    A streak is the number of steps in a row in which something happened. It stays as it is in a step that says nothing
    about it, and after its warning.
    """
    completions = [completion for group in groups for completion in group.completions]
    verdicts = [completion.verdict for completion in completions if completion.verdict]
    failed = all(verdict.status == "error" for verdict in verdicts)
    constant = len({verdict.reward for verdict in verdicts}) == 1
    cut = all(completion.finish_reason == "length" for completion in completions)
    reason = next((f" ({verdict.detail})" for verdict in verdicts if verdict.detail), "")
    verifier = (
        f"the verifier has failed on every completion{reason}, so no reward means anything: reward.function = "
        f"{config.reward.function!r} returns None or runs into an error or a time-out; try it on rows of completions/ "
        f"in the run folder"
    )
    reward = (
        f"all completions of a step have earned the same reward (now {verdicts[0].reward:g}), so every advantage is 0: "
        f"the problems are too hard or too easy for this policy, or reward.function cannot tell completions apart; "
        f"change the problems, the policy or the reward"
    )
    length = f"every completion was cut at sampling.max_new_tokens = {config.sampling.max_new_tokens}"
    if step + 1 == FAILED_STEPS:  # no completion of the run has ended
        length = (
            f"the first ones of the run, {length}: if that is enough for an answer, the model never generates the "
            f"token that ends one; check that the eos_token of its tokenizer and its chat template are those that it "
            f"was trained with, or raise sampling.max_new_tokens"
        )
    else:
        length += (
            ": answers are longer than that now, and are graded unfinished; raise sampling.max_new_tokens, or see in "
            "completions/ of the run folder whether the policy repeats itself"
        )
    alarms: dict[str, tuple[bool | None, int, str]] = {
        "verifier": (failed, FAILED_STEPS, verifier),
        "reward": (None if failed else constant, CONSTANT_STEPS, reward),
        "length": (cut, FAILED_STEPS, length),
    }
    if record.correction:
        correction = (
            f"the {record.correction.kind} correction has masked or truncated nothing: the draws may be too close "
            f"together to matter (lower optimizer.ess), or the log-probs of the rollouts are wrong"
        )
        unchanged = corrects_nothing(record) if record.rows else None
        alarms["correction"] = (unchanged, record.correction.warn_after, correction)
    after = dict(streaks)
    for name, (happened, limit, message) in alarms.items():
        before = streaks.get(name, 0)
        if before < limit and happened is not None:
            after[name] = before + 1 if happened else 0
            if after[name] == limit:
                warnings.warn(f"for {limit} steps in a row, {message}", ThreepoWarning, stacklevel=2)
    return after
