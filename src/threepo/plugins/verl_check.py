"""A check of verl's rollout servers after every push of weights, against the trainer's own model (docs/certificate.md).

Before a push, while the servers sleep, the workers compute log-probs of a fixed prompt by the pass with which verl
scores rollouts: nothing is loaded or exported for it. After the push, every server generates tokens after the prompt,
then reads prompt and tokens. Reading is compared with the workers, and generation, for which a server may use its
prefix cache, with reading.
"""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu

from threepo.errors import UserError
from threepo.plugins.trainers import check_release
from threepo.rollout.weight_check import FOLLOWING, TOLERANCE, Judge, Logprobs, WeightCheck, fixed_prompt

AT_ROLLOUT_DRAWS = "at_rollout_draws"
"""Marks a batch that an IVONEngine scores at the draws that the next push sends, row by row."""
_CAUSES = (
    "Either the push loses or changes tensors, the servers' engine loads this model wrongly, or it computes more "
    "coarsely than the tolerance allows; use the version of the engine that verl pins, without quantisation, or a "
    "trainer_mode without the check"
)


class ServerCheck:
    """Checks all rollout servers, vLLM's or SGLang's, after each push of a verl trainer that has been set up."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._push = trainer, trainer.checkpoint_manager.update_weights
        rollout = trainer.config.actor_rollout_ref.rollout
        actor = OmegaConf.select(trainer.config, "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype")
        self._name = f"actor_rollout_ref.rollout.name = {rollout.name!r}"
        rooms = rollout.max_model_len, rollout.prompt_length + rollout.response_length
        self._tokens = fixed_prompt(len(trainer.tokenizer), *rooms, after=FOLLOWING + 1)
        in_float32 = rollout.dtype == "float32" and actor == "fp32"
        tolerance = TOLERANCE[torch.float32 if in_float32 else torch.bfloat16]
        self._check = WeightCheck(tolerance, Judge(f"{self._name}: a rollout server", "tolerance", _CAUSES))
        self.metrics: dict[str, float] = {}
        """The mean difference in log-prob (nats) at the last push."""
        trainer.checkpoint_manager.update_weights = self.push

    def push(self, global_steps: int | None = None) -> Any:
        """Push as verl does, and check; `UserError` names the first replica that does not hold what it should."""
        draws = getattr(self._trainer, "sent_draws", [None])
        of_draws = self._expected(len(draws))  # before the push, while the servers sleep
        metrics = self._push(global_steps)
        addresses = self._trainer.llm_server_manager.server_addresses
        last = len(self._tokens) - 1
        written = self._ask([self._tokens] * len(addresses), max_tokens=FOLLOWING, logprobs=True)
        rows = self._ask([[*self._tokens, *answer.token_ids] for answer in written], max_tokens=1, prompt_logprobs=0)
        if not all("prompt_logprobs" in row.extra_fields for row in rows):
            fix = "choose vllm or sglang, or a trainer_mode without the check"
            raise UserError(f"{self._name}: its servers tell no log-probs of a prompt; {fix}")
        read = [torch.tensor(row.extra_fields["prompt_logprobs"])[:-1, 0] for row in rows]  # the last is a filler
        indices = [replica % len(draws) for replica in range(len(addresses))]
        expected = [Logprobs(of_draws[i], own[last:]) for i, own in zip(indices, read, strict=True)]
        self._check.expect([draws[i] for i in indices], self._trainer.global_steps, expected)
        for replica, (own, answer) in enumerate(zip(read, written, strict=True)):
            place = f"replica {replica} ({addresses[replica]})"
            self._check.check(replica, Logprobs(own[:last], answer.log_probs), place)
        apart = [(own[:last] - of_draws[i]).abs().mean() for i, own in zip(indices, read, strict=True)]
        self.metrics = {"certificate/difference": float(sum(apart)) / len(apart)}
        return metrics

    def _ask(self, rows: Sequence[Sequence[int]], **wanted: Any) -> list[Any]:
        """Let every server continue its row of tokens, sampled from the model's own distribution."""
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "ignore_eos": True}
        asked = zip(self._trainer.llm_server_manager.server_handles, rows, strict=True)
        replies = [
            server.generate.remote(request_id=uuid4().hex, prompt_ids=list(row), sampling_params=plain | wanted)
            for server, row in asked
        ]
        answers: list[Any] = ray.get(replies)
        return answers

    def _expected(self, draws: int) -> list[torch.Tensor]:
        """The workers' log-probs of the prompt's tokens but the first; row i is for draw i modulo `draws`.

        There is a row for every rank, because verl deals the same number to each.
        """
        workers, count = self._trainer.actor_rollout_wg, len(self._tokens)
        tensors = {"input_ids": torch.tensor(self._tokens), "position_ids": torch.arange(count)}
        tensors["loss_mask"] = torch.ones(count)
        rows: dict[str, Any] = {
            name: torch.nested.as_nested_tensor([value] * workers.world_size, layout=torch.jagged)
            for name, value in tensors.items()
        }
        rows["extra_fields"] = [{"draw": rank % draws} for rank in range(workers.world_size)]
        how = {"temperature": 1.0, "compute_loss": False, "calculate_entropy": False, AT_ROLLOUT_DRAWS: True}
        how |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": count}  # a row at a time
        scored = workers.compute_log_prob(tu.get_tensordict(rows, how))
        return [row[:-1].float() for row in tu.get(scored, "log_probs").unbind()]  # the last token predicts none


@register_trainer("certified")
class CertifiedTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer, with a check of all rollout servers after every push of weights."""

    def __init__(self, config: DictConfig) -> None:
        check_release("verl", "0.9.1")
        config.trainer.v1.trainer_mode = "sync"  # by which verl chooses its settings and its replay buffer
        super().__init__(config)

    def _setup(self) -> None:
        super()._setup()
        self._servers = ServerCheck(self)

    def on_step_end(self) -> None:
        """End a step as verl does, with the check's metrics."""
        super().on_step_end()
        self._pending_sync_metrics = self._servers.metrics
