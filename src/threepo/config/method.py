"""[method] and [noise]: the lattice of methods, and the noise of draws. Named points are in presets.py."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from threepo.config.optimizers import OPTIMIZERS
from threepo.config.records import (
    OWN,
    Count,
    CountOrZero,
    Named,
    NotNegative,
    OneOf,
    Positive,
    PositiveOrInfinite,
    Settings,
    Share,
    must,
)

CREDIT_RULES = {
    "grpo": Named("threepo.methods.credit:GRPO", "rewards minus their mean, over their standard deviation"),
    "dr_grpo": Named("threepo.methods.credit:DR_GRPO", "rewards minus their mean"),
    "rloo": Named("threepo.methods.credit:RLOO", "rewards minus the mean of the others"),
    "maxrl": Named("threepo.methods.credit:MAXRL", "rewards minus their mean, over their mean"),
    "pass_at_k": Named("threepo.methods.credit:PASS_AT_K", "what a completion adds to pass@k"),
}
"""To add a credit rule, write a `Rule` in methods/credit.py and a line here."""


class Advantage(Settings, table="method.advantage"):
    """[method.advantage]: how the rewards of a group become advantages (method.md 2.1).

    Examples:
        >>> dataclasses.replace(threepo.GRPO, advantage=threepo.Advantage(rule="rloo")).advantage.rule
        'rloo'
    """

    rule: Annotated[str, OneOf(CREDIT_RULES, OWN)] = "grpo"
    """How the rewards of a group become advantages."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """grpo: delta degrees of freedom of the deviation; 1 as in verl and TRL."""
    epsilon: Positive = 1e-6
    """Added to the divisor of advantages."""
    k: Count = 4
    """pass_at_k: k, below the size of a group."""
    unlikeliness: Share = 0.0
    """Cuts the reward of right completions by up to this share, most for the likeliest (method.md 2.2)."""

    def __post_init__(self) -> None:
        fix = "pass_at_k counts right completions, whose rewards must stay 1; set it to 0, or another rule"
        self.only_if(self.rule != "pass_at_k", fix, "unlikeliness")


CORRECTIONS = dict.fromkeys(("none", "token_tis", "token_mis", "seq_tis", "seq_mis", "geometric_mis"))
"""Kinds of corrections, which objectives/corrections.py tells apart."""


class Correction(Settings, table="method.correction"):
    """[method.correction]: importance correction from the rollout policies to the gradient's policy (method.md 4).

    Examples:
        >>> truncated = threepo.Correction(kind="token_tis", high=10.0)
        >>> dataclasses.replace(threepo.C3PO, correction=truncated).correction.high
        10.0
    """

    kind: Annotated[str, OneOf(CORRECTIONS, OWN)] = "none"
    """Importance sampling by token or sequence, truncated (tis) or masked (mis); `geometric_mis`: by mean log-ratio."""
    low: NotNegative = 0.5
    """Lowest ratio that masking kinds keep."""
    high: PositiveOrInfinite = 2.0
    """Above this ratio, masking kinds mask and truncating kinds clamp; `inf`: never."""
    weight: Literal["ratio", "one"] = "ratio"
    """Masking kinds: weight of kept tokens, their ratio or 1."""
    normalizer: Literal["kept", "all"] = "kept"
    """Divide by the tokens kept (as in verl) or by all (TRL)."""
    warn_after: CountOrZero = 50
    """Warn after so many steps in a row in which the correction changed nothing; 0: never."""

    def __post_init__(self) -> None:
        self.check("low", self.low < self.high, f"must be below method.correction.high = {self.high}")


class Method(Settings, table="method"):
    """[method]: one point of the lattice that holds GRPO, B3PO, M3PO, C3PO and their relatives (method.md).

    Examples:
        >>> threepo.C3PO.draws, threepo.C3PO.gradient_at, threepo.C3PO.correction.kind
        (4, 'fresh', 'seq_mis')
        >>> dataclasses.replace(threepo.C3PO, draws=8).group_size
        16
    """

    name: str = "custom"
    """Name in tables and plots."""
    rollouts_per_prompt: Count = 16
    """Completions of each prompt, over all draws."""
    draws: CountOrZero = 0
    """Draws that generate the rollouts; 0: the mean weights do."""
    advantages: Literal["prompt", "draw"] = "prompt"
    """One advantage group per prompt, or per prompt and draw."""
    antithetic: bool = False
    """Draws come in pairs with noise of opposite sign."""
    gradient_at: Literal["mean", "generator", "fresh", "evolution"] = "mean"
    """Weights at which the gradient is taken: the mean, the draw that generated the rollout, or a fresh draw.
    `evolution`: no backward pass (method.md 3.9)."""
    log_evolution: bool = False
    """Log how the gradient compares with an evolution strategy's."""
    gradient_draws: Count = 1
    """Fresh draws whose gradients are averaged (method.md 3.2)."""
    normalize: Literal["step", "part"] = "step"
    """Divide by the tokens of the update, or by each draw's own (M3PO, method.md 3.3)."""
    greedy: bool = False
    """Decode rollouts greedily (method.md 3.5)."""
    cumulative: bool = False
    """Reproduce the paper's released M3PO (method.md 7)."""
    optimizer: Annotated[str, OneOf(OPTIMIZERS, OWN)] = "adamw"
    """The same as optimizer.kind; set either."""
    advantage: Advantage = field(default_factory=Advantage)
    correction: Correction = field(default_factory=Correction)

    def __post_init__(self) -> None:
        g, n, evolves = self.rollouts_per_prompt, self.draws, self.gradient_at == "evolution"
        if n and g % n:
            divisors = ", ".join(str(d) for d in range(1, g + 1) if g % d == 0)
            self.check("draws", False, f"must divide method.rollouts_per_prompt = {g}; set one of {divisors}")
        fix = "needs draws of the weights; set method.draws to 1 or more"
        self.only_if(n > 0, fix, "gradient_at", "advantages", "cumulative")
        fix = (
            f"leaves one completion in each advantage group (draws = {n}, advantages = {self.advantages!r}), with "
            f"nothing to compare it to; set at least {2 * g}"
        )
        self.check("rollouts_per_prompt", self.group_size > 1, fix)
        fix = f"must be below the {self.group_size} completions of an advantage group"
        self.check("advantage.k", self.advantage.rule != "pass_at_k" or self.advantage.k < self.group_size, fix)
        fix = "only gradient_at = 'fresh' takes several; set gradient_draws = 1 or gradient_at = 'fresh'"
        self.only_if(self.gradient_at == "fresh", fix, "gradient_draws")
        fix = (
            f"rollouts of one draw would be identical and have no ratio to correct by; set draws = rollouts_per_prompt "
            f"(now {n} and {g}) and correction.kind = 'none' (now {self.correction.kind!r})"
        )
        self.check("greedy", not self.greedy or (n == g and self.correction.kind == "none"), fix)
        self.only_if(n > 0 and n % 2 == 0, f"needs an even number of draws, not {n}", "antithetic")
        fix = f"compares draws with each other; set method.draws to 2 or more (now {n})"
        self.check("gradient_at", not evolves or n > 1, fix)
        self.only_if(n > 1, fix, "log_evolution")
        fix = "is of no use with gradient_at = 'evolution', which takes no gradient of a policy; set the default"
        self.only_if(not evolves, fix, "advantages", "normalize", "cumulative", "log_evolution")
        self.correction.only_if(not evolves, fix, "kind")
        self.advantage.only_if(not evolves, fix, "unlikeliness")
        fix = "only gradient_at = 'generator' has parts with tokens of their own; set normalize = 'step'"
        self.only_if(self.gradient_at == "generator", fix, "normalize")
        fix = "is for rewards of 0 and 1, and an evolution strategy credits the mean reward of a draw; set another rule"
        self.check("advantage.rule", self.advantage.rule != "pass_at_k" or not (evolves or self.log_evolution), fix)

    @property
    def independent_draws(self) -> int:
        """Number of draws with noise of their own: an antithetic pair counts once."""
        return self.draws // 2 if self.antithetic else self.draws

    @property
    def group_size(self) -> int:
        """Number of completions that share one advantage computation, G."""
        return self.rollouts_per_prompt // self.draws if self.advantages == "draw" else self.rollouts_per_prompt

    @property
    def passes(self) -> int:
        """Number of backward passes of each row."""
        return 0 if self.gradient_at == "evolution" else self.gradient_draws


# The paper's points, and ours. More are made the same way: dataclasses.replace(threepo.C3PO, draws=2).

GRPO = Method(name="grpo")
"""The mean generates, the mean is updated (paper section 2.1)."""

B3PO = Method(name="b3po", draws=1, gradient_at="generator", optimizer="ivon")
"""One draw of the weights per step, gradient at that draw (paper section 3.1)."""

M3PO = Method(name="m3po", draws=4, advantages="draw", gradient_at="generator", normalize="part", optimizer="ivon")
"""M draws, each with its own share of the rollouts and advantage groups; gradients are averaged (paper section 3.1)."""

C3PO = Method(name="c3po", draws=4, gradient_at="fresh", correction=Correction(kind="seq_mis"), optimizer="ivon")
"""A prompt's group is split over N draws; the gradient is taken at a fresh draw and corrected (paper section 3.2)."""

C3PO_REPLAY = Method(name="c3po_replay", draws=4, gradient_at="generator", optimizer="ivon")
"""C3PO with every row's gradient at the draw that generated it: on-policy, so it needs no correction (ours)."""

THOMPSON = Method(name="thompson", draws=16, gradient_at="fresh", greedy=True, optimizer="ivon")
"""One greedy rollout per draw: all exploration is in weight space (paper appendix, "A limiting case")."""


NOISE_STRUCTURES = ("rank",)
"""Settings of [noise] that each stand for a class of posterior/noise_structures.py; 0: without it."""


class NoiseConfig(Settings, table="noise"):
    """[noise]: how large the noise of draws is, and which parameters it touches (method.md 1.9)."""

    unit: Literal["posterior", "absolute", "rms"] = "posterior"
    """Unit of `size`: IVON's sigma, 1 (`absolute`), or each parameter's root mean square when the run begins."""
    size: NotNegative = 1.0
    """Sigma in that unit, until [ess_schedule] changes it; 0: no noise, which with IVON freezes the Hessian."""
    rank: Annotated[int, must(lambda rank: rank >= 0, "must be 0 or more")] = 0
    """Rank of the noise of matrices, as in EGGROLL (method.md 1.9); 0: full."""
    tied: bool = False
    """Parameters of one shape have the same noise (docs/evolution.md#tied-noise)."""
    structure: str = ""
    """Your own structure, `module:Class`."""
    where: Annotated[
        dict[str, NotNegative],
        must(lambda where: any(where.values()), "must name some parameters, with factors above 0"),
    ] = field(default_factory=lambda: {"all": 1.0})
    """Factors of sigma for `all`, kinds of layers (`embedding`, `head`, `norm`, `attention`, `mlp`, `other`), or
    patterns such as "model.layers.2.*"; the most specific counts, and what none names has no noise. Keys are added
    to a preset's or extended recipe's; 0 removes one."""

    def __post_init__(self) -> None:
        self.check("tied", not (self.tied and self.rank), "has no low-rank form; set noise.rank = 0, or remove it")
        if self.structure:
            self.check("structure", not (self.tied or self.rank), "has no rank and is not tied; remove those")
            from threepo.user_code import find_object

            find_object(self.structure, "noise.structure")

    @property
    def group_structure(self) -> str:
        """The structure as groups of parameters have it, such as `rank=2`; empty: all numbers are independent."""
        if self.structure:
            return self.structure
        if self.tied:
            return "tied"
        return ", ".join(f"{name}={getattr(self, name)}" for name in NOISE_STRUCTURES if getattr(self, name))
