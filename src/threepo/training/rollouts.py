"""The rollouts of a step, and dynamic sampling as in DAPO (arXiv 2503.14476; method.md 3.8)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from threepo.config import SamplingConfig, TrainConfig
from threepo.data.source import ProblemSource
from threepo.types import Completion, Group, Problem


@dataclass(frozen=True)
class Rollouts:
    """All groups that a step has generated."""

    groups: Sequence[Group]
    """The groups to learn from."""
    discarded: Sequence[Group] = ()
    """Groups that the update leaves out."""
    rounds: int = 0
    """Rounds of dynamic sampling; 0 without it."""
    missing: int = 0
    """Number of `groups` without spread that are there because none with spread was found."""
    drawn: int = 0
    """Number of problems that dynamic sampling has taken from the source since the run began."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How they were decoded."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Seconds of their parts, and bytes that were written for engines, by metric."""
    number: int = 0
    """Number of the batch that a single group was generated in, with `overlap.stream`."""

    @property
    def generated(self) -> Sequence[Group]:
        """All groups, the ones to learn from first."""
        return (*self.groups, *self.discarded)

    @property
    def completions(self) -> list[Completion]:
        """The completions of all groups, the ones to learn from first."""
        return [completion for group in self.generated for completion in group.completions]


def until_full(
    config: TrainConfig, source: ProblemSource, drawn: int, answer: Callable[[Sequence[Problem]], Sequence[Group]]
) -> Rollouts:
    """Fill a batch with groups that have spread; `answer` makes the groups of the source's next problems.

    Ends after sampling.dynamic_rounds rounds, or once every problem of a finite source was tried. Groups without spread
    then fill the batch, the first ones first.
    """
    settings, wanted = config.sampling, config.data.prompts_per_step
    kept: list[Group] = []
    flat: list[Group] = []
    tried: set[str] = set()
    rounds = 0
    while len(kept) < wanted and rounds < settings.dynamic_rounds:
        problems, drawn = source.untried(drawn, settings.prompts_per_round or wanted - len(kept), tried)
        if not problems:
            break
        groups = answer(problems)
        tried.update(problem.id for problem in problems)
        rounds += 1
        for group in groups:
            (flat if group.is_flat else kept).append(group)
    missing = max(wanted - len(kept), 0)
    return Rollouts(kept[:wanted] + flat[:missing], kept[wanted:] + flat[missing:], rounds, missing, drawn)
