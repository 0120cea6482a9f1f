"""All that a GPU has to prove, in parts: python tests/gpu/checks.py [PART ...]

Each part has a time limit, below ten minutes and 56 for all, and a verdict. A part that has passed is not repeated
while the commit is the same and nothing has changed, so an interrupted run goes on where it was; `--again` repeats it.
Results are in build/gpu/checks.json, and as tables in build/gpu/checks.md.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threepo.files import write_json, write_text

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "gpu"
PACKAGES = ("threepo", "torch", "triton", "transformers", "vllm", "bitsandbytes", "peft")


class Part(NamedTuple):
    """Tests that run in a process of their own."""

    tests: str
    """Files and options of pytest, separated by blanks."""
    limit_s: int
    devices: int = 1
    """CUDA devices that it needs."""
    package: str = ""
    """A package without which it is left out."""


PARTS = {
    "bits": Part(
        "tests/posterior/triton_interpreted.py tests/models/triton_scores_interpreted.py tests/gpu/test_bits.py", 240
    ),
    "runs": Part("tests/gpu/test_runs.py -k not(two_ranks)", 420),
    "memory": Part("tests/gpu/test_memory.py", 360),
    "vllm": Part("tests/rollout/test_vllm.py -k agree", 420, package="vllm"),
    "vllm_engine": Part("tests/rollout/test_vllm.py -k not(agree)", 590, package="vllm"),
    "graphs": Part("tests/gpu/test_graphs.py", 480, package="vllm"),
    "certificate": Part("tests/rollout/test_weight_faults.py", 590, package="vllm"),
    "ranks": Part("tests/gpu/test_runs.py -k two_ranks", 240, devices=2),
}


def main() -> int:
    """Run the parts that have not passed; returns 0 if none has failed, and none that was named was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where left out")
    parser.add_argument("--again", action="store_true", help="repeat what has passed, too")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    machine, file = described(), OUT / "checks.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    same = found.get("machine") == machine and not machine["commit"].endswith("dirty")
    results: dict[str, Any] = found.get("parts", {}) if same else {}
    for name in options.parts or PARTS:
        if options.again or results.get(name, {}).get("verdict") != "passed":
            results[name] = run(name, PARTS[name])
            print(f"{name}: {results[name]['verdict']}, {results[name]['seconds']:.0f} s", flush=True)
            write_json(file, {"machine": machine, "parts": results})
            write_text(OUT / "checks.md", page(machine, results))
    print(f"results: {file.relative_to(ROOT)} and {(OUT / 'checks.md').relative_to(ROOT)}")
    fine = ("passed",) if options.parts else ("passed", "left out")  # what is asked for by name has to run
    return int(any(results[name]["verdict"] not in fine for name in options.parts or PARTS))


def described() -> dict[str, str]:
    """The device, and the versions of what runs on it."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    found = {"device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}", "commit": git.stdout.strip()}
    found |= {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def run(name: str, part: Part) -> dict[str, Any]:
    """Run a part; returns its verdict, seconds, and the outcome and figures of each test."""
    if part.package and not find_spec(part.package):
        return {"verdict": "left out", "why": f"{part.package} is not installed", "seconds": 0.0, "tests": {}}
    if part.devices > torch.cuda.device_count():
        return {"verdict": "left out", "why": f"needs {part.devices} devices", "seconds": 0.0, "tests": {}}
    report, log, begin = OUT / f"{name}.xml", OUT / f"{name}.log", time.monotonic()
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *part.tests.split(), f"--junitxml={report}", "--tb=short"]
    with log.open("w") as said:
        try:
            status = subprocess.run(command, cwd=ROOT, stdout=said, stderr=said, timeout=part.limit_s).returncode
            verdict = "passed" if status == 0 else "failed"
        except subprocess.TimeoutExpired:
            verdict = f"not done after {part.limit_s} s"
    tests = outcomes(report) if report.is_file() else {}
    if verdict == "passed" and all(test["outcome"] == "skipped" for test in tests.values()):
        verdict = "failed"  # nothing was looked at
    return {"verdict": verdict, "why": "", "seconds": time.monotonic() - begin, "tests": tests}


def outcomes(report: Path) -> dict[str, Any]:
    """Outcome, message and figures of the tests in pytest's report, by name."""
    tests = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = [(kind, case.find(kind)) for kind in ("failure", "error", "skipped")]
        kind, element = next(((kind, e) for kind, e in bad if e is not None), ("passed", None))
        figures = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        message = "" if element is None else element.attrib.get("message", "")[:500]
        tests[case.attrib["name"]] = {"outcome": kind, "message": message, "figures": figures}
    return tests


def page(machine: dict[str, str], results: dict[str, Any]) -> str:
    """The results as tables in Markdown."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items() if value != "none"), ""]
    lines += ["| part | verdict | seconds | passed | failed | skipped |", "| --- | --- | --- | --- | --- | --- |"]
    for name, part in results.items():
        counted = [test["outcome"] for test in part["tests"].values()]
        failed = len(counted) - counted.count("passed") - counted.count("skipped")
        numbers = f"{part['seconds']:.0f} | {counted.count('passed')} | {failed} | {counted.count('skipped')}"
        lines.append(f"| {name} | {part['verdict']}{part['why'] and ': '}{part['why']} | {numbers} |")
    lines += ["", "| check | figures |", "| --- | --- |"]
    for part in results.values():
        for name, test in part["tests"].items():
            figures = "; ".join(f"{label}: {value}" for label, value in test["figures"].items())
            bad = test["outcome"] not in ("passed", "skipped")
            if figures or bad:
                told = test["message"].replace("\n", " ").replace("|", "/")[:200] if bad else ""
                lines.append(f"| {name} | {figures}{test['outcome'] + ': ' + told if bad else ''} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
