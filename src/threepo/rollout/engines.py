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
    """Copies of the weights, one for each of `units`."""
    units: str
    rows: int
    """Most rows that are decoded together."""


class EngineKind(NamedTuple):
    """An engine that `engine.kind` can name."""

    builder: str
    """`module:function` that makes it from a policy and settings; only imported for use."""
    memory: Callable[[EngineConfig, int], EngineMemory]
    """What it holds with these settings and so many draws."""


def _local(settings: EngineConfig, draws: int) -> EngineMemory:
    return EngineMemory(draws, "draws", settings.max_batch_rows)


def _vllm(settings: EngineConfig, draws: int) -> EngineMemory:
    return EngineMemory(settings.vllm.replicas, "replicas", settings.vllm.replicas * settings.max_batch_rows)


ENGINES = {
    "local": EngineKind("threepo.rollout.local:LocalEngine", _local),
    "vllm": EngineKind("threepo.rollout.vllm:VLLMEngine", _vllm),
}


def build_engine(settings: EngineConfig, policy: Policy) -> RolloutEngine:
    """The rollout engine that `settings.kind` names; the caller closes it."""
    engine: RolloutEngine = pkgutil.resolve_name(ENGINES[settings.kind].builder)(policy, settings)
    return engine
