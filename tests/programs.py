"""Python programs in processes of their own, which are forked from one that has imported the heavy libraries.

Importing torch and transformers takes seconds, and says nothing about the program; it imports threepo itself.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType


def forkserver() -> ForkServerContext:
    """Starts processes that have the heavy libraries, and nothing of threepo."""
    import torch

    context = multiprocessing.get_context("forkserver")
    libraries = ["torch", "transformers.modeling_utils", "pyarrow.parquet", "pydantic"]
    if not torch.cuda.is_available():  # a GPU's libraries need not survive a fork
        libraries += ["vllm.v1.worker.cpu_worker", "vllm.entrypoints.openai.api_server"]  # left out without vLLM
    context.set_forkserver_preload(libraries)
    return context


def redirect(output: str, errors: str) -> None:
    """Send what this process and those that it starts print to files."""
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)


def run_program(
    program: str | Path, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, given as its file or its text, in this folder; a `PYTHONPATH` comes before all other paths."""
    with tempfile.TemporaryDirectory() as said:
        files = [os.path.join(said, name) for name in ("output", "errors")]
        process = forked(program, folder, arguments, environment, files)
        process.join()
        output, errors = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess([str(program), *arguments], process.exitcode or 0, output, errors)


class Leader:
    """A program, given as its text, that leads a group of processes: what `subprocess.Popen` has for a replica's.

    Its one argument, if any, is the number of `link`; the file of `output` must exist.
    """

    def __init__(self, program: str, environment: Mapping[str, str], output: str, link: int | None = None) -> None:
        theirs, self.stdin = Pipe(duplex=False)
        begun, begins = Pipe(duplex=False)
        given = Connection(os.dup(link)) if link is not None else None
        self._process = forkserver().Process(
            target=_lead, args=(program, dict(environment), output, theirs, begins, given)
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid
        for end in filter(None, (theirs, begins, given)):
            end.close()
        begun.recv()  # from now on the group can be killed
        begun.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the program", timeout or 0)
        return self._process.exitcode


def _lead(
    program: str,
    environment: dict[str, str],
    output: str,
    stdin: Connection,
    begins: Connection,
    link: Connection | None,
) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    begins.send(())
    begins.close()
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    redirect(output, output)
    os.environ.clear()
    os.environ.update(environment)
    _run_text(program, *([str(link.fileno())] if link else []))


def _run_text(program: str, *arguments: str) -> None:
    """Run a program as `python -c` does, whose own processes import nothing of this one's main module."""
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(main))


def forked(
    program: str | Path, folder: Path, arguments: Sequence[str], environment: dict[str, str], files: Sequence[str]
) -> ForkServerProcess:
    """Start a program, as in `run_program`, that prints to these two files."""
    process = forkserver().Process(target=_run, args=(program, folder, arguments, environment, files))
    process.start()
    return process


def _run(
    program: str | Path, folder: Path, arguments: Sequence[str], environment: dict[str, str], files: Sequence[str]
) -> None:
    redirect(*files)
    faulthandler.enable()  # a process that dies of a signal says where it was
    os.chdir(folder)
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # torch has read it when it was imported
        import torch

        torch.set_num_threads(int(threads))
    if path := environment.get("PYTHONPATH"):
        sys.path[:0] = path.split(os.pathsep)
    if isinstance(program, Path):
        sys.argv = [str(program), *arguments]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
        return
    sys.path.insert(0, "")
    _run_text(program, *arguments)
