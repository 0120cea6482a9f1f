"""[schedule], [ess_schedule]: what changes over a run."""

from typing import Annotated, Literal

from pydantic import Field

from threepo.config.records import Positive, PositiveShare, Settings, Share


class ScheduleConfig(Settings, table="schedule"):
    """[schedule]: the learning rate over the run, as a factor of optimizer.lr."""

    kind: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall along a cosine to the floor at the last step."""
    warmup_share: Share = 0.06
    """Linear warm-up over this share of the steps."""
    floor: Share = 0.1
    """Cosine only: the factor at the end (the paper decays to 0.1, its released code to 0)."""


class EssScheduleConfig(Settings, table="ess_schedule"):
    """[ess_schedule]: ess over the run; sigma goes with 1 / sqrt(ess) (method.md 1.8). Noise of a given size begins at
    ess = 1. Steps are training steps."""

    kind: Literal[
        "constant",
        "cosine",
        "linear",
        "stages",
        "entropy_switch",
        "entropy_ratio",
        "controller",
        "kl_steps",
        "similarity",
    ] = "constant"
    """Constant; falling over the run; sigma falling in stages; low while entropy is low; following entropy; steered to
    `target`; or sigma times or over `ratio` a step, by the KL between draw and gradient, or by how alike and how
    certain the completions of a prompt are."""
    floor: PositiveShare = 0.1
    """cosine, linear: the factor of ess at the end. entropy_switch: the factor while entropy is low."""
    entropy_share: Share = 0.75
    """entropy_switch: entropy is low at or below this share of its highest value so far."""
    stages: Annotated[int, Field(ge=3)] = 10
    """stages: their number. The first has no noise, the second sigma of the start."""
    last: PositiveShare = 0.01
    """stages: sigma of the last one, as a share of that of the start."""
    ratio: Annotated[float, Field(gt=1)] = 1.01
    """kl_steps, similarity: factor of sigma in a step."""
    weight: Share = 0.5
    """similarity: weight of how alike the completions are; the rest is that of certainty."""
    encoder: str = ""
    """similarity: a Hugging Face encoder (directory or hub id), as in PSN: completions are compared by the means of its
    last hidden states. Empty: by the counts of their tokens, a stand-in of ours that needs no other model. Plans do not
    count the encoder: its float32 weights stay on the device, and it reads one text after the other."""
    metric: Literal["kept_share", "kl"] = "kept_share"
    """controller: hold the share of completions that the correction keeps, or the KL per token between draws (nats)."""
    target: Positive = 0.7
    """controller: the value to hold. kl_steps: the KL per token (nats) above which sigma falls. similarity: the value
    above which sigma rises."""
    gain: PositiveShare = 0.3
    """controller: the share of the measured error that one step corrects; 1 would correct all of it, noise included."""
    lowest: PositiveShare = 1e-6
    """Kinds that follow a measured number: ess never falls below this share of its start."""
    highest: Annotated[float, Field(ge=1)] = 1e6
    """And never rises above this multiple of it."""

    def __post_init__(self) -> None:
        possible = self.kind != "controller" or self.metric != "kept_share" or self.target < 1
        self.check("target", possible, "a kept share to hold must lie below 1")
        self.check("encoder", not self.encoder or self.kind == "similarity", "is for kind = 'similarity'; remove it")
