"""The lattice of methods as settings: advantages, correction, and the axes that tell the methods apart."""

from dataclasses import dataclass, field
from typing import Any, Literal

from threepo.config.checks import not_negative, positive, require
from threepo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """[method.advantage]: from the rewards of a group to advantages (method.md 2.1)."""

    scale: Literal["std", "none"] = "std"
    """`std`: divide the centred rewards by their standard deviation; `none`: only centre them."""
    ddof: int = 1
    """Delta degrees of freedom of that deviation: 1 (Bessel, verl and TRL) or 0 (population)."""
    epsilon: float = 1e-6
    """Added to the deviation."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups with equal rewards everywhere: `keep` their rows (advantage 0, tokens counted) or `drop` them."""

    def __post_init__(self) -> None:
        require(self.ddof in (0, 1), "method.advantage.ddof", self.ddof, "set 0 or 1")
        positive(self, "method.advantage", "epsilon")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """[method.correction]: importance correction from the rollout policies to the gradient's policy (method.md 4)."""

    kind: Literal["none", "token_tis", "token_mis", "seq_tis", "seq_mis", "geometric_mis"] = "none"
    """T(runcated) or M(asked) importance sampling per token or per sequence; `geometric_mis` masks by the mean
    log-ratio of a sequence."""
    low: float = 0.5
    """Lower bound of the ratio that is kept; masking kinds only."""
    high: float = 2.0
    """Upper bound of the ratio: beyond it, masking kinds drop and truncating kinds clamp."""
    weight: Literal["ratio", "one"] = "ratio"
    """What is kept by a masking kind is weighted by its ratio, or by 1 (the paper leaves it open; method.md 7)."""
    normalizer: Literal["kept", "all"] = "kept"
    """Divide by the tokens that were kept (verl) or by all tokens (TRL)."""
    warn_after: int = 50
    """Warn after this many steps in a row in which the correction dropped or truncated nothing; 0 never warns."""

    def __post_init__(self) -> None:
        require(self.high > 0, "method.correction.high", self.high, "must be above 0; inf for no bound")
        require(
            0 <= self.low < self.high,
            "method.correction.low",
            self.low,
            f"must be at least 0 and below method.correction.high = {self.high}",
        )
        not_negative(self, "method.correction", "warn_after")


@dataclass(frozen=True, kw_only=True)
class Method:
    """[method]: one point of the lattice that holds GRPO, B3PO, M3PO, C3PO and their relatives (method.md).

    In a recipe, `preset` picks a named point and further keys change its axes.
    """

    name: str = "custom"
    """For tables and plots only; nothing branches on it."""
    rollouts_per_prompt: int = 16
    """Completions of each prompt a step, over all draws together."""
    draws: int = 0
    """Draws of the weights that generate them, N or M; 0: the mean weights."""
    advantages: Literal["prompt", "draw"] = "prompt"
    """One advantage group per prompt, pooled over draws, or one per prompt and draw."""
    gradient_at: Literal["mean", "generator", "fresh"] = "mean"
    """Weights at which the gradient is taken: the mean, the draw that generated the row, or a draw of its own."""
    gradient_draws: int = 1
    """With gradient_at = fresh: how many fresh draws, averaged (decoupled Monte Carlo, method.md 3.2)."""
    normalize: Literal["step", "part"] = "step"
    """Divide by the token count of the update, or by each draw's own and average the draws (M3PO, method.md 3.3)."""
    greedy: bool = False
    """Decode rollouts greedily: each draw is a deterministic policy (the Thompson limit, method.md 3.5)."""
    cumulative: bool = False
    """Reproduce the paper's released M3PO, which carries gradients over from draw to draw (method.md 7)."""
    optimizer: Literal["adamw", "ivon"] = "adamw"
    """Optimizer of the preset; used when the recipe's [optimizer] names no kind."""
    advantage: Advantage = field(default_factory=Advantage)
    """How rewards become advantages."""
    correction: Correction = field(default_factory=Correction)
    """How rows from other weights than the gradient's are corrected."""

    def __post_init__(self) -> None:
        positive(self, "method", "rollouts_per_prompt", "gradient_draws")
        not_negative(self, "method", "draws")
        g, n = self.rollouts_per_prompt, self.draws
        if n and g % n:
            divisors = ", ".join(str(d) for d in range(1, g + 1) if g % d == 0)
            raise UserError(
                f"method.draws = {n}: must divide method.rollouts_per_prompt = {g} evenly; "
                f"set draws to one of {divisors}"
            )
        if n == 0:
            self._refuse_without_draws()
        if self.group_size == 1:
            raise UserError(
                f"method.rollouts_per_prompt = {g}: leaves one completion in each advantage group (draws = {n}, "
                f"advantages = {self.advantages!r}), which has none to be compared with, so nothing can be learnt; "
                f"set at least {2 * g}"
            )
        if self.gradient_draws > 1 and self.gradient_at != "fresh":
            raise UserError(
                f"method.gradient_draws = {self.gradient_draws}: only gradient_at = 'fresh' takes several; "
                f"set gradient_draws = 1 or gradient_at = 'fresh'"
            )
        if self.greedy and (n != g or self.correction.kind != "none"):
            raise UserError(
                f"method.greedy = true: rollouts of one draw would be identical and have no ratio to correct by; "
                f"set draws = rollouts_per_prompt (now {n} and {g}) and correction.kind = 'none' "
                f"(now {self.correction.kind!r})"
            )

    def _refuse_without_draws(self) -> None:
        wrong: tuple[str, Any] | None = None
        if self.gradient_at != "mean":
            wrong = ("gradient_at", self.gradient_at)
        elif self.advantages == "draw":
            wrong = ("advantages", self.advantages)
        elif self.cumulative:
            wrong = ("cumulative", self.cumulative)
        if wrong:
            raise UserError(
                f"method.{wrong[0]} = {wrong[1]!r}: needs draws of the weights; set method.draws to 1 or more"
            )

    @property
    def group_size(self) -> int:
        """Completions that share one advantage computation, G."""
        return self.rollouts_per_prompt // self.draws if self.advantages == "draw" else self.rollouts_per_prompt
