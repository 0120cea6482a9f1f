"""Compiles the CPU kernels into the wheel, where there is a C compiler; without one the package works, only slower."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Value-changing optimisations stay off in the posterior: its numbers are the same bits on every machine. Attention and
# products of the rollouts may differ from machine to machine.
# No -march: the sources hold a version for each level of processors, chosen at run time, so a wheel runs on every
# processor of its architecture.
COMMON = ("-std=gnu99", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-shared")
LIBRARIES = {
    Path("src/threepo/posterior/native.c"): ("_native.so", ("-ffp-contract=off",)),
    Path("src/threepo/rollout/decode_attention.c"): ("_decode_attention.so", ("-fopenmp-simd", "-Wno-psabi")),
    Path("src/threepo/rollout/stacked_linear.c"): ("_stacked_linear.so", ("-pthread", "-Wno-psabi")),
}


class CompileKernels(BuildHookInterface):  # type: ignore[misc]
    """`cc native.c -o _native.so` and so on; plain shared libraries, so one wheel serves every Python version."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel, or the editable install, is put together."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        compiler = (
            shlex.split(os.environ.get("CC", "")) or list(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))[:1]
        )
        compiled = [
            self._compile(root, compiler, source, source.with_name(name), flags)
            for source, (name, flags) in LIBRARIES.items()
        ]
        build_data["artifacts"] += [str(target) for target in compiled if target]
        if any(compiled):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _compile(
        self, root: Path, compiler: list[str], source: Path, target: Path, flags: tuple[str, ...]
    ) -> Path | None:
        """The library, or None if it could not be made; then none of another version lies there either.

        A run that goes on beside this keeps the one that it has loaded: the file is replaced, and never overwritten.
        """
        made = root / target.with_suffix(f".{os.getpid()}")
        try:
            if not compiler:
                raise OSError("no C compiler found")
            # On macOS, who builds for another processor says so in ARCHFLAGS.
            architecture = shlex.split(os.environ.get("ARCHFLAGS", "")) if sys.platform == "darwin" else []
            command = [*compiler, *architecture, *COMMON, *flags, str(source), "-o", str(made), "-lm"]
            subprocess.run(command, cwd=root, check=True)
            os.replace(made, root / target)
        except (OSError, subprocess.CalledProcessError) as error:
            for left in (made, root / target):
                left.unlink(missing_ok=True)
            self.app.display_warning(f"threepo: {source}: {error}; the same will be done in plain torch, slower")
            return None
        return target
