"""Certified trainers of verl that put faults into the servers of verl_on_cpu: trainer_mode=faults or threepo_faults.

VERL_FAULTS is JSON: the fault of each step; step 0 is the start. VERL_RECORDS/found.jsonl has what the check said.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from verl.trainer.ppo.v1 import register_trainer

from threepo.errors import UserError
from threepo.plugins.verl import CertifiedDrawTrainer
from threepo.plugins.verl_check import CertifiedTrainer


class Faults:
    """Puts a step's fault into the servers for the push at its end, writes down the error, and pushes again without."""

    def _try(self: Any, push: Callable[[], None]) -> None:
        fault, found = json.loads(os.environ["VERL_FAULTS"]).get(str(self.global_steps), ""), ""
        self._put(fault)
        try:
            push()
        except UserError as error:
            found = str(error)
        with (Path(os.environ["VERL_RECORDS"]) / "found.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.global_steps, "fault": fault, "found": found}) + "\n")
        if fault:
            self._put("")
            self.checkpoint_manager.update_weights(self.global_steps)

    def _put(self: Any, fault: str) -> None:
        ray.get([server.put.remote(fault) for server in self.llm_server_manager.server_handles])

    def on_init_end(self) -> None:
        self._try(super().on_init_end)  # type: ignore[misc]

    def on_step_end(self) -> None:
        self._try(super().on_step_end)  # type: ignore[misc]


@register_trainer("faults")
class FaultyTrainer(Faults, CertifiedTrainer):  # type: ignore[misc]
    """verl's own methods."""


@register_trainer("threepo_faults")
class FaultyDrawTrainer(Faults, CertifiedDrawTrainer):  # type: ignore[misc]
    """threepo's methods."""
