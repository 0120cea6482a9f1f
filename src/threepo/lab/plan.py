"""Memory and compute of a run, from its recipe and the shape of its model; loads no weights.

Memory is given for one process, or for each of several ranks, with a GPU each. FSDP2 shards a model by its layers and
the rest (embedding, last norm, head), and gathers each of these for its part of a pass.
"""

import logging
import math

import torch

from threepo.config import SFTConfig, TrainConfig
from threepo.config.recipes import model_to_come
from threepo.errors import UserError
from threepo.lab.activations import activation_bytes
from threepo.models.adapters import adapter_folder
from threepo.models.four_bit import BYTES
from threepo.models.loading import Shape, model_shape
from threepo.models.packing import GPU_TOKENS
from threepo.rewards.grading import refuse_missing
from threepo.rollout.memory import GIB, bytes_per_token, layers_without_keys
from threepo.training.metrics import step_flops

UNKNOWN = 512
"""Tokens of a prompt, or of a demonstration, where nothing bounds them."""
GPUS = {"24 GB": 23, "48 GB": 44, "80 GB": 79, "141 GB": 140}
"""GiB that a process finds on GPUs that are sold as such."""
RESTING = ("weights", "weights of the reference", "momentum and Hessian", "AdamW's moments")
"""Labels of the tensors that training keeps between two updates, while the next draws are made."""
Plan = dict[str, list[str]]
"""Lines of the plan by their label."""


def plan(config: TrainConfig | SFTConfig, prompt_tokens: int = 0, response_tokens: int = 0, ranks: int = 1) -> Plan:
    """Plan of a run: what it would hold in memory and compute.

    `prompt_tokens` and `response_tokens` are means; 0 stands for the longest that the recipe allows.
    """
    config.parallel.shards(ranks)  # refuse first
    settings = model_to_come(config.model)
    model = model_shape(settings)
    if adapter_folder(settings.path) and not model.adapters:
        raise UserError(f"model.path = {settings.path!r}: holds adapters; set model.lora.rank to theirs, or merge them")
    if config.parallel.offload:
        config.model.lora.only_if(False, "is for one process that does not offload; remove it", "base_dtype")
    if model.adapters and ranks > 1:
        raise UserError("model.lora: the memory of adapters is computed for one process only; leave the ranks out")
    lines = [f"{config.model.path}: {model.weights:,} weights"]
    if model.adapters:
        lines += [f"adapters of {model.adapters:,} numbers, of which {model.trained:,} are trained; the rest is frozen"]
    if isinstance(config, SFTConfig):
        return {"model": lines} | _fine_tuning(config, model, prompt_tokens + response_tokens, ranks)
    return {"model": lines} | _reinforcement(config, model, prompt_tokens, response_tokens, ranks)


def _reinforcement(config: TrainConfig, model: Shape, prompt_tokens: int, response_tokens: int, ranks: int) -> Plan:
    refuse_missing(config.reward)
    data, method = config.data, config.method
    most, limit = config.sampling.max_new_tokens, "sampling.max_new_tokens"
    if config.environment.factory:
        most, limit = config.environment.max_tokens, "environment.max_tokens"
    longest_prompt = data.max_prompt_tokens or min(UNKNOWN, max(_context(model) - most, 1))
    prompt, response = prompt_tokens or longest_prompt, response_tokens or most
    if response > most:
        fix = f"must be at most {limit} = {most}, where responses are cut; lower it, or raise that one"
        raise UserError(f"--response-tokens {response}: {fix}")
    prompts, draws = data.prompts_per_step, max(method.draws, 1)
    rows = prompts * method.rollouts_per_prompt
    backward_rows = rows if method.passes else 0
    trainer, training, between = _trainer_memory(config, model, backward_rows, longest_prompt + most, ranks)
    engine, engine_gib = _engine_memory(config, model, rows, prompt + most, ranks)
    tokens, frozen = rows * (prompt + response), model.adapters > 0
    flops = step_flops(model.weights, draws * prompts * prompt, rows * response, method.passes * tokens, frozen)
    grpo_flops = step_flops(model.weights, prompts * prompt, rows * response, tokens, frozen)
    return {
        "a step": [f"{prompts} prompts x {method.rollouts_per_prompt} completions = {rows} rows"],
        "trainer": trainer,
        "engine": engine,
        "each GPU": _left_on_gpus(config, training, between, engine_gib),
        "compute": [
            f"{_tera(flops)} TFLOP a step, {flops / grpo_flops:.4g} times GRPO's, without attention between tokens",
            f"for {prompt} prompt and {response} response tokens a row{_assumed(prompt_tokens and response_tokens)}",
        ],
    }


def _fine_tuning(config: SFTConfig, model: Shape, tokens: int, ranks: int) -> Plan:
    if config.conversations:
        rows, what, longest = config.conversations.batch_size, "conversations", config.conversations.max_tokens
    else:
        assert config.demonstrations is not None, "a recipe has demonstrations or conversations"
        rows, what, longest = config.demonstrations.batch_size, "demonstrations", UNKNOWN
    longest = min(longest, _context(model))
    mean = tokens or longest
    trainer, *_ = _trainer_memory(config, model, rows, longest, ranks)
    flops = step_flops(model.weights, read=0, decoded=0, trained=rows * mean, frozen=model.adapters > 0)
    return {
        "a step": [f"{rows} {what}"],
        "trainer": trainer,
        "compute": [
            f"{_tera(flops)} TFLOP a step, without attention between tokens",
            f"for {mean} tokens a row{_assumed(tokens)}",
        ],
    }


def _context(model: Shape) -> int:
    """The most tokens that the model reads."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))


def _assumed(given: int) -> str:
    return "" if given else ", assumed: give means by --prompt-tokens and --response-tokens"


def _trainer_memory(
    config: TrainConfig | SFTConfig, model: Shape, rows: int, longest: int, ranks: int
) -> tuple[list[str], float, float]:
    """Memory of training in one process or rank: the lines, and the most that it takes of a GPU while it trains and
    between two updates, in GiB.

    `rows`: rows of a step that have a backward pass, of up to `longest` tokens.
    """
    shards, offload = config.parallel.shards(ranks), config.parallel.offload
    held = _held(config, model, shards)
    total = sum(held.values())
    lines = [f"{ranks} ranks, each with 1/{shards} of the weights"] if ranks > 1 else []
    lines += [f"{gib:.4g} GiB {label}" for label, gib in held.items()]
    lines.append(f"{total:.4g} GiB in all{', in the memory of its CPU' if offload else ''}")
    if offload:
        sizes = [4 * -(-p.numel() // shards) for p in model.model.parameters()]
        more = 2 * sum((1 << (size - 1).bit_length()) - size for size in sizes) / GIB  # of weights and gradients
        lines.append(f"{more:.4g} GiB more there with a GPU, as torch rounds pinned memory up to powers of two")
    on_gpu = {} if offload else held
    between, training = 0.0, sum(on_gpu.values())
    if isinstance(config, TrainConfig) and config.engine.kind == "vllm":
        resting = sum(gib for label, gib in on_gpu.items() if label in RESTING)
        between = resting + _checked_bytes(config, model, shards) / GIB
        lines.append(f"{between:.4g} GiB between two updates, while a draw for the engine is checked")
    micro = min(-(-rows // ranks), max((config.batching.tokens or GPU_TOKENS) // longest, 1))
    if micro:
        sharded = shards if ranks > 1 or offload else 0
        passing, passing_lines = _micro_batch_memory(config, model, micro, longest, sharded)
        training += passing
        lines += passing_lines
        lines += [f"{training:.4g} GiB at most of a GPU while it trains"] if passing else []
    return lines, training, between


def _held(config: TrainConfig | SFTConfig, model: Shape, shards: int) -> dict[str, float]:
    """GiB of what training keeps, by label."""
    rounded_bytes = {"float32": 4.0, "bfloat16": 2.0, "nf4": BYTES}[config.model.lora.base_dtype]
    weights = 4 * (model.weights + model.adapters - model.rounded) + rounded_bytes * model.rounded
    states = {label: 4 * count * model.trained for label, count in _states(config).items()}
    return {label: size / shards / GIB for label, size in {"weights": weights, **states}.items()}


def _checked_bytes(config: TrainConfig, model: Shape, shards: int) -> float:
    """Bytes of a draw on its way to vLLM, or of the copy of the mean while the model is compared under the draw."""
    as_adapters = model.adapters and config.engine.processes.adapters  # which go through the trainer's own model
    numbers = model.adapters if as_adapters else model.weights
    on_the_way: int = numbers * getattr(torch, config.engine.dtype).itemsize
    is_compared = config.method.draws and not config.parallel.offload
    return max(on_the_way, 4 * model.trained / shards if is_compared else 0)


def _states(config: TrainConfig | SFTConfig) -> dict[str, int]:
    """Number of float32 tensors of the trained weights' size that are held beside the weights, by label."""
    optimizer = config.optimizer
    if isinstance(config, SFTConfig):
        return {"gradients": 1, **optimizer.memory(0)}
    method, states = config.method, {}
    if method.passes or optimizer.kind != "sgd":  # which moves each parameter at once
        states["gradients"] = 1
    if config.objective.reference_kl:
        states["weights of the reference"] = 1
    draws = {"generator": max(method.draws, 1), "fresh": method.gradient_draws}.get(method.gradient_at, 0)
    return states | optimizer.memory(draws)


def _micro_batch_memory(
    config: TrainConfig | SFTConfig, model: Shape, micro: int, longest: int, shards: int
) -> tuple[float, list[str]]:
    """GiB that come and go with a micro-batch of `micro` rows, and lines on them; `shards` is 0 without FSDP2."""
    dtype, recomputed = getattr(torch, config.model.compute_dtype), config.model.gradient_checkpointing
    base = config.model.lora.base_dtype
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it would show what is caught here
    try:
        passing = activation_bytes(
            model.model, micro, longest, dtype, recomputed=recomputed, sharded=shards > 0, base_dtype=base
        )
    except UserError:
        raise
    except Exception as error:  # the model's own code may raise anything, such as for tensors without memory
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return 0.0, [f"activations come on top, which cannot be counted for this model ({reason})"]
    parts = {f"activations and gradients on their way, with micro-batches of {micro} x {longest} tokens": passing}
    if shards:
        text = model.config.get_text_config()
        ends = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2) + text.hidden_size
        layer = (model.weights - ends) / text.num_hidden_layers
        parts["gathered weights: embedding, head and two layers"] = dtype.itemsize * (ends + 2 * layer)
        parts["gradients of a layer, not yet sharded"] = (dtype.itemsize + 4) * layer
    return sum(parts.values()) / GIB, [f"{size / GIB:.4g} GiB {label}" for label, size in parts.items()]


def _engine_memory(config: TrainConfig, model: Shape, rows: int, tokens: int, ranks: int) -> tuple[list[str], float]:
    """Memory of the engine that has most to do: the lines, and GiB of weights that it holds on the trainer's GPU."""
    engine, own, draws = config.engine, config.engine.processes, max(config.method.draws, 1)
    gpus = own.tensor_parallel
    if ranks % gpus and ranks > 1:
        raise UserError(f"engine.vllm.tensor_parallel = {gpus}: must divide the number of ranks, {ranks}")
    engines = len(own.servers) or (ranks // gpus if ranks > 1 else own.replicas)
    turns = -(-draws // engines)
    # Ranks and servers that have no draw of their own share one; replicas rest.
    sharing = max(engines // draws, 1) if ranks > 1 or own.servers else 1
    busiest = turns * -(-rows // (draws * sharing))
    copies, what = turns, "draw"
    if engine.kind == "vllm":
        copies, what = 1, "server" if own.servers else "replica"
    dtype, together = getattr(torch, engine.dtype), min(busiest, engine.max_batch_rows)
    gib = _served_numbers(config, model, copies) * dtype.itemsize / gpus / GIB
    several, place = "s" if copies > 1 else "", f" on {gpus} GPUs" if gpus > 1 else ""
    lines = [f"{gib:.4g} GiB weights of {copies} {what}{several}{place}, {engine.dtype}"]
    text = model.config.get_text_config()
    if (stateful := layers_without_keys(text)) < text.num_hidden_layers:
        cache = together * tokens * bytes_per_token(model.config, dtype) / gpus / GIB
        lines += [f"{cache:.4g} GiB keys and values of {together} rows of {tokens} tokens, if all were that long"]
    if stateful:
        lines += [f"states of the rows come on top, which are not counted, of layers without attention ({stateful})"]
    return lines, 0.0 if own.servers else gib


def _served_numbers(config: TrainConfig, model: Shape, copies: int) -> float:
    """Numbers of an engine's weights, adapters included; the local engine shares what it can with the trainer."""
    engine, text = config.engine, model.config.get_text_config()
    if model.adapters and engine.kind == "local":
        shared = model.rounded if config.model.lora.base_dtype in (engine.dtype, "nf4") else 0
        return model.weights + model.adapters - model.trained + copies * model.trained - shared
    both = engine.kind == "vllm" and text.tie_word_embeddings  # vLLM holds a tied head and its embedding
    apart = text.vocab_size * text.hidden_size if both else 0
    return copies * (model.weights + apart + engine.processes.adapters * model.adapters)


def _left_on_gpus(config: TrainConfig, training: float, between: float, engine: float) -> list[str]:
    """Lines on the memory that GPUs have left beside a trainer and an engine's weights, all in GiB."""
    trainer = between if config.engine.processes.sleep else max(training, between)
    shared = config.engine.kind == "vllm" and not config.engine.processes.servers
    lines = []
    for name, size in GPUS.items():
        left, over = size - trainer - engine, max(trainer + engine, training) - size
        share = math.floor(100 * (size - trainer) / size) / 100
        most = f"; engine.vllm.gpu_memory_utilization at most {share:.2f}" if shared else ""
        words = f"{left:.3g} GiB left for keys and values{most}" if over < 0 else f"{over:.3g} GiB too much"
        lines.append(f"{name}: {words}")
    return lines


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.4g}" if flops < 1e15 else f"{flops / 1e12:,.0f}"
