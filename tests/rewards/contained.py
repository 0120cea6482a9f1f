"""Runs programs that attack the machine, in a process namespace of its own: what leaves the sandbox gets no further.

A line of JSON comes in for each program and goes out for what became of it, with the processes that it left behind.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from threepo.config import SandboxConfig
from threepo.errors import UserError
from threepo.rewards.sandbox import Submission, open_sandbox

PATIENCE_S = 20


class Contained:
    """The end outside: hands programs in and gets their outcomes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def abandon(self, program: str) -> list[str]:
        """The processes left of a program whose caller is killed while it runs."""
        return list(self._ask({"abandoned": {"kind": "stdin", "program": program, "cases": [""]}})["left"])

    def run(self, kind: str, program: str, cases: list[str], **submission: str) -> dict[str, Any]:
        """Endings, outputs, and what is left."""
        return self._ask({"kind": kind, "program": program, "cases": cases, **submission})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the program has ended what watches over it"
        return dict(json.loads(line))


def why_not() -> str:
    """Why the sandbox cannot be tested on this machine; empty where it can."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "needs Linux, and unshare (apt-get install util-linux)"
    try:
        open_sandbox(SandboxConfig())
    except UserError as error:
        return str(error)
    apart = subprocess.run([*_apart(), "true"], capture_output=True, text=True, check=False)
    return apart.stderr.strip()


@contextmanager
def contained(settings: dict[str, Any], folder: Path, user: Sequence[str] = ()) -> Iterator[Contained]:
    """A process in namespaces of its own, started by `user`, that runs programs in the sandbox of these settings."""
    process = subprocess.Popen(
        [*_apart(), *user, sys.executable, __file__, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SECRET_OF_THE_HOST": "hunter2"},
    )
    try:
        yield Contained(process)
    finally:
        process.kill()
        process.communicate()


def _apart() -> list[str]:
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *users, "--fork", "--pid", "--kill-child", "--mount-proc"]


def _left() -> list[str]:
    """The kernel's list of other processes, once they have had time to end."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        others = _others()
        if not others or time.monotonic() > deadline:
            return [_status(pid) for pid in others]
        time.sleep(0.02)


def _abandon(submission: dict[str, Any]) -> None:
    """Let a process of ours have a program run, and kill it once the program runs; then reap, as process 1 must."""
    before = _others()
    caller = subprocess.Popen([sys.executable, __file__, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert caller.stdin is not None
    caller.stdin.write(json.dumps(submission).encode() + b"\n")
    caller.stdin.flush()
    while not any("(sleeping)" in _status(pid) for pid in _others() - before):
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and _others():
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)


def _status(pid: str) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text()
    return ""


def _others() -> set[str]:
    return {pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()}


def main() -> None:
    """The end inside, which is process 1 there."""
    sandbox = open_sandbox(SandboxConfig(**json.loads(sys.argv[1])))
    for _ in range(100):  # so that the harness gets descriptors that a program could not open itself
        os.open(os.devnull, os.O_RDONLY)
    for line in sys.stdin:
        submission = json.loads(line)
        if "abandoned" in submission:
            _abandon(submission["abandoned"])
            print(json.dumps({"left": _left()}), flush=True)
            continue
        outcomes = list(sandbox.run(Submission(**{**submission, "cases": tuple(submission["cases"])})))
        endings = [outcome.ending for outcome in outcomes]
        outputs = [outcome.output for outcome in outcomes]
        print(json.dumps({"endings": endings, "outputs": outputs, "left": _left()}), flush=True)


if __name__ == "__main__":
    main()
