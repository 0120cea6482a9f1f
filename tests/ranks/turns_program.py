"""The program of test_dealing.py, run on each rank: ranks prepare their engines, which note the time, and share values.

turns_program.py NOTES
"""

import os
import sys
import time
from unittest.mock import patch

import torch

from threepo.ranks.dealing import SharedEngine
from threepo.ranks.launch import join_world
from threepo.ranks.world import PADDED_BYTES
from threepo.rollout.engines import RolloutEngine


class Noting(RolloutEngine):
    """Takes its time to prepare."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def prepare(self, draws: int, tokens: int) -> None:
        os.write(self._file, f"{os.environ['RANK']} begins {draws}\n".encode())
        time.sleep(0.5)
        os.write(self._file, f"{os.environ['RANK']} ends\n".encode())


with join_world(30) as world:
    SharedEngine(Noting(sys.argv[1]), world, 1).prepare(4, 100)
    for padded in (30, PADDED_BYTES):  # large shares one by one, or all at once
        with patch("threepo.ranks.world.PADDED_BYTES", padded):
            for values in ([None, {"rows": [b"\0" * 10_000]}, None], [(), [0.5, ()], ()], [b"a" * 100] * 3):
                with torch.device("meta"):  # a caller's default device is not for this
                    assert world.gather(values[world.rank]) == values
