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
    data: DataConfig
    run: RunConfig = field(default_factory=RunConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    method: Method = field(default_factory=Method)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ess_schedule: EssScheduleConfig = field(default_factory=EssScheduleConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        require(self.run.steps > 0, "run.steps", self.run.steps, "must be greater than 0")
        if self.optimizer.kind != "ivon":
            self._refuse_without_posterior()
        if self.ess_schedule.kind == "controller":
            self._check_controller()
        self.engine.check_temperature(self.sampling.temperature, "sampling.temperature")
        self.engine.check_temperature(self.eval.temperature, "eval.temperature")
        fix = (
            "greedy rollouts of one policy are identical, so nothing can be learned; set a temperature above 0, or "
            "method.preset = 'thompson' for one greedy rollout per draw"
        )
        sampled = self.sampling.temperature > 0
        require(sampled or self.method.greedy, "sampling.temperature", self.sampling.temperature, fix)
        fix = (
            "importance ratios are wrong when rollouts are cut by top-p or top-k, since the gradient's policy is not; "
            "set sampling.top_p = 1 and sampling.top_k = 0"
        )
        whole, correction = self.sampling.top_p == 1 and self.sampling.top_k == 0, self.method.correction.kind
        require(whole or correction == "none", "method.correction.kind", correction, fix)
        prompts = self.data.prompts_per_step
        fix = f"must not exceed data.prompts_per_step = {prompts}"
        require(self.objective.mini_batches <= prompts, "objective.mini_batches", self.objective.mini_batches, fix)

    def _refuse_without_posterior(self) -> None:
        kind = self.optimizer.kind
        fix = f"needs a posterior to draw from; set optimizer.kind = 'ivon' (now {kind!r}), or"
        require(not self.method.draws, "method.draws", self.method.draws, f"{fix} method.draws = 0")
        require(not self.eval.draws, "eval.draws", self.eval.draws, f"{fix} eval.draws = 0")
        fix = f"{kind} has no ess; set optimizer.kind = 'ivon'"
        require(self.ess_schedule.kind == "constant", "ess_schedule.kind", self.ess_schedule.kind, fix)

    def _check_controller(self) -> None:
        at, schedule, correction = self.method.gradient_at, self.ess_schedule, self.method.correction.kind
        fix = (
            f"rollouts and gradient share their draws with method.gradient_at = {at!r}, so there is nothing to "
            f"measure; set method.preset = 'c3po'"
        )
        require(at == "fresh", "ess_schedule.kind", schedule.kind, fix)
        fix = f"method.correction.kind = {correction!r} masks nothing; set metric = 'kl', or a correction that masks"
        measured = schedule.metric == "kl" or correction.endswith("mis")
        require(measured, "ess_schedule.metric", schedule.metric, fix)


@settings("")
class SFTConfig:
    """`threepo sft`: warm start by supervised fine-tuning (method.md 5)."""

    model: ModelConfig
    demonstrations: DemonstrationConfig | None = None
    conversations: ConversationConfig | None = None
    """One of the two is set: worked texts of procedural tasks, or chats."""
    run: RunConfig = field(default_factory=RunConfig)
    optimizer: OptimizerConfig = field(default_factory=IVONConfig)
    """IVON learns a posterior that RLVR can start from; AdamW does not."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(kind="cosine", warmup_share=0.1))
    batching: BatchingConfig = field(default_factory=BatchingConfig)

    def __post_init__(self) -> None:
        if (self.demonstrations is None) == (self.conversations is None):
            raise UserError(
                f"[demonstrations] and [conversations]: {'neither' if self.demonstrations is None else 'both'} given; "
                f"set one of the two"
            )
        epochs, steps = (self.conversations.epochs if self.conversations else 0), self.run.steps
        fix = f"conversations.epochs = {epochs} gives the length of the run too; set one of them to 0"
        require(not (epochs and steps), "run.steps", steps, fix)
        require(bool(epochs or steps), "run.steps", steps, "must be greater than 0")


@settings("")
class EvaluationConfig:
    """`threepo eval`; the command line alone is enough: threepo eval MODEL --benchmarks aime24."""

    model: ModelConfig
    data: DataConfig
    """Held-out problems: data.eval, or those of the task in data.train. With benchmarks: only how prompts are made."""
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)
    run: RunConfig = field(default_factory=RunConfig)
    """The seed, and the threads."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Only max_new_tokens is read, where [eval] leaves its own at 0."""
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        self.engine.check_temperature(self.eval.temperature, "eval.temperature")
