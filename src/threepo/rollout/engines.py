"""The rollout engines by name."""

from threepo.config import EngineConfig
from threepo.models.policy import Policy
from threepo.rollout.engine import RolloutEngine
from threepo.rollout.local import LocalEngine
from threepo.rollout.vllm import VLLMEngine


def build_engine(settings: EngineConfig, policy: Policy) -> RolloutEngine:
    """The rollout engine that `engine.kind` names; the caller closes it."""
    if settings.kind == "vllm":
        return VLLMEngine(policy, settings)
    return LocalEngine(policy, settings)
