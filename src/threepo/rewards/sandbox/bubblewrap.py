"""Programs in namespaces of their own, by bubblewrap (https://github.com/containers/bubblewrap).

Inside there is a Python interpreter with its standard library, both read-only, an empty `/tmp` of limited size and
`/dev/null`; no other file, no network, no process but its own, and no environment. Where threepo runs as root, the
programs do not: limits on processes mean nothing to root.
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Generator, Sequence
from pathlib import Path

from threepo.errors import UserError
from threepo.rewards.sandbox import seccomp
from threepo.rewards.sandbox.harness import NOBODY
from threepo.rewards.sandbox.interface import Job
from threepo.rewards.sandbox.local import ENVIRONMENT, FILES_LIMIT, Pipe, ended, input_bytes

SETTING = "reward.sandbox.backend = 'bubblewrap'"
OTHERS = (
    "or set reward.sandbox.backend to 'sandbox_fusion', or, where you trust every program that the policy may write, "
    "to 'unconfined'"
)
HOME = "/python"
"""Where the interpreter stands inside."""
END_LIMIT_S = 30.0
_BOTH_USERS = f"0 0 1\n{NOBODY} {NOBODY} 1\n"


class Bubblewrap:
    """Starts programs in bubblewrap."""

    confined = True

    def __init__(self) -> None:
        if not seccomp.supported():
            raise UserError(
                f"{SETTING}: knows the system calls of x86_64 and aarch64, not of {os.uname().machine}; {OTHERS}"
            )
        program = shutil.which("bwrap")
        if program is None:
            raise UserError(
                f"{SETTING}: there is no bwrap on this machine; install it (apt-get install bubblewrap), {OTHERS}"
            )
        self.drop_root = os.geteuid() == 0 and _is_mapped(NOBODY)
        self._command = [program, *_NAMESPACES, *_user(self.drop_root), *_mounts()]
        self._guard = seccomp.guard()

    @contextlib.contextmanager
    def start(
        self, arguments: Sequence[str], files: Sequence[int], job: Job
    ) -> Generator[subprocess.Popen[bytes], None, None]:
        """The kernel ends all that is inside when the process that this gives has ended."""
        with Pipe() as guard, Pipe() as mapped, Pipe() as told:
            os.write(guard.write, self._guard)  # less than a pipe holds
            guard.close(guard.write)
            size = str(FILES_LIMIT + input_bytes(job))
            command = [*self._command, "--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--remount-ro", "/"]
            command += ["--chdir", "/tmp", "--seccomp", str(guard.read), "--info-fd", str(told.write)]
            if self.drop_root:
                command += ["--userns-block-fd", str(mapped.read)]
            handed = [*files, guard.read, told.write, mapped.read]
            process = subprocess.Popen(
                [*command, "--", f"{HOME}/bin/python", *arguments, str(max(handed) + 1)],
                pass_fds=handed,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for threepo, which may finish its step with true verdicts
            )
            first = None
            try:
                told.close(told.write)
                pid = _first_inside(told.read)
                if pid is not None:
                    first = os.pidfd_open(pid)
                    if self.drop_root:
                        _map_users(pid)
                        os.write(mapped.write, b"x")
                yield process
            finally:
                _end(process, first)


def _first_inside(told: int) -> int | None:
    """The process whose end is the end of all inside, as bubblewrap tells; None where it did not come so far."""
    text = b""
    while not (found := re.search(rb'"child-pid": (\d+)\D', text)):
        part = os.read(told, 4096)
        if not part:
            return None
        text += part
    return int(found[1])


def _end(process: subprocess.Popen[bytes], first: int | None) -> None:
    """End all inside; bubblewrap then ends by itself, once the kernel has cleared everything away."""
    if first is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        os.close(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
    ended(process)


def _map_users(pid: int) -> None:
    """Give the new user namespace root and nobody. Where that is refused the harness cannot start, and says so."""
    with contextlib.suppress(OSError):
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(_BOTH_USERS)


def _is_mapped(user: int) -> bool:
    """Whether this identity exists in the user namespace of this process."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return any(first <= user < first + count for first, _, count in (map(int, line.split()) for line in lines))


_NAMESPACES = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"),
    *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
)


def _user(drop_root: bool) -> tuple[str, ...]:
    if drop_root:
        capabilities = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        return ("--uid", "0", "--gid", "0", *capabilities)
    return ("--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL")


@functools.cache
def _mounts() -> tuple[str, ...]:
    """The file system inside, but for /tmp."""
    own = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})  # not of a virtual environment
    binds = {
        f"{HOME}/bin/python": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        _inside(sysconfig.get_path("stdlib")): sysconfig.get_path("stdlib"),
        _inside(own): own,
    }
    extensions = Path(own, "lib-dynload").glob("*.so")
    modules = [str(path) for path in extensions if "tkinter" not in path.name]  # which would bring the libraries of X11
    libraries = _libraries([binds[f"{HOME}/bin/python"], *modules])
    binds |= {_inside(path): path for path in libraries}
    parents = {str(parent) for place in (*binds, "/dev/null") for parent in Path(place).parents} - {"/"}
    folders = ":".join(sorted({os.path.dirname(_inside(path)) for path in libraries}))
    hidden = [f"{folder}/{name}" for folder in binds for name in ("site-packages", "dist-packages")]
    return (
        *(word for folder in sorted(parents) for word in ("--perms", "0755", "--dir", folder)),
        *(word for place, path in binds.items() for word in ("--ro-bind", path, place)),
        *(word for place in hidden if os.path.isdir(_outside(place, binds)) for word in ("--tmpfs", place)),
        *("--dev-bind", "/dev/null", "/dev/null", "--setenv", "LD_LIBRARY_PATH", folders),
    )


def _inside(path: str) -> str:
    """Where a file of this machine stands inside: the interpreter's own under HOME, others where they are."""
    relative = os.path.relpath(path, sys.base_prefix)
    return path if relative.startswith("..") else f"{HOME}/{relative}"


def _outside(place: str, binds: dict[str, str]) -> str:
    folder, name = os.path.split(place)
    return os.path.join(binds[folder], name)


def _libraries(files: Sequence[str]) -> list[str]:
    """The shared libraries that these files load, the loader among them."""
    ldd = shutil.which("ldd")
    if ldd is None:
        raise UserError(f"{SETTING}: there is no ldd on this machine to tell what Python needs; install it, {OTHERS}")
    told = subprocess.run([ldd, *files], capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", told, re.MULTILINE)))
