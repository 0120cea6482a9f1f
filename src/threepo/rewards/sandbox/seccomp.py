"""Filters of system calls for the local sandbox: classic BPF, assembled by hand.

`harness_filter` holds for everything in the sandbox: no tracing, no namespaces or mounts, no sockets but pairs, no
memory that the limits do not count, none of the calls that kernel bugs like best, and none newer than `_NEWER`.
`program_filter` comes on top in the process of the program: it may have threads but no children, may not become another
program, and may not send signals or change the limits of others. A refused call returns an error and the program goes
on; a call by the tables of another architecture ends the process.
"""

import errno
import platform
import struct

_REFUSED = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448,
kcmp 312 272, pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, unshare 272 97, setns 308 268,
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429, fsopen 430 430,
fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, name_to_handle_at 303 264,
open_by_handle_at 304 265, quotactl 179 60, quotactl_fd 443 443, swapon 167 224, swapoff 168 225, acct 163 89,
syslog 103 116, reboot 169 142, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273,
delete_module 176 106, iopl 172 -1, ioperm 173 -1, modify_ldt 154 -1, settimeofday 164 170, clock_settime 227 112,
clock_adjtime 305 266, adjtimex 159 171, add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
io_uring_register 427 427, io_setup 206 0, lookup_dcookie 212 18, personality 135 92, vhangup 153 58, vmsplice 278 75,
migrate_pages 256 238, move_pages 279 239, cachestat 451 451, socket 41 198, sendmsg 46 211, sendmmsg 307 269,
setsockopt 54 208, memfd_create 319 279, memfd_secret 447 447, shmget 29 194, semget 64 190, msgget 68 186,
mq_open 240 180, inotify_init 253 -1, inotify_init1 294 26, inotify_add_watch 254 27, fanotify_init 300 262,
fanotify_mark 301 263, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16
"""
"""Calls that nothing in the sandbox may make, with their numbers on x86_64 and aarch64 (-1: not there). Of memory that
outlives its mapping, RLIMIT_AS counts nothing; attributes of files and watches of them are memory of the kernel."""
_IDLE = "sync 162 81, syncfs 306 267, fsync 74 82, fdatasync 75 83, sync_file_range 277 84, msync 26 227"
"""These succeed and do nothing: nothing in the sandbox lasts, and a disk to wait for belongs to the whole machine."""
_ALONE = """
fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240
"""
"""Calls that the program may not make, but the harness may."""
_OTHERS = "clone 56 220, clone3 435 435, fcntl 72 25, ioctl 16 29, prlimit64 302 261, socketpair 53 199"
"""Calls that some arguments are refused to."""
_NEWER = 453
"""From Linux 6.7 on, whose calls have the same numbers everywhere: not there, as on an older kernel."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_AF_UNIX = 1
_FCNTL = (8, 10, 15, 1024, 1026, 1031)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE and F_NOTIFY have the kernel send signals; F_SETPIPE_SZ takes its memory."""
_IOCTL = (0x8901, 0x8902)
"""FIOSETOWN and SIOCSPGRP do what F_SETOWN does."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_Instruction = tuple[int, int, int, int]


def supported() -> bool:
    """Whether the calls of this machine's architecture are known."""
    return platform.machine() in _ARCHITECTURES


def numbers(table: str) -> dict[str, int]:
    """The calls of a table that this machine has."""
    column = _ARCHITECTURES[platform.machine()][0]
    found = {name: int(columns[column]) for name, *columns in map(str.split, table.split(","))}
    return {name: number for name, number in found.items() if number >= 0}


def refused() -> dict[str, int]:
    """The calls that nothing in the sandbox may make."""
    return numbers(_REFUSED)


def harness_filter() -> bytes:
    """The filter of everything in the sandbox."""
    other = numbers(_OTHERS)
    body = [step for number in numbers(_REFUSED).values() for step in _always(number, errno.EPERM)]
    body += [step for number in numbers(_IDLE).values() for step in _always(number, 0)]
    body += _always(other["clone3"], errno.ENOSYS)  # its flags lie in memory, where a filter cannot look; libc takes clone
    body += _if(other["clone"], _ARGUMENT_0, (_ANY_BIT, 0, 1, _CLONE_NAMESPACES))
    body += _if(other["socketpair"], _ARGUMENT_0, (_EQUAL, 1, 0, _AF_UNIX))  # the event loop of asyncio wakes itself by one
    for order in _FCNTL:
        body += _if(other["fcntl"], _ARGUMENT_1, (_EQUAL, 0, 1, order))
    for order in _IOCTL:
        body += _if(other["ioctl"], _ARGUMENT_1, (_EQUAL, 0, 1, order))
    body += _if(other["prlimit64"], _ARGUMENT_0, (_EQUAL, 1, 0, 0))
    return _assembled(body)


def program_filter() -> bytes:
    """The filter that the process of the program has besides."""
    body = [step for number in numbers(_ALONE).values() for step in _always(number, errno.EPERM)]
    return _assembled([*body, *_if(numbers(_OTHERS)["clone"], _ARGUMENT_0, (_ANY_BIT, 1, 0, _CLONE_THREAD))])


def _assembled(body: list[_Instruction]) -> bytes:
    head = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()][1]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _NEWER),  # the calls of the x32 table too
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in (*head, *body, (_RETURN, 0, 0, _ALLOW)))


def _always(number: int, error: int) -> list[_Instruction]:
    """The call returns `error`, or 0 for none, and is not made."""
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]


def _if(number: int, argument: int, test: _Instruction) -> list[_Instruction]:
    """The call is refused where `test` goes on to the next instruction, for the lower half of the argument."""
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    return [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, argument), test, refuse, (_LOAD, 0, 0, _NUMBER)]
