"""The table of engines."""

import subprocess
import sys
from typing import get_args, get_type_hints

from threepo.config import EngineConfig
from threepo.rollout.engines import ENGINES


def test_every_kind_of_the_configuration_has_an_entry() -> None:
    assert set(ENGINES) == set(get_args(get_type_hints(EngineConfig)["kind"]))


def test_engines_are_imported_only_for_use() -> None:
    modules = {"vllm", "threepo.rollout.vllm", "threepo.rollout.local"}
    program = f"import sys, threepo.api; assert not {modules} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
