"""What a run would take, from its recipe and the model's shape alone: no weights are loaded and nothing is written.

FLOPs follow the paper's count (appendix on compute): per weight and token, two forward and six forward and backward.
What that count leaves out is listed next to it. Legend: W weights, P prompts a step, G completions of a prompt over all
draws, N draws that generate, K draws at which the gradient of every row is taken.
"""

from dataclasses import dataclass
from typing import Any

from threepo.config import IVONConfig, OptimizerConfig, SFTConfig, TrainConfig
from threepo.config.recipes import model_to_come
from threepo.models.loading import model_shape
from threepo.rollout.engines import ENGINES
from threepo.rollout.memory import GIB, bytes_per_token

UNKNOWN = 512
"""Tokens of a prompt, or of a demonstration, where nothing bounds them."""
FLOAT32 = 4
TERA = 1e12
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one RLVR step."""

    prefill: float
    decode: float
    training: float

    @property
    def total(self) -> float:
        """As in the paper's table."""
        return self.prefill + self.decode + self.training


def step_flops(
    weights: float,
    prompts: int,
    rollouts: int,
    prefills: int,
    prompt_tokens: float,
    response_tokens: float,
    gradient_draws: int = 1,
) -> StepFlops:
    """The paper's count: 2 W P (S prompt + G response) for rollouts, 6 W P G K (prompt + response) for training.

    Args:
        weights: W.
        prompts: P.
        rollouts: G, over all draws.
        prefills: S, how often each prompt is read: once for each draw, which shares it among its completions.
        prompt_tokens: mean tokens of a prompt.
        response_tokens: mean tokens of a completion.
        gradient_draws: K, how often each row is trained on.
    """
    return StepFlops(
        prefill=2 * weights * prompts * prefills * prompt_tokens,
        decode=2 * weights * prompts * rollouts * response_tokens,
        training=6 * weights * prompts * rollouts * gradient_draws * (prompt_tokens + response_tokens),
    )


def plan(config: TrainConfig | SFTConfig, prompt_tokens: int = 0, response_tokens: int = 0) -> list[tuple[str, str]]:
    """What the run would load, hold and compute, as labels with values; an empty label continues the one above.

    `prompt_tokens` and `response_tokens` are means; 0 stands for the longest that the recipe allows.
    """
    model = model_to_come(config.model)
    shape, weights = model_shape(model)
    path = config.model.path
    lines = [("model", f"{path}: {weights:,} weights")]
    if model.path != path:
        lines.append(("", f"{path} is not there yet; its run begins with {model.path}, of the same shape"))
    if isinstance(config, SFTConfig):
        return [*lines, *_fine_tuning(config, shape, weights, prompt_tokens + response_tokens)]
    method, sampling = config.method, config.sampling
    draws = max(method.draws, 1)
    prompt_tokens = prompt_tokens or config.data.max_prompt_tokens or UNKNOWN
    response_tokens = response_tokens or sampling.max_new_tokens
    rows = config.data.prompts_per_step * method.rollouts_per_prompt
    lines += [
        ("data", f"{config.data.train}, rewarded by {config.reward.function}"),
        ("method", f"{method.name}: {method.draws} draws, gradient at {method.gradient_at}, {config.optimizer.kind}"),
        ("a step", f"{config.data.prompts_per_step} prompts x {method.rollouts_per_prompt} completions = {rows} rows"),
        *_trainer_memory(weights, config.optimizer, _gradient_draws(config)),
        *_engine_memory(config, shape, weights, rows, draws, prompt_tokens + sampling.max_new_tokens),
    ]
    flops = step_flops(
        weights,
        config.data.prompts_per_step,
        method.rollouts_per_prompt,
        draws,
        prompt_tokens,
        response_tokens,
        method.gradient_draws,
    )
    return [
        *lines,
        ("compute", f"{prompt_tokens} prompt and {response_tokens} response tokens a row"),
        ("", f"{_tera(flops.prefill)} TFLOP to read prompts"),
        ("", f"{_tera(flops.decode)} TFLOP to decode"),
        ("", f"{_tera(flops.training)} TFLOP to train"),
        ("", f"{_tera(flops.total)} TFLOP a step, as the paper counts"),
        *_uncounted(config, shape, weights, rows, prompt_tokens + response_tokens),
        ("", f"{draws * weights * _BYTES[config.engine.dtype] / GIB:.4g} GiB of weights written into the engine"),
    ]


def _fine_tuning(config: SFTConfig, shape: Any, weights: int, tokens: int) -> list[tuple[str, str]]:
    """A warm start on rows of so many tokens each; 0: as many as the recipe allows."""
    if config.conversations:
        rows, what, most = config.conversations.batch_size, "conversations", config.conversations.max_tokens
    else:
        assert config.demonstrations is not None, "a recipe has demonstrations or conversations"
        rows, what, most = config.demonstrations.batch_size, "demonstrations", UNKNOWN
    tokens = tokens or most
    return [
        ("a step", f"{rows} {what}"),
        *_trainer_memory(weights, config.optimizer, gradient_draws=1),
        ("compute", f"{tokens} tokens a row"),
        ("", f"{_tera(6 * weights * rows * tokens)} TFLOP a step"),
        *_uncounted(config, shape, weights, rows, tokens),
    ]


def _gradient_draws(config: TrainConfig) -> int:
    method = config.method
    return {"generator": max(method.draws, 1), "fresh": method.gradient_draws, "mean": 1}[method.gradient_at]


def _trainer_memory(weights: int, optimizer: OptimizerConfig, gradient_draws: int) -> list[tuple[str, str]]:
    """Tensors of the size of the weights, all float32; the states are those that the optimizers really keep."""
    parts = {"weights": 1, "gradients": 1}
    if isinstance(optimizer, IVONConfig):
        parts |= {"momentum and Hessian": 2, "the mean while perturbed": 1}
        if gradient_draws > 1:
            parts["running means over gradient draws"] = 2
    else:
        parts["AdamW's moments"] = 2
    size = weights * FLOAT32 / GIB
    lines = [f"{count * size:.4g} GiB {name}" for name, count in parts.items()]
    total = f"{sum(parts.values()) * size:.4g} GiB in all, float32; activations come on top"
    return [("trainer", lines[0]), *(("", line) for line in [*lines[1:], total])]


def _engine_memory(
    config: TrainConfig, shape: Any, weights: int, rows: int, draws: int, tokens: int
) -> list[tuple[str, str]]:
    import torch

    engine = config.engine
    copies, what, most = ENGINES[engine.kind].memory(engine, draws)
    together = min(rows, most)
    cache = together * tokens * bytes_per_token(shape, getattr(torch, engine.dtype))
    return [
        (
            "engine",
            f"{copies * weights * _BYTES[engine.dtype] / GIB:.4g} GiB weights of {copies} {what}, {engine.dtype}",
        ),
        ("", f"{cache / GIB:.4g} GiB keys and values of {together} rows of {tokens} tokens, if all were that long"),
    ]


def _uncounted(
    config: TrainConfig | SFTConfig, shape: Any, weights: int, rows: int, length: int
) -> list[tuple[str, str]]:
    """The computing that the paper's count leaves out, for rows of `length` tokens."""
    text = shape.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    rollouts, draws, old = 0, 1, False
    if isinstance(config, TrainConfig):
        rollouts, draws, old = 1, config.method.gradient_draws, config.objective.mini_batches > 1
    recomputed = config.model.gradient_checkpointing
    # Each token attends to all before it, half a square of tokens. A backward pass costs as much as two forward passes.
    attention = 2 * length**2 * width * text.num_hidden_layers * rows * (rollouts + draws * (3 + old + recomputed))
    lines = [("not counted", f"{_tera(attention)} TFLOP of attention between tokens, if no window bounds it")]
    forward = _tera(2 * weights * rows * length * draws)
    if old:
        lines.append(("", f"{forward} TFLOP for log-probs before the first of several updates"))
    if recomputed:
        lines.append(("", f"{forward} TFLOP to recompute activations"))
    return lines


def _tera(flops: float) -> str:
    return f"{flops / TERA:,.4g}" if flops < 1e15 else f"{flops / TERA:,.0f}"
