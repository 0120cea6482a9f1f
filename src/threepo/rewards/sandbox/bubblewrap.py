"""Programs in namespaces of their own, by bubblewrap (https://github.com/containers/bubblewrap).

Inside there are a Python interpreter with its standard library, read-only, an empty `/tmp` of limited size and
`/dev/null`; no other file, no network, no other process, and no environment. Programs do not run as root even if
threepo does, because limits on processes do not hold for root.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from threepo.config import SandboxConfig
from threepo.errors import UserError
from threepo.rewards.sandbox import seccomp
from threepo.rewards.sandbox.harness import NOBODY
from threepo.rewards.sandbox.local import ENVIRONMENT, PYTHON_ARGUMENTS, LocalSandbox, Process, spawn

HOME = "/python"
"""The folder of the interpreter inside."""
OTHERS = (
    "or set reward.sandbox.backend to 'sandbox_fusion', or, where you trust every program that the policy may write, "
    "to 'unconfined'"
)


class Bubblewrap(LocalSandbox):
    """Starts programs in bubblewrap."""

    advice = (
        "the kernel must let this process make user namespaces (docs/rewards.md says what stands in the way, in "
        f"containers above all), {OTHERS}"
    )

    def __init__(self, settings: SandboxConfig) -> None:
        super().__init__(settings)
        self.drop_root = os.geteuid() == 0 and _is_mapped(NOBODY)
        user = ["--uid", "0", "--gid", "0", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if not self.drop_root:
            user = ["--uid", str(NOBODY), "--gid", str(NOBODY)]
        self._command = [_found("bwrap", "bubblewrap"), *_NAMESPACES, *user, *_mounts()]
        try:
            self.filters = seccomp.harness_filter(), seccomp.program_filter()
        except OSError:
            raise _missing("libseccomp", "libseccomp2") from None

    def start(self, link: int, folder: str, room: int) -> Process:
        """The harness is process 1 inside: when it ends, the kernel ends everything there."""
        command = [*self._command, "--perms", "1777", "--size", str(room), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        inside = ["--remount-ro", "/", "--", f"{HOME}/bin/python", *PYTHON_ARGUMENTS]
        if not self.drop_root:
            return spawn([*command, *inside], link, env={})
        # Its user namespace maps root and nobody, which only a process outside can write.
        (info_read, info), (block, block_write) = os.pipe(), os.pipe()
        with open(info_read, "rb") as answer, open(block_write, "wb", 0) as release:
            with open(info, "wb"), open(block, "rb"):
                waiting = ["--info-fd", str(info), "--userns-block-fd", str(block)]
                process = spawn([*command, *waiting, *inside], link, env={}, pass_fds=(info, block))
            pid = re.search(rb"\d+", answer.read())  # missing if bubblewrap failed before, which it reports itself
            with suppress(OSError):  # if this is refused, the harness cannot give up root, and reports that
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{int(pid[0]) if pid else 0}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
                release.write(b"x")
        return process


def _found(program: str, package: str) -> str:
    if path := shutil.which(program):
        return path
    raise _missing(program, package)


def _missing(what: str, package: str) -> UserError:
    problem = f"reward.sandbox.backend = 'bubblewrap': there is no {what} on this machine"
    return UserError(f"{problem}; install it (apt-get install {package}), {OTHERS}")


def _is_mapped(user: int) -> bool:
    """Whether this identity exists in the user namespace of this process."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return any(first <= user < first + count for first, _, count in (map(int, line.split()) for line in lines))


_NAMESPACES = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--die-with-parent", "--clearenv", "--as-pid-1", "--cap-drop", "ALL"),
    *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
)


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
    parents = {str(parent) for target in (*binds, "/dev/null") for parent in Path(target).parents} - {"/"}
    folders = ":".join(sorted({os.path.dirname(_inside(path)) for path in libraries}))
    packages = [
        f"{target}/{name}"
        for target, path in binds.items()
        for name in ("site-packages", "dist-packages")
        if os.path.isdir(f"{path}/{name}")
    ]
    return (
        *(word for folder in sorted(parents) for word in ("--perms", "0755", "--dir", folder)),
        *(word for target, path in binds.items() for word in ("--ro-bind", path, target)),
        *(word for folder in packages for word in ("--tmpfs", folder, "--remount-ro", folder)),  # hides their files
        *("--dev-bind", "/dev/null", "/dev/null", "--setenv", "LD_LIBRARY_PATH", folders),
    )


def _inside(path: str) -> str:
    """The path inside of a file of this machine: under HOME if it is the interpreter's own, else the same."""
    relative = os.path.relpath(path, sys.base_prefix)
    return path if relative.startswith("..") else f"{HOME}/{relative}"


def _libraries(files: Sequence[str]) -> list[str]:
    """The shared libraries that these files load, the loader among them."""
    listing = subprocess.run([_found("ldd", "libc-bin"), *files], capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", listing, re.MULTILINE)))
