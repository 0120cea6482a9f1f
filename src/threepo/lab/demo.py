"""The demonstration in two acts: an easy task, where four methods tie, and one from which GRPO learns nothing.

threepo demo. Every stage is a recipe of demo/ with a folder of the same name. Stages run as the runs of a study: a
process a core, with one thread each. Finished stages are not repeated.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from threepo.errors import UserError
from threepo.files import read_json, write_json
from threepo.lab.curves import plot
from threepo.lab.page import PAGE, write_page
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
"""What the probe compares this noise with, and how far from the mean it may lead."""


def demonstrate(
    folder: Path, console: Console, overrides: Sequence[str] = (), warm_start_overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run both acts. Returns the content of summary.json; each act's picture and report are in the same folder.

    `overrides` (section.key=value) change the methods' recipes, `warm_start_overrides` the recipes of the warm starts.
    """

    def stage(kind: str, name: str, settings: Sequence[str], start: StudyRun | None = None) -> StudyRun:
        more = ("run.threads=1", f"run.folder={folder / name}", *([f"model.path={start.folder}"] if start else []))
        return StudyRun(name, folder / name, kind, f"demo/{name}", (*settings, *more), start=start)

    easy, hard = (stage("sft", name, warm_start_overrides) for name in ("warm_start", "choices/warm_start"))
    asked = folder / "choices/probe"
    settings = (*PROBE, *COMPARED, *overrides, "--output", str(asked))
    probe = StudyRun("choices/probe", asked, "probe", str(hard.folder), settings, start=hard)
    methods = [stage("train", name, overrides, easy) for name in FIRST_ACT]
    first = _finished("first act", folder, [easy, hard, probe, *methods], FIRST_ACT)
    summary = _show(first, folder, "first_act", tie(first), console)
    probed = read_json(asked / SUMMARY)
    text = f"Second act: a task on which GRPO finds nothing. Before training, a probe says: {probed['verdict']}\n"
    console.print(text, highlight=False)
    # The slowest first, so that it is not left alone at the end.
    methods = [stage("train", name, overrides, hard) for name in reversed(SECOND_ACT)]
    second = _finished("second act", folder, methods, SECOND_ACT)
    shown = _show(second, folder, "second_act", discovery(probed, second), console)
    summary["second_act"] = shown | {"probe": probed}
    write_json(folder / SUMMARY, summary)
    return summary


def _finished(title: str, folder: Path, stages: Sequence[StudyRun], methods: Sequence[str]) -> list[RunReport]:
    """Bring all stages to their end; returns the runs of the methods."""
    with open_runner(title, folder, len(stages), _say) as runner:
        runner.finish(stages)
    if runner.failed:
        fix = "their logs, named above, say why; the same command goes on"
        raise UserError(f"{title}: {', '.join(sorted(runner.failed))} failed; {fix}")
    return read_runs([folder / name for name in methods])


def _say(run: StudyRun) -> None:
    """Repeat the result with which the log of a training ends."""
    if run.kind != "probe":
        print(run.log.read_text().rpartition("finished: ")[2].splitlines()[0], file=sys.stderr)


def _show(runs: Sequence[RunReport], folder: Path, name: str, words: str, console: Console) -> dict[str, Any]:
    """Draw and write the report of an act, print its table and its closing words; returns all in figures."""
    plot(runs, folder / f"{name}.png")
    write_page(runs, runs[0], folder / name)
    console.print(*tables(runs), words, sep="\n", highlight=False)
    page = (folder / name / PAGE).absolute().as_uri()
    console.print(f"\ncurves: {folder / name}.png\nreport: {page}\n", highlight=False, soft_wrap=True)
    return {"task": _task(runs[0]), "methods": {run.name: run.summary() for run in runs}, "conclusion": words}


def tie(runs: Sequence[RunReport]) -> str:
    """A sentence that compares the ends of methods."""
    ends = [run.summary()["pass_at_1_after"] for run in runs]
    begin, low, high = (f"{100 * share:.1f}" for share in (runs[0].summary()["pass_at_1_before"], min(ends), max(ends)))
    verdict = "they tie" if max(ends) - min(ends) < 0.1 else "here they do not tie"
    return (
        f"{_task(runs[0])}: an easy task. All methods begin with {begin} % of the held-out problems right and end "
        f"with {low} to {high} %, so {verdict}. Over ten seeds, none was better than GRPO: docs/studies.md."
    )


def discovery(probed: Mapping[str, Any], runs: Sequence[RunReport]) -> str:
    """Sentences about what GRPO, GRPO with an entropy bonus and noise found, and what the task was made for."""
    chance, with_noise = (f"{row['mu']['value']:.2g}" for row in (probed["mean"], probed["noise"][0]))
    found = []
    for run, label in zip(runs, LABELS, strict=True):
        end, right = run.summary()["pass_at_1_after"], _right(run)
        what = "learns the task" if end > 0.5 else "finds something" if right else "finds nothing"
        found.append(f"{label} {what} ({right:,} right, pass@1 {100 * end:.1f} %)")
    words = (
        f"{_task(runs[0])}: of {runs[0].summary()['rollouts']:,} rollouts each, {', '.join(found)}. Before training, "
        f"a rollout was right with a chance of {chance}, and of {with_noise} with noise on the embedding. The leading "
        f"arms of auto: {runs[-1].summary()['arms']}."
    )
    if end <= 0.5:
        return f"{words} Here noise on the weights did not help."
    return (
        f"{words} The task was made for such noise: many decisions must be alike, as they are after similar prompts. "
        f"How both ways to explore fare as it gets harder: docs/consistent_choice.md."
    )


def _right(run: RunReport) -> int:
    """Number of right rollouts of a run whose rewards are 0 and 1."""
    rewards = [float(row["reward/mean"]) for row in run.steps]
    return round(sum(rewards) / len(rewards) * int(run.summary()["rollouts"]))


def _task(run: RunReport) -> str:
    data = run.config["data"]
    return f"{data['train']}, levels {', '.join(map(str, data['levels']))}"
