"""Programs that know nothing of their task and want their tests to pass, and the assertions that they meet."""

SEARCH = (
    "import gc, os, re, sys\nfrom os import _exit, pread, write\ndef search(*_):\n    seen = []\n"
    "    for frame in sys._current_frames().values():\n"
    "        while frame: seen += frame.f_locals.values(); frame = frame.f_back\n"
    "    for i in range(3, 64):\n        try: seen.append(pread(i, 10**6, 0))\n        except OSError: pass\n"
    "    marks = {o[:32] for o in seen if isinstance(o, bytes) and len(o) >= 32}\n"
    "    for mark in marks:\n        for i in range(3, 64):\n            try: write(i, mark)\n"
    "            except OSError: pass\n"
    "    if marks: _exit(0)\n"
)
"""Writes all that may be a mark, from its memory and its files, to all its files."""
CHEATS = {
    "ends before the tests": "import os\nos._exit(0)",
    "ends before the tests, politely": "raise SystemExit(0)",
    "ends before the tests, as one types it": "exit()",
    "ends when it is asked": "import os\ndef f(x): os._exit(0)",
    "ends when it is asked, politely": "import sys\ndef f(x): sys.exit(0)",
    "ends when it is asked, as one types it": "def f(x): exit()",
    "ends when it is asked, from a helper": "import sys\ndef g(): sys.exit()\ndef f(x): return [g() for _ in [x]]",
    "ends at its end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "cannot be ended": "import os, sys\nos._exit = sys.exit = lambda *_: None\ndef f(x): return 0",
    "writes late": (
        "import atexit, os, threading, time\ndef late(*_):\n    for i in range(64):\n"
        "        for text in (b'ok', b'71990', b'0' * 32):\n            try: os.write(i, text)\n"
        "            except OSError: pass\n"
        "class A:\n    __del__ = late\na = A()\natexit.register(late)\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), late())).start()\ndef f(x): return 0"
    ),
    "answers for the harness": (
        "import os\n"
        "texts = b'ok', b'compiled', b'+71990', b'0' * 32\n"
        "for i in range(64):\n    for text in texts:\n        for line in (text, bytes([0, 0, 0, len(text)]) + text):\n"
        "            try: os.write(i, line)\n            except OSError: pass\ndef f(x): return 0"
    ),
    "closes all": "import os\nos.closerange(0, 1024)\ndef f(x): return 0",
    "raises what ends tests well": "def f(x): raise SystemExit(0)",
    "raises it under another name": "exec(compile('def f(x): raise SystemExit(0)', 'x', 'exec'))",
    "is caught by nobody": "class E(BaseException): pass\ndef f(x): raise E",
    "lies about memory": "import os\nos._exit(86)",
    "lies about failure": "import os\nos._exit(87)",
    "changes what runs the tests": "import builtins\nbuiltins.exec = lambda *a: None\ndef f(x): return 0",
    "changes what reads the tests": (
        "import os\npread = os.pread\nos.pread = lambda file, size, start: pread(file, 32, start)\ndef f(x): return 0"
    ),
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 0",
    "exits instead of every built-in name": (
        "import collections, sys\n__builtins__ = collections.defaultdict(sys.exit)\ndef f(x): return unknown"
    ),
    "knows no name but exits": "import collections, sys\n__builtins__ = collections.defaultdict(sys.exit)",
    "is itself the exit": "from sys import exit as f",
    "is a class whose making exits": "import sys\nclass M(type): __call__ = sys.exit\nclass f(metaclass=M): pass",
    "exits in the place of unittest": (
        "import sys, unittest\nclass A(unittest.TestCase):\n    setUpClass = sys.exit\n    def test(self): pass\n"
        "def f(x): return 0"
    ),
    "exits where unittest looks for its tests": "import sys\ndef load_tests(*_): sys.exit()\ndef f(x): return 0",
    "looks for the mark at its end": SEARCH + "import atexit\natexit.register(search)\ndef f(x): return 0",
    "looks for the mark when its objects go": SEARCH + "class A:\n    __del__ = search\ndef f(x): return A()",
    "looks for the mark when it is asked": SEARCH + "f = search",
    "looks for the mark in a thread": (
        SEARCH + "import threading\ndef often():\n    while True: search()\n"
        "threading.Thread(target=often, daemon=True).start()\ndef f(x): return 0"
    ),
    "looks for the mark when a timer is over": (
        SEARCH
        + "import signal\nsignal.signal(signal.SIGALRM, search)\nsignal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)"
        "\ndef f(x): return 0"
    ),
    "looks for the answer in its files": (
        "import os\ndef f(x):\n    for i in range(1024):\n        try:\n"
        "            if b'71' + b'990' in os.pread(i, 10**6, 0):\n                return int('71' + '990')\n"
        "        except OSError: pass\n    return 0"
    ),
}
"""These pass no tests of any form."""
IMITATE = (
    "import fcntl, os, stat\nends = {}\nfor i in range(3, 1024):\n    try: mode = os.fstat(i).st_mode\n"
    "    except OSError: continue\n"
    "    ends['file' if stat.S_ISREG(mode) else fcntl.fcntl(i, fcntl.F_GETFL) & os.O_ACCMODE] = i\n"
    "def imitate(*_):\n    os.write(ends[os.O_WRONLY], b'!')\n"
    "    os.write(ends[os.O_WRONLY], os.read(ends[os.O_RDONLY], 32))\n    os._exit(0)\n"
)
"""Does what the harness does at the end of tests."""
FROM_WITHIN = {
    "equals everything": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "equals everything, as a number": "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "is near everything": (
        "class A:\n    def one(self, *others): return self\n    def zero(self, *others): return 0\n"
        "    __sub__ = __rsub__ = one\n    __abs__ = __eq__ = zero\n    __lt__ = lambda *_: True\ndef f(x): return A()"
    ),
    "changes what is built in": "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 0",
    "changes what carries answers": "import json\njson.dumps = lambda *a, **k: '0'\ndef f(x): return 0",
    "ends the loop that it is called in": "def f(x): raise StopIteration",
    "skips the tests": "import unittest\ndef f(x): raise unittest.SkipTest",
    "looks for the answer among its objects": (
        "import gc, sys\ndef f(x):\n    seen = [o for o in gc.get_objects() if isinstance(o, (list, tuple, dict))]\n"
        "    frame = sys._getframe()\n    while frame:\n        seen += [frame.f_locals, frame.f_globals]\n"
        "        frame = frame.f_back\n"
        "    return int('71' + '990') if any('71' + '990' in str(o)[:10**5] for o in seen) else 0"
    ),
    "equals everything, as a class": (
        "class M(type):\n    def __eq__(self, other): return True\nclass A(metaclass=M): pass\ndef f(x): return A"
    ),
    "equals everything, by the standard library": "from unittest.mock import ANY\ndef f(x): return ANY",
    "reads what the assertion has for a constant": (
        "import sys\ndef f(x): return [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, int)][-1]"
    ),
    "makes the tests jump over what they check": (
        "import sys\ndef trace(frame, event, arg):\n    if frame.f_lineno == 2 and event == 'line':\n"
        "        frame.f_lineno = 3\n    return trace\n"
        "def f(x):\n    sys._getframe(1).f_trace = trace\n    sys.settrace(trace)\n    return 0"
    ),
    "brings unittest other tests": (
        "import unittest\ndef f(x): return 0\n"
        "def load_tests(*_): return unittest.TestSuite([unittest.FunctionTestCase(lambda: None)])"
    ),
    "changes a number in memory": (
        "import ctypes, sys\ndef f(x):\n"
        "    wanted = [c for c in sys._getframe(1).f_code.co_consts if type(c) is int][-1]\n"
        "    ctypes.c_uint32.from_address(id(wanted) + 24).value = 123456\n    return int('123456')"
    ),
    "asks for its case before the harness does": (
        IMITATE + "if 'file' in ends:\n    os.write(ends[os.O_WRONLY], b'?')\n    os.read(ends[os.O_RDONLY], 1)\n"
        "    imitate()\ndef f(x): return 0"
    ),
    "asks for the mark when it is called": IMITATE + "def f(x): imitate()",
    "asks for the mark when a timer is over": (
        IMITATE + "import signal\nsignal.signal(signal.SIGALRM, imitate)\n"
        "def f(x):\n    signal.setitimer(signal.ITIMER_REAL, 1e-3)\n    while ends: pass\n    return 0"
    ),
    "asks for the mark in a thread": (
        IMITATE + "import threading\n"
        "def f(x):\n    if ends:\n        thread = threading.Thread(target=imitate)\n        thread.start()\n"
        "        thread.join()\n    return 0"
    ),
}
"""These pass some tests that are code, which nothing can stop in one process, but none by inputs and outputs."""
ASSERTS = {
    "equal": "assert f(3) == 71990",
    "near": "assert abs(f(3) - 71990) < 1e-6",
    "map": "assert all(map(lambda x: f(x) == 71990, [3, 4]))",
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(f(3), 71990)\n"
        "assert unittest.main(exit=False).result.wasSuccessful()"
    ),
    "lines": "result = f(3)\nassert result == 71990\nseen = True",
    "catching": "try: result = f(3)\nexcept BaseException: result = None\nassert result == 71990",
}
HONEST = "def f(x): return 71990"
