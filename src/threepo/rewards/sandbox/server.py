"""Programs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion), over its `POST /run_code`.

Each case is a request of its own, and `harness` runs it there as it does here. The server reads standard output only
after the program has ended: one that writes more than the pipe and a buffer hold, 190 kB, waits until its time is up.
So the program writes to a file, which the server returns whatever its size.
"""

import base64
import inspect
import json
import random
import secrets
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from threepo.config import SandboxConfig
from threepo.rewards.sandbox import Ending, Outcome, Submission, harness
from threepo.rewards.sandbox.harness import MARK_BYTES, MEMORY, NO_PYTHON, WRONG

WORKERS = 32
MARGIN_S = 10.0
"""Seconds that a request may take beyond the time to compile and to run."""
ANSWER = "threepo-answer"
"""The file with what the program wrote or returned."""
ANSWER_LIMIT = 2 * harness.OUTPUT_LIMIT
"""Bytes that are read of the server's answer: the output in base64, which takes 4/3, and what else it says."""
ATTEMPTS = 6
LONGEST_WAIT_S = 30.0
UNREADABLE = (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError)
"""Errors of an answer that did not come, is not JSON, or has another layout than SandboxFusion's."""
ENDINGS: dict[int, Ending] = {0: "ok", MEMORY: "memory", WRONG: "wrong", NO_PYTHON: "compile error"}


class ServerSandbox:
    """Runs programs on a server, several at a time."""

    advice = "start the server, or correct reward.sandbox.url"

    def __init__(self, settings: SandboxConfig) -> None:
        self.workers = settings.workers or WORKERS
        self._settings = settings
        self._free = threading.BoundedSemaphore(self.workers)
        self._seen = False

    def run(self, submission: Submission) -> Generator[Outcome, None, None]:
        """See `Sandbox.run`."""
        order = vars(replace(submission, cases=()))
        code = f"{inspect.getsource(harness)}\n\non_server({order!r}, {ANSWER!r})\n"
        for case in submission.cases:
            mark = secrets.token_hex(MARK_BYTES // 2) if submission.kind == "script" else ""
            try:
                yield _outcome(self._ask(code, mark + case), mark)
            except UNREADABLE as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                yield Outcome("sandbox error", message=f"{self._settings.url}: {reason}")

    def _ask(self, code: str, stdin: str) -> dict[str, Any]:
        """The server's answer. Before its first answer, an address that does not answer counts as wrong."""
        url, seconds = self._settings.url.rstrip("/") + "/run_code", self._settings.timeout_s
        body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": seconds}
        body |= {"memory_limit_MB": self._settings.memory_mib, "fetch_files": [ANSWER]}
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        attempt = 0
        while True:
            try:
                with self._free, urlopen(request, timeout=2 * seconds + MARGIN_S) as response:
                    answer = json.loads(response.read(ANSWER_LIMIT))
                self._seen = True
                return dict(answer)
            except (OSError, HTTPException) as error:
                status = error.code if isinstance(error, HTTPError) else None
                may_change = self._seen if status is None else status in (429, 503, 504)
                attempt += 1
                if not may_change or attempt == ATTEMPTS:
                    raise
                time.sleep(wait_s(attempt))


def wait_s(attempt: int) -> float:
    """Seconds to wait after an attempt, counted from 1: longer each time, and not the same for all who wait."""
    return random.uniform(0.5, 1.0) * min(LONGEST_WAIT_S, 2.0**attempt)


def _outcome(answer: dict[str, Any], mark: str) -> Outcome:
    if answer["status"] == "SandboxError":
        return Outcome("sandbox error", message=str(answer.get("message") or "the server says SandboxError"))
    ran: dict[str, Any] = answer["run_result"]
    if ran["status"] == "TimeLimitExceeded":
        return Outcome("time-out")
    ending = ENDINGS.get(ran["return_code"], "runtime error")
    file = answer["files"].get(ANSWER)  # gone if the program removed it
    output = base64.b64decode(file or "").decode("utf-8", "replace")
    if ending == "ok" and (file is None or (mark and output != mark)):
        return Outcome("runtime error")
    return Outcome(ending, output)
