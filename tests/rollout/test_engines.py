"""The cost of importing engines."""

import subprocess
import sys


def test_engines_are_imported_only_for_use() -> None:
    modules = {"vllm", "threepo.rollout.vllm", "threepo.rollout.local"}
    program = f"import sys, threepo.api; assert not {modules} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
