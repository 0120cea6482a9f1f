"""Programs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion), over its `POST /run_code`.

Each case is a request of its own. What a function returns comes back after a random mark and is compared here. Tests
that are Python code run in the process of the program, for the server has no other: their end is proved by a second
random mark, which a program can still find, since it can read its own source (docs/rewards.md).
"""

import http.client
import json
import random
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from threepo.config import SandboxConfig
from threepo.rewards.sandbox.interface import Job, Outcome

WORKERS = 32
MARGIN_S = 10.0
"""What a request may take beyond the time to compile and to run."""

_CALL = """
if __name__ == "__main__":
    import json, sys
    sys.set_int_max_str_digits(0)
    _value = (
        getattr(Solution(), {entry!r}) if hasattr(globals().get("Solution"), {entry!r}) else globals()[{entry!r}]
    )(*json.loads(sys.stdin.read()))
    sys.stdout.write("\\n" + {mark!r} + json.dumps(_value, default=list) + "\\n")
"""


@dataclass(frozen=True)
class Retries:
    """When to ask again, and how long to wait: longer each time, and never the same for all who wait."""

    attempts: int = 6
    busy_s: tuple[float, float] = (1.0, 8.0)
    """Shortest and longest wait where the server says that it is too busy."""
    unreachable_s: tuple[float, float] = (2.0, 30.0)
    """The same where it does not answer."""

    def wait(self, attempt: int, answered: bool) -> float:
        """Seconds to wait after attempt number `attempt`, from 0."""
        least, most = self.busy_s if answered else self.unreachable_s
        return random.uniform(0.5, 1.0) * float(min(most, least * 2 ** (attempt + 1)))


class ServerSandbox:
    """Runs programs on a server, so many at a time."""

    def __init__(self, settings: SandboxConfig, retries: Retries | None = None) -> None:
        self.workers = settings.workers or WORKERS
        self._settings = settings
        self._retries = retries or Retries()
        self._places = threading.BoundedSemaphore(self.workers)
        self._seen = False

    def run(self, job: Job) -> Generator[Outcome, None, None]:
        """The outcome of each case, each asked for when the last has been taken."""
        for case in job.cases:
            mark = secrets.token_hex(16)
            try:
                answer = self._ask(*_source(job, case, mark))
                yield _outcome(job, answer, mark)
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                said = " ".join(str(error).split())[:300]
                yield Outcome("sandbox error", message=f"{self._settings.url}: {type(error).__name__}: {said}")

    def _ask(self, code: str, stdin: str) -> dict[str, Any]:
        """The server's answer. Until the first one, an address that does not answer is taken to be wrong."""
        seconds = self._settings.timeout_s
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self._settings.memory_mib,
            "files": {},
            "fetch_files": [],
        }
        request = urllib.request.Request(
            self._settings.url.rstrip("/") + "/run_code",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        attempt = 0
        while True:
            try:
                with self._places, urllib.request.urlopen(request, timeout=2 * seconds + MARGIN_S) as response:
                    answer = json.loads(response.read())
                self._seen = True
                return dict(answer)
            except (OSError, http.client.HTTPException) as error:
                attempt += 1
                status = error.code if isinstance(error, urllib.error.HTTPError) else None
                may_change = self._seen if status is None else status in (429, 503, 504)
                if not may_change or attempt >= self._retries.attempts:
                    raise
                time.sleep(self._retries.wait(attempt - 1, status is not None))


def _source(job: Job, case: str, mark: str) -> tuple[str, str]:
    """The code to send, and its input."""
    program = f"{job.prefix}\n{job.program}\n"
    if job.kind == "stdin":
        return program, case
    if job.kind == "call":
        return program + _CALL.format(entry=job.entry, mark=mark), case
    return f"{program}\n{case}\nprint('\\n' + {mark!r})\n", ""


def _outcome(job: Job, answer: dict[str, Any], mark: str) -> Outcome:
    if answer["status"] == "SandboxError":
        return Outcome("sandbox error", message=str(answer.get("message") or "the server says SandboxError"))
    compiled: dict[str, Any] | None = answer.get("compile_result")
    ran: dict[str, Any] = answer["run_result"]
    if compiled and (compiled["status"] != "Finished" or compiled["return_code"]):
        return Outcome("compile error")
    if ran["status"] == "TimeLimitExceeded":
        return Outcome("time-out")
    if ran["status"] != "Finished" or ran["return_code"]:
        return _failure(job, str(ran.get("stderr") or "").rstrip().rpartition("\n")[2])
    output = ran.get("stdout") or ""
    if job.kind == "stdin":
        return Outcome("ok", output)
    _, found, after = output.rpartition(f"\n{mark}")
    return Outcome("ok", after) if found else Outcome("runtime error")


def _failure(job: Job, last_line: str) -> Outcome:
    """What the last line of a traceback says."""
    if last_line.startswith("MemoryError"):
        return Outcome("memory")
    if last_line.startswith(("SyntaxError", "IndentationError", "TabError")):
        return Outcome("compile error")
    return Outcome("wrong" if job.kind == "script" and last_line.startswith("AssertionError") else "runtime error")
