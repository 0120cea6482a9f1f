"""The lattice of methods as settings: the axes that tell methods apart, and its named points."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from threepo.config.records import Count, CountOrZero, NotNegative, Positive, require, settings


@settings("method.advantage")
class Advantage:
    """[method.advantage]: how the rewards of a group become advantages (method.md 2.1)."""

    scale: Literal["std", "none"] = "std"
    """`std`: divide the centred rewards by their standard deviation; `none`: only centre them."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """Delta degrees of freedom of that deviation: 1 (Bessel, as in verl and TRL) or 0 (population)."""
    epsilon: Positive = 1e-6
    """Added to the deviation."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups in which all rewards are equal: `keep` their rows (advantage 0, tokens counted) or `drop` them."""


@settings("method.correction")
class Correction:
    """[method.correction]: importance correction from the rollout policies to the gradient's policy (method.md 4)."""

    kind: Literal["none", "token_tis", "token_mis", "seq_tis", "seq_mis", "geometric_mis"] = "none"
    """Truncated (tis) or masked (mis) importance sampling per token or per sequence; `geometric_mis` masks by the mean
    log-ratio of a sequence."""
    low: NotNegative = 0.5
    """Masking kinds: the lowest ratio that is kept."""
    high: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 2.0
    """The highest ratio: above it, masking kinds mask and truncating kinds clamp. `inf`: no bound."""
    weight: Literal["ratio", "one"] = "ratio"
    """Masking kinds: weight what is kept by its ratio, or by 1 (the paper does not say; method.md 7)."""
    normalizer: Literal["kept", "all"] = "kept"
    """Divide by the number of tokens kept (as verl does) or by the number of all tokens (TRL)."""
    warn_after: CountOrZero = 50
    """Warn after this many steps in a row in which the correction changed nothing; 0: never."""

    def __post_init__(self) -> None:
        high = f"must be below method.correction.high = {self.high}"
        require(self.low < self.high, "method.correction.low", self.low, high)


@settings("method")
class Method:
    """[method]: one point of the lattice that holds GRPO, B3PO, M3PO, C3PO and their relatives (method.md).

    In a recipe, `preset` chooses a named point, and further keys change its axes.
    """

    name: str = "custom"
    """For tables and plots; the program never branches on it."""
    rollouts_per_prompt: Count = 16
    """Completions of each prompt per step, over all draws."""
    draws: CountOrZero = 0
    """Draws of the weights that generate the rollouts, N or M; 0: the mean weights generate them."""
    advantages: Literal["prompt", "draw"] = "prompt"
    """One advantage group per prompt, pooled over draws, or one per prompt and draw."""
    gradient_at: Literal["mean", "generator", "fresh"] = "mean"
    """Weights at which the gradient is taken: the mean, the draw that generated the row, or a fresh draw. With a single
    draw, the first `fresh` one is that draw (method.md 3.2)."""
    gradient_draws: Count = 1
    """With gradient_at = "fresh": the number of gradient draws, averaged (decoupled Monte Carlo, method.md 3.2)."""
    normalize: Literal["step", "part"] = "step"
    """Divide by the token count of the update, or by that of each draw and average over draws (M3PO, method.md 3.3)."""
    greedy: bool = False
    """Decode rollouts greedily: each draw is a deterministic policy (the Thompson limit, method.md 3.5)."""
    cumulative: bool = False
    """Reproduce the paper's released M3PO, which carries gradients over from draw to draw (method.md 7)."""
    optimizer: Literal["adamw", "ivon"] = "adamw"
    """Optimizer of the preset, used when [optimizer] names no kind."""
    advantage: Advantage = field(default_factory=Advantage)
    correction: Correction = field(default_factory=Correction)

    def __post_init__(self) -> None:
        g, n = self.rollouts_per_prompt, self.draws
        if n and g % n:
            divisors = ", ".join(str(d) for d in range(1, g + 1) if g % d == 0)
            fix = f"must divide method.rollouts_per_prompt = {g} evenly; set draws to one of {divisors}"
            require(False, "method.draws", n, fix)
        for axis, without in (("gradient_at", "mean"), ("advantages", "prompt"), ("cumulative", False)):
            value = getattr(self, axis)
            fix = "needs draws of the weights; set method.draws to 1 or more"
            require(n > 0 or value == without, f"method.{axis}", value, fix)
        fix = (
            f"leaves one completion in each advantage group (draws = {n}, advantages = {self.advantages!r}), with "
            f"nothing to compare it to; set at least {2 * g}"
        )
        require(self.group_size > 1, "method.rollouts_per_prompt", g, fix)
        several, fresh = self.gradient_draws > 1, self.gradient_at == "fresh"
        fix = "only gradient_at = 'fresh' takes several; set gradient_draws = 1 or gradient_at = 'fresh'"
        require(fresh or not several, "method.gradient_draws", self.gradient_draws, fix)
        fix = (
            f"rollouts of one draw would be identical and have no ratio to correct by; set draws = rollouts_per_prompt "
            f"(now {n} and {g}) and correction.kind = 'none' (now {self.correction.kind!r})"
        )
        require(not self.greedy or (n == g and self.correction.kind == "none"), "method.greedy", self.greedy, fix)

    @property
    def group_size(self) -> int:
        """Number of completions that share one advantage computation, G."""
        return self.rollouts_per_prompt // self.draws if self.advantages == "draw" else self.rollouts_per_prompt


# The named points. More are made the same way: dataclasses.replace(threepo.C3PO, draws=2).

GRPO = Method(name="grpo")
"""The mean generates, the mean is updated (paper section 2.1)."""

B3PO = Method(name="b3po", draws=1, gradient_at="generator", optimizer="ivon")
"""One draw of the weights per step, gradient at that draw (paper section 3.1)."""

M3PO = Method(name="m3po", draws=4, advantages="draw", gradient_at="generator", normalize="part", optimizer="ivon")
"""M draws, each with its own advantage groups; gradients are averaged over draws (paper section 3.1). The draws share
the rollouts, as in the paper's main table: 16 = 4 draws of 4."""

C3PO = Method(name="c3po", draws=4, gradient_at="fresh", correction=Correction(kind="seq_mis"), optimizer="ivon")
"""A prompt's group is split over N draws, advantages are pooled, the gradient is taken at a fresh draw and corrected
by Seq-MIS on [0.5, 2] (paper section 3.2)."""

C3PO_REPLAY = Method(name="c3po_replay", draws=4, gradient_at="generator", optimizer="ivon")
"""C3PO with every row's gradient at the draw that generated it: on-policy, so it needs no correction. The paper names
it and rules it out for its memory; addressed noise makes it free."""

THOMPSON = Method(name="thompson", draws=16, gradient_at="fresh", greedy=True, optimizer="ivon")
"""One greedy rollout per draw: all exploration is in weight space (paper appendix, "A limiting case")."""

PRESETS = {method.name: method for method in (GRPO, B3PO, M3PO, C3PO, C3PO_REPLAY, THOMPSON)}
