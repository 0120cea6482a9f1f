"""Filters of system calls for programs in the sandbox, as classic BPF assembled by hand.

`guard()` goes over the whole sandbox: no way to trace or look into another process, to make namespaces or mounts, to
open sockets, to hold memory that the limits do not count, and none of the calls that kernel bugs like best. `lone()`
comes on top for the process that runs the program: it may have threads, but no children, may not become another
program, and may neither signal anybody else nor change the limits of another. Both answer a forbidden call with an
error and let the program go on; a call by the tables of another architecture ends the process.
"""

import errno
import platform
import struct

_NUMBERS: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64); -1 where an architecture has no such call
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "socket": (41, 198),
    # Memory that outlives its mapping is not part of the address space that RLIMIT_AS counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # What the functions below treat in ways of their own.
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "fcntl": (72, 25),
    "prlimit64": (302, 261),
}
_STARTING = ("clone", "clone3", "fork", "vfork", "execve", "execveat")
_SIGNALLING = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
FORBIDDEN = tuple(name for name in _NUMBERS if name not in (*_STARTING, *_SIGNALLING, "fcntl", "prlimit64"))
"""Calls that nothing in the sandbox may make."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
OWN_PID = 0x7AC0FFEE
"""Stands in `lone()` for the identity of the process that will load it."""

_SET_OWNER, _SET_OWNER_EX = 8, 15
"""F_SETOWN and F_SETOWN_EX, by which the kernel signals whoever is named when a pipe can be read."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_Instruction = tuple[int, int, int, int]


def supported() -> bool:
    """Whether the calls of this machine's architecture are known."""
    return platform.machine() in _ARCHITECTURES


def number(name: str) -> int:
    """The number of a call on this machine; -1 where it has none."""
    return _NUMBERS[name][_ARCHITECTURES[platform.machine()][0]]


def guard() -> bytes:
    """The filter of everything in the sandbox."""
    body = [step for name in FORBIDDEN for step in _answer(name, errno.EPERM)]
    body += _answer("clone3", errno.ENOSYS)  # its flags lie in memory, out of a filter's sight; libc then takes clone
    body += _where("clone", [(_ANY_BIT, 0, 1, _CLONE_NAMESPACES), _error(errno.EPERM)])
    return _assembled(body)


def lone() -> bytes:
    """The filter of a process that stays alone; it puts its own identity where `OWN_PID` stands."""
    body = [step for name in ("fork", "vfork", "execve", "execveat", "tkill") for step in _answer(name, errno.EPERM)]
    body += _where("clone", [(_ANY_BIT, 1, 0, _CLONE_THREAD), _error(errno.EPERM)])
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        body += _where(name, [(_EQUAL, 1, 0, OWN_PID), _error(errno.EPERM)])
    owner = [(_EQUAL, 1, 0, _SET_OWNER), (_EQUAL, 0, 1, _SET_OWNER_EX), _error(errno.EPERM)]
    body += _where("fcntl", owner, _ARGUMENT_1)
    body += _where("prlimit64", [(_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, OWN_PID), _error(errno.EPERM)])
    return _assembled(body)


def _assembled(body: list[_Instruction]) -> bytes:
    head: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()][1]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if platform.machine() == "x86_64":
        head += [(_AT_LEAST, 0, 1, _X32), _error(errno.ENOSYS)]
    return b"".join(struct.pack("=HBBI", *step) for step in (*head, *body, (_RETURN, 0, 0, _ALLOW)))


def _answer(name: str, code: int) -> list[_Instruction]:
    """`name` fails with the error `code`."""
    return [(_EQUAL, 0, 1, number(name)), _error(code)] if number(name) >= 0 else []


def _where(name: str, test: list[_Instruction], argument: int = _ARGUMENT_0) -> list[_Instruction]:
    """Applies `test` to the lower half of an argument of `name`; the call that passes it is allowed."""
    inner: list[_Instruction] = [(_LOAD, 0, 0, argument), *test, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(inner), number(name)), *inner]


def _error(code: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERROR | code)
