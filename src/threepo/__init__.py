"""threepo: RLVR that explores in weight space, with posteriors over the weights learned by IVON.

The names below are loaded when first used, so importing the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threepo.config.method import B3PO, C3PO, C3PO_REPLAY, GRPO, M3PO, THOMPSON, Advantage, Correction, Method
    from threepo.environment import Turn
    from threepo.errors import UserError
    from threepo.evaluation.scores import pass_at_k
    from threepo.library import Run, evaluate, fine_tune, train
    from threepo.posterior.gaussian import Posterior
    from threepo.posterior.ivon import IVON
    from threepo.types import Arm, Draw, Problem, Verdict

    __version__: str

__all__ = ["B3PO", "C3PO", "C3PO_REPLAY", "GRPO", "M3PO", "THOMPSON", "Advantage", "Correction", "Method"]
__all__ += ["IVON", "Arm", "Draw", "Posterior", "Problem", "Run", "Turn", "UserError", "Verdict"]
__all__ += ["evaluate", "fine_tune", "pass_at_k", "train"]

_ELSEWHERE = {
    "IVON": "posterior.ivon",
    "Posterior": "posterior.gaussian",
    "Turn": "environment",
    "UserError": "errors",
    "pass_at_k": "evaluation.scores",
    **dict.fromkeys(("Run", "evaluate", "fine_tune", "train"), "library"),
    **dict.fromkeys(("Arm", "Draw", "Problem", "Verdict"), "types"),
}
"""The modules of the names that are not in config.method."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("threepo")
    if name not in __all__:
        raise AttributeError(f"module 'threepo' has no attribute {name!r}")
    return getattr(import_module(f"threepo.{_ELSEWHERE.get(name, 'config.method')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
