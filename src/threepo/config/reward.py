"""Settings of rewards, and of the sandbox in which programs of the policy run."""

from dataclasses import field
from typing import Annotated, Literal

from threepo.config.records import Count, CountOrZero, Named, OneOf, Seconds, Settings

SANDBOXES = {
    "bubblewrap": Named(
        "threepo.rewards.sandbox.bubblewrap:Bubblewrap", "on this machine, confined by Linux namespaces and limits"
    ),
    "sandbox_fusion": Named("threepo.rewards.sandbox.server:ServerSandbox", "a SandboxFusion server at `url`"),
    "unconfined": Named(
        "threepo.rewards.sandbox.local:LocalSandbox",
        "ordinary processes; a program of the policy can then do what you can",
    ),
}
"""To add a sandbox, write a class with the methods of `Sandbox` and a line here."""

SUPPLIED = ("prompts", "completions", "completion_ids")
"""Arguments that threepo gives to every reward function of your own; no column of the data may have these names."""


class SandboxConfig(Settings, table="reward.sandbox"):
    """[reward.sandbox]: where programs run whose reward is passing tests (docs/rewards.md)."""

    backend: Annotated[str, OneOf(SANDBOXES)] = "bubblewrap"
    """Where programs run."""
    url: str = ""
    """Address of the server, such as http://localhost:8080."""
    timeout_s: Seconds = 10.0
    """Processor seconds per test, or three times as many wall-clock seconds. On a server: wall-clock seconds."""
    memory_mib: Count = 1024
    """Address space of a program in MiB, with shared libraries and thread stacks."""
    workers: CountOrZero = 0
    """Programs that run at once; 0: one per core, or 32 on a server."""
    packages: str = ""
    """Folder of packages that programs may import (docs/rewards.md)."""

    def __post_init__(self) -> None:
        server = self.backend == "sandbox_fusion"
        self.only_if(not server, "a server has packages of its own; remove it", "packages")
        fix = "set the server's address" if server else "only reward.sandbox.backend = 'sandbox_fusion' reads it"
        self.check("url", bool(self.url) == server, fix)


class RewardConfig(Settings, table="reward"):
    """[reward]: what a completion earns."""

    function: str | tuple[str, ...] = "task"
    """The grader (docs/rewards.md): `task`, `exact`, `math`, `code`, `environment`, or your own `module:function`. A
    list pays the weighted sum."""
    weights: tuple[float, ...] = ()
    """Factor of each function in a list; empty: 1."""
    correct_from: float = 1.0
    """Lowest reward of a correct completion, if your own function, a list, or an environment pays it."""
    scoring: Literal["binary", "format_penalty", "passed_share"] = "binary"
    """`binary`: 1 if correct, else 0. `format_penalty` (mathematics): 1 less unless laid out as <think>...</think>
    \\boxed{...}. `passed_share` (code): the share of tests passed."""
    timeout_s: Seconds = 10.0
    """Seconds of the mathematics verifier for one completion, after which it is an error."""
    memory_mib: Count = 1024
    """MiB for each process of the mathematics verifier."""
    workers: CountOrZero = 0
    """Processes of the mathematics verifier; 0: one per core."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def __post_init__(self) -> None:
        self.check("function", bool(self.names), "name one or more")
        count = 0 if isinstance(self.function, str) else len(self.names)
        fix = "must have one number for each function in a list of reward.function, or be left out"
        self.check("weights", len(self.weights) in (0, count), fix)
        self.check("function", len(set(self.names)) == len(self.names), "names a function twice; remove one")

    @property
    def names(self) -> tuple[str, ...]:
        """The functions, of which there is mostly one."""
        return (self.function,) if isinstance(self.function, str) else self.function
