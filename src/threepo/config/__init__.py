"""Every setting a user can make, as frozen records: one per table of a recipe, with the vetted values as defaults.

A record checks its fields when it is made, and a record that holds two settings refuses what cannot work together.
Neither torch nor transformers is imported here, so that the command line answers at once.
"""

import os
from dataclasses import field
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from threepo.config.arms import ArmsConfig, check_arms
from threepo.config.engine import AnyEngine, LocalEngineConfig, SamplingConfig
from threepo.config.environment import EnvironmentConfig
from threepo.config.method import Advantage, Correction, Method, NoiseConfig
from threepo.config.model import LoRAConfig, ModelConfig, TinyConfig
from threepo.config.objective import AnyObjective, ObjectiveConfig, PPOConfig
from threepo.config.optimizers import AdamWConfig, AnyOptimizer, IVONConfig, OptimizerConfig, SGDConfig
from threepo.config.records import (
    OWN,
    Count,
    CountOrZero,
    Named,
    NotNegative,
    OneOf,
    PositiveShare,
    Seconds,
    Settings,
)
from threepo.config.reward import RewardConfig, SandboxConfig
from threepo.config.schedules import AnyEssSchedule, ConstantEss, ScheduleConfig
from threepo.config.sources import BenchmarksConfig, ConversationConfig, DataConfig, DemonstrationConfig
from threepo.errors import UserError

__all__ = ["TRACKERS", "EvaluationConfig", "SFTConfig", "TrainConfig"]
__all__ += ["AdamWConfig", "Advantage", "AnyEngine", "ArmsConfig", "BatchingConfig", "BenchmarksConfig"]
__all__ += ["ConversationConfig", "Correction", "DataConfig", "DemonstrationConfig", "EnvironmentConfig"]
__all__ += ["EvalConfig", "IVONConfig"]
__all__ += ["LoRAConfig", "LocalEngineConfig", "Method", "ModelConfig", "NoiseConfig", "ObjectiveConfig"]
__all__ += ["OptimizerConfig", "PPOConfig", "ParallelConfig", "RewardConfig", "RunConfig", "SGDConfig"]
__all__ += ["SamplingConfig", "SandboxConfig", "ScheduleConfig", "TinyConfig"]

_NOT_IN_VLLM = "vLLM's processes do not import your code; set engine.kind = 'local', or remove it"

TRACKERS = {
    "tensorboard": Named("threepo.plugins.trackers:TensorBoard", "event files in the run folder", needs="tensorboard"),
    "wandb": Named("threepo.plugins.trackers:WeightsAndBiases", "W&B", needs="wandb"),
    "trackio": Named("threepo.plugins.trackers:Trackio", "trackio", needs="trackio"),
    "mlflow": Named("threepo.plugins.trackers:MLflow", "MLflow", needs="mlflow"),
}
"""To add a tracker, write a class with the methods of `Tracker` and a line here."""


class RunConfig(Settings, table="run"):
    """[run]: how long, where, and how often to evaluate and save."""

    folder: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """Run folder; empty: runs/ followed by the recipe's name."""
    steps: CountOrZero = 100
    """Training steps of one batch each; 0: see conversations.epochs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random without a separate seed."""
    checkpoint_every: CountOrZero = 50
    """Steps between checkpoints; 0: only at the end and at an interruption."""
    keep_checkpoints: CountOrZero = 2
    """Newest checkpoints to keep; 0: all."""
    threads: CountOrZero = 0
    """CPU threads of torch; 0: its own choice. 1 suits small models, above all where others use the cores. A resumed
    run repeats bitwise only with the same number."""
    trackers: tuple[Annotated[str, OneOf(TRACKERS, OWN)], ...] = ()
    """Services that get a copy of the metrics (docs/analysis.md#trackers)."""
    show_every: CountOrZero = 0
    """Steps between printed rollouts, and between trackers' tables of rollouts; 0: none."""


class EvalConfig(Settings, table="eval"):
    """[eval]: evaluation on held-out problems, at the mean weights unless `draws` is set (method.md 6)."""

    every: CountOrZero = 0
    """Training steps between evaluations; 0: none."""
    problems: Count = 256
    """Held-out problems; all if there are fewer."""
    samples: Count = 8
    """Completions per problem, K; pass@k is reported up to k = K."""
    temperature: NotNegative = 0.6
    """Divides the logits; 0 decodes greedily."""
    top_p: PositiveShare = 0.95
    """Nucleus sampling, as in [sampling]; 1: all tokens."""
    top_k: CountOrZero = 50
    """Most probable tokens to keep; 0: all."""
    max_new_tokens: CountOrZero = 0
    """Longest completion in tokens; 0: as in training."""
    draws: CountOrZero = 0
    """Draws of the posterior, S, which write K/S completions each; 0: evaluate the mean weights."""
    best_draws: CountOrZero = 0
    """RandOpt in `threepo eval` (docs/evaluation.md): only the B best draws write completions, K/B each; 0: all
    write."""
    selection_problems: Count = 128
    """best_draws: training problems, from the first, on which draws are compared."""
    part_size: Count = 256
    """`threepo eval`: completions saved together; an interruption loses at most these."""

    def __post_init__(self) -> None:
        fix = f"must be below eval.draws = {self.draws}, from which they are chosen"
        self.only_if(self.best_draws < self.draws, fix, "best_draws")
        key, writing = ("best_draws", self.best_draws) if self.best_draws else ("draws", self.draws or 1)
        self.check(key, self.samples % writing == 0, f"must divide eval.samples = {self.samples}")


class BatchingConfig(Settings, table="batching"):
    """[batching]: how rows are packed for forward and backward passes. It changes speed and memory, not results."""

    tokens: CountOrZero = 0
    """Most tokens of a micro-batch; a longer row goes alone. 0: 4096 on a CPU, 16384 on a GPU."""


class OverlapConfig(Settings, table="overlap"):
    """[overlap]: rollouts of later steps are made while the policy is updated (docs/overlap.md)."""

    lag: Annotated[int, Field(ge=0, le=16)] = 0
    """Rollouts come from the weights of so many steps ago; 0: no overlap. More than 1 saves time only with `stream`."""
    most_kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """After a step of larger `correction/kl` (nats per token), rollouts wait for the update (docs/overlap.md); 0: no
    limit."""
    stream: bool = False
    """Learn from groups as they finish (docs/overlap.md). Your reward function then gets the completions of one prompt,
    from several threads."""
    journal: str = ""
    """With `stream`: journal.jsonl of another run of the same recipe, to repeat it."""

    def __post_init__(self) -> None:
        self.only_if(self.lag > 0, "nothing overlaps; set overlap.lag, or remove it", "most_kl", "stream")
        self.only_if(self.stream, "only a stream has a journal; set overlap.stream = true, or remove it", "journal")


class ParallelConfig(Settings, table="parallel"):
    """[parallel]: how the ranks that torchrun starts share a run (docs/scaling.md)."""

    replicate: Count = 1
    """Copies of the weights, each sharded over ranks / replicate ranks (docs/scaling.md)."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in the CPUs' memory, and compute the updates there."""
    timeout_s: Seconds = 3600.0
    """Seconds that a rank waits for the others before the run ends."""

    def shards(self, ranks: int) -> int:
        """The number of ranks, out of `ranks`, over which a copy of the weights is spread; `UserError` if uneven."""
        self.check("replicate", ranks % self.replicate == 0, f"must divide the number of ranks, {ranks}")
        return ranks // self.replicate


class TrainConfig(Settings, table=""):
    """`threepo train`: reinforcement learning from verifiable rewards."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = field(default_factory=RunConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    method: Method = field(default_factory=Method)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: AnyEngine = field(default_factory=LocalEngineConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    objective: AnyObjective = field(default_factory=PPOConfig)
    optimizer: AnyOptimizer = field(default_factory=AdamWConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    arms: ArmsConfig = field(default_factory=ArmsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ess_schedule: AnyEssSchedule = field(default_factory=ConstantEss)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)

    def __post_init__(self) -> None:
        self.check("run.steps", self.run.steps > 0, "must be greater than 0")
        self._check_stream()
        measured = self._whole_rollouts and not self._evolves
        fix = "needs a gradient, and rollouts from all tokens: set sampling.top_p = 1 and sampling.top_k = 0"
        self.overlap.only_if(measured, fix, "most_kl")
        self._check_draws()
        self._check_evolution()
        self._check_arms()
        self._check_ess_schedule()
        self._check_rollouts()

    @property
    def _noisy(self) -> bool:
        return isinstance(self.optimizer, IVONConfig) or self.noise.unit != "posterior"

    @property
    def _evolves(self) -> bool:
        return self.method.gradient_at == "evolution"

    @property
    def _has_one_draw(self) -> bool:
        return self.method.gradient_at == "fresh" and self.method.draws == self.method.gradient_draws == 1

    @property
    def _whole_rollouts(self) -> bool:
        return self.sampling.top_p == 1 and self.sampling.top_k == 0

    def _check_stream(self) -> None:
        method, whole = self.method, not self.overlap.stream
        fix = "needs whole batches; remove it, or set overlap.stream = false"
        self.sampling.only_if(whole, fix, "dynamic_rounds", "raised_temperature")
        fix = "compares the draws of a whole batch, and a stream mixes batches; set overlap.stream = false"
        method.only_if(whole, fix, "log_evolution")
        self.check("method.gradient_at", whole or not self._evolves, fix)
        fix = "the one fresh draw of a step belongs to a batch, and the clock decides to which; set it to 'generator'"
        self.check("method.gradient_at", whole or not self._has_one_draw, fix)

    def _check_draws(self) -> None:
        method, learned = self.method, isinstance(self.optimizer, IVONConfig)
        fix = f"optimizer.kind = {self.optimizer.kind!r} says otherwise; set both alike, or only one of them"
        self.check("method.optimizer", method.optimizer == self.optimizer.kind, fix)
        fix = "needs noise to draw; set optimizer.kind = 'ivon', noise.unit = 'absolute' or 'rms', or remove it"
        method.only_if(self._noisy, fix, "draws")
        self.eval.only_if(self._noisy, fix, "draws")
        fix = "draws are not chosen while training; set it to 0, and let `threepo eval` choose some afterwards"
        self.eval.only_if(False, fix, "best_draws")
        drawn = bool(method.draws or self.eval.draws)
        fix = "no draws are made, so nothing has noise; set method.draws, or remove [noise]"
        self.noise.only_if(drawn or learned, fix)
        fix = "without noise every draw is the mean, which only IVON takes, as a check; set it above 0"
        needed = drawn and (not learned or self._evolves or method.log_evolution)
        self.check("noise.size", self.noise.size > 0 or not needed, fix)
        self.noise.only_if(self.engine.kind != "vllm", _NOT_IN_VLLM, "structure")
        method.only_if(learned, "only IVON carries gradients over from draw to draw; remove it", "cumulative")

    def _check_evolution(self) -> None:
        fix = "the comparison is with the gradient of one update a batch; set method.log_evolution = false"
        self.objective.only_if(not self.method.log_evolution, fix, "mini_batches")
        if not self._evolves:
            return
        self.objective.only_if(False, "an evolution strategy has no loss; remove it, or change method.gradient_at")
        fix = "an evolution strategy scores no rollouts, so there is no entropy to follow; set another kind, or 0"
        self.check("ess_schedule.kind", self.ess_schedule.metric_read != "policy/entropy", fix)
        self.sampling.only_if(False, fix, "raised_temperature")
        if self.optimizer.kind == "sgd":
            fix = "an evolution strategy moves one parameter at a time, and clips no norm; set it to 0"
            self.optimizer.only_if(False, fix, "max_grad_norm")

    def _check_arms(self) -> None:
        check_arms(self.arms, self.method, self.noise, self.optimizer)
        fix = "a draw without an arm has the noise of [noise], which is the unit of the arms' sizes; set it to 0"
        self.eval.only_if(not self.arms.active or isinstance(self.optimizer, IVONConfig), fix, "draws")

    def _check_ess_schedule(self) -> None:
        schedule, method, optimizer = self.ess_schedule, self.method, self.optimizer
        fix = f"{optimizer.kind} has no noise; set optimizer.kind = 'ivon', or noise.unit"
        self.check("ess_schedule.kind", self._noisy or schedule == ConstantEss(), fix)
        learned = isinstance(optimizer, IVONConfig) and optimizer.learn_hessian
        learns = learned and method.gradient_at in ("generator", "fresh")
        fix = (
            "the first stage has no noise, and an evolution strategy and IVON's Hessian are made of noise; set another "
            "kind, or, with IVON, optimizer.learn_hessian = false"
        )
        self.check("ess_schedule.kind", schedule.kind != "stages" or not (self._evolves or learns), fix)
        if schedule.metric_read.startswith("correction/"):
            fix = "the gradient's draw is then the one that generates, so no ratio differs from 1; set it to 2 or more"
            self.check("method.draws", not self._has_one_draw, fix)
            elsewhere = method.draws > 0 and method.gradient_at in ("fresh", "mean")
            fix = (
                "follows the ratios between rollouts and gradient, which need draws of the weights, a gradient "
                "elsewhere, and rollouts from all tokens; set method.preset = 'c3po', sampling.top_p = 1 and "
                "sampling.top_k = 0"
            )
            self.check("ess_schedule.kind", elsewhere and self._whole_rollouts, fix)
        if schedule.metric_read == "correction/kept_share":
            kind = method.correction.kind
            what = "single tokens" if kind == "token_mis" else "nothing"
            other = "set metric = 'kl' and a target such as 1e-3, or a correction of whole completions, seq_mis"
            fix = f"method.correction.kind = {kind!r} masks {what}; {other}"
            self.check("ess_schedule.metric", kind in ("seq_mis", "geometric_mis"), fix)
            fix = "without it, more noise keeps more completions; set it above 0, or ess_schedule.metric = 'kl'"
            self.check("method.correction.low", method.correction.low > 0, fix)

    def _check_rollouts(self) -> None:
        sampling, method, batch = self.sampling, self.method, self.data.prompts_per_step
        fix = "greedy rollouts of one policy are all the same; set it above 0, or set method.preset = 'thompson'"
        self.check("sampling.temperature", sampling.temperature > 0 or method.greedy, fix)
        fix = f"must exceed sampling.temperature = {sampling.temperature}, and method.greedy has none; set it to 0"
        rises = sampling.raised_temperature > sampling.temperature and not method.greedy
        sampling.only_if(rises, fix, "raised_temperature")
        fix = f"must hold a batch, data.prompts_per_step = {batch}, or be 0"
        sampling.only_if(sampling.prompts_per_round >= batch, fix, "prompts_per_round")
        fix = "with overlap, rollouts and updates need memory at once; set it to false, or overlap.lag = 0"
        self.engine.processes.only_if(self.overlap.lag == 0, fix, "sleep")
        fix = "importance ratios are wrong if rollouts are cut; set sampling.top_p = 1 and sampling.top_k = 0"
        method.correction.only_if(self._whole_rollouts, fix, "kind")
        fix = f"must not exceed data.prompts_per_step = {batch}"
        self.check("objective.mini_batches", self.objective.mini_batches <= batch, fix)
        scoring = self.reward.scoring
        fix = f"needs rewards of 0 and 1 (maxrl: none below 0); set reward.scoring = 'binary' (now {scoring!r})"
        refused = {"pass_at_k": ("format_penalty", "passed_share"), "maxrl": ("format_penalty",)}
        self.check("method.advantage.rule", scoring not in refused.get(method.advantage.rule, ()), fix)
        self.environment.must_hold("sampling.max_new_tokens", sampling.max_new_tokens)
        self.environment.must_hold("eval.max_new_tokens", self.eval.max_new_tokens)
        fix = "pass_at_k needs rewards of 0 and 1; set it to 1, or choose another method.advantage.rule"
        self.environment.only_if(method.advantage.rule != "pass_at_k", fix, "discount")


WARM_START_SCHEDULE: dict[str, Any] = {"kind": "cosine", "warmup_share": 0.1}
"""Defaults of [schedule] in a warm start, also where a recipe sets only some of its keys."""


class SFTConfig(Settings, table=""):
    """`threepo sft`: warm start by supervised fine-tuning (method.md 5)."""

    model: ModelConfig
    demonstrations: DemonstrationConfig | None = None
    conversations: ConversationConfig | None = None
    """Chats to imitate; exactly one of [demonstrations] and [conversations] is set."""
    run: RunConfig = field(default_factory=RunConfig)
    optimizer: AnyOptimizer = field(default_factory=IVONConfig)
    """IVON learns a posterior that RLVR can start from; AdamW does not."""
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    """Noise of the draws; only IVON reads it."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(**WARM_START_SCHEDULE))
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if (self.demonstrations is None) == (self.conversations is None):
            given = "both" if self.conversations else "neither"
            raise UserError(f"[demonstrations] and [conversations]: {given} given; set one of the two")
        epochs, steps = (self.conversations.epochs if self.conversations else 0), self.run.steps
        fix = f"conversations.epochs = {epochs} gives the length of the run too; set one of them to 0"
        self.check("run.steps", not (epochs and steps), fix)
        fix = "fine-tuning with AdamW has no noise; set optimizer.kind = 'ivon'"
        self.noise.only_if(isinstance(self.optimizer, IVONConfig), fix)
        self.check("run.steps", bool(epochs or steps), "must be greater than 0")
        self.run.only_if(False, "fine-tuning has no rollouts to show; remove it", "show_every")


class EvaluationConfig(Settings, table=""):
    """`threepo eval`; the command line alone is enough: threepo eval MODEL --benchmarks aime24."""

    model: ModelConfig
    data: DataConfig
    """Held-out problems, of data.eval or data.train; with benchmarks, only how prompts are made."""
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)
    run: RunConfig = field(default_factory=RunConfig)
    """The seed, and the threads."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: AnyEngine = field(default_factory=LocalEngineConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Rollout settings; only max_new_tokens is read, if [eval] leaves its own at 0."""
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    """Noise of the draws of eval.draws. unit = "posterior": noise of the model's own posterior."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        fix = "no draws are made, so nothing has noise; set eval.draws, or remove [noise]"
        self.noise.only_if(self.eval.draws > 0, fix)
        fix = "every draw would be the mean; set it above 0, or eval.draws = 0"
        self.check("noise.size", self.eval.draws == 0 or self.noise.size > 0, fix)
        self.noise.only_if(self.engine.kind != "vllm", _NOT_IN_VLLM, "structure")
        self.environment.must_hold("eval.max_new_tokens", self.eval.max_new_tokens or self.sampling.max_new_tokens)
