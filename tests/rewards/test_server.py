"""The client of SandboxFusion, against a server that keeps the protocol by really running the programs."""

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from threepo.config import RewardConfig, SandboxConfig
from threepo.errors import UserError
from threepo.rewards import code
from threepo.rewards.code import CodeGrader
from threepo.rewards.code_tests import parse_tests
from threepo.rewards.grading import load_grader
from threepo.rewards.sandbox import Submission
from threepo.rewards.sandbox.server import ATTEMPTS, ServerSandbox, wait_s


class Server(ThreadingHTTPServer):
    """Answers `POST /run_code`; the first answers may be given in advance."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.prepared: list[tuple[int, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.running = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({"path": self.path, **request})
            prepared = self.server.prepared.pop(0) if self.server.prepared else None
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        status, answer = prepared or (200, run(request))
        with self.server.lock:
            self.server.running -= 1
        if status == 0:
            self.close_connection = True  # and nothing is said
            return
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def run(request: dict[str, Any]) -> dict[str, Any]:
    """SandboxFusion's answer for Python, which it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run_command(request, Path(folder)))
        files = {
            name: base64.b64encode((Path(folder) / name).read_bytes()).decode()
            for name in request.get("fetch_files", [])
            if (Path(folder) / name).is_file()
        }
    good = result["status"] == "Finished" and result["return_code"] == 0
    answer = {"status": "Success" if good else "Failed", "message": "", "compile_result": None, "run_result": result}
    return {**answer, "executor_pod_name": None, "files": files}


async def run_command(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """SandboxFusion's `run_command_bare`: output is read when the process has ended, as much as a pipe holds."""
    (folder / "program.py").write_text(request["code"])
    process = await asyncio.create_subprocess_shell(
        f"ulimit -v {request['memory_limit_MB'] << 10}; exec {sys.executable} program.py",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
    )
    assert process.stdin is not None
    process.stdin.write(request["stdin"].encode())
    process.stdin.close()
    late = False
    try:
        await asyncio.wait_for(process.wait(), request["run_timeout"])
    except TimeoutError:
        late = True
        process.kill()
    result = {"status": "TimeLimitExceeded" if late else "Finished", "execution_time": 0.1}
    result["return_code"] = None if late else process.returncode
    for name in ("stdout", "stderr"):
        stream = getattr(process, name)
        result[name] = (await stream.read(1 << 20)).decode()
    return result


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def settings(server: Server, **fields: Any) -> SandboxConfig:
    return SandboxConfig(backend="sandbox_fusion", url=server.url + "/", **{"timeout_s": 3.0, **fields})


def grader(server: Server, **fields: Any) -> CodeGrader:
    return CodeGrader(RewardConfig(function="code", sandbox=settings(server, **fields)))


ADD = "def add(a, b):\n    return a + b"
UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)\nunittest.main()"
)
PAIRS = {"inputs": ["1 2\n", "3 4"], "outputs": ["3", "7\n"]}
JUDGED = [
    ("print(sum(map(int, input().split())))", PAIRS, "passed"),
    ("print(3)", PAIRS, "wrong"),
    ("print(1 / 0)", PAIRS, "runtime error"),
    ("print(", PAIRS, "compile error"),
    ("x = [0] * 10**9", PAIRS, "memory"),
    ("import time\ntime.sleep(60)", {"inputs": [""], "outputs": [""]}, "time-out"),
    (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "passed"),
    (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [4]}, "wrong"),
    ("print('[3]')\nraise SystemExit", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "runtime error"),
    (ADD, {"assert_case": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}, "passed"),
    (ADD, {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, "wrong"),
    (ADD, {"functional": "def check(f):\n    assert f(1, 2) == ONE + 2\ncheck(add)", "prefix": "ONE = 1"}, "passed"),
    ("import os\nos._exit(0)", {"functional": "assert add(1, 2) == 3"}, "runtime error"),
    ("import sys\ndef add(a, b): sys.exit(0)", {"functional": "assert add(1, 2) == 3"}, "runtime error"),
    (ADD, {"functional": UNITTEST}, "passed"),
    (ADD.replace("+", "-"), {"functional": UNITTEST}, "wrong"),
    ("print('x' * int(input()))", {"inputs": ["500000"], "outputs": ["x" * 500_000]}, "passed"),
    ("print(len(input()))", {"inputs": ["x" * 500_000], "outputs": ["500000"]}, "passed"),
    ("print('x' * int(input()))", {"inputs": ["17000000"], "outputs": ["x" * 17_000_000]}, "runtime error"),
    ("def xs(n): return 'x' * n", {"fn_name": "xs", "inputs": [[500_000]], "outputs": ["x" * 500_000]}, "passed"),
    ("print(3)\nexit()", {"inputs": [""], "outputs": ["3"]}, "passed"),
    ("import os\nos.remove('threepo-answer')", {"inputs": [""], "outputs": [""]}, "runtime error"),
]


@pytest.mark.parametrize(("program", "tests", "detail"), JUDGED)
def test_programs_get_the_verdicts_that_they_get_here(program: str, tests: Any, detail: str, server: Server) -> None:
    timeout_s = 1.0 if detail == "time-out" else 20.0
    found = grader(server, timeout_s=timeout_s).grade(f"```python\n{program}\n```", parse_tests(tests))
    assert (found.detail, found.status) == (detail, "right" if detail == "passed" else "wrong")


def test_a_request_says_what_the_settings_say(server: Server) -> None:
    list(ServerSandbox(settings(server, memory_mib=770)).run(Submission("stdin", "print(1)", ("a\n",))))
    (request,) = server.requests
    assert "print(1)" in request.pop("code")
    assert request == {
        "path": "/run_code",
        "language": "python",
        "stdin": "a\n",
        "run_timeout": 3.0,
        "memory_limit_MB": 770,
        "fetch_files": ["threepo-answer"],
    }


def test_what_is_expected_is_never_sent(server: Server) -> None:
    for program, tests in (
        (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [31337]}),
        ("print(3)", {"inputs": [""], "outputs": ["31337"]}),
    ):
        grader(server).grade(f"```python\n{program}\n```", parse_tests(tests))
    assert "31337" not in json.dumps(server.requests)


SUBMISSION = Submission("stdin", "print(1)", ("",))


@pytest.mark.parametrize("failure", [(503, b"busy"), (504, b""), (429, b""), (0, b"")])
def test_what_may_pass_is_tried_again(
    failure: tuple[int, bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threepo.rewards.sandbox.server.LONGEST_WAIT_S", 0.0)
    sandbox = ServerSandbox(settings(server))
    assert [outcome.output for outcome in sandbox.run(SUBMISSION)] == ["1\n"]
    server.prepared = [failure] * (ATTEMPTS - 1)
    assert [outcome.output for outcome in sandbox.run(SUBMISSION)] == ["1\n"]
    server.prepared = [failure] * ATTEMPTS
    assert [outcome.ending for outcome in sandbox.run(SUBMISSION)] == ["sandbox error"]


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"broken"),
        (200, b"no json"),
        (200, []),
        (200, {"status": "Success"}),
        (200, {"status": "Success", "run_result": None}),
        (200, {"status": "Success", "run_result": {"status": "Finished", "return_code": 0}, "files": None}),
        (200, {"status": "Success", "run_result": "[]", "files": {}}),
        (200, {"status": "SandboxError", "message": "no space"}),
    ],
)
def test_what_will_not_pass_is_an_error_of_the_sandbox_at_once(answer: tuple[int, Any], server: Server) -> None:
    judge = grader(server)
    before = len(server.requests)
    server.prepared = [answer]
    found = judge.grade("```python\nprint(1)\n```", parse_tests({"inputs": ["", ""], "outputs": ["1", "1"]}))
    assert (found.status, found.detail, found.reward) == ("error", "sandbox error", 0.0)
    assert len(server.requests) == before + 1


def test_trl_is_told_what_the_sandbox_could_not_judge(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = grader(server)
    monkeypatch.setattr(code, "_default_grader", lambda: judge)
    server.prepared = [(500, b"broken")]
    tests = [{"inputs": [""], "outputs": ["1"]}]
    assert code.reward(["```python\nprint(1)\n```"], tests=tests) == [None]


def test_waits_grow_and_differ() -> None:
    waits = [[wait_s(attempt) for attempt in range(1, ATTEMPTS)] for _ in range(50)]
    assert all(1 <= wait <= 30 for row in waits for wait in row)
    assert max(row[0] for row in waits) <= min(row[2] for row in waits)
    assert len({row[0] for row in waits}) == 50


def test_no_more_requests_at_a_time_than_workers(server: Server) -> None:
    judge = grader(server, workers=2)
    tests = parse_tests({"inputs": [""], "outputs": ["1"]})
    text = "```python\nimport time\ntime.sleep(0.1)\nprint(1)\n```"
    threads = [threading.Thread(target=judge.grade, args=(text, tests)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.most == 2


def test_an_address_where_nobody_answers_is_refused(server: Server) -> None:
    free = Server()
    free.server_close()
    sandbox = SandboxConfig(backend="sandbox_fusion", url=free.url)
    with pytest.raises(UserError, match=rf"{free.url}: .*refused.*correct reward.sandbox.url"):
        load_grader(RewardConfig(function="code", sandbox=sandbox), None, [])
