"""Programs in namespaces of their own, by bubblewrap (https://github.com/containers/bubblewrap).

Inside there are a Python interpreter with its standard library, read-only, an empty `/tmp` of limited size and
`/dev/null`; no other file, no network, no other process, and no environment. Programs do not run as root even if
threepo does, because limits on processes do not hold for root.

Filters of system calls (`seccomp`) lie on top.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from threepo.config import SandboxConfig
from threepo.rewards.sandbox.harness import NOBODY
from threepo.rewards.sandbox.local import PYTHON_ARGUMENTS, LocalSandbox, Process, environment, spawn
from threepo.rewards.sandbox.seccomp import filters

HOME = "/python"
"""The folder of the interpreter inside."""
PACKAGES = "/packages"
"""The folder of reward.sandbox.packages inside."""
NAMESPACES = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--die-with-parent", "--clearenv", "--as-pid-1", "--cap-drop", "ALL"),
)
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
        settings.check("backend", sys.platform == "linux", f"works on Linux only; run there, {OTHERS}")
        self.drop_root = os.geteuid() == 0 and _nobody_is_mapped()
        user = ["--uid", str(NOBODY), "--gid", str(NOBODY)]
        if self.drop_root:
            user = ["--uid", "0", "--gid", "0", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            readable = not self.packages or os.stat(self.packages).st_mode & 0o005 == 0o005
            fix = f"programs run as nobody, who must be able to read it: chmod -R o+rX {self.packages}"
            settings.check("packages", readable, fix)
        bwrap = shutil.which("bwrap") or ""
        settings.check("backend", bwrap != "", _missing("bwrap", "bubblewrap"))
        self._command = [bwrap, *NAMESPACES, *user, *_file_system(self.packages)]
        with suppress(OSError):
            self.filters = filters()
        settings.check("backend", self.filters[0] != b"", _missing("libseccomp", "libseccomp2"))

    @contextmanager
    def start(self, link: Connection, room: int) -> Iterator[Process]:
        """The harness is process 1 inside: when it ends, the kernel ends everything there, files in memory included."""
        command = [*self._command, "--perms", "1777", "--size", str(room), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        inside = ["--remount-ro", "/", "--", f"{HOME}/bin/python", *PYTHON_ARGUMENTS]
        if not self.drop_root:
            yield spawn([*command, *inside], link, env={})
            return
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
        yield process


def _nobody_is_mapped() -> bool:
    """True if this process's user namespace has the user nobody."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [tuple(map(int, line.split())) for line in lines]  # first user inside, first outside, count
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def _missing(what: str, package: str) -> str:
    return f"there is no {what} on this machine; install it (apt-get install {package}), {OTHERS}"


@cache
def _file_system(packages: str) -> list[str]:
    """bwrap's arguments for the files inside, except /tmp, and for the environment."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    own = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})  # not of a virtual environment
    folders = dict.fromkeys((sysconfig.get_path("stdlib"), own))
    modules = Path(own, "lib-dynload").glob("*.so")
    binaries = [python, *(str(path) for path in modules if "tkinter" not in path.name)]  # which would bring X11
    binaries += map(str, Path(packages).rglob("*.so")) if packages else ()
    libraries = [path for path in _libraries(binaries) if not (packages and path.startswith(f"{packages}/"))]
    binds = {f"{HOME}/bin/python": python} | {_inside(path): path for path in (*folders, *libraries)}
    binds |= {PACKAGES: packages} if packages else {}
    words = ["--dir", "/dev", "--dev-bind", "/dev/null", "/dev/null"]
    for target, path in binds.items():
        words += ["--dir", os.path.dirname(target), "--ro-bind", path, target]  # what it would create, nobody may enter
    for path in (f"{folder}/{name}" for folder in folders for name in ("site-packages", "dist-packages")):
        if os.path.isdir(path):
            words += ["--tmpfs", _inside(path), "--remount-ro", _inside(path)]  # hides its files
    searched = sorted({os.path.dirname(_inside(path)) for path in libraries})
    variables = environment(packages and PACKAGES) | {"LD_LIBRARY_PATH": ":".join(searched)}
    for name, value in variables.items():
        words += ["--setenv", name, value]
    return words


def _libraries(binaries: list[str]) -> list[str]:
    """The shared libraries that binaries load, and the libraries' loader."""
    listing = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", listing, re.MULTILINE)))


def _inside(path: str) -> str:
    """The path inside of a file of this machine: under HOME if it is the interpreter's own, else the same."""
    relative = os.path.relpath(path, sys.base_prefix)
    return path if relative.startswith("..") else f"{HOME}/{relative}"
