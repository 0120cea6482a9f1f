"""Settings of rewards: what a completion is paid, and where the programs among them run."""

import math
from dataclasses import dataclass, field
from typing import Literal

from threepo.config.checks import not_negative, positive, require


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """[reward.sandbox]: where programs run whose reward is that they pass tests (docs/rewards.md)."""

    backend: Literal["bubblewrap", "sandbox_fusion", "unconfined"] = "bubblewrap"
    """`bubblewrap`: on this machine, confined by Linux namespaces and limits. `sandbox_fusion`: a SandboxFusion server
    at `url`. `unconfined`: as plain processes of yours; whatever a policy writes can then do what you can do."""
    url: str = ""
    """Of the SandboxFusion server, such as http://localhost:8080."""
    timeout_s: float = 10.0
    """Seconds of processor time that a program may take for each test; of wall-clock time three times as many, since
    the machine may be busy. On a server: of wall-clock time."""
    memory_mib: int = 1024
    """Memory of a program, in MiB: of its address space, so shared libraries and the stacks of threads count."""
    workers: int = 0
    """Programs that run at the same time; 0: one for each processor core, or 32 on a server."""

    def __post_init__(self) -> None:
        positive(self, "reward.sandbox", "timeout_s", "memory_mib")
        not_negative(self, "reward.sandbox", "workers")
        server = self.backend == "sandbox_fusion"
        require(
            bool(self.url) == server,
            "reward.sandbox.url",
            self.url,
            "name the address of the server" if server else "only reward.sandbox.backend = 'sandbox_fusion' reads it",
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """[reward]: what a completion is paid."""

    function: str = "task"
    """`task`: the verifier that belongs to the problems; `exact`: the answer must equal the reference; `math`: it must
    be mathematically equal to it; `code`: the program must pass the tests of the problem; or your own
    `module:function`, called as TRL calls them: f(prompts=..., completions=..., completion_ids=..., <columns>=...),
    with those that it has arguments for, -> a number each."""
    correct_from: float = 1.0
    """A completion counts as correct when the value that your own function returns is at least this."""
    scoring: Literal["binary", "format_penalty", "passed_share"] = "binary"
    """`binary`: 1 if correct, else 0. `format_penalty` (mathematics): 1 less where the completion does not keep the
    layout <think>...</think> \\boxed{...}, as in the paper's code. `passed_share` (code): the share of tests passed."""
    timeout_s: float = 10.0
    """Seconds that the mathematics verifier may take for one completion; one that takes longer is an error."""
    memory_mib: int = 1024
    """Memory of a process of the mathematics verifier, in MiB."""
    workers: int = 0
    """Processes of the mathematics verifier; 0: one for each processor core."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where programs run."""

    def __post_init__(self) -> None:
        require(not math.isnan(self.correct_from), "reward.correct_from", self.correct_from, "must be a number")
        positive(self, "reward", "timeout_s", "memory_mib")
        not_negative(self, "reward", "workers")
