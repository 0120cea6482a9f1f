"""What each command reads: a record of tables per command, and the combinations of settings that it refuses."""

from dataclasses import field

from threepo.config.learning import (
    AdamWConfig,
    BatchingConfig,
    EssScheduleConfig,
    IVONConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from threepo.config.method import Method
from threepo.config.records import require, settings
from threepo.config.sections import EngineConfig, EvalConfig, ModelConfig, RewardConfig, RunConfig, SamplingConfig
from threepo.config.sources import BenchmarksConfig, ConversationConfig, DataConfig, DemonstrationConfig
from threepo.errors import UserError


@settings("")
class TrainConfig:
    """`threepo train`: reinforcement learning from verifiable rewards."""

    model: ModelConfig
    """The policy."""
    data: DataConfig
    """The problems."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, folder, checkpoints."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The verifier."""
    method: Method = field(default_factory=Method)
    """The point of the lattice."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Decoding of rollouts."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The rollout engine."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """The policy loss."""
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    """AdamW or IVON."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the run."""
    ess_schedule: EssScheduleConfig = field(default_factory=EssScheduleConfig)
    """Noise over the run."""
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    """Micro-batches."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation while training."""

    def __post_init__(self) -> None:
        require(self.run.steps > 0, "run.steps", self.run.steps, "must be greater than 0")
        if self.optimizer.kind != "ivon":
            self._refuse_without_posterior()
        if self.ess_schedule.kind == "controller":
            self._check_controller()
        self.engine.check_temperature(self.sampling.temperature, "sampling.temperature")
        self.engine.check_temperature(self.eval.temperature, "eval.temperature")
        if self.sampling.temperature == 0 and not self.method.greedy:
            raise UserError(
                "sampling.temperature = 0: greedy rollouts of one policy are identical and teach nothing; set a "
                "temperature above 0, or method.preset = 'thompson' for one greedy rollout per draw"
            )
        filtered = self.sampling.top_p < 1 or self.sampling.top_k > 0
        if filtered and self.method.correction.kind != "none":
            raise UserError(
                f"method.correction.kind = {self.method.correction.kind!r}: importance ratios are wrong when rollouts "
                f"are cut by top-p or top-k, since the gradient's policy is not; set sampling.top_p = 1 and top_k = 0"
            )
        prompts = self.data.prompts_per_step
        fix = f"more than data.prompts_per_step = {prompts} prompts cannot be split into; lower it"
        require(self.objective.mini_batches <= prompts, "objective.mini_batches", self.objective.mini_batches, fix)

    def _refuse_without_posterior(self) -> None:
        kind = self.optimizer.kind
        fix = f"needs a posterior to draw from; set optimizer.kind = 'ivon' (now {kind!r}), or"
        require(not self.method.draws, "method.draws", self.method.draws, f"{fix} method.draws = 0")
        require(not self.eval.draws, "eval.draws", self.eval.draws, f"{fix} eval.draws = 0")
        fix = f"{kind} has no ess; set optimizer.kind = 'ivon'"
        require(self.ess_schedule.kind == "constant", "ess_schedule.kind", self.ess_schedule.kind, fix)

    def _check_controller(self) -> None:
        if self.method.gradient_at != "fresh":
            raise UserError(
                f"ess_schedule.kind = 'controller': rollouts and gradient share their draws with method.gradient_at = "
                f"{self.method.gradient_at!r}, so there is nothing to measure; use method.preset = 'c3po'"
            )
        if self.ess_schedule.metric == "kept_share" and not self.method.correction.kind.endswith("mis"):
            raise UserError(
                f"ess_schedule.metric = 'kept_share': method.correction.kind = {self.method.correction.kind!r} drops "
                f"nothing; set ess_schedule.metric = 'kl', or a correction that masks"
            )


@settings("")
class SFTConfig:
    """`threepo sft`: warm start by supervised fine-tuning (method.md 5)."""

    model: ModelConfig
    """The model to start from."""
    demonstrations: DemonstrationConfig | None = None
    """What to imitate: worked texts of procedural tasks,"""
    conversations: ConversationConfig | None = None
    """or chats; one of the two."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, folder, checkpoints."""
    optimizer: OptimizerConfig = field(default_factory=IVONConfig)
    """IVON learns a posterior that RLVR can start from; AdamW does not."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(kind="cosine", warmup_share=0.1))
    """Learning rate over the run."""
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    """Micro-batches."""

    def __post_init__(self) -> None:
        if (self.demonstrations is None) == (self.conversations is None):
            raise UserError(
                f"[demonstrations] and [conversations]: {'neither' if self.demonstrations is None else 'both'} given; "
                f"write the one that holds what to imitate"
            )
        epochs, steps = (self.conversations.epochs if self.conversations else 0), self.run.steps
        fix = f"conversations.epochs = {epochs} gives the length of the run too; set one of them to 0"
        require(not (epochs and steps), "run.steps", steps, fix)
        require(bool(epochs or steps), "run.steps", steps, "must be greater than 0")


@settings("")
class EvaluationConfig:
    """`threepo eval`; the command line alone is enough: threepo eval MODEL --benchmarks aime24."""

    model: ModelConfig
    """The model to evaluate."""
    data: DataConfig
    """Held-out problems: data.eval, or the held-out half of the task in data.train; with benchmarks, only how prompts
    are put."""
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)
    """Published problem sets."""
    run: RunConfig = field(default_factory=RunConfig)
    """The seed, and the threads."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The verifier."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The rollout engine."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Only max_new_tokens is read, where [eval] leaves its own at 0."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """What to measure."""

    def __post_init__(self) -> None:
        self.engine.check_temperature(self.eval.temperature, "eval.temperature")
