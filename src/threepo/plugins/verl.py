"""C3PO and its relatives inside verl 0.9, in verl's own trainer, Ray placement and rollout servers (docs/verl.md).

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=threepo actor_rollout_ref.actor.strategy=fsdp2 \\
        algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr=0.3 \\
        'actor_rollout_ref.actor.optim.override_optimizer_config={method: c3po, draws: 4, ess: 1e9}' ...

verl finds this module through the entry point `verl.plugins`. If verl says "Unknown trainer 'threepo'",
`python -c "import threepo.plugins.verl"` says why: verl logs the reason only at the level DEBUG.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.model import convert_weight_keys
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from threepo.config import IVONConfig
from threepo.config.arms import MEAN
from threepo.errors import UserError
from threepo.methods.arms import Bandit, Outcome
from threepo.methods.method import gradient_draws, rollout_draws
from threepo.plugins.trainers import LOGGED, check_release, load_tally, passed_settings_kept, save_tally
from threepo.plugins.verl_batches import join_outputs, rows_of_draws
from threepo.plugins.verl_check import AT_ROLLOUT_DRAWS, CertifiedTrainer
from threepo.plugins.verl_settings import check_config, ranks_of_replica, read_settings
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import Movement, posterior_metrics
from threepo.types import Arm, Draw

_NOT_FOUND = 'its plug-in failed to load; `python -c "import threepo.plugins.verl"` says why'
_OF_ADAMW = ("optimizer", "optimizer_impl", "betas", "weight_decay", "clip_grad")
MOST_REQUESTS = 1 << 20
"""Conversations of a step whose servers are remembered; a forgotten one would go on under another draw."""


@EngineRegistry.register("language_model", "fsdp2", device=["cuda", "cpu"], vendor="threepo")
class IVONEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP2 engine with IVON, which verl uses if VERL_ENGINE_VENDOR=threepo.

    A method of threepo says at which draws an update takes its gradient. Between calls the model holds the mean, so
    checkpoints and evaluation losses are of the mean; log-probs for an update are taken at the update's draws.
    """

    replica: int | None = None
    """The rollout replica to which this rank sends weights; it gets draw `replica` modulo N. None: it gets the mean."""
    arms: Sequence[Arm | None] = ()
    """The arm of each draw for rollouts, where arms are chosen; None: the mean weights."""
    _step: int | None = None
    """The step of the draws that wrote the rollouts; None before the first."""
    _divisor: float | None = None
    """Divides the sum of the gradients observed for the next step."""
    _movement: Movement | None = None

    def _build_optimizer(self, module: torch.nn.Module) -> IVON:
        config = self.optimizer_config
        if rank := self.model_config.lora_rank:
            raise UserError(f"actor_rollout_ref.model.lora_rank = {rank}: IVON here trains all weights; set 0")
        for field in dataclasses.fields(FSDPOptimizerConfig):
            value = tuple(config.betas) if field.name == "betas" else getattr(config, field.name)
            if field.name in _OF_ADAMW and value != field.default:
                fix = "leave it out, and set override_optimizer_config (betas, weight_decay, clip_radius, ...)"
                raise UserError(f"actor_rollout_ref.actor.optim.{field.name} = {value!r}: not IVON's; {fix}")
        if self.scaler is not None:
            fix = "float16 scales gradients, which IVON would mistake for curvature; set bf16 or fp32"
            raise UserError(f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype = 'fp16': {fix}")
        self.method, _, settings = read_settings(config.override_optimizer_config)
        self._passed = settings
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return IVON(named, lr=config.lr, model=module, **{"clip_radius": IVONConfig().clip_radius, **settings})

    def draw_step(self) -> int:
        """Count steps so far, including skipped ones, so that no two steps have the same draws."""
        return int(self.optimizer.param_groups[0]["step"] + self.optimizer.skipped_steps)

    def rollout_draws(self) -> list[Draw | None]:
        """The draws that the next push sends, or the mean alone."""
        if self.replica is None:
            return [None]
        return rollout_draws(self.method, self.optimizer.seed, self.draw_step(), self.arms)

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run verl's passes at the gradient's draws; an evaluation's loss and a reference model use the mean."""
        if self.optimizer is None or (forward_only and loss_function is not None):
            return super().forward_backward_batch(data, loss_function, forward_only)
        writers = self.rollout_draws() if tu.get(data, AT_ROLLOUT_DRAWS) else self._gradient_draws()
        if not forward_only and "response_mask" in data:
            data["loss_mask"] = data["response_mask"]  # verl divides by its sum: by the tokens that a correction kept
        with self._state_on_device(model=False):
            if len(set(writers)) > 1:
                return self._draw_by_draw(writers, data, loss_function, forward_only)
            with self.optimizer.at(writers[0]):
                outputs = super().forward_backward_batch(data, loss_function, forward_only)
            if not forward_only:
                self.optimizer.observe(writers[0])
                self._divisor = None
            return outputs

    def _gradient_draws(self) -> list[Draw | None]:
        # All mini-batches of a step take their gradients at the draws of their rollouts.
        step = self.draw_step() if self._step is None else self._step
        return gradient_draws(self.method, self.optimizer.seed, step, self.arms)

    def _draw_by_draw(
        self, writers: Sequence[Draw | None], data: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        """Run verl's passes over the rows of each draw at its weights; a row knows its writer's place in `writers`."""
        averaged = self.method.normalize == "part"  # over draws, instead of over all their tokens
        parts: list[tuple[list[int], Any]] = []
        tokens: list[float] = []
        for draw in dict.fromkeys(writers):  # the mean weights may write for several
            indices = {index for index, writer in enumerate(writers) if writer == draw}
            rows, part = rows_of_draws(indices, data, self.get_data_parallel_group())
            if part is None:
                continue
            with self.optimizer.at(draw):
                outputs = super().forward_backward_batch(part, loss_function, forward_only)
            kept = tu.get(part, "batch_num_tokens")
            if not (forward_only or kept):  # all rows of the draw are masked
                self.optimizer.zero_grad(set_to_none=True)
                continue
            parts.append((rows, outputs))
            tokens.append(kept)
            if not forward_only:  # verl divided this gradient by the tokens of the part
                self.optimizer.observe(draw, 1.0 if averaged else 1.0 / kept, weight=kept)
        if not parts:
            fix = "loosen the correction, or raise actor_rollout_ref.actor.ppo_mini_batch_size"
            raise UserError(f"all rows of a mini-batch are masked, so there is nothing to learn from: {fix}")
        self._divisor = None if averaged else sum(tokens)
        return join_outputs(parts, [1 / len(parts) if averaged else count / sum(tokens) for count in tokens])

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """Train on a batch as verl does, and add IVON's metrics."""
        self._movement = self._movement or Movement(self.optimizer)
        outputs = super().train_batch(data, loss_function)
        metrics = self.optimizer.step_metrics() | posterior_metrics(self.optimizer)
        logged = {name: metrics[name] for name in LOGGED} | self._movement.metrics()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"] |= {name: [value] for name, value in logged.items()}
        return outputs

    def load_checkpoint(self, *args: Any, **settings: Any) -> None:
        """Load as verl does; settings that were passed replace the checkpoint's."""
        if not isinstance(self.optimizer, IVON):
            super().load_checkpoint(*args, **settings)
            return
        if not self.checkpoint_manager.should_load_optimizer:
            fix = "add 'optimizer' there and to save_contents, or train from the weights with resume_mode=disable"
            raise UserError(f"actor_rollout_ref.actor.checkpoint.load_contents: leaves out IVON's posterior; {fix}")
        with passed_settings_kept(self.optimizer, self._passed):
            super().load_checkpoint(*args, **settings)

    def optimizer_step(self) -> float:
        """Step without clipping, because the Hessian is learned from these gradients; return their norm."""
        self.optimizer.step(divisor=self._divisor)
        return float(self.optimizer.step_metrics()["optimizer/grad_norm"])

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Yield the weights, one at a time, of the draw for this rank's rollout replica; a collective."""
        self._step, draws = self.draw_step(), self.rollout_draws()
        draw = draws[(self.replica or 0) % len(draws)]
        return unfuse_moe_params(self._weights(draw), self.model_config.hf_config.model_type), None

    def _weights(self, draw: Draw | None) -> Iterator[tuple[str, torch.Tensor]]:
        with self._state_on_device(model=True):
            for name, value in self.optimizer.weights(draw, gather=True):
                yield next(iter(convert_weight_keys({name: value}, self.module))), value

    @contextmanager
    def _state_on_device(self, model: bool) -> Iterator[None]:
        """Bring IVON's state, and the weights if asked, to the device for the body; verl may keep them on the CPU."""
        state = {"model": model and self._is_offload_param, "optimizer": self._is_offload_optimizer, "grad": False}
        if not any(state.values()) or self.mode == "train":  # verl has brought all of it to the device
            yield
            return
        self.to(get_device_name(), **state)
        try:
            yield
        finally:
            self.to("cpu", **state)


class IVONWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker for training and rollouts, with an IVONEngine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Make the model as verl does."""
        os.environ["VERL_ENGINE_VENDOR"] = "threepo"  # by which verl chooses engines
        super().init_model()
        if not isinstance(self.actor.engine, IVONEngine):
            raise UserError(f"verl chose the engine {type(self.actor.engine).__name__}: {_NOT_FOUND}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def send_draws(self, draws: bool, arms: Sequence[Arm | None] = ()) -> list[Draw | None]:
        """Let the next `update_weights` send draws, with these arms where arms are chosen, or else the mean.

        Returns what it will send: replica r gets number r modulo their number.
        """
        self.actor.engine.replica = self.rank // ranks_of_replica(self.config.rollout) if draws else None
        self.actor.engine.arms = arms
        sent: list[Draw | None] = self.actor.engine.rollout_draws()
        return sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def noisy_names(self) -> list[str]:
        """Names of the parameters that have noise."""
        return [entry.name for entry in self.actor.engine.optimizer.noisy()]


@register_trainer("threepo")
class DrawTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer, with rollouts from draws of the weights, and the tally of the arms."""

    def __init__(self, config: DictConfig) -> None:
        check_release("verl", "0.9.1")
        self._method, self._arms_settings, ivon = check_config(config)
        self._seed: int = ivon.get("seed", 0)
        self._bandit = Bandit(self._arms_settings, self._method, lambda: self.actor_rollout_wg.noisy_names()[0])
        self._chosen: Sequence[Arm | None] = ()  # for the draws that write the rollouts
        config.trainer.v1.trainer_mode = "sync"  # by which verl chooses its settings and its replay buffer
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            if "actor" in str(role):
                self.role_worker_mapping[role] = ray.remote(IVONWorker)

    def _setup(self) -> None:
        super()._setup()
        servers = self.llm_server_manager
        by_address = dict(zip(servers.server_addresses, servers.server_handles, strict=True))
        servers.global_load_balancer = ray.remote(DrawRouter).remote(by_address, max(self._method.draws, 1))
        if self._arms_settings.active and not self.global_steps:
            self._bandit.begin()
        self._prepare_sending(draws=True)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps and self._arms_settings.active:
            given = self.config.trainer.resume_mode == "resume_path" and self.config.trainer.resume_from_path
            self._bandit.begin(load_tally(Path(given or self._checkpoint_folder())))

    def _save_checkpoint(self) -> None:
        if self._arms_settings.active:  # first, because verl ends by naming this checkpoint the latest
            save_tally(self._bandit.tally, self._checkpoint_folder())
        super()._save_checkpoint()

    def _checkpoint_folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def on_step_end(self) -> None:
        """End a step as verl does, which pushes the draws of the next."""
        self._prepare_sending(draws=True)
        super().on_step_end()

    def on_validate_begin(self) -> None:
        """Evaluate the mean."""
        self._send(draws=False)

    def on_validate_end(self) -> None:
        """Roll out from draws again."""
        self._send(draws=True)

    def _send(self, draws: bool) -> None:
        self.checkpoint_manager.sleep_replicas()
        self._prepare_sending(draws)
        self.checkpoint_manager.update_weights(self.global_steps)

    def _prepare_sending(self, draws: bool) -> None:
        """Let the next `update_weights` send the draws of the step that comes next, or else the mean."""
        if draws:
            self._chosen = self._bandit.choose(self._seed, self.global_steps)
        self.sent_draws: Sequence[Draw | None] = self.actor_rollout_wg.send_draws(draws, self._chosen)[0]

    def get_llm_client(self) -> "DrawClient":
        """Make verl's client with the draw of each server."""
        client: DrawClient = self.llm_server_manager.get_client(DrawClient)
        servers, draws = self.llm_server_manager.server_addresses, max(self._method.draws, 1)
        client.draw_of = {address: replica % draws for replica, address in enumerate(servers)}
        return client

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self._method.advantages == "draw":  # verl compares rows of one uid
            data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["uid", "extra_fields"])
            rows = zip(tu.get(data, "uid"), tu.get(data, "extra_fields"), strict=True)
            uids = tu.get_tensordict({"uid": [f"{uid}/{fields['draw']}" for uid, fields in rows]})
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=uids)
        if self._arms_settings.active:
            metrics |= self._bandit.count(self._outcomes(batch))
        return super()._compute_advantage(batch, metrics)

    def _outcomes(self, batch: Any) -> list[list[Outcome]]:
        """The outcomes of a step's rollouts, prompt by prompt."""
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["extra_fields", "rm_scores"])
        rewards = data["rm_scores"].sum(dim=1).tolist()
        prompts: dict[str, dict[str, Outcome]] = {}
        for key, tag, fields, reward in zip(batch.keys, batch.tags, tu.get(data, "extra_fields"), rewards, strict=True):
            prompt, rollout, _ = key.rsplit("_", 2)  # an agent may return several texts of a rollout, with one reward
            if not tag.get("is_padding"):
                arm = str(self._chosen[fields["draw"]] or MEAN)
                prompts.setdefault(prompt, {})[rollout] = Outcome(arm, reward, math.isfinite(reward))
        # Sorted, because verl has them in the order in which they came, on which a sum's last bits depend.
        return sorted(sorted(group.values()) for group in prompts.values())


class DrawClient(LLMServerClient):  # type: ignore[misc]
    """verl's client of rollout servers; `extra_fields["draw"]` of a completion is the index of its draw."""

    draw_of: Mapping[str, int]
    """The index of a server's draw, by the server's address."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._asked: dict[str, str] = {}

    async def _acquire_server(self, request_id: str, **fields: Any) -> tuple[str, Any]:
        self._asked[request_id], server = await super()._acquire_server(request_id, **fields)
        return self._asked[request_id], server

    async def generate(self, request_id: str, **settings: Any) -> Any:
        """Generate as verl does, and note the draw."""
        output = await super().generate(request_id, **settings)
        output.extra_fields["draw"] = self.draw_of[self._asked.pop(request_id)]
        return output


class DrawRouter(GlobalRequestLoadBalancer):  # type: ignore[misc]
    """Sends the requests of a prompt to the draws in turn; replica r has draw r modulo N."""

    def __init__(self, servers: dict[str, Any], draws: int) -> None:
        super().__init__(servers, max_cache_size=MOST_REQUESTS)
        self._draws = draws
        self._asked: Counter[int] = Counter()

    def require_acquire_fields(self) -> list[str]:
        """Name the fields by which a request is routed."""
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, **fields: Any) -> tuple[str, Any]:
        """Choose a request's server; later turns of a conversation stay on the server of its first turn."""
        if request_id not in self._request_id_to_server:
            prompt = hash(tuple(fields["prompt_ids"]))
            replicas = list(self._servers)[self._asked[prompt] % self._draws :: self._draws]
            self._asked[prompt] += 1
            self._request_id_to_server[request_id] = min(replicas, key=self.get_inflight_count)
        return super().acquire_server(request_id)  # type: ignore[no-any-return]


@register_trainer("threepo_certified")
class CertifiedDrawTrainer(CertifiedTrainer, DrawTrainer):
    """A DrawTrainer that checks after every push that each server holds its own draw, or the mean for evaluations."""
