"""The tool that runs programs, in an environment's process and the real sandbox."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rewards.contained import why_not
from threepo.config import EnvironmentConfig
from threepo.errors import UserError
from threepo.rollout.environments import Environments
from threepo.types import Problem

REASON = why_not()
FACTORY = "threepo.plugins.python_tool:PythonTool"


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_programs_run_in_the_sandbox_and_their_output_comes_back() -> None:
    settings = {"sandbox": {"timeout_s": 1.0, "memory_mib": 256}, "longest": 200}
    with closing(Environments(EnvironmentConfig(factory=FACTORY, settings=settings))) as environments:
        (tool,) = environments.tools
        assert tool["function"]["parameters"]["required"] == ["code"]
        environments.begin(1)
        assert environments.call({0: ("reset", Problem("p", "2 ** 10?"), 1)})[0].value is None

        def run(*programs: str) -> list[str]:
            calls = [("python", {"code": program}) for program in programs]
            return list(environments.call({0: ("tools", calls, "")})[0].value)

        assert run("print(2 ** 10)", "x = 1", "import sys\nprint('a', file=sys.stderr)\nsys.exit(3)") == [
            "1024\n",
            "[no output]",
            "a\n",
        ]
        failed, wrong, late, big = run(
            "def f():\n    return x\n\nprint('so far')\nf()",
            "print('a'",
            "import time\nprint(1, flush=True)\ntime.sleep(100)",
            "x = bytearray(10 ** 9)",
        )
        assert failed.startswith('so far\nTraceback (most recent call last):\n  File "<code>", line 5, in <module>\n')
        assert failed.endswith("NameError: name 'x' is not defined\n")
        assert "line 2, in f" in failed
        assert "SyntaxError: '(' was never closed" in wrong
        assert late == "1\n[the program took too long]"
        assert big == "[it needed too much memory]"
        (long,) = run("print('a' * 1000 + 'b')")
        assert long == "a" * 100 + "\n[802 characters left out]\n" + "a" * 98 + "b\n"
        (outside,) = run("import os\nprint(os.path.exists('/etc/passwd'), os.getuid())")
        assert outside == "False 65534\n"


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that they have started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_program_ends_with_its_episode() -> None:
    settings = EnvironmentConfig(factory=FACTORY, settings={"sandbox": {"timeout_s": 100.0}}, timeout_s=3.0)
    with closing(Environments(settings)) as environments, ThreadPoolExecutor(1) as thread:
        environments.begin(1)
        environments.call({0: ("reset", Problem("p", "2 ** 10?"), 1)})
        program = "import time\ntime.sleep(100)"
        answer = thread.submit(environments.call, {0: ("tools", [("python", {"code": program})], "")})
        running: set[int] = set()
        while not answer.done():
            running |= descendants(environments._first.pid)
            time.sleep(0.1)
        assert answer.result()[0].failure == "time-out"
        assert len(running) >= 4, "the episode, bubblewrap, the harness and the program"
        deadline = time.monotonic() + 5
        while running and time.monotonic() < deadline:
            running = {pid for pid in running if Path(f"/proc/{pid}").exists()}
            time.sleep(0.01)
        assert not running


def test_a_sandbox_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(UserError, match="environment.settings.sandbox.packages = '/nowhere'"):
        Environments(EnvironmentConfig(factory=FACTORY, settings={"sandbox": {"packages": "/nowhere"}}))
