"""The demonstration in two acts: an easy task, where four methods tie, and one from which GRPO learns nothing.

threepo demo. Every stage is a recipe of demo/ with a folder of the same name. Stages run as the runs of a study: a
process a core, with one thread each. Finished stages are not repeated.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from threepo.errors import UserError
from threepo.files import read_json, write_json
from threepo.lab.curves import plot
from threepo.lab.page import write_page
from threepo.lab.report import RunReport, read_runs, tables
from threepo.lab.study import open_runner
from threepo.lab.study_config import StudyRun
from threepo.run_folder import SUMMARY

FIRST_ACT = ("grpo", "b3po", "m3po", "c3po")
SECOND_ACT = ("choices/grpo", "choices/entreg", "choices/auto")
LABELS = ("GRPO", "an entropy bonus (entreg)", "noise that finds its own place and size (auto)")
PROBE = ("--recipe", "demo/choices/replay", "--exact", 'probe.places=["embedding"]', "probe.sizes=[0.65]")
"""Arguments of the second act's probe: the noise of a recipe that chose it by hand."""
COMPARED = ("probe.temperatures=[1.5]", "probe.most_kl=2.0")
"""The temperature that the probe compares this noise with, and the largest KL to the mean that noise may have."""


def demonstrate(
    folder: Path, console: Console, overrides: Sequence[str] = (), warm_start_overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run both acts. Returns the content of summary.json; each act's picture and report are in the same folder.

    `overrides` (section.key=value) change the methods' recipes, `warm_start_overrides` the recipes of the warm starts.
    """

    def stage(kind: str, name: str, settings: Sequence[str], start: StudyRun | None = None) -> StudyRun:
        more = ("run.threads=1", f"run.folder={folder / name}", *([f"model.path={start.folder}"] if start else []))
        return StudyRun(name, folder / name, kind, f"demo/{name}", (*settings, *more), start=start)

    def act(
        name: str, stages: list[StudyRun], methods: Sequence[str], conclude: Callable[[Sequence[RunReport]], str]
    ) -> dict[str, Any]:
        with open_runner(name, folder, len(stages), _say) as runner:
            runner.finish(stages)
        if runner.failed:
            failed = ", ".join(sorted(runner.failed))
            raise UserError(f"{name}: {failed} failed; the logs named above say why; the same command goes on")
        runs = read_runs([folder / method for method in methods])
        page = folder / name.replace(" ", "_")
        plot(runs, page.with_suffix(".png"))
        address = write_page(runs, runs[0], page)
        words = f"{name.capitalize()} ({_task(runs[0])}): {conclude(runs)}"
        console.print(*tables(runs), words, sep="\n", highlight=False)
        links = f"\ncurves: {page}.png\nreport: {address}\n"
        console.print(links, highlight=False, soft_wrap=True)
        return {"task": _task(runs[0]), "methods": {run.name: run.summary() for run in runs}, "conclusion": words}

    easy, hard = (stage("sft", name, warm_start_overrides) for name in ("warm_start", "choices/warm_start"))
    asked = folder / "choices/probe"
    settings = (*PROBE, *COMPARED, *overrides, "--output", str(asked))
    probe = StudyRun("choices/probe", asked, "probe", str(hard.folder), settings, start=hard)
    methods = [stage("train", name, overrides, easy) for name in FIRST_ACT]
    summary = act("first act", [easy, hard, probe, *methods], FIRST_ACT, tie)
    probed = read_json(asked / SUMMARY)
    console.print(f"Second act. Before training, a probe says: {probed['verdict']}\n", highlight=False)
    # The slowest first, so that it is not left alone at the end.
    methods = [stage("train", name, overrides, hard) for name in reversed(SECOND_ACT)]
    summary["second_act"] = act("second act", methods, SECOND_ACT, discovery) | {"probe": probed}
    write_json(folder / SUMMARY, summary)
    return summary


def _say(run: StudyRun) -> None:
    """Repeat the result with which the log of a training ends."""
    if run.kind != "probe":
        print(run.log.read_text().rpartition("finished: ")[2].splitlines()[0], file=sys.stderr)


def tie(runs: Sequence[RunReport]) -> str:
    """A sentence that compares the ends of methods."""
    ends = [run.summary()["pass_at_1_after"] for run in runs]
    begin, low, high = (f"{100 * share:.1f}" for share in (runs[0].summary()["pass_at_1_before"], min(ends), max(ends)))
    # Seeds of one method lie as far apart.
    verdict = "they tie" if max(ends) - min(ends) < 0.1 else "here they do not tie"
    return (
        f"an easy task. All methods begin with {begin} % of the held-out problems right and end with {low} to {high} "
        f"%, so {verdict}. Over ten seeds, none was better than GRPO: docs/studies.md."
    )


def discovery(runs: Sequence[RunReport]) -> str:
    """Sentences about what GRPO, GRPO with an entropy bonus and noise found, and what the task was made for."""
    found, number = [], runs[0].summary()["rollouts"]
    for run, label in zip(runs, LABELS, strict=True):
        end, right = run.summary()["pass_at_1_after"], round(fmean(row["reward/mean"] for row in run.steps) * number)
        what = "learns the task" if end > 0.5 else "finds something" if right else "finds nothing"
        found.append(f"{label} {what} ({right:,} right, pass@1 {100 * end:.1f} %)")
    return (
        f"of {number:,} rollouts each, {', '.join(found)}. Arms of auto: {runs[-1].summary()['arms']}. "
        "The task was made for noise; how both ways to explore fare as it gets harder: docs/consistent_choice.md."
    )


def _task(run: RunReport) -> str:
    data = run.config["data"]
    return f"{data['train']}, levels {', '.join(map(str, data['levels']))}"
