"""Memory and compute of a run, from its recipe and the shape of its model; loads no weights and writes nothing.

FLOPs follow the paper's count (appendix on compute): per weight and token, two forward and six forward and backward.
What that count leaves out is listed next to it. Legend: W weights, P prompts a step, G completions of a prompt over all
draws, N draws that generate, K draws at which the gradient of every row is taken.

On several ranks memory is that of each, one GPU (rank_memory.py), and a model says how long a step may take
(step_time.py).
"""

from typing import Any

import torch

from threepo.config import SFTConfig, TrainConfig
from threepo.config.recipes import model_to_come
from threepo.errors import UserError
from threepo.models.adapters import adapter_folder
from threepo.models.loading import Shape, model_shape
from threepo.models.packing import GPU_TOKENS
from threepo.objectives.policy_loss import scored_first
from threepo.rollout.engines import ENGINES
from threepo.rollout.memory import GIB, bytes_per_token
from threepo.training.optimizers import OPTIMIZERS
from threepo.training.rank_memory import passing, rank_memory
from threepo.training.step_time import ASSUMED, Work, step_times

UNKNOWN = 512
"""Tokens of a prompt, or of a demonstration, where nothing bounds them."""
_BYTES = {"float32": 4, "bfloat16": 2}
GPUS = {"H100": 79, "H200": 140}
"""GiB of memory of GPUs."""
CARDS = {"24 GB": 23, "48 GB": 44, "80 GB": 79}
"""GiB that a process finds on GPUs that are sold as such."""


def step_flops(weights: float, read: float, decoded: float, trained: float, frozen: bool = False) -> dict[str, float]:
    """Operations of one RLVR step by what they are for; the paper's table has their sum.

    Tokens: those of prompts, `read` once for each draw, which shares them among its completions; those `decoded`; and
    those of prompts and completions that are `trained` on, once for each draw at which their gradient is taken.
    `frozen`: no gradients of the weights are made, which saves two operations of six, and adapters count nothing.
    """
    forward, passes = 2 * weights, 2 if frozen else 3
    return {"to read prompts": forward * read, "to decode": forward * decoded, "to train": passes * forward * trained}


Plan = dict[str, list[str]]
"""Lines by their label."""


def plan(config: TrainConfig | SFTConfig, prompt_tokens: int = 0, response_tokens: int = 0, ranks: int = 1) -> Plan:
    """What the run would load, hold in memory and compute.

    `prompt_tokens` and `response_tokens` are means; 0 stands for the longest that the recipe allows.
    """
    config.parallel.shards(ranks)  # refuse first
    model, path = model_to_come(config.model), config.model.path
    found = model_shape(model)
    if adapter_folder(model.path) and not found.adapters:
        raise UserError(f"model.path = {model.path!r}: holds adapters; set model.lora.rank to theirs, or merge them")
    weights = found.weights
    lines = [f"{path}: {weights:,} weights"]
    if found.adapters:
        if ranks > 1:
            raise UserError("model.lora: the memory of adapters is computed for one process only; leave the ranks out")
        lines += [f"adapters of {found.adapters:,} numbers, of which {found.trained:,} are trained; the rest is frozen"]
    if model.path != path:
        lines.append(f"{path} is not there yet; its run begins with {model.path}, of the same shape")
    if isinstance(config, SFTConfig):
        return {"model": lines} | _fine_tuning(config, found, prompt_tokens + response_tokens, ranks)
    return {"model": lines} | _reinforcement(config, found, prompt_tokens, response_tokens, ranks)


def _reinforcement(config: TrainConfig, model: Shape, prompt_tokens: int, response_tokens: int, ranks: int) -> Plan:
    data, method, engine = config.data, config.method, config.engine
    shape, weights = model.config, model.weights
    draws = max(method.draws, 1)
    gradient_draws = {"generator": draws, "fresh": method.gradient_draws}.get(method.gradient_at, 0)
    passes = 0 if method.gradient_at == "evolution" else method.gradient_draws
    longest_prompt, longest = data.max_prompt_tokens or UNKNOWN, config.sampling.max_new_tokens
    prompt_tokens, response_tokens = prompt_tokens or longest_prompt, response_tokens or longest
    prompts, rollouts = data.prompts_per_step, method.rollouts_per_prompt
    rows = prompts * rollouts
    flops = step_flops(
        weights,
        read=prompts * draws * prompt_tokens,
        decoded=rows * response_tokens,
        trained=rows * passes * (prompt_tokens + response_tokens),
        frozen=model.adapters > 0,
    )
    served = model.served(engine)
    mean = served if model.pushed(engine) and not model.adapters else 0  # adapters' own W was pushed at the start
    copied = (draws * (model.pushed(engine) or served) + mean) * _BYTES[engine.dtype] / GIB
    if ranks == 1:
        tokens = (rows, longest_prompt + longest) if passes else (0, 0)
        trainer, most = _trainer_memory(config, model, gradient_draws, tokens)
        generator, copy = _engine_memory(config, model, rows, draws, prompt_tokens + longest)
        memory = {"trainer": trainer, "engine": generator, "one GPU": _cards(config, most, copy)}
        if engine.kind == "local":
            copied = copy  # every load writes all that it has
        else:
            memory["time"] = _time(config, model, rows, prompt_tokens, response_tokens, 1)
    else:
        tokens = (rows * (prompt_tokens + response_tokens), longest_prompt + longest) if passes else (0, 0)
        trainer, most = _each_rank(config, model, gradient_draws, tokens, ranks)
        each = config.engine.vllm.tensor_parallel
        if ranks % each:
            raise UserError(f"engine.vllm.tensor_parallel = {each}: must divide the number of ranks, {ranks}")
        own = -(-rows * each // ranks), -(-draws // ranks)
        memory = {
            "each GPU": [*trainer, *_before(config, shape, weights)],
            "its engine": _replica(config, model, *own, prompt_tokens + longest, most),
            "time": _time(config, model, rows, prompt_tokens, response_tokens, ranks),
        }
    return {
        "data": [f"{data.train}, rewarded by {', '.join(config.reward.names)}"],
        "method": [f"{method.name}: {method.draws} draws, gradient at {method.gradient_at}, {config.optimizer.kind}"],
        "a step": [f"{prompts} prompts x {rollouts} completions = {rows} rows", *_dynamic(config)],
        **memory,
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


def _dynamic(config: TrainConfig) -> list[str]:
    """What the rollouts of a step can grow to with dynamic sampling."""
    rounds, each = config.sampling.dynamic_rounds, config.sampling.prompts_per_round or config.data.prompts_per_step
    return [f"dynamic sampling may answer up to {rounds * each} prompts for them"] if rounds else []


def _fine_tuning(config: SFTConfig, model: Shape, tokens: int, ranks: int) -> Plan:
    shape, weights = model.config, model.weights
    if config.conversations:
        rows, what, most = config.conversations.batch_size, "conversations", config.conversations.max_tokens
    else:
        assert config.demonstrations is not None, "a recipe has demonstrations or conversations"
        rows, what, most = config.demonstrations.batch_size, "demonstrations", UNKNOWN
    tokens = tokens or most
    if ranks == 1:
        memory, _ = _trainer_memory(config, model, 1, (rows, most))
    else:
        memory, _ = _each_rank(config, model, 1, (rows * tokens, most), ranks)
    return {
        "a step": [f"{rows} {what}"],
        "trainer" if ranks == 1 else "each GPU": memory,
        "compute": [
            f"{tokens} tokens a row",
            f"{_tera((4 if model.adapters else 6) * weights * rows * tokens)} TFLOP a step",
        ],
        "not counted": _uncounted(config, shape, weights, rows, tokens),
    }


def _tensors(config: TrainConfig | SFTConfig, gradient_draws: int) -> dict[str, int]:
    """What training holds of every weight: by label, how many float32 tensors of their size."""
    optimizer = config.optimizer
    compared = isinstance(config, TrainConfig) and config.objective.reference_kl
    moved = isinstance(config, TrainConfig) and config.method.gradient_at == "evolution" and optimizer.kind == "sgd"
    held = {"weights": 1} | ({} if moved else {"gradients": 1})  # else each parameter is moved at once
    held |= {"weights of the reference": 1} if compared else {}
    if isinstance(config, TrainConfig) and optimizer.kind != "ivon" and gradient_draws > 1:
        divided = config.method.gradient_at == "fresh" or config.method.normalize == "part"
        held |= {"sums over gradient draws": 1} if divided else {}
    return held | OPTIMIZERS[optimizer.kind].memory(optimizer, gradient_draws)


def _trainer_memory(
    config: TrainConfig | SFTConfig, model: Shape, gradient_draws: int, rows: tuple[int, int]
) -> tuple[list[str], float]:
    """Memory of one process, and the most that it takes of a GPU, in GiB.

    `rows`: those of a step, and tokens of the longest.
    """
    whole = model.weights + model.adapters - model.rounded * (1 - model.rounded_bytes / 4)  # as many float32 numbers
    held = {
        name: count * (whole if name == "weights" else model.trained) * 4 / GIB
        for name, count in _tensors(config, gradient_draws).items()
    }
    dtype, recomputed = getattr(torch, config.model.compute_dtype), config.model.gradient_checkpointing
    everything, longest = rows
    micro = min(everything, max((config.batching.tokens or GPU_TOKENS) // max(longest, 1), 1))
    base, most = config.model.lora.base_dtype, sum(held.values())
    lines = [
        *(f"{gib:.4g} GiB {name}" for name, gib in held.items()),
        f"{most:.4g} GiB in all, {f'float32 and {base}' if model.rounded else 'float32'}",
    ]
    try:
        passes = passing(model.model, micro, longest, dtype, recomputed, base) / GIB if micro else 0.0
    except UserError:
        raise
    except Exception as error:  # its own code may raise anything, such as for tensors without memory
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return [*lines, f"activations come on top, which cannot be counted for this model ({reason})"], most
    most += passes
    lines += [
        f"{passes:.4g} GiB of activations and gradients on their way, with micro-batches of {micro} x {longest} tokens",
        f"{most:.4g} GiB at most of a GPU while it trains with{'' if recomputed else 'out'} gradient checkpointing",
    ]
    return lines, most


def _each_rank(
    config: TrainConfig | SFTConfig, model: Shape, gradient_draws: int, tokens: tuple[int, int], ranks: int
) -> tuple[list[str], float]:
    """Memory of a rank's training, and the most that it takes of a GPU, in GiB.

    `tokens`: of all rows of a step, and of the longest.
    """
    (everything, longest), offload = tokens, config.parallel.offload
    micro = max(min(config.batching.tokens or GPU_TOKENS, -(-everything // ranks)), longest)
    recomputed, shards = config.model.gradient_checkpointing, config.parallel.shards(ranks)
    dtype = getattr(torch, config.model.compute_dtype)
    found = rank_memory(model.config, model.weights, _tensors(config, gradient_draws), shards, micro, dtype)
    memory = found[recomputed]
    most, otherwise = ((sum(m.worst.values()) if offload else m.peak) / GIB for m in (memory, found[not recomputed]))
    where = "in the memory of its CPU" if offload else "float32"
    held = sum(memory.held.values()) / GIB
    moment = next(name for name, found in memory.moments.items() if found is memory.worst)
    lines = [
        f"{ranks} ranks, each with 1/{shards} of the weights; micro-batches of {micro} tokens",
        *(f"{size / GIB:.4g} GiB {label}" for label, size in memory.held.items()),
        f"{held:.4g} GiB of these in all, {where}; for the {moment}:",
        *(f"{size / GIB:.4g} GiB {label}" for label, size in memory.worst.items() if size),
        f"{most:.4g} GiB at most of a GPU while it trains ({otherwise:.4g} with{'out' if recomputed else ''} "
        f"gradient checkpointing)",
    ]
    return lines, most


def _before(config: TrainConfig, shape: Any, weights: int) -> list[str]:
    """What a rank's GPU holds besides its shards before it trains: of the largest parameter, and of the probe."""
    text, engine = shape.get_text_config(), config.engine
    # Mean, Hessian and the result, float32.
    gathered = (3 if config.method.draws else 1) * 4 * text.vocab_size * text.hidden_size / GIB
    lines = [f"{gathered:.4g} GiB before, while the weights of a draw are made"]
    if engine.kind == "vllm":
        probe = weights * _BYTES[engine.dtype] / GIB
        lines.append(f"{probe:.4g} GiB after that, while the probe runs on all of them, {engine.dtype}")
    return lines


def _replica(config: TrainConfig, model: Shape, rows: int, draws: int, tokens: int, trains: float) -> list[str]:
    """Memory of the engine of a rank that decodes so many rows of so many draws, beside training with `trains` GiB."""
    if config.engine.kind != "vllm":
        return _engine_memory(config, model, rows, draws, tokens)[0]
    each = config.engine.vllm.tensor_parallel
    copy = model.served(config.engine) * _BYTES[config.engine.dtype] / each / GIB
    a_token = bytes_per_token(model.config, getattr(torch, config.engine.dtype)) / each
    needed = min(rows, config.engine.max_batch_rows) * tokens * a_token / GIB
    lines = [
        f"{copy:.4g} GiB weights of a replica{f' on {each} GPUs' if each > 1 else ''}, {config.engine.dtype}",
        f"{needed:.4g} GiB keys and values of {rows} rows of {tokens} tokens, if all were that long",
    ]
    for gpu, size in GPUS.items():
        left = size - trains - copy
        share = f"engine.vllm.gpu_memory_utilization at most {(size - trains) / size:.2f}"
        said = f"{left:.4g} GiB left for keys and values; {share}" if left > 0 else f"{-left:.4g} GiB too much"
        lines.append(f"{gpu} ({size} GiB): {said}")
    return lines


def _time(
    config: TrainConfig, model: Shape, rows: int, prompt_tokens: int, response_tokens: int, ranks: int
) -> list[str]:
    """A step's time by a model."""
    method, pushed = config.method, model.pushed(config.engine)
    draws = 1 if pushed else max(config.method.draws, 1)  # adapters share a batch
    passes = (2 if model.adapters else 3) + config.model.gradient_checkpointing + scored_first(config.objective)
    work = Work(
        weights=model.weights,
        cache=bytes_per_token(model.config, torch.bfloat16),
        prompts=config.data.prompts_per_step,
        rows=rows,
        draws=draws,
        prompt=prompt_tokens,
        response=response_tokens,
        longest=config.sampling.max_new_tokens,
        operations=2.0 * (passes * method.gradient_draws + (config.objective.reference_kl > 0)),
        gpus=config.engine.vllm.tensor_parallel,
    )
    times = step_times(work, ranks)
    grpo = times["GRPO"]
    parts = (
        f"generation {grpo.generation:.3g}, update {grpo.update:.3g}, weights {grpo.pushes:.2g}, other {grpo.rest:g}"
    )
    lines = ["by a model, not measured", f"{grpo.total:.3g} s a step with all rows at the mean (GRPO): {parts}"]
    ways = {"own": "with a draw for every replica", "in turn": "with draws in turn on all replicas"}
    for name, what in ways.items():
        if draws > 1 and (name == "in turn" or ranks > work.gpus):
            lines.append(f"{times[name].total:.3g} s, {times[name].total / grpo.total:.2f} times as long, {what}")
    if pushed and method.draws > 1:
        lines.append(f"about as long with {method.draws} draws as adapters in one batch")
    spread = "all as long as the longest" if response_tokens >= work.longest else "spread as usual (log-normal)"
    return [*lines, f"assumed: responses {spread}; {ASSUMED}"]


def _cards(config: TrainConfig, trains: float, copy: float) -> list[str]:
    """What GPUs of usual sizes have left beside training with `trains` GiB and `copy` GiB of an engine's weights."""
    lines = []
    for card, size in CARDS.items():
        left = size - trains - copy
        share = f"; engine.vllm.gpu_memory_utilization at most {(size - trains) / size:.2f}"
        said = f"{left:.3g} GiB left for keys and values{share if config.engine.kind == 'vllm' else ''}"
        lines.append(f"{card}: {said if left > 0 else f'{-left:.3g} GiB too much'}")
    return lines


def _engine_memory(config: TrainConfig, model: Shape, rows: int, draws: int, tokens: int) -> tuple[list[str], float]:
    """Lines, and the GiB of weights in them."""
    engine, shape = config.engine, model.config
    copies, what, most = ENGINES[engine.kind].memory(engine, draws)
    held, named = copies * model.served(engine), f"weights of {copies} {what}"
    if model.adapters and engine.kind == "local":
        held = model.weights + model.adapters - model.trained + copies * model.trained
        named = f"frozen weights and adapters of {copies} {what}"
        if config.model.lora.base_dtype in (engine.dtype, "nf4") and model.rounded:
            held -= model.rounded
            named += ", without those of the trainer"
    elif model.pushed(engine):
        held = copies * (model.served(engine) + engine.vllm.adapters * model.pushed(engine))
        what_of = "frozen weights" if model.adapters else "the mean"
        named = f"{what_of} of {copies} {what}, and for each up to {engine.vllm.adapters} adapters"
    together = min(rows, most)
    cache = together * tokens * bytes_per_token(shape, getattr(torch, engine.dtype)) / GIB
    gib = held * _BYTES[engine.dtype] / GIB
    lines = [
        f"{gib:.4g} GiB {named}, {engine.dtype}",
        f"{cache:.4g} GiB keys and values of {together} rows of {tokens} tokens, if all were that long",
    ]
    return lines, gib


def _uncounted(config: TrainConfig | SFTConfig, shape: Any, weights: int, rows: int, length: int) -> list[str]:
    """The compute that the paper's count leaves out, for rows of `length` tokens."""
    text = shape.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    rollouts, draws, old, compared = 0, 1, False, False
    if isinstance(config, TrainConfig):
        evolves = config.method.gradient_at == "evolution"
        rollouts, draws = 1, 0 if evolves else config.method.gradient_draws
        old = scored_first(config.objective)
        compared = config.objective.reference_kl > 0
    recomputed = config.model.gradient_checkpointing
    # Each token attends to all before it, half a square of tokens. A backward pass costs as much as two forward passes.
    passes = rollouts + compared + draws * (3 + old + recomputed)
    attention = 2 * length**2 * width * text.num_hidden_layers * rows * passes
    once = 2 * weights * rows * length
    forward = _tera(once * draws)
    return [
        f"{_tera(attention)} TFLOP of attention between tokens, if no window bounds it",
        *([f"{forward} TFLOP for log-probs before the update"] if old else []),
        *([f"{_tera(once)} TFLOP for log-probs of the reference"] if compared else []),
        *([f"{forward} TFLOP to recompute activations"] if recomputed and draws else []),
    ]


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.4g}" if flops < 1e15 else f"{flops / 1e12:,.0f}"
