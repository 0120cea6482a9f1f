"""Programs in namespaces of their own, by bubblewrap (https://github.com/containers/bubblewrap).

Inside there are a Python interpreter with its standard library, read-only, an empty `/tmp` of limited size and
`/dev/null`; no other file, no network, no other process, and no environment. Programs do not run as root even if
threepo does, because limits on processes do not hold for root.

libseccomp (https://github.com/seccomp/libseccomp) makes filters of system calls. A refused call returns an error and
the program goes on; a call by the tables of another architecture ends it.
"""

import ctypes
import errno
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path

from threepo.config import SandboxConfig
from threepo.errors import UserError
from threepo.rewards.sandbox.harness import NOBODY
from threepo.rewards.sandbox.local import PYTHON_ARGUMENTS, LocalSandbox, Process, environment, spawn

HOME = "/python"
PACKAGES = "/packages"
"""The folders of the interpreter and of reward.sandbox.packages inside."""
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
        if sys.platform != "linux":
            raise UserError(f"reward.sandbox.backend = 'bubblewrap': works on Linux only; run there, {OTHERS}")
        ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
        is_mapped = any(first <= NOBODY < first + count for first, _, count in ranges)  # in this user namespace
        self.drop_root = os.geteuid() == 0 and is_mapped
        user = ["--uid", str(NOBODY), "--gid", str(NOBODY)]
        if self.drop_root:
            user = ["--uid", "0", "--gid", "0", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            if self.packages and os.stat(self.packages).st_mode & 0o005 != 0o005:
                fix = f"programs run as nobody, who must be able to read it: chmod -R o+rX {self.packages}"
                raise UserError(f"reward.sandbox.packages = {settings.packages!r}: {fix}")
        self._command = [_found("bwrap", "bubblewrap"), *NAMESPACES, *user, *_mounts(self.packages)]
        try:
            self.filters = filters()
        except OSError:
            raise _missing("libseccomp", "libseccomp2") from None

    def scratch(self) -> AbstractContextManager[str]:
        """None here: the program's files are in memory, in its own namespace, and end with it."""
        return nullcontext("")

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


@cache
def _mounts(packages: str) -> list[str]:
    """The file system inside, but for /tmp, and the environment."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    own = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})  # not of a virtual environment
    folders = dict.fromkeys((sysconfig.get_path("stdlib"), own))
    modules = Path(own, "lib-dynload").glob("*.so")
    loading = [python, *(str(path) for path in modules if "tkinter" not in path.name)]  # which would bring X11
    loading += map(str, Path(packages).rglob("*.so")) if packages else ()
    listing = subprocess.run([_found("ldd", "libc-bin"), *loading], capture_output=True, text=True, check=False).stdout
    libraries = sorted(set(re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", listing, re.MULTILINE)))  # and their loader
    libraries = [path for path in libraries if not (packages and path.startswith(f"{packages}/"))]
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
    return [*words, *(word for name, value in variables.items() for word in ("--setenv", name, value))]


def _inside(path: str) -> str:
    """The path inside of a file of this machine: under HOME if it is the interpreter's own, else the same."""
    relative = os.path.relpath(path, sys.base_prefix)
    return path if relative.startswith("..") else f"{HOME}/{relative}"


LIBRARY = "libseccomp.so.2"
REFUSED = """
    ptrace process_vm_readv process_vm_writev kcmp unshare setns mount umount umount2 pivot_root chroot
    name_to_handle_at open_by_handle_at quotactl swapon swapoff acct syslog reboot kexec_load kexec_file_load
    init_module finit_module delete_module iopl ioperm modify_ldt settimeofday clock_settime clock_adjtime adjtimex
    add_key request_key keyctl bpf perf_event_open userfaultfd io_setup lookup_dcookie personality vhangup vmsplice
    migrate_pages move_pages socket sendmsg sendmmsg setsockopt memfd_create shmget semget msgget mq_open
    inotify_init inotify_init1 inotify_add_watch fanotify_init fanotify_mark
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
"""
"""Calls that nothing in the sandbox may make: those that look into other processes or change the machine, those with a
history of kernel bugs, and those that take memory that no limit counts, of the kernel or without a mapping."""
IDLE = "sync syncfs fsync fdatasync sync_file_range msync"
"""These do nothing and return 0: no file in the sandbox lasts, and the disk belongs to the whole machine."""
ALONE = "fork vfork execve execveat kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
"""The harness needs these, the program may not make them: it has threads but no children, and signals nobody."""
UNIFORM, KEPT = range(424, 600), (436, 437, 439, 441, 452)
"""Calls since Linux 5.1 have the same number on all architectures. They are not there, as on an older kernel, but for
close_range, openat2, faccessat2, epoll_pwait2 and fchmodat2."""
ORDERS = {"fcntl": (8, 10, 15, 1024, 1026, 1031), "ioctl": (0x8901, 0x8902)}
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, FIOSETOWN and SIOCSPGRP have the kernel send signals;
F_SETPIPE_SZ takes its memory."""
CLONE_THREAD, CLONE_NAMESPACES = 0x00010000, [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]
AF_UNIX = 1
NOT_EQUAL, MASKED_EQUAL = 1, 7
ALLOW, ERROR = 0x7FFF0000, 0x00050000
LOW = 0xFFFFFFFF
"""Where the kernel reads 32 bits of an argument, a comparison of all 64 could be dodged."""
Rule = tuple[str | int, int, tuple[int, int, int, int] | None]
"""A call, what it returns, and the argument that it is refused for: its position, operator, and one or two values."""


def filters() -> tuple[bytes, bytes]:
    """For everything in the sandbox, and for the program on top of that; `OSError` where there is no libseccomp."""
    everywhere: list[Rule] = [
        *((call, errno.EPERM, None) for call in REFUSED.split()),
        *((call, 0, None) for call in IDLE.split()),
        *((call, errno.ENOSYS, None) for call in UNIFORM if call not in KEPT),
        *(("clone", errno.EPERM, (0, MASKED_EQUAL, flag, flag)) for flag in CLONE_NAMESPACES),
        *((call, errno.EPERM, (1, MASKED_EQUAL, LOW, order)) for call, orders in ORDERS.items() for order in orders),
        ("prlimit64", errno.EPERM, (0, NOT_EQUAL, 0, 0)),
        ("socketpair", errno.EPERM, (0, NOT_EQUAL, AF_UNIX, 0)),  # asyncio needs a pair to wake itself
    ]
    alone: list[Rule] = [(call, errno.EPERM, None) for call in ALONE.split()]
    return _assembled(everywhere), _assembled([*alone, ("clone", errno.EPERM, (0, MASKED_EQUAL, CLONE_THREAD, 0))])


def _assembled(rules: Iterable[Rule]) -> bytes:
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    state = ctypes.c_void_p(library.seccomp_init(ALLOW))
    for call, error, comparison in rules:
        number = call if isinstance(call, int) else library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:  # else this architecture does not have it
            condition = struct.pack("IiQQ", *comparison) if comparison else None
            failed = library.seccomp_rule_add_array(state, ERROR | error, number, int(bool(comparison)), condition)
            assert not failed, (call, failed)
    with tempfile.TemporaryFile() as file:
        failed = library.seccomp_export_bpf(state, file.fileno())
        assert not failed, failed
        library.seccomp_release(state)
        file.seek(0)
        return file.read()
