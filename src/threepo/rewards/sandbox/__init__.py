"""Opens the sandbox that the settings name, and tries it with a program of one line."""

from collections.abc import Callable

from threepo.config import SandboxConfig
from threepo.errors import UserError
from threepo.rewards.sandbox.bubblewrap import Bubblewrap
from threepo.rewards.sandbox.interface import Sandbox, Submission
from threepo.rewards.sandbox.local import LocalSandbox
from threepo.rewards.sandbox.server import ServerSandbox

BACKENDS: dict[str, Callable[[SandboxConfig], Sandbox]] = {
    "bubblewrap": Bubblewrap,
    "sandbox_fusion": ServerSandbox,
    "unconfined": LocalSandbox,
}


def open_sandbox(settings: SandboxConfig) -> Sandbox:
    """The sandbox of these settings; `UserError` if it cannot run a program of one line."""
    sandbox = BACKENDS[settings.backend](settings)
    (outcome,) = sandbox.run(Submission(kind="stdin", program="print(input())", cases=("hello\n",)))
    if outcome.ending == "sandbox error":
        raise UserError(f"reward.sandbox.backend = {settings.backend!r}: {outcome.message}; {sandbox.advice}")
    if outcome.ending != "ok":
        raise UserError(
            f"reward.sandbox: a program of one line ended with {outcome.ending!r} under reward.sandbox.memory_mib = "
            f"{settings.memory_mib} and reward.sandbox.timeout_s = {settings.timeout_s}; raise them"
        )
    return sandbox
