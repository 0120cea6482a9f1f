"""The sandbox that the settings name, tried before anything depends on it."""

from threepo.config import SandboxConfig
from threepo.errors import UserError
from threepo.rewards.sandbox.bubblewrap import OTHERS, Bubblewrap
from threepo.rewards.sandbox.interface import Job, Sandbox
from threepo.rewards.sandbox.local import LocalSandbox, Unconfined
from threepo.rewards.sandbox.server import ServerSandbox

TRIAL = Job(kind="stdin", program="print(input())", cases=("hello\n",))


def open_sandbox(settings: SandboxConfig) -> Sandbox:
    """The sandbox of these settings; `UserError` where it does not run a program of one line."""
    if settings.backend == "sandbox_fusion":
        sandbox: Sandbox = ServerSandbox(settings)
        advice = "start the server, or mend reward.sandbox.url"
    elif settings.backend == "unconfined":
        sandbox = LocalSandbox(settings, Unconfined())
        advice = "see whether Python starts here"
    else:
        sandbox = LocalSandbox(settings, Bubblewrap())
        advice = (
            "the kernel must let this process make user namespaces (docs/rewards.md says what stands in the way, in "
            f"containers above all), {OTHERS}"
        )
    outcome = next(iter(sandbox.run(TRIAL)))
    if outcome.ending == "sandbox error":
        raise UserError(f"reward.sandbox.backend = {settings.backend!r}: {outcome.message}; {advice}")
    if outcome.ending != "ok":
        raise UserError(
            f"reward.sandbox: a program of one line ended with {outcome.ending!r} under reward.sandbox.memory_mib = "
            f"{settings.memory_mib} and reward.sandbox.timeout_s = {settings.timeout_s}; raise them"
        )
    return sandbox
