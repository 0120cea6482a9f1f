"""Further checks of sharded_program.py on its ranks, with given tensors instead of computed ones."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sharded_program import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, MixtralConfig, Olmo3Config, Qwen2Config

from threepo import IVON, Posterior
from threepo.config import LoRAConfig, ModelConfig, ParallelConfig
from threepo.config.engine import VLLMEngineConfig
from threepo.models.loading import make_tokenizer
from threepo.models.packing import flatten
from threepo.models.policy import load_policy
from threepo.posterior import perturbation
from threepo.posterior.draw_file import PushedWeights, RoundedWeights, file_contents, roundings
from threepo.posterior.metrics import Movement, posterior_metrics
from threepo.posterior.point_optimizers import PointAdamW
from threepo.posterior.shards import like_parameter, local
from threepo.ranks.pushed_files import PushedFiles
from threepo.ranks.sharding import GatheredWeights, load_sharded, source_sums
from threepo.ranks.world import World
from threepo.rollout.payloads import choose_payload, parameter_names
from threepo.training.checkpoint import TrainState, save_checkpoint
from threepo.training.sft import cross_entropy
from threepo.types import Draw, Row

SHAPES = {"matrix": (37, 45), "wide": (3, 2503), "cube": (4, 6, 10), "column": (2050, 2), "vector": (9,)}
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
SETTINGS = {"lr": 0.5, "ess": 1e4, "hess_init": 0.1, "betas": (0.9, 0.95), "clip_radius": 0.5}


def given(step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + len(shape)))


def spread(tensor: torch.Tensor, *placements: Placement) -> torch.Tensor:
    """The tensor on a mesh of all ranks, with as many dimensions as placements."""
    world = dist.get_world_size()
    shape = (world,) if len(placements) == 1 else (1, world)
    return distribute_tensor(tensor, init_device_mesh("cpu", shape), placements)


def trained(lay_out: Callable[[torch.Tensor], torch.Tensor]) -> tuple[IVON, dict[str, nn.Parameter]]:
    """Three steps, the second of two draws, with parameters and gradients laid out by `lay_out`."""
    named = {name: nn.Parameter(lay_out(given(0, shape))) for name, shape in SHAPES.items()}
    optimizer = IVON(named.items(), model=nn.Module(), **SETTINGS)
    for step in range(1, 4):
        for index in range(1 + step % 2):
            with optimizer.perturbed(Draw(0, step, index)):
                for p in named.values():
                    p.grad = lay_out(given(10 * step + index, tuple(p.shape)) + 0.1 * whole(p))
            optimizer.observe(Draw(0, step, index))
        optimizer.step()
    return optimizer, named


def last_dimension(tensor: torch.Tensor) -> torch.Tensor:
    return spread(tensor, Shard(tensor.ndim - 1))


def second_dimension(tensor: torch.Tensor) -> torch.Tensor:
    return spread(tensor, Replicate(), Shard(min(1, tensor.ndim - 1)))


def columns() -> None:
    """Shards along any dimension follow plain tensors, bit by bit."""
    expected, plain = trained(lambda tensor: tensor)
    for lay_out in (last_dimension, second_dimension):
        ours, spread_out = trained(lay_out)
        assert ours.step_metrics()["posterior/clipped_share"] == expected.step_metrics()["posterior/clipped_share"] > 0
        for name, p in plain.items():
            q = spread_out[name]
            assert torch.equal(whole(q), p), name
            for key in ("hessian", "momentum"):
                assert torch.equal(whole(ours.state[q][key]), expected.state[p][key]), (name, key)


def not_finite() -> None:
    """A gradient that is NaN on one rank only, of a parameter that is not spread, skips the step on both."""
    for bad_rank in (0, 1, None):
        split, own = nn.Parameter(spread(torch.ones(6), Shard(0))), nn.Parameter(torch.ones(3))
        optimizer = IVON([("split", split), ("own", own)], model=nn.Module())
        split.grad = spread(torch.ones(6), Shard(0))
        own.grad = torch.full((3,), float("nan") if dist.get_rank() == bad_rank else 1.0)
        assert optimizer.observe(None) == (bad_rank is None)
        optimizer.step()
        assert optimizer.skipped_steps == (bad_rank is not None)
        for p in (whole(split), own):
            assert bool(p.eq(1).all()) == (bad_rank is not None)


def metrics() -> None:
    """Metrics of a posterior, and of how far the weights move, are the same on every rank and in one process."""
    shapes = {"mlp.weight": (301, 47), "lm_head.weight": (60, 700), "norm": (5,), "attn.bias": (1,)}
    named = {name: nn.Parameter(given(0, shape)) for name, shape in shapes.items()}
    expected = IVON(named.items(), hess_init=0.5)
    for name, p in named.items():
        expected.state[p]["hessian"].copy_(given(1, shapes[name]).exp())
    start = {name: p.detach().clone() for name, p in named.items()}
    moved = Movement(expected)
    for p in named.values():
        p.data += given(2, tuple(p.shape))
    known = moved.metrics()
    assert len(known) == 2 + 2 * len(shapes), "of all, and of each kind"
    for lay_out in (lambda tensor: spread(tensor, Shard(0)), last_dimension, second_dimension):
        ours = {name: nn.Parameter(lay_out(p.clone())) for name, p in start.items()}
        ours["norm"] = nn.Parameter(start["norm"].clone())  # not sharded, unlike the others
        optimizer = IVON(ours.items(), hess_init=0.5, model=nn.Module())
        for name, p in ours.items():
            optimizer.state[p]["hessian"].copy_(like_parameter(expected.state[named[name]]["hessian"], p))
        moved = Movement(optimizer)
        for name, p in ours.items():
            p.data.copy_(like_parameter(named[name].detach(), p))
        assert moved.metrics() == known
        assert posterior_metrics(optimizer) == posterior_metrics(expected)


def loading() -> None:
    """Ranks hold the bits of from_pretrained, compute the same as one process, and write what it writes.

    A tied model, and two in bfloat16 whose weights lie in several files; families with other norms, windows, experts.
    """
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    with tempfile.TemporaryDirectory() as own:
        folder = world.gather(own)[0]
        for config in (
            Qwen2Config(tie_word_embeddings=True, **SIZES),
            Olmo3Config(tie_word_embeddings=False, sliding_window=8, **SIZES),
            MixtralConfig(tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2, **SIZES),
        ):
            path = f"{folder}/{config.model_type}"
            if world.rank == 0:
                torch.manual_seed(1)
                model = AutoModelForCausalLM.from_config(config)
                dtype = torch.float32 if config.tie_word_embeddings else torch.bfloat16
                model.to(dtype).save_pretrained(path, max_shard_size="40KB")
                make_tokenizer().save_pretrained(path)
            dist.barrier()
            settings = ModelConfig(path=path, gradient_checkpointing=True)
            policy = load_sharded(settings, ParallelConfig(), world)
            expected = load_policy(settings)
            assert policy.scorer.packed_rows == expected.scorer.packed_rows
            assert policy.scorer.linear_head == expected.scorer.linear_head
            mine, theirs = dict(policy.model.named_parameters()), dict(expected.model.named_parameters())
            assert mine.keys() == theirs.keys()
            for name, p in mine.items():
                assert 0 < p.to_local().numel() < p.numel() or p.numel() == 1, name
                assert torch.equal(whole(p), theirs[name]), name
            rows = [Row(n, tuple(range(3, 3 + n)), ((2, n),)) for n in (5, 12)]
            packed = flatten(rows, policy.device)
            for ours, other in zip(policy.logprobs(packed), expected.logprobs(packed), strict=True):
                assert torch.equal(ours, other)
            optimizer = PointAdamW(mine.items(), model=policy.model)
            save_checkpoint(Path(path) / "checkpoint", policy, optimizer, TrainState(), world)
            if world.rank == 0:
                expected.save(Path(path) / "known")
                written, known = (load_file(f"{path}/{name}/model.safetensors") for name in ("checkpoint", "known"))
                assert written.keys() == known.keys()
                assert all(torch.equal(written[name], value) for name, value in known.items())
        dist.barrier()


def written() -> None:
    """What a rank writes for an engine has the sums of all ranks' shards; another draw or a wrong shard has others."""
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    draws = [None, Draw(0, 0, 0), Draw(0, 0, 1)]
    with tempfile.TemporaryDirectory() as own:
        folder = world.gather(own)[0]
        if world.rank == 0:
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
        dist.barrier()
        kinds: list[tuple[int, Literal["float32", "bfloat16"]]] = [(0, "float32"), (0, "bfloat16"), (4, "bfloat16")]
        for rank, name in kinds:
            settings = ModelConfig(path=folder, lora=LoRAConfig(rank=rank))
            policy = load_sharded(settings, ParallelConfig(replicate=world.size // 2), world)
            optimizer = IVON(policy.model.named_parameters(), ess=1e5, model=policy.model)
            payload, dtype = choose_payload(policy, VLLMEngineConfig(dtype=name)), getattr(torch, name)
            tensors = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in payload.layout.items()}
            expected = [source_sums(policy, optimizer, draw, dtype, world) for draw in draws]
            for draw in draws:
                payload.write(GatheredWeights(optimizer, draw, 1, 1, {}), draw, tensors)
                found = payload.sums(tensors)
                assert [sums.items() <= found.items() for sums in expected] == [other == draw for other in draws]
            with patch.object(perturbation, "whole", with_a_wrong_row):
                payload.write(GatheredWeights(optimizer, draws[-1], 1, 1, {}), draws[-1], tensors)
            wrong = expected[-1].items() - payload.sums(tensors).items()
            seen = {"model.embed_tokens.weight", "lm_head.weight"} if world.rank == 1 else set()
            assert {name for name, _ in wrong} == seen
        dist.barrier()


def pushes() -> None:
    """Servers that are told of changes by all ranks make the draws of the gathered weights, to the bit."""
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    policy = load_sharded(ModelConfig(path="tiny-qwen2"), ParallelConfig(replicate=world.size // 2), world)
    optimizer, dtype = IVON(policy.model.named_parameters(), ess=1e5, model=policy.model), torch.bfloat16
    names, server = parameter_names(policy.architecture), PushedWeights()
    with tempfile.TemporaryDirectory() as own:
        files = PushedFiles(Path(world.gather(own)[0]) / "weights", 3, world)
        for step in range(5):
            tensors, metadata = file_contents(optimizer, policy.saved_tensors(), names, noisy=True)
            size = files.push(tensors, metadata, roundings(optimizer, tensors))
            assert len(files.changes) == step % 3
            server.follow(files.full, files.changes)
            draw = Draw(0, step, 0)
            rounded = RoundedWeights(optimizer)
            expected = {names[name]: value.to(dtype) for name, value in rounded.weights(draw, gather=True)}
            for name, value in server.draw(draw, dtype, torch.device("cpu")):
                assert torch.equal(value.to(dtype), expected[names[name]]), name
            if step % 3 == 0:
                whole_push = size
            assert len(set(world.gather(size))) == 1
            assert 0 < size < whole_push or step % 3 == 0
            for index, p in enumerate(policy.model.parameters()):
                moved = given(100 * step + index, tuple(p.shape)) * 1e-5
                local(p.detach()).add_(local(like_parameter(moved, p)))
        dist.barrier()
        files.close()


def copies() -> None:
    """Copies of the weights add up their gradients once, after the last micro-batch, whatever the number of these."""
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    rows = [Row(n, tuple(range(3, 3 + n)), ((2, n),)) for n in range(4, 14)]
    policy = load_sharded(ModelConfig(path="tiny-qwen2"), ParallelConfig(replicate=2), world)
    found = []
    for budget, at_once in ((15, False), (15, True), (1000, False)):
        with (
            patch.object(dist, "all_reduce", wraps=dist.all_reduce) as added,
            patch.object(type(policy), "add_up_copies", lambda *_: None) if at_once else nullcontext(),
        ):
            cross_entropy(policy, rows, budget, world)
        found.append((added.call_count, {name: whole(p.grad) for name, p in policy.model.named_parameters()}))
        policy.model.zero_grad()
    (once, later), (often, each), (again, together) = found
    assert (often, again) == (2 * once, once), "a rank has two micro-batches, or one"
    for name, grad in later.items():
        assert torch.allclose(grad, each[name], rtol=1e-4, atol=1e-5), name
        assert torch.allclose(grad, together[name], rtol=1e-4, atol=1e-5), name


def with_a_wrong_row(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; on the second rank, embeddings and head with a wrong last row."""
    full = whole(tensor)
    if dist.get_rank() == 1 and full.shape[0] == SIZES["vocab_size"]:
        full[-1] += 1e-3
    return full


def cut_twice() -> None:
    """FSDP2 over tensor parallelism cuts one dimension twice, here into uneven parts: weights and Hessians fit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain, model = nn.Linear(8, 14), nn.Linear(8, 14)
    model.load_state_dict(plain.state_dict())
    fully_shard(parallelize_module(model, mesh["tensor"], ColwiseParallel()), mesh=mesh["data"])
    expected, ours = IVON(plain.named_parameters(), **SETTINGS), IVON(model.named_parameters(), model=model, **SETTINGS)
    posterior = Posterior.of(expected)
    for name, hessian in posterior.hessian.items():
        hessian.copy_(given(1, tuple(hessian.shape)).exp())
        assert not hessian.eq(ours.state[model.get_parameter(name)]["hessian"].full_tensor()).any()
    posterior.load_into(ours)
    for name, p in model.named_parameters():
        assert torch.equal(whole(ours.state[p]["hessian"]), posterior.hessian[name]), name
    drawn = dict(expected.weights(Draw(1, 2, 3)))
    for name, value in ours.weights(Draw(1, 2, 3)):
        assert torch.equal(whole(value), drawn[name]), name
