"""Memory and compute of a run, from its recipe and the shape of its model; loads no weights and writes nothing.

FLOPs follow the paper's count (appendix on compute): per weight and token, two forward and six forward and backward.
What that count leaves out is listed next to it. Legend: W weights, P prompts a step, G completions of a prompt over all
draws, N draws that generate, K draws at which the gradient of every row is taken.
"""

from typing import Any

from threepo.config import OptimizerConfig, SFTConfig, TrainConfig
from threepo.config.recipes import model_to_come
from threepo.models.loading import model_shape
from threepo.rollout.engines import ENGINES
from threepo.rollout.memory import GIB, bytes_per_token
from threepo.training.optimizers import OPTIMIZERS

UNKNOWN = 512
"""Tokens of a prompt, or of a demonstration, where nothing bounds them."""
_BYTES = {"float32": 4, "bfloat16": 2}


def step_flops(
    weights: float, prompts: int, rollouts: int, prefills: int, prompt: float, response: float, draws: int = 1
) -> dict[str, float]:
    """Operations of one RLVR step by what they are for; the paper's table has their sum.

    `prompt` and `response` are mean tokens; `rollouts` is G; `prefills` is how often each prompt is read: once for each
    draw, which shares it among its completions; `draws`, K, is how often each row is trained on.
    """
    return {
        "to read prompts": 2 * weights * prompts * prefills * prompt,
        "to decode": 2 * weights * prompts * rollouts * response,
        "to train": 6 * weights * prompts * rollouts * draws * (prompt + response),
    }


Plan = dict[str, list[str]]
"""Lines by their label."""


def plan(config: TrainConfig | SFTConfig, prompt_tokens: int = 0, response_tokens: int = 0) -> Plan:
    """What the run would load, hold in memory and compute.

    `prompt_tokens` and `response_tokens` are means; 0 stands for the longest that the recipe allows.
    """
    model, path = model_to_come(config.model), config.model.path
    shape, weights = model_shape(model)
    lines = [f"{path}: {weights:,} weights"]
    if model.path != path:
        lines.append(f"{path} is not there yet; its run begins with {model.path}, of the same shape")
    if isinstance(config, SFTConfig):
        return {"model": lines} | _fine_tuning(config, shape, weights, prompt_tokens + response_tokens)
    return {"model": lines} | _reinforcement(config, shape, weights, prompt_tokens, response_tokens)


def _reinforcement(config: TrainConfig, shape: Any, weights: int, prompt_tokens: int, response_tokens: int) -> Plan:
    data, method, engine = config.data, config.method, config.engine
    draws = max(method.draws, 1)
    gradient_draws = {"generator": draws, "fresh": method.gradient_draws, "mean": 1}[method.gradient_at]
    prompt_tokens = prompt_tokens or data.max_prompt_tokens or UNKNOWN
    response_tokens = response_tokens or config.sampling.max_new_tokens
    prompts, rollouts = data.prompts_per_step, method.rollouts_per_prompt
    rows = prompts * rollouts
    flops = step_flops(weights, prompts, rollouts, draws, prompt_tokens, response_tokens, method.gradient_draws)
    copied = draws * weights * _BYTES[engine.dtype] / GIB
    return {
        "data": [f"{data.train}, rewarded by {config.reward.function}"],
        "method": [f"{method.name}: {method.draws} draws, gradient at {method.gradient_at}, {config.optimizer.kind}"],
        "a step": [f"{prompts} prompts x {rollouts} completions = {rows} rows"],
        "trainer": _trainer_memory(weights, config.optimizer, gradient_draws),
        "engine": _engine_memory(config, shape, weights, rows, draws, prompt_tokens + config.sampling.max_new_tokens),
        "compute": [
            f"{prompt_tokens} prompt and {response_tokens} response tokens a row",
            *(f"{_tera(count)} TFLOP {purpose}" for purpose, count in flops.items()),
            f"{_tera(sum(flops.values()))} TFLOP a step, as the paper counts",
        ],
        "not counted": [
            *_uncounted(config, shape, weights, rows, prompt_tokens + response_tokens),
            f"{copied:.4g} GiB of weights written into the engine",
        ],
    }


def _fine_tuning(config: SFTConfig, shape: Any, weights: int, tokens: int) -> Plan:
    if config.conversations:
        rows, what, most = config.conversations.batch_size, "conversations", config.conversations.max_tokens
    else:
        assert config.demonstrations is not None, "a recipe has demonstrations or conversations"
        rows, what, most = config.demonstrations.batch_size, "demonstrations", UNKNOWN
    tokens = tokens or most
    return {
        "a step": [f"{rows} {what}"],
        "trainer": _trainer_memory(weights, config.optimizer, gradient_draws=1),
        "compute": [f"{tokens} tokens a row", f"{_tera(6 * weights * rows * tokens)} TFLOP a step"],
        "not counted": _uncounted(config, shape, weights, rows, tokens),
    }


def _trainer_memory(weights: int, optimizer: OptimizerConfig, gradient_draws: int) -> list[str]:
    """Tensors of the size of the weights, all float32."""
    tensors = {"weights": 1, "gradients": 1, **OPTIMIZERS[optimizer.kind].memory(optimizer, gradient_draws)}
    size = weights * 4 / GIB
    total = f"{sum(tensors.values()) * size:.4g} GiB in all, float32; activations come on top"
    return [*(f"{count * size:.4g} GiB {name}" for name, count in tensors.items()), total]


def _engine_memory(config: TrainConfig, shape: Any, weights: int, rows: int, draws: int, tokens: int) -> list[str]:
    import torch

    engine = config.engine
    copies, what, most = ENGINES[engine.kind].memory(engine, draws)
    together = min(rows, most)
    cache = together * tokens * bytes_per_token(shape, getattr(torch, engine.dtype)) / GIB
    return [
        f"{copies * weights * _BYTES[engine.dtype] / GIB:.4g} GiB weights of {copies} {what}, {engine.dtype}",
        f"{cache:.4g} GiB keys and values of {together} rows of {tokens} tokens, if all were that long",
    ]


def _uncounted(config: TrainConfig | SFTConfig, shape: Any, weights: int, rows: int, length: int) -> list[str]:
    """The compute that the paper's count leaves out, for rows of `length` tokens."""
    text = shape.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    rollouts, draws, old = 0, 1, False
    if isinstance(config, TrainConfig):
        rollouts, draws, old = 1, config.method.gradient_draws, config.objective.mini_batches > 1
    recomputed = config.model.gradient_checkpointing
    # Each token attends to all before it, half a square of tokens. A backward pass costs as much as two forward passes.
    attention = 2 * length**2 * width * text.num_hidden_layers * rows * (rollouts + draws * (3 + old + recomputed))
    forward = _tera(2 * weights * rows * length * draws)
    return [
        f"{_tera(attention)} TFLOP of attention between tokens, if no window bounds it",
        *([f"{forward} TFLOP for log-probs before the first of several updates"] if old else []),
        *([f"{forward} TFLOP to recompute activations"] if recomputed else []),
    ]


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.4g}" if flops < 1e15 else f"{flops / 1e12:,.0f}"
