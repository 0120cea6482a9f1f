"""What runs inside the sandbox: starts the program for each of its tests, and tells how that ended.

The parent sends this module as compiled code, for some tests with `scripts`, `remote` and `crossing`, which run in one
namespace with it. So it imports nothing of threepo, and only what it needs: every import delays every program.

The harness reads the job and holds `control`, the only channel whose word is believed. The program runs in a process of
its own, forked from the harness before the harness knows anything that the program must not know; it holds no
descriptor of the harness's. For tests that are Python code there are two: the harness runs the tests, the other process
the program, and only plain data passes between them. So a program cannot answer for the tests, nor see what they
expect: its objects are compared by nobody but itself.

Lines on `control`: `ready`, `compiled` or `uncompilable`, then for each case one of `ok`, `wrong`, `runtime`, `memory`
and `time`. A byte from `go` comes before each case, so that the output of one is read before the next can write.
"""

from __future__ import annotations

import atexit
import gc
import marshal
import os
import resource
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False  # the module `typing` takes longer to import than Python takes to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any, NoReturn

    from threepo.rewards.sandbox.scripts import run_script

MEMORY_EXIT = 86
"""Exit status of a program that ran out of memory; one that claims it without need only harms itself."""
STACK = 64 << 20
NOBODY = 65534
SET_FILTER, DIE_WITH_PARENT = 22, 1
"""PR_SET_SECCOMP and PR_SET_PDEATHSIG, with which Linux's prctl is called."""
SIGKILL, SIGXCPU = 9, 24
"""On Linux and macOS; the module `signal` takes longer to import than most programs to run."""


def main(job: dict[str, Any], tests: IO[bytes], go: int, control: int, output: int) -> None:
    """Run the job, in the process that has been made for it."""
    if job["filter"]:
        import ctypes  # noqa: F401 - once for all cases
    _limit(job)
    tell(control, "ready")
    try:
        # The last argument: without the future statements of this module.
        prefix, program = (compile(job[part], f"<{part}>", "exec", 0, True) for part in ("prefix", "program"))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        tell(control, "uncompilable")
        return
    tell(control, "compiled")
    if job["kind"] != "stdin":
        import json  # noqa: F401 - once for all cases, and for both processes of a script
    for name in job["imports"]:
        with_or_without(name)
    gc.freeze()  # else every case would copy what its first collection looks at
    if job["kind"] == "script":
        run_script(job, prefix, program, tests, go, control)
        return
    for text in marshal.load(tests):
        if not os.read(go, 1):
            return
        source = _input(text if job["kind"] == "stdin" else "")
        pid = os.fork()
        if not pid:
            os.dup2(source, 0)
            _run_case(job, text, output, prefix, program)
        os.close(source)
        tell(control, ending_of(pid, job["cpu_s"]))


def _limit(job: dict[str, Any]) -> None:
    """Give up root, where the harness has it, and set the limits that hold for all that follows."""
    if job["drop"]:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _control_process(DIE_WITH_PARENT, SIGKILL)  # bubblewrap asked for it, but another user starts without
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK if hard == resource.RLIM_INFINITY else min(STACK, hard), hard))
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))


def with_or_without(name: str) -> None:
    """Import a module that every case will import, once for all; where it fails, let each case find out."""
    try:
        __import__(name)
    except Exception:
        sys.modules.pop(name, None)


def tell(control: int, line: str) -> None:
    os.write(control, line.encode() + b"\n")


def _input(text: str) -> int:
    """A file without a name that holds `text`."""
    name = f".input{os.getpid()}"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    write(file, text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def ending_of(pid: int, cpu_s: float) -> str:
    """How the process ended, which this waits for."""
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if usage.ru_utime + usage.ru_stime > cpu_s or code == -SIGXCPU:
        return "time"
    return {0: "ok", MEMORY_EXIT: "memory"}.get(code, "runtime")


# The process of the program


def _run_case(job: dict[str, Any], text: str, output: int, prefix: CodeType, program: CodeType) -> NoReturn:
    if job["kind"] == "stdin":
        os.dup2(output, 1)
        alone(job, ())
        main = module("__main__")
        _end_after(lambda: execute(main, prefix, program), main)
    answer = os.dup2(output, job["limits"]["RLIMIT_NOFILE"] - 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    alone(job, (answer,))
    names = module("solution")
    _end_after(lambda: _call(names, job["entry"], text, answer, prefix, program), names)


def alone(job: dict[str, Any], keep: tuple[int, ...]) -> None:
    """Close all descriptors but standard ones and `keep`, and set what holds for the program only."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    first = 3
    for file in (*sorted(keep), max(job["above"], job["limits"]["RLIMIT_NOFILE"])):
        os.closerange(first, file)
        first = file + 1
    soft = int(-(-job["cpu_s"] // 1))
    hard = soft * job["cases"] if job["kind"] == "script" else soft  # of which `Link.allow` gives a part at a time
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard + 1))
    if job["filter"]:
        _load_filter(job["filter"].replace(job["own_pid"], os.getpid().to_bytes(4, sys.byteorder)))


def _load_filter(instructions: bytes) -> None:
    import ctypes

    data = ctypes.create_string_buffer(instructions, len(instructions))
    place = ctypes.addressof(data).to_bytes(8, sys.byteorder)
    program = (len(instructions) // 8).to_bytes(2, sys.byteorder) + bytes(6) + place  # struct sock_fprog
    _control_process(SET_FILTER, 2, program)


def _control_process(option: int, *arguments: Any) -> None:
    import ctypes

    if ctypes.CDLL(None).prctl(option, *arguments):
        raise OSError(f"prctl {option} failed")


def module(name: str) -> dict[str, Any]:
    """The names of a new module, which stands where imports find it."""
    module = sys.modules[name] = ModuleType(name)
    return module.__dict__


def execute(names: dict[str, Any], *parts: CodeType) -> None:
    for code in parts:
        exec(code, names)


def _call(names: dict[str, Any], entry: str, arguments: str, answer: int, *parts: CodeType) -> None:
    """Call the program's function `entry` and write what it returns."""
    import json

    sys.set_int_max_str_digits(0)
    execute(names, *parts)
    # The method first: the prefix may have imported a function of that name.
    is_method = hasattr(names.get("Solution"), entry)
    function = getattr(names["Solution"](), entry) if is_method else names[entry]
    write(answer, json.dumps(function(*json.loads(arguments)), default=list).encode())


def _end_after(run: Callable[[], None], names: dict[str, Any]) -> NoReturn:
    """Run the program and end the process as Python would, but leave taking it down to the kernel, which is faster."""
    code: Any = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    except MemoryError:
        code = MEMORY_EXIT
    except BaseException:
        code = 1
    last: list[Callable[[], object]] = [
        lambda: sys.modules["threading"]._shutdown(),  # waits for threads
        lambda: atexit._run_exitfuncs(),
        lambda: sys.stdout.flush(),
        names.clear,  # which writes out files that were left open
        lambda: sys.__stdout__.flush(),  # type: ignore[union-attr]
    ]
    for step in last:
        try:
            step()
        except BaseException:
            continue  # no threads or nothing registered; or as broken as the program left it
    os._exit(code & 255 if isinstance(code, int) else int(code is not None))
