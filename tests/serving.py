"""Functions for the processes of test_workers, good and bad."""

import ctypes
import os
import signal
import sys
import time
from typing import Any


def serve(item: Any) -> Any:
    """The item back, unless it is the name of something worse."""
    match item:
        case "hang":
            time.sleep(1000)
        case "hold on to the interpreter":
            return len(str(9 ** (9**9)))
        case "crash":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "eat":
            return len(bytearray(2**40))
        case "leave":
            os._exit(3)
        case "fail":
            raise ValueError("two\nlines \ud800")
        case "exit":
            raise SystemExit(4)
        case "main":
            return repr(sys.modules["__main__"])
        case "who":
            return os.getpid()
    return item
