"""Memory and compute of a run, from its recipe, the shape of its model and data on this machine; loads no weights.

FLOPs follow the paper's count (flops.py). What that count leaves out is listed next to it. Legend: W weights, P prompts
a step, G completions of a prompt over all draws, N draws that generate, K draws at which the gradient of every row is
taken.

On several ranks memory is given for one rank, with one GPU (rank_memory.py).
"""

import math
from typing import Any

import torch

from threepo.config import EngineConfig, SFTConfig, TrainConfig, VLLMEngineConfig
from threepo.config.recipes import model_to_come
from threepo.config.sources import is_local, is_source, split_source
from threepo.data.finite import FiniteProblems
from threepo.data.installed import installed_source
from threepo.data.published import PUBLISHED
from threepo.data.source import open_training, split_copy
from threepo.errors import UserError
from threepo.lab.rank_memory import passing, rank_memory
from threepo.models.adapters import adapter_folder
from threepo.models.loading import Shape, model_shape
from threepo.models.packing import GPU_TOKENS
from threepo.objectives.policy_loss import scored_first
from threepo.rollout.memory import GIB, bytes_per_token
from threepo.training.flops import step_flops

UNKNOWN = 512
"""Tokens of a prompt, or of a demonstration, where nothing bounds them."""
_BYTES = {"float32": 4, "bfloat16": 2}
GPUS = {"H100 (79 GiB)": 79, "H200 (140 GiB)": 140}
"""GiB of memory of the GPUs of a rank."""
CARDS = {"24 GB": 23, "48 GB": 44, "80 GB": 79}
"""GiB that a process finds on GPUs that are sold as such."""
RESTING = ("weights", "weights of the reference", "momentum and Hessian", "AdamW's moments")
"""Labels of the tensors that training keeps between two updates, while the next draws are made."""


Plan = dict[str, list[str]]
"""Lines by their label."""


def plan(config: TrainConfig | SFTConfig, prompt_tokens: int = 0, response_tokens: int = 0, ranks: int = 1) -> Plan:
    """Plan of a run: what it would load, hold in memory and compute.

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
    data, method = config.data, config.method
    draws = max(method.draws, 1)
    gradient_draws = {"generator": draws, "fresh": method.gradient_draws}.get(method.gradient_at, 0)
    passes = 0 if method.gradient_at == "evolution" else method.gradient_draws
    longest_prompt, longest = data.max_prompt_tokens or UNKNOWN, config.sampling.max_new_tokens
    prompt, prompt_line = _tokens(prompt_tokens, data.max_prompt_tokens, "prompt", "data.max_prompt_tokens")
    response, response_line = _tokens(response_tokens, longest, "response", "sampling.max_new_tokens")
    prompts, rollouts = data.prompts_per_step, method.rollouts_per_prompt
    rows = prompts * rollouts
    flops = step_flops(
        model.weights,
        read=prompts * draws * prompt,
        decoded=rows * response,
        trained=rows * passes * (prompt + response),
        frozen=model.adapters > 0,
    )
    generator, copy = _engine_memory(config, model, rows, prompt + longest, ranks)
    if ranks == 1:
        step = (rows, longest_prompt + longest) if passes else (0, 0)
        trainer, most = _trainer_memory(config, model, gradient_draws, step)
        memory = {"trainer": trainer, "engine": generator, "one GPU": _cards(config, CARDS, most, copy)}
    else:
        step = (rows * (prompt + response), longest_prompt + longest) if passes else (0, 0)
        trainer, most = _each_rank(config, model, gradient_draws, step, ranks)
        memory = {"each GPU": trainer, "its engine": [*generator, *_cards(config, GPUS, most, copy)]}
    return {
        "data": [f"{data.train}, rewarded by {', '.join(config.reward.names)}", _supply(config)],
        "method": [f"{method.name}: {method.draws} draws, gradient at {method.gradient_at}, {config.optimizer.kind}"],
        "a step": [f"{prompts} prompts x {rollouts} completions = {rows} rows", *_dynamic(config)],
        **memory,
        "compute": [
            prompt_line,
            response_line,
            *(f"{_tera(count)} TFLOP {purpose}" for purpose, count in flops.items()),
            f"{_tera(sum(flops.values()))} TFLOP a step, as the paper counts",
        ],
        "not counted": [
            *_uncounted(config, model.config, model.weights, rows, prompt + response),
            _push(config, model, copy, ranks),
        ],
    }


def _tokens(given: int, most: int, what: str, setting: str) -> tuple[int, str]:
    """Mean tokens of a row, and a line that says whether they are given or assumed."""
    if given:
        return given, f"{given} {what} tokens a row, as given"
    if most:
        return most, f"{most} {what} tokens a row, assumed: all as long as {setting} allows"
    return UNKNOWN, f"{UNKNOWN} {what} tokens a row, assumed: {setting} sets no limit; give the mean"


def _supply(config: TrainConfig) -> str:
    """The prompts that the run asks for, and how many the data has; data of the hub are not downloaded for it."""
    name, size, steps = config.data.train, config.data.prompts_per_step, config.run.steps
    asked = f"{steps} steps x {size} prompts = {steps * size:,}"
    published, copy = split_copy(name, PUBLISHED)
    installed = installed_source(name)
    remote = published is not None or is_source(name) or (installed is not None and not installed.endless)
    if remote and not is_local(split_source(copy if published else name)[0]):
        return f"{asked}; a plan does not load these data: `threepo data show {name}` counts them"
    problems = open_training(config.data).problems
    if not isinstance(problems, FiniteProblems):
        return f"{asked}; problems are generated without end"
    problems.batch(0, size)  # refuses fewer than a step takes
    count = len(problems.problems)
    return f"{asked}; the data have {count:,}: {steps / (count // size):.3g} epochs, if no prompt is too long"


def _dynamic(config: TrainConfig) -> list[str]:
    """Largest number of rollouts of a step with dynamic sampling."""
    rounds, each = config.sampling.dynamic_rounds, config.sampling.prompts_per_round or config.data.prompts_per_step
    return [f"dynamic sampling may answer up to {rounds * each} prompts for them"] if rounds else []


def _fine_tuning(config: SFTConfig, model: Shape, tokens: int, ranks: int) -> Plan:
    shape, weights = model.config, model.weights
    if config.conversations:
        rows, what, most = config.conversations.batch_size, "conversations", config.conversations.max_tokens
    else:
        assert config.demonstrations is not None, "a recipe has demonstrations or conversations"
        rows, what, most = config.demonstrations.batch_size, "demonstrations", UNKNOWN
    given, tokens = tokens > 0, tokens or most
    if ranks == 1:
        memory, _ = _trainer_memory(config, model, 1, (rows, most))
    else:
        memory, _ = _each_rank(config, model, 1, (rows * tokens, most), ranks)
    return {
        "a step": [f"{rows} {what}"],
        "trainer" if ranks == 1 else "each GPU": memory,
        "compute": [
            f"{tokens} tokens a row, {'as given' if given else 'assumed'}",
            f"{_tera((4 if model.adapters else 6) * weights * rows * tokens)} TFLOP a step",
        ],
        "not counted": _uncounted(config, shape, weights, rows, tokens),
    }


def _tensors(config: TrainConfig | SFTConfig, gradient_draws: int) -> dict[str, int]:
    """Memory of training by label: how many float32 tensors of the weights' size."""
    optimizer = config.optimizer
    compared = isinstance(config, TrainConfig) and config.objective.reference_kl
    moved = isinstance(config, TrainConfig) and config.method.gradient_at == "evolution" and optimizer.kind == "sgd"
    held = {"weights": 1} | ({} if moved else {"gradients": 1})  # else each parameter is moved at once
    held |= {"weights of the reference": 1} if compared else {}
    if isinstance(config, TrainConfig) and optimizer.kind != "ivon" and gradient_draws > 1:
        divided = config.method.gradient_at == "fresh" or config.method.normalize == "part"
        held |= {"sums over gradient draws": 1} if divided else {}
    return held | optimizer.memory(gradient_draws)


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
    probed = [(_resting(held) + probe, words) for probe, words in _probe(config, model)]
    lines = [
        *(f"{gib:.4g} GiB {name}" for name, gib in held.items()),
        f"{most:.4g} GiB in all, {f'float32 and {base}' if model.rounded else 'float32'}",
        *(f"{gib:.4g} GiB before, {words}" for gib, words in probed),
    ]
    try:
        passes = passing(model.model, micro, longest, dtype, recomputed, base) / GIB if micro else 0.0
    except UserError:
        raise
    except Exception as error:  # its own code may raise anything, such as for tensors without memory
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        lines.append(f"activations come on top, which cannot be counted for this model ({reason})")
        return lines, max(most, *(gib for gib, _ in probed), 0.0)
    most += passes
    lines += [
        f"{passes:.4g} GiB of activations and gradients on their way, with micro-batches of {micro} x {longest} tokens",
        f"{most:.4g} GiB at most of a GPU while it trains with{'' if recomputed else 'out'} gradient checkpointing",
    ]
    return lines, max(most, *(gib for gib, _ in probed), 0.0)


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
    before = _gathered(config, model.config) + _probe(config, model)
    resting = 0.0 if offload else _resting(memory.held) / GIB
    lines = [
        f"{ranks} ranks, each with 1/{shards} of the weights; micro-batches of {micro} tokens",
        *(f"{size / GIB:.4g} GiB {label}" for label, size in memory.held.items()),
        f"{held:.4g} GiB of these in all, {where}; for the {moment}:",
        *(f"{size / GIB:.4g} GiB {label}" for label, size in memory.worst.items() if size),
        f"{most:.4g} GiB at most of a GPU while it trains ({otherwise:.4g} with{'out' if recomputed else ''} "
        f"gradient checkpointing)",
        *(f"{resting + gib:.4g} GiB before, {words}" for gib, words in before),
    ]
    return lines, max(most, *(resting + gib for gib, _ in before), 0.0)


def _resting(held: dict[str, float]) -> float:
    """Memory that training keeps between two updates."""
    return sum(size for label, size in held.items() if label in RESTING)


def _gathered(config: TrainConfig | SFTConfig, shape: Any) -> list[tuple[float, str]]:
    """GiB that a rank holds for a moment of the largest parameter, to make its weights of a draw."""
    if not isinstance(config, TrainConfig):
        return []
    text = shape.get_text_config()
    # Mean, Hessian and the result, float32.
    size = (3 if config.method.draws else 1) * 4 * text.vocab_size * text.hidden_size
    return [(size / GIB, "while the weights of a draw are made")]


def _probe(config: TrainConfig | SFTConfig, model: Shape) -> list[tuple[float, str]]:
    """GiB that the probe of a push holds on the trainer's GPU: weights of a draw (`rollout.probe`)."""
    if not isinstance(config, TrainConfig) or config.engine.kind != "vllm":
        return []
    whole = not (model.adapters and model.pushed(config.engine))  # draws of adapters go through the trainer's weights
    size = (model.weights if whole else model.adapters) * _BYTES[config.engine.dtype]
    what = "all weights" if whole else "the adapters"
    return [(size / GIB, f"while the probe runs with {what} of a draw in {config.engine.dtype}")]


def _cards(config: TrainConfig, cards: dict[str, int], most: float, copy: float) -> list[str]:
    """Memory that GPUs have left beside a trainer that takes `most` GiB, and `copy` GiB of an engine's weights."""
    lines, shared = [], config.engine.kind == "vllm" and not config.engine.servers
    for card, size in cards.items():
        left, share = size - most - copy, math.floor(100 * (size - most) / size) / 100
        most_share = f"; engine.vllm.gpu_memory_utilization at most {share:.2f}" if shared else ""
        said = f"{left:.3g} GiB left for keys and values{most_share}"
        lines.append(f"{card}: {said if left > 0 else f'{-left:.3g} GiB too much'}")
    return lines


def _engines(engine: EngineConfig, ranks: int) -> int:
    """Number of engines, replicas or servers that share the draws of a step."""
    each = engine.tensor_parallel
    if ranks % each and ranks > 1:
        raise UserError(f"engine.vllm.tensor_parallel = {each}: must divide the number of ranks, {ranks}")
    replicas = engine.vllm.replicas if isinstance(engine, VLLMEngineConfig) else 1
    return len(engine.servers) or (ranks // each if ranks > 1 else replicas)


def _engine_memory(config: TrainConfig, model: Shape, rows: int, tokens: int, ranks: int) -> tuple[list[str], float]:
    """Lines on the engine that has most to do, and the GiB of weights that it holds on the trainer's GPU."""
    engine, draws, each = config.engine, max(config.method.draws, 1), config.engine.tensor_parallel
    count = _engines(engine, ranks)
    spread = ranks > 1 or bool(engine.servers)  # then engines that have no draw of their own share one
    turns = -(-draws // count)
    busiest = turns * -(-rows // (draws * (max(count // draws, 1) if spread else 1)))
    copies, what = engine.copies(turns)
    held, named = copies * model.served(engine), f"weights of {copies} {what}{'s' if copies > 1 else ''}"
    if model.adapters and engine.kind == "local":
        held = model.weights + model.adapters - model.trained + copies * model.trained
        named = f"frozen weights and adapters of {copies} {what}s"
        if config.model.lora.base_dtype in (engine.dtype, "nf4") and model.rounded:
            held -= model.rounded
            named += ", without those of the trainer"
    elif pushed := model.pushed(engine):
        held += copies * engine.adapters * pushed
        beside = "frozen weights" if model.adapters else "the mean"
        named = f"{beside} of {copies} {what}, and up to {engine.adapters} adapters"
    together = min(busiest, engine.max_batch_rows)
    gib = held * _BYTES[engine.dtype] / each / GIB
    cache = together * tokens * bytes_per_token(model.config, getattr(torch, engine.dtype)) / each / GIB
    lines = [
        f"{gib:.4g} GiB {named}{f' on {each} GPUs' if each > 1 else ''}, {engine.dtype}",
        f"{cache:.4g} GiB keys and values of {together} rows of {tokens} tokens, if all were that long",
    ]
    if engine.kind == "vllm" and draws > 1:
        rounds = -(-turns // engine.adapters) if model.pushed(engine) else turns
        longer = max(rounds, busiest / -(-rows // count) if spread else 1)
        how = "in turn" if rounds > 1 else "in one batch" if turns > 1 else "at the same time"
        ratio = f"up to {longer:.3g} times as long as" if longer > 1 else "about as long as"
        plural = "s" if count > 1 else ""
        lines.append(f"{draws} draws {how} on {count} {what}{plural}: decoding takes {ratio} with one draw")
    return lines, 0.0 if engine.servers else gib


def _push(config: TrainConfig, model: Shape, copy: float, ranks: int) -> str:
    """The weights that a step hands to an engine, which holds `copy` GiB."""
    engine, draws = config.engine, max(config.method.draws, 1)
    if engine.kind == "local":
        return f"{copy:.4g} GiB of weights written into the engine"  # every load writes all that it has
    if engine.servers:
        size = model.weights * (8 if config.method.draws and config.optimizer.kind == "ivon" else 4)
        return f"{size / GIB:.4g} GiB of mean and Hessian written to engine.vllm.weights_folder"
    served, pushed = model.served(engine), model.pushed(engine)
    mean = served if pushed and not model.adapters else 0  # the frozen weights of adapters were pushed at the start
    turns = -(-draws // _engines(engine, ranks)) if ranks > 1 else draws
    size = (turns * (pushed or served) + mean) * _BYTES[engine.dtype]
    path = "copied to the CPU, summed, read by the probe and by vLLM, and summed again"
    return f"{size / GIB:.4g} GiB of weights pushed into {'each replica of ' if ranks > 1 else ''}vLLM: {path}"


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
