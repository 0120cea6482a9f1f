"""Filters of system calls, by libseccomp (https://github.com/seccomp/libseccomp), for what runs in the sandbox.

A refused call returns an error and the program goes on; a call by the tables of another architecture ends it.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from errno import ENOSYS, EPERM

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
"""Calls that do nothing and return 0: no file in the sandbox lasts, and the disk belongs to the whole machine."""
HARNESS_ONLY = "fork vfork execve execveat kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
"""Calls that the harness needs and the program may not make: it has threads but no children, and signals nobody."""
SINCE_5_1, ALLOWED_SINCE_5_1 = range(424, 600), (436, 437, 439, 441, 452)
"""Calls since Linux 5.1 have the same number on all architectures. They do not exist, as on an older kernel, except
close_range, openat2, faccessat2, epoll_pwait2 and fchmodat2."""
REFUSED_ORDERS = {"fcntl": (8, 10, 15, 1024, 1026, 1031), "ioctl": (0x8901, 0x8902)}
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, FIOSETOWN and SIOCSPGRP have the kernel send signals;
F_SETPIPE_SZ takes its memory."""
CLONE_THREAD, CLONE_NAMESPACES = 0x00010000, [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]
AF_UNIX = 1
NOT_EQUAL, MASKED_EQUAL = 1, 7
ALLOW, ERROR = 0x7FFF0000, 0x00050000
LOW = 0xFFFFFFFF
"""Where the kernel reads 32 bits of an argument, a comparison of all 64 could be dodged."""


Rule = tuple[str | int, int, tuple[int, int, int, int] | None]
"""A call that is not made, by name or number, and what it returns: an error, or 0 for success. The third part is the
only argument for which it is not made: its position, an operator, and one or two values; None for all."""


def filters() -> tuple[bytes, bytes]:
    """Filters for everything in the sandbox, and for the program on top of it; `OSError` without libseccomp."""
    everything: list[Rule] = [
        *((call, EPERM, None) for call in REFUSED.split()),
        *((call, 0, None) for call in IDLE.split()),
        *((call, ENOSYS, None) for call in SINCE_5_1 if call not in ALLOWED_SINCE_5_1),
        *(("clone", EPERM, (0, MASKED_EQUAL, flag, flag)) for flag in CLONE_NAMESPACES),
        ("prlimit64", EPERM, (0, NOT_EQUAL, 0, 0)),
        ("socketpair", EPERM, (0, NOT_EQUAL, AF_UNIX, 0)),  # asyncio needs a pair to wake itself
    ]
    for call, orders in REFUSED_ORDERS.items():
        everything += [(call, EPERM, (1, MASKED_EQUAL, LOW, order)) for order in orders]
    program: list[Rule] = [(call, EPERM, None) for call in HARNESS_ONLY.split()]
    program.append(("clone", EPERM, (0, MASKED_EQUAL, CLONE_THREAD, 0)))
    return _compile(everything), _compile(program)


def _compile(rules: Iterable[Rule]) -> bytes:
    """The filter's program, as the kernel reads it."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    state = ctypes.c_void_p(library.seccomp_init(ALLOW))
    for call, error, argument in rules:
        number = call if isinstance(call, int) else library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:  # else this architecture does not have it
            condition = struct.pack("IiQQ", *argument) if argument else None
            failed = library.seccomp_rule_add_array(state, ERROR | error, number, int(bool(argument)), condition)
            assert not failed, (call, failed)
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:  # there may be no folder for temporary files
        failed = library.seccomp_export_bpf(state, file.fileno())
        assert not failed, failed
        library.seccomp_release(state)
        file.seek(0)
        return file.read()
