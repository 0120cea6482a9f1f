"""The certificate of weights inside TRL 1.16: a check of vLLM after every weight sync (docs/certificate.md).

    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, ...))
    trainer.add_callback(CertificateCallback(trainer))

For every trainer of TRL that has `vllm_generation`. Works with vLLM in the trainer's process (`vllm_mode="colocate"`)
and as a server.
"""

from functools import cached_property
from typing import Any

from transformers import TrainerCallback

from threepo.certify import Certificate, Engine, Result, completions_server, vllm_engine
from threepo.errors import UserError
from threepo.plugins.trainers import check_release


class CertificateCallback(TrainerCallback):  # type: ignore[misc]
    """Checks vLLM's weights after each of TRL's syncs, and rehearses at the first; wrong weights end the training.

    The log gets `certificate/difference`, the mean difference in log-prob (nats).

    Args:
        trainer: with `use_vllm=True`; its model must be whole in every process.
        rehearse: False leaves out the rehearsal, which syncs twice more.
        settings: of `threepo.certify.Certificate`.
    """

    def __init__(self, trainer: Any, *, rehearse: bool = True, **settings: Any) -> None:
        check_release("trl", "1.16")
        if not getattr(trainer, "use_vllm", False):
            raise UserError("CertificateCallback: the trainer has no engine; set use_vllm=True, or leave it out")
        self.results: list[Result] = []
        """One for each sync."""
        self._trainer, self._rehearse = trainer, rehearse
        self._certificate = Certificate(trainer.accelerator.unwrap_model(trainer.model), **settings)
        self._generation, self._sync = trainer.vllm_generation, trainer.vllm_generation.sync_weights
        self._generation.sync_weights = self._sync_and_check

    @property
    def _has_engine(self) -> bool:
        """False in processes that let the main one ask the server."""
        return self._generation.mode == "colocate" or bool(self._trainer.accelerator.is_main_process)

    def _sync_and_check(self) -> None:
        if not self._has_engine:
            self._sync()
            return
        if self._rehearse and not self.results:
            result = self._certificate.rehearse(self._engine, self._push)
            print(f"threepo: {result}", flush=True)
        else:
            self._push()
            result = self._certificate.check(self._engine)
        self.results.append(result)
        mode = "train" if self._trainer.model.training else "eval"
        self._trainer._metrics[mode]["certificate/difference"].append(result.mean)

    def _push(self) -> None:
        self._sync()
        if self._generation.mode == "colocate" and self._generation.enable_sleep_mode:
            self._generation.llm.wake_up(tags=["kv_cache"])  # TRL wakes only the weights; it may wake this again

    @cached_property
    def _engine(self) -> Engine:
        """The engine whose weights are checked, found at the first sync."""
        if self._generation.mode == "colocate":
            return vllm_engine(self._generation.llm)
        client = self._generation.vllm_client
        return completions_server(client.base_url, client.model)
