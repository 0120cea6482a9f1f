"""The table of rollout engines. To add one: a file with its class, a line here, and its settings in config."""

import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from threepo.config import EngineConfig
from threepo.models.policy import Policy
from threepo.rollout.engine import RolloutEngine


class EngineMemory(NamedTuple):
    """What an engine holds at the same time."""

    copies: int
    """Copies of the weights."""
    unit: str
    """What has a copy each, in the plural."""
    rows: int
    """Most rows that are decoded together."""


class EngineKind(NamedTuple):
    """An engine that `engine.kind` can name."""

    builder: str
    """`module:function` that makes it from a policy and settings; imported only when it is used."""
    memory: Callable[[EngineConfig, int], EngineMemory]
    """What it holds with these settings and so many draws."""


ENGINES = {
    "local": EngineKind(
        "threepo.rollout.local:LocalEngine",
        lambda settings, draws: EngineMemory(draws, "draws", settings.max_batch_rows),
    ),
    "vllm": EngineKind(
        "threepo.rollout.vllm:VLLMEngine",
        lambda settings, draws: EngineMemory(
            settings.vllm.replicas, "replicas", settings.vllm.replicas * settings.max_batch_rows
        ),
    ),
}


def build_engine(settings: EngineConfig, policy: Policy) -> RolloutEngine:
    """The rollout engine that `settings.kind` names; the caller closes it."""
    engine: RolloutEngine = pkgutil.resolve_name(ENGINES[settings.kind].builder)(policy, settings)
    return engine
