"""Python programs in processes of their own, which are forked from one that has imported the heavy libraries.

Importing torch and transformers takes seconds, and says nothing about the program; it imports threepo itself.
"""

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType


def forkserver() -> ForkServerContext:
    """Starts processes that have the heavy libraries, and nothing of threepo."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.modeling_utils", "pyarrow.parquet", "pydantic"])
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
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(main))
