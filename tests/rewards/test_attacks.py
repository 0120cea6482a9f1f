"""Programs that a policy might write to get its reward without the work, or to harm the machine.

Each runs in the sandbox, and that in a process namespace of its own (`contained`). How it ends is judged; the
machine is as it was; no process is left.
"""

import ctypes
import json
import os
from collections.abc import Iterator

import pytest

from rewards.cheats import ASSERTS, CHEATS, FROM_WITHIN, HONEST
from rewards.contained import Contained, contained, why_not
from threepo.rewards.code_tests import parse_tests
from threepo.rewards.sandbox import Outcome
from threepo.rewards.sandbox.seccomp import IDLE, REFUSED

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SETTINGS = {"timeout_s": 0.7, "memory_mib": 192}


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contained]:
    folder = tmp_path_factory.mktemp("host")
    (folder / "precious").write_text("as it was")
    with contained(SETTINGS, folder) as process:
        yield process
    assert [path.name for path in folder.iterdir()] == ["precious"]
    assert (folder / "precious").read_text() == "as it was"


HARM = {
    "forks": ("import os\nwhile True: os.fork()", "runtime error"),
    "forks and minds no error": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "time-out",
    ),
    "starts threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "runtime error",
    ),
    "starts small threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "runtime error",
    ),
    "waits for a thread for ever": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(10**6,)).start()",
        "time-out",
    ),
    "takes memory": ("x = bytearray(10**9)", "memory"),
    "takes memory in small parts": ("x = []\nwhile True: x.append(bytearray(10**5))", "memory"),
    "takes shared memory": ("import mmap\nx = [mmap.mmap(-1, 10**8) for _ in range(9)]", "runtime error"),
    "fills the disk": (
        "for i in range(10**4):\n    with open(f'/tmp/{i}', 'wb') as file: file.write(bytes(10**7))",
        "runtime error",
    ),
    "writes one huge file": (
        "with open('/tmp/x', 'wb') as file:\n    while True: file.write(bytes(10**7))",
        "runtime error",
    ),
    "makes a huge file with a hole": ("with open('/tmp/x', 'wb') as file: file.truncate(10**12)", "runtime error"),
    "computes for ever": ("while True: pass", "time-out"),
    "computes for ever and minds no signal": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass",
        "time-out",
    ),
    "takes kernel memory by descriptors": (
        "import os, socket\nends = []\nwhile True: ends += [os.pipe(), socket.socketpair()]",
        "runtime error",
    ),
    "computes for ever in threads": (
        "import threading\ndef f():\n    while True: pass\nfor _ in range(8): threading.Thread(target=f).start()",
        "time-out",
    ),
    "closes all and sleeps": ("import os, time\nos.closerange(0, 1024)\ntime.sleep(10**6)", "time-out"),
    "computes for ever in C": ("sum(iter(int, 1))", "time-out"),
    "sleeps": ("import time\ntime.sleep(10**6)", "time-out"),
    "prints for ever": ("while True: print('x' * 1000)", "wrong"),
    "prints errors for ever": (
        "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
        "time-out",
    ),
    "becomes another program": ("import os, sys\nos.execv('/python/bin/python', ['python'])", "runtime error"),
    "starts another program": ("import subprocess\nsubprocess.run(['/python/bin/python'])", "runtime error"),
    "starts a daemon": (
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(10**6)\n",
        "runtime error",
    ),
    "starts processes for its work": (
        "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
        "runtime error",
    ),
    "breaks the interpreter": ("import ctypes\nctypes.string_at(0)", "runtime error"),
    "dies of its own signal": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "runtime error"),
    "is not Python": ("def f(:", "compile error"),
    "has a null byte": ("x = '\0'", "compile error"),
    "overwhelms the compiler": ("x = " + "(" * 10**5, "compile error"),
    "overwhelms the compiler with depth": ("x = " + "-" * 10**6 + "1", "compile error"),
}


@pytest.mark.parametrize("name", HARM)
def test_a_program_that_does_harm_fails_and_leaves_nothing(name: str, inside: Contained) -> None:
    program, ending = HARM[name]
    result = inside.run("stdin", program, [""])
    assert (result["endings"], result["left"]) == ([ending], [])


def test_of_several_tests_the_ones_after_a_harmful_end_are_still_run(inside: Contained) -> None:
    program = "import os\nn = int(input())\nif n == 1: os._exit(3)\nwhile n == 2: pass\nprint(n)"
    result = inside.run("stdin", program, ["0", "1", "2", "3"])
    assert result["endings"] == ["ok", "runtime error", "time-out", "ok"]
    assert (result["outputs"][0], result["outputs"][3], result["left"]) == ("0\n", "3\n", [])
    program = f"def f(n):\n    global input\n    input = lambda: n\n    exec({program.replace('print(n)', '')!r})"
    result = inside.run("script", program, [f"f({n})" for n in range(4)])
    assert (result["endings"], result["left"]) == (["ok", "runtime error", "time-out", "ok"], [])


def number(name: str) -> int:
    """The number of a system call on this machine; negative where it has none."""
    return int(ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name(name.encode())) if not REASON else -1


CALLS = [(number(name), (-1, 1)) for name in REFUSED.split() if number(name) >= 0]
CALLS += [(number(name), (0, 0)) for name in IDLE.split() if number(name) >= 0]
CALLS += [(number, (-1, 38)) for number in (424, 425, 434, 435, 438, 442, 443, 448, 451, 463, 467, 599)]
"""The return value and errno of each call, with nonsense for arguments."""

SEES = {
    "files": (
        "import os\nprint(sorted(os.listdir('/')))\nprint(os.listdir('/tmp'), os.listdir('/dev'))",
        "['dev', 'lib', 'lib64', 'python', 'tmp']\n[] ['null']\n",
    ),
    "files that every machine has": (
        "import os\n"
        "for path in ('/etc/passwd', '/proc/self/status', '/proc/1/root', '/root', '/home', '/sys', '/bin/sh'):\n"
        "    assert not os.path.exists(path), path\nprint('none')",
        "none\n",
    ),
    "what is behind links": (
        "import os\nfor i, path in enumerate(('/etc/passwd', '../../etc/passwd', '/proc/1/cwd', '/python/../etc')):\n"
        "    os.symlink(path, f'/tmp/{i}')\n    assert not os.path.exists(f'/tmp/{i}'), path\nprint('none')",
        "none\n",
    ),
    "the environment": (
        "import os\nprint(sorted(os.environ), 'hunter2' in str(os.environ))",
        "['LD_LIBRARY_PATH', 'PWD', 'PYTHONHASHSEED'] False\n",
    ),
    "packages that are not Python's own": (
        "import importlib.util as u\nprint([n for n in ('torch', 'numpy', 'pip', 'threepo') if u.find_spec(n)])",
        "[]\n",
    ),
    "its powers": (
        "import os\nprint(os.getresuid(), os.getresgid(), os.getgroups())\n"
        "try: os.setuid(0)\nexcept OSError: print('no root')",
        "(65534, 65534, 65534) (65534, 65534, 65534) []\nno root\n",
    ),
    "open files": (
        "import os\nfound = []\nfor i in range(1024):\n    try: os.fstat(i); found.append(i)\n"
        "    except OSError: pass\nprint(found)",
        "[0, 1, 2]\n",
    ),
    "places to write": (
        "import os\n"
        "library = os.path.dirname(os.__file__)\n"
        "for folder in ('/', '/dev', '/python', '/python/lib', library, library + '/site-packages', '/lib', '/tmp'):\n"
        "    try: open(folder + '/x', 'w').close(); print(folder)\n    except OSError: pass",
        "/tmp\n",
    ),
    "places to write devices": (
        "import os, stat\ntry: os.mknod('/tmp/d', stat.S_IFCHR | 0o666, os.makedev(1, 1)); open('/tmp/d')\n"
        "except OSError: print('no')",
        "no\n",
    ),
    "limits to raise": (
        "import resource\nfor name in ('CPU', 'AS', 'NOFILE', 'FSIZE', 'NPROC', 'CORE'):\n"
        "    kind = getattr(resource, 'RLIMIT_' + name)\n    soft, hard = resource.getrlimit(kind)\n"
        "    assert hard != resource.RLIM_INFINITY, name\n"
        "    try: resource.setrlimit(kind, (soft, hard + 1)); print(name)\n    except ValueError: pass",
        "",
    ),
    "time to use": (
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))",
        "(1, 1)\n",  # at the hard limit no signal is sent that a program could ignore
    ),
    "whom to signal": (
        "import os\nfor pid in (1, os.getppid(), -1, 0, -os.getppid(), os.getpid()):\n"
        "    try: os.kill(pid, 9); print(pid)\n    except PermissionError: pass",
        "",
    ),
    "whom to talk to": (
        "import socket\nvsock, alg, packet, tipc = 40, 38, 17, 30\n"
        "for family in (*map(int, (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK)),\n"
        "               vsock, alg, packet, tipc):\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
        "        try: socket.socket(family, kind); print(family)\n        except PermissionError: pass\n"
        "    try: socket.socketpair(family); print('pair', family)\n    except PermissionError: pass",
        "pair 1\n",
    ),
    "how much a pair of sockets takes": (
        "import socket\none, two = socket.socketpair()\n"
        "try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30); print('more')\n"
        "except PermissionError: pass\n"
        "try: socket.send_fds(one, [b'x'], [0]); print('files')\nexcept PermissionError: pass",
        "",
    ),
    "how much a pipe takes": (
        "import fcntl, os\ntry: fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20); print('more')\n"
        "except PermissionError: pass",
        "",
    ),
    "whom to have signalled when a pipe is written": (
        "import ctypes, fcntl, os\nlibc, end = ctypes.CDLL(None, use_errno=True), os.pipe()[0]\n"
        "owner = ctypes.create_string_buffer(b'\\1' + bytes(3) + os.getppid().to_bytes(4, 'little'))\n"
        "orders = [(libc.fcntl, order) for order in (fcntl.F_SETOWN, 10, 15, fcntl.F_SETLEASE, fcntl.F_NOTIFY)]\n"
        "for call, order in [*orders, (libc.ioctl, 0x8901), (libc.ioctl, 0x8902)]:\n"
        "    for hidden in (0, 1 << 32):  # the kernel does not look at the upper half\n"
        "        result = call(end, ctypes.c_ulong(order | hidden), owner)\n"
        "        if (result, ctypes.get_errno()) != (-1, 1): print(order, hidden, result, ctypes.get_errno())",
        "",
    ),
    "whose limits to change": (
        "import os, resource\nfor pid in (os.getppid(), 1):\n"
        "    try: resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0)); print(pid)\n    except PermissionError: pass\n"
        "print(resource.prlimit(0, resource.RLIMIT_CPU) == resource.getrlimit(resource.RLIMIT_CPU))",
        "True\n",
    ),
    "system calls": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for number, wanted in {CALLS}:\n"
        "    ctypes.set_errno(0)\n    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)\n"
        "    if (value, ctypes.get_errno()) != wanted: print(number, value, ctypes.get_errno())",
        "",
    ),
    "namespaces": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for number, flags in (({number('unshare')}, 1 << 28), ({number('clone')}, 1 << 28 | 17)):\n"
        "    print(libc.syscall(ctypes.c_long(number), ctypes.c_long(flags), 0, 0, 0, 0), ctypes.get_errno())",
        "-1 1\n-1 1\n",
    ),
    "the whole file system to delete": (
        "import os, shutil\nshutil.rmtree('/', ignore_errors=True)\nprint(os.path.exists(os.__file__))",
        "True\n",
    ),
}


@pytest.mark.parametrize("name", SEES)
def test_what_a_program_finds(name: str, inside: Contained) -> None:
    program, output = SEES[name]
    assert inside.run("stdin", program, [""]) == {"endings": ["ok"], "outputs": [output], "left": []}


def by_outputs(kind: str, program: str, inside: Contained) -> str:
    """The verdict on a program whose output, or whose function's result, is compared with 71990."""
    if kind == "stdin":
        tests, program = {"inputs": ["3"], "outputs": ["71990"]}, f"{program}\nprint(f(int(input())))"
    else:
        tests = {"fn_name": "f", "inputs": [[3]], "outputs": [71990]}
    parsed = parse_tests(tests)
    result = inside.run(kind, program, list(parsed.submission.cases), entry=parsed.submission.entry)
    assert result["left"] == []
    return parsed.judge(0, Outcome(result["endings"][0], result["outputs"][0]))


@pytest.mark.parametrize("kind", ["stdin", "call"])
@pytest.mark.parametrize("name", [*CHEATS, *FROM_WITHIN])
def test_cheating_is_not_rewarded(name: str, kind: str, inside: Contained) -> None:
    """The expected output is not in the sandbox; so nothing inside can compare with it, or find it."""
    assert by_outputs(kind, (CHEATS | FROM_WITHIN)[name], inside) != "passed"


@pytest.mark.parametrize("name", CHEATS)
def test_tests_that_are_code_must_come_to_their_end(name: str, inside: Contained) -> None:
    """Each of the tests is a process of its own, as `test_an_honest_program_passes_the_same_tests` shows."""
    result = inside.run("script", CHEATS[name], list(ASSERTS.values()))
    assert len(result["endings"]) == len(ASSERTS)
    assert not {"ok", "sandbox error"} & set(result["endings"])
    assert result["left"] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("equals everything", "equal"),
        ("is near everything", "near"),
        ("changes what is built in", "near"),
        ("skips the tests", "unittest"),
        ("ends the loop that it is called in", "map"),
        ("looks for the answer among its objects", "equal"),
        ("equals everything, as a class", "equal"),
        ("equals everything, by the standard library", "equal"),
        ("reads what the assertion has for a constant", "equal"),
        ("makes the tests jump over what they check", "lines"),
        ("brings unittest other tests", "unittest"),
        ("changes a number in memory", "equal"),
        ("asks for its case before the harness does", "equal"),
        ("asks for the mark when it is called", "equal"),
        ("asks for the mark when a timer is over", "equal"),
        ("asks for the mark in a thread", "equal"),
    ],
)
def test_tests_that_are_code_can_be_deceived_from_within(name: str, kind: str, inside: Contained) -> None:
    """docs/rewards.md says so, and advises inputs and outputs, where the same programs fail."""
    assert inside.run("script", FROM_WITHIN[name], [ASSERTS[kind]])["endings"] == ["ok"]


def test_an_honest_program_passes_the_same_tests(inside: Contained) -> None:
    assert [by_outputs(kind, HONEST, inside) for kind in ("stdin", "call")] == ["passed"] * 2
    assert inside.run("script", HONEST, list(ASSERTS.values()))["endings"] == ["ok"] * len(ASSERTS)


@pytest.mark.parametrize("kind", ["call", "script"])
def test_before_its_own_code_has_run_a_program_cannot_find_its_tests(kind: str, inside: Contained) -> None:
    """They are neither among its objects nor in its files; and it cannot reach the outside."""
    program = (
        "import gc, os, stat\nfound = [o for o in gc.get_objects() if 'se' + 'cret' in str(o)[:10**5]]\n"
        "for i in range(1024):\n    try:\n        if stat.S_ISSOCK(os.fstat(i).st_mode): found.append(i)\n"
        "        if b'se' + b'cret' in os.pread(i, 10**6, 0): found.append(i)\n    except OSError: pass\n"
        "seen = repr(found)\ndef f(x): return seen"
    )
    case = '["secret"]' if kind == "call" else "assert f('secret') == '[]', seen"
    result = inside.run(kind, program, [case, case], entry="f")
    assert result["endings"] == ["ok", "ok"]
    if kind == "call":
        assert [json.loads(output) for output in result["outputs"]] == ["[]", "[]"]


@pytest.mark.skipif(os.geteuid() != 0, reason="this whole file runs as another user then")
def test_where_threepo_is_not_root_a_program_finds_no_more(tmp_path_factory: pytest.TempPathFactory) -> None:
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    with contained(SETTINGS, tmp_path_factory.mktemp("user"), user) as process:
        for name in ("its powers", "places to write", "files", "open files", "the whole file system to delete"):
            program, output = SEES[name]
            assert process.run("stdin", program, [""]) == {"endings": ["ok"], "outputs": [output], "left": []}, name


def test_a_program_ends_with_its_caller_however_that_ends(inside: Contained) -> None:
    """The program gives its thread a name of its own, so that one can see that it runs."""
    rename = "ctypes.CDLL(None).prctl(15, b'sleeping', 0, 0, 0)"
    assert inside.abandon(f"import ctypes, time\n{rename}\ntime.sleep(10**6)") == []


def test_after_all_this_a_program_still_runs(inside: Contained) -> None:
    assert inside.run("stdin", "print(input()[::-1])", ["abc"])["outputs"] == ["cba\n"]
