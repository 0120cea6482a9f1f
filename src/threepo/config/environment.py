"""Settings of episodes, in which a policy acts in an environment for several turns."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from threepo.config.records import (
    Count,
    CountOrZero,
    Mebibytes,
    ParallelOrZero,
    PositiveShare,
    Seconds,
    Settings,
    Share,
)


class EnvironmentConfig(Settings, table="environment"):
    """[environment]: episodes of several turns (docs/episodes.md)."""

    factory: str = ""
    """Your own `module:Class`, of which each episode gets an object; empty: no episodes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class, by name."""
    max_turns: Count = 16
    """Most replies of an episode; each has at most sampling.max_new_tokens."""
    max_tokens: Count = 4096
    """Most tokens of an episode after its prompt, replies and observations together."""
    discount: PositiveShare = 1.0
    """An episode earns the sum of its replies' rewards, each times this to the power of the replies before it."""
    keep_thoughts: bool = False
    """Some chat templates drop the thoughts of earlier turns. true: the policy goes on reading them; false: such a
    template is refused."""
    max_failed_share: Share = 0.5
    """The run ends if more than this share of a step's episodes fails: environments that raise, hang or die."""
    timeout_s: Seconds = 60.0
    """Seconds that an environment may take for one answer; if it is slower, its episode fails."""
    memory_mib: Mebibytes = 1024
    """MiB that an environment may use in addition to the imported code."""
    answer_steps: CountOrZero = 1
    """Tokens that other episodes may write while an environment answers; then all wait for it. Raise it for slow
    environments. For vLLM replicas only."""
    workers: ParallelOrZero = 0
    """Environments that compute at once; 0: one per processor core. More help if they wait for a network."""

    def __post_init__(self) -> None:
        self.only_if(bool(self.factory), "no environment reads it; set environment.factory, or remove it")
        fix = "must be 'module:Class'; envs.py in the current directory is the module envs"
        self.check("factory", not self.factory or ":" in self.factory, fix)
