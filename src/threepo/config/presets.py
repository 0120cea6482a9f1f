"""The rows of the lattice by name: a method, and what else of a recipe belongs to it. To add a row, add it here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from threepo.config.method import B3PO, C3PO, C3PO_REPLAY, GRPO, M3PO, THOMPSON, Advantage, Correction, Method

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Preset:
    """A row of the lattice, which `method.preset` names. Keys set in the recipe override it."""

    method: Method
    source: str
    """Its number on arXiv, or `threepo`."""
    tables: Tables = field(default_factory=dict)
    """Keys of other tables of a recipe, by table."""


PAPER, OURS = "2608.09805", "threepo"
_FOUR_UPDATES = {"mini_batches": 4}  # several updates of a batch: with one, the ratio to the old policy is always 1
_ARMS = {"choice": "thompson"}
_CLIP_HIGHER = {"loss": "ppo", "clip_high": 0.28, **_FOUR_UPDATES}


def _row(base: Method, name: str, source: str, tables: Tables | None = None, **axes: Any) -> Preset:
    """A method with other axes, or with other tables."""
    return Preset(replace(base, name=name, **axes), source, tables or {})


_ROWS = (
    # The paper's own, and what it compares with.
    Preset(GRPO, "2402.03300"),
    Preset(B3PO, PAPER),
    Preset(M3PO, PAPER),
    Preset(C3PO, PAPER),
    Preset(C3PO_REPLAY, OURS),
    Preset(THOMPSON, PAPER),
    _row(C3PO, "isotropic", PAPER, {"optimizer": {"noise_shape": "isotropic", "learn_hessian": False}}),
    _row(C3PO_REPLAY, "fixed_replay", OURS, {"noise": {"unit": "rms", "size": 0.05}}, optimizer="adamw"),
    _row(C3PO_REPLAY, "auto", OURS, {"noise": {"unit": "rms", "size": 1.0}, "arms": _ARMS}, optimizer="adamw", draws=8),
    # The posterior, and 4, 13 and 20 times its sigma: with sigma at 5 % of the weights' RMS, the same as auto's.
    _row(C3PO_REPLAY, "c3po_auto", OURS, {"arms": {**_ARMS, "sizes": [1.0, 4.0, 13.0, 20.0]}}, draws=8),
    # Others that explore in weight space.
    Preset(
        # Noise on the MLPs generates, the mean is updated; with its own size, sigma stays within [1e-6, 0.5].
        Method(name="psn", draws=1, correction=Correction(kind="token_tis", high=10.0, warn_after=0)),
        "2602.02555",
        {
            "noise": {"unit": "absolute", "size": 4e-3, "where": {"mlp": 1.0}},
            # Bounds: (4e-3 / 0.5)^2 and (4e-3 / 1e-6)^2
            "ess_schedule": {"kind": "kl_steps", "target": 0.003, "ratio": 1.01, "lowest": 6.4e-5, "highest": 1.6e7},
        },
    ),
    Preset(
        Method(name="qerl", draws=1),
        "2510.11696",
        {
            "noise": {"unit": "absolute", "size": 1e-2, "where": {"norm": 1.0}},
            "ess_schedule": {"kind": "stages", "stages": 10, "last": 0.01},
        },
    ),
    Preset(
        Method(
            name="es",
            rollouts_per_prompt=30,
            draws=30,
            gradient_at="evolution",
            greedy=True,
            optimizer="sgd",
            advantage=Advantage(ddof=0, epsilon=1e-8),
        ),
        "2509.24372",
        {"noise": {"unit": "absolute", "size": 1e-3}, "optimizer": {"lr": 5e-7}, "schedule": {"warmup_share": 0.0}},
    ),
    # Exploration by entropy, temperature and data.
    _row(GRPO, "entreg", PAPER, {"objective": {"entropy_coefficient": 1e-3}}),
    _row(GRPO, "polaris", PAPER, {"sampling": {"raised_temperature": 1.4, "raise_below": 0.85}}),
    _row(GRPO, "kl_cov", "2505.22617", {"objective": {"loss": "kl_cov", **_FOUR_UPDATES}}),
    _row(GRPO, "clip_cov", "2505.22617", {"objective": {"loss": "clip_cov", **_FOUR_UPDATES}}),
    _row(GRPO, "high_entropy", "2506.01939", {"objective": {"entropy_mask_share": 0.2}}),
    _row(GRPO, "clip_higher", "2503.14476", {"objective": _CLIP_HIGHER}),
    _row(GRPO, "dapo", "2503.14476", {"objective": _CLIP_HIGHER, "sampling": {"dynamic_rounds": 10}}),
    # Ratios, and credit.
    _row(GRPO, "gspo", "2507.18071", {"objective": {"loss": "gspo", **_FOUR_UPDATES}}),
    _row(GRPO, "cispo", "2506.13585", {"objective": {"loss": "cispo", **_FOUR_UPDATES}}),
    _row(
        GRPO, "dr_grpo", "2503.20783", {"objective": {"aggregation": "constant"}}, advantage=Advantage(rule="dr_grpo")
    ),
    _row(GRPO, "rloo", "2402.14740", advantage=Advantage(rule="rloo")),
    _row(GRPO, "maxrl", "2602.02710", advantage=Advantage(rule="maxrl")),
    _row(GRPO, "pass_at_k", "2508.10751", advantage=Advantage(rule="pass_at_k", k=4)),
    _row(GRPO, "unlikeliness", "2506.02355", advantage=Advantage(unlikeliness=0.25)),
)

PRESETS = {row.method.name: row for row in _ROWS}
