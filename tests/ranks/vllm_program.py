"""The program of test_vllm_on_ranks.py, run by torchrun.

vllm_program.py COMMANDS.json: commands one after another, since ranks take long to start: [[folder, fault, status, the
arguments of a command], ...]. A rank writes into the folder which draws its engine has served.
vllm_program.py train ...: one command as threepo runs it, whose engines lose their patience once they have started.
"""

import faulthandler
import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rollout.forks import replicas_forked
from threepo.cli import main
from threepo.ranks.launch import join_world
from threepo.rollout.payloads import Payload
from threepo.rollout.vllm import VLLMEngine

PATIENCE = 20.0
"""Seconds that a replica may be silent. Its start takes longer."""
RANK = os.environ["RANK"]
START, LOAD, GENERATE, WRITE = VLLMEngine.__init__, VLLMEngine.load, VLLMEngine.generate, Payload.write


def impatient(engine: Any, *arguments: Any) -> None:
    """`VLLMEngine.__init__`; it also tells the test the replica's process."""
    START(engine, *arguments)
    (replica,) = engine._replicas
    replica.limit_silence(PATIENCE)
    Path(f"replica-of-{RANK}").write_text(str(replica.pid))


def another(payload: Any, posterior: Any, draw: Any, tensors: Any) -> None:
    """`Payload.write`; the second rank writes a draw of a later step."""
    WRITE(payload, posterior, replace(draw, step=draw.step + 99) if RANK == "1" else draw, tensors)


def noted(engine: Any, requests: Any, sampling: Any, seed: int) -> Any:
    """`VLLMEngine.generate`, with a line about this rank's requests: how many of which draw (-1: the mean)."""
    served = Counter(-1 if request.draw is None else request.draw.index for request in requests)
    with Path(f"served-by-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(served) + "\n")
    return GENERATE(engine, requests, sampling, seed)


FAULTS = {
    "": (VLLMEngine, "load", LOAD),
    "another": (Payload, "write", another),
}
"""A class whose method is replaced, the method, and what replaces it."""

if __name__ == "__main__":
    faulthandler.dump_traceback_later(550, exit=True)
    if sys.argv[1] == "train":
        with patch.object(VLLMEngine, "__init__", impatient):
            sys.exit(main(sys.argv[1:]))
    with join_world(300.0) as world, replicas_forked():
        for folder, fault, expected, command in json.loads(Path(sys.argv[1]).read_text()):
            os.chdir(folder)
            with (
                patch("threepo.ranks.launch._PATIENCE_S", 0),  # nobody waits for torchrun here
                patch("threepo.commands.join_world", lambda *_: nullcontext(world)),  # ranks meet once in a process
                patch.object(VLLMEngine, "generate", noted),
                patch.object(*FAULTS[fault]),
            ):
                status = main(command)
            if status != expected:
                print(f"{command}: exit status {status}", file=sys.stderr, flush=True)
                os._exit(1)
    sys.stderr.flush()
    os._exit(0)
