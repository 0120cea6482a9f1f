"""Filters of system calls for the local sandbox, made by libseccomp (https://github.com/seccomp/libseccomp).

A refused call returns an error and the program goes on; a call by the tables of another architecture ends it.
"""

import ctypes
import errno
import tempfile
from collections.abc import Iterable
from ctypes import c_int, c_uint, c_uint64

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
FCNTL, IOCTL = (8, 10, 15, 1024, 1026, 1031), (0x8901, 0x8902)
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


def harness_filter() -> bytes:
    """For everything in the sandbox; `OSError` where there is no libseccomp."""
    rules: list[Rule] = [(call, errno.EPERM, None) for call in REFUSED.split()]
    rules += [(call, 0, None) for call in IDLE.split()]
    rules += [(call, errno.ENOSYS, None) for call in UNIFORM if call not in KEPT]
    rules += [("clone", errno.EPERM, (0, MASKED_EQUAL, flag, flag)) for flag in CLONE_NAMESPACES]
    rules += [("fcntl", errno.EPERM, (1, MASKED_EQUAL, LOW, order)) for order in FCNTL]
    rules += [("ioctl", errno.EPERM, (1, MASKED_EQUAL, LOW, order)) for order in IOCTL]
    rules.append(("prlimit64", errno.EPERM, (0, NOT_EQUAL, 0, 0)))
    rules.append(("socketpair", errno.EPERM, (0, NOT_EQUAL, AF_UNIX, 0)))  # asyncio needs a pair to wake itself
    return _assembled(rules)


def program_filter() -> bytes:
    """For the process of the program, on top of that of the harness."""
    rules: list[Rule] = [(call, errno.EPERM, None) for call in ALONE.split()]
    return _assembled([*rules, ("clone", errno.EPERM, (0, MASKED_EQUAL, CLONE_THREAD, 0))])


class _Comparison(ctypes.Structure):
    _fields_ = (("position", c_uint), ("operator", c_int), ("first", c_uint64), ("second", c_uint64))


def _assembled(rules: Iterable[Rule]) -> bytes:
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    state = ctypes.c_void_p(library.seccomp_init(ALLOW))
    for call, error, comparison in rules:
        number = call if isinstance(call, int) else library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:  # else this architecture does not have it
            condition = ctypes.byref(_Comparison(*comparison or ()))
            failed = library.seccomp_rule_add_array(state, ERROR | error, number, int(bool(comparison)), condition)
            assert not failed, (call, failed)
    with tempfile.TemporaryFile() as file:
        failed = library.seccomp_export_bpf(state, file.fileno())
        assert not failed, failed
        library.seccomp_release(state)
        file.seek(0)
        return file.read()
