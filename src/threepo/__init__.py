"""threepo: RLVR that explores in weight space, with posteriors over the weights learned by IVON.

The names below are loaded when first used, so importing the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threepo.config import Advantage, Correction, Method
    from threepo.config.method import B3PO, C3PO, C3PO_REPLAY, GRPO, M3PO, THOMPSON
    from threepo.errors import UserError
    from threepo.evaluation.scores import pass_at_k
    from threepo.posterior.gaussian import Posterior
    from threepo.posterior.ivon import IVON
    from threepo.types import Draw, Problem, Verdict

    __version__: str

__all__ = [
    "B3PO",
    "C3PO",
    "C3PO_REPLAY",
    "GRPO",
    "IVON",
    "M3PO",
    "THOMPSON",
    "Advantage",
    "Correction",
    "Draw",
    "Method",
    "Posterior",
    "Problem",
    "UserError",
    "Verdict",
    "pass_at_k",
]

_HOMES = {
    "threepo.config": ("Advantage", "Correction", "Method"),
    "threepo.errors": ("UserError",),
    "threepo.evaluation.scores": ("pass_at_k",),
    "threepo.config.method": ("B3PO", "C3PO", "C3PO_REPLAY", "GRPO", "M3PO", "THOMPSON"),
    "threepo.posterior.gaussian": ("Posterior",),
    "threepo.posterior.ivon": ("IVON",),
    "threepo.types": ("Draw", "Problem", "Verdict"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("threepo")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'threepo' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
