"""Settings of episodes, in which a policy acts in an environment for several turns."""

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from threepo.config.records import (
    Count,
    CountOrZero,
    PositiveShare,
    Seconds,
    Settings,
    Share,
)


class EnvironmentConfig(Settings, table="environment"):
    """[environment]: episodes of several turns (docs/episodes.md)."""

    factory: str = ""
    """Your own `module:Class`, with an object for each episode; empty: no episodes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    max_turns: Count = 16
    """Most replies of an episode, each of at most sampling.max_new_tokens."""
    max_tokens: Count = 4096
    """Most tokens of an episode after its prompt."""
    discount: PositiveShare = 1.0
    """Factor of a reply's reward for each reply before it."""
    keep_thoughts: bool = False
    """If the chat template drops thoughts of earlier turns: true goes on showing them to the policy; false refuses the
    template."""
    max_failed_share: Share = 0.5
    """The run ends if more than this share of a step's episodes fails."""
    timeout_s: Seconds = 60.0
    """Seconds for an answer of the environment, after which its episode fails."""
    memory_mib: Count = 1024
    """MiB of an environment, in addition to the imported code."""
    answer_steps: CountOrZero = 1
    """vLLM replicas: tokens that other episodes may write while an environment answers (docs/episodes.md#speed)."""
    workers: CountOrZero = 0
    """Environments that compute at once; 0: one per core. More help if they wait for a network."""

    @property
    def own_names(self) -> tuple[list[str], str]:
        """Names of the user's code that plays: the class, or what a plug-in of ours gets by name; and their setting."""
        if not self.factory.startswith("threepo.plugins."):
            return [self.factory], "environment.factory"
        played = {"trl_environment": ("factory",), "openenv": ("observation", "action")}
        keys = played.get(self.factory.removeprefix("threepo.plugins.").partition(":")[0], ())
        return [str(self.settings[key]) for key in keys if key in self.settings], "environment.settings"

    def must_hold(self, setting: str, tokens: int) -> None:
        """Raise `UserError` if episodes are shorter than the longest reply, `tokens`, which this setting gives."""
        fix = f"must hold a reply of {setting} = {tokens}; raise it, or lower that one"
        self.check("max_tokens", not self.factory or tokens <= self.max_tokens, fix)

    def __post_init__(self) -> None:
        self.only_if(bool(self.factory), "no environment reads it; set environment.factory, or remove it")
        fix = "must be 'module:Class'; envs.py in the current directory is the module envs"
        self.check("factory", not self.factory or ":" in self.factory, fix)
        try:
            json.dumps(self.settings, default=str, allow_nan=False)
        except ValueError:
            self.check("settings", False, "no number may be infinite or NaN, which config.json cannot hold; write text")
