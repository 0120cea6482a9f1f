"""Compiles the CPU kernels into the wheel, where there is a C compiler; without one the package works, only slower."""

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/threepo/posterior/native.c")
TARGET = SOURCE.with_name("_native.so")
# Value-changing optimisations stay off: the numbers are the same bits on every machine.
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS = ("-std=gnu99", "-O3", *EXACT, "-fvisibility=hidden", "-fPIC", "-shared")


class CompileKernels(BuildHookInterface):  # type: ignore[misc]
    """`cc native.c -o _native.so`; a plain shared library, so one wheel serves every Python version."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel, or the editable install, is put together."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        (root / TARGET).unlink(missing_ok=True)
        compiler = (
            shlex.split(os.environ.get("CC", "")) or list(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))[:1]
        )
        try:
            if not compiler:
                raise OSError("no C compiler found")
            subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(TARGET), "-lm"], cwd=root, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            (root / TARGET).unlink(missing_ok=True)
            self.app.display_warning(f"threepo: {error}; IVON will use its slower kernels in plain torch")
            return
        build_data["artifacts"].append(str(TARGET))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
