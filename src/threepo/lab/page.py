"""A report of training runs as one page that needs no network: findings, tables, figures, and a browser of rollouts.

    threepo report RUN... [--output FOLDER] [--baseline RUN] [--live]

Writes index.html, and each figure as a PNG in figures/ (docs/analysis.md). The page's own parts are in templates/.
Rollouts travel as base64 of gzip of JSON, in chunks that a browser unpacks one by one.
"""

import base64
import gzip
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from pyarrow import compute

from threepo.errors import UserError
from threepo.evaluation.tables import cells
from threepo.files import atomic_file
from threepo.lab.arms_view import arm_shares, arm_tables, shown_arms
from threepo.lab.completions import DRAW, read_completions, read_file, saved_groups
from threepo.lab.curves import cost, costs, learning, noise, share_panel
from threepo.lab.exploration import analyse
from threepo.lab.exploration_view import exploration_panels, exploration_tables
from threepo.lab.figures import Palette, Panel, colours, inline_svg, picture, with_data
from threepo.lab.report import RunReport, by_method, differing_settings, findings, read_runs, tables
from threepo.run_folder import COMPLETIONS, SUMMARY

ALONE = "Nothing to compare: exploration compares a method with a baseline, and this is one method"
PAGE, FIGURES = "index.html", "figures"
MOST_TEXT = 150_000_000
"""About as many characters of rollouts are in a page; of runs with more, every second step is left out, and so on."""
REFRESH, LIVE_SHARE = 15, 30
"""Seconds between versions of a page of runs that go on; and what divides `MOST_TEXT` for it, as it is loaded often."""
_CHUNK = 1_000_000
"""Characters that a browser unpacks at a time, so that it can answer in between."""
COLUMNS = "reward correct status num_tokens finish_reason parsed_answer rho correction_weight"
"""Columns of completions that the page has as they are."""


def write_page(runs: Sequence[RunReport], baseline: RunReport, folder: Path, refresh: int = 0) -> str:
    """Write the page and its PNGs, and return its address; `baseline`, one of the runs, is what others are paired with.

    `refresh`: after so many seconds, a browser loads the page again, which has fewer rollouts, and no PNGs; 0: never.
    """
    methods = by_method(runs)
    light = colours(list(methods))
    most = MOST_TEXT // len(runs) // (LIVE_SHARE if refresh else 1)
    steps = {run.name: _steps(run.path, most) for run in runs}
    environment = Environment(loader=PackageLoader("threepo.lab"), autoescape=True, trim_blocks=True)
    page = environment.get_template("report.html").stream(
        refresh=refresh,
        findings=findings(runs, baseline),
        date=f"{datetime.now().astimezone():%d %B %Y, %H:%M %Z}",
        versions=[f"{package} {version(package)}" for package in ("threepo", "torch", "transformers")],
        light=light,
        dark=colours(list(methods), dark=True),
        runs=[run.name for run in runs],
        owners=[i for run in runs for i, seeds in enumerate(methods.values()) if run in seeds],
        tables=[cells(each) for each in tables(runs)],
        settings=cells(differing_settings(runs)),
        sections=_sections(runs, baseline, light, None if refresh else folder / FIGURES),
        folder=FIGURES,
        steps=[{"name": name, "shown": len(chosen), "all": total} for name, (chosen, total) in steps.items()],
        chunks=_chunks([chosen for chosen, _ in steps.values()]),
    )
    with atomic_file(folder / PAGE) as temporary:
        page.dump(str(temporary), "utf-8")
    return (folder / PAGE).absolute().as_uri()


def follow(runs: Sequence[RunReport], baseline: RunReport, folder: Path) -> None:
    """Write the page after new steps, until all runs have a result or Ctrl-C; its last version does not reload."""
    paths, first = [run.path for run in runs], runs.index(baseline)
    with suppress(KeyboardInterrupt):
        while not all((path / SUMMARY).is_file() for path in paths):
            time.sleep(REFRESH)
            known, runs = runs, read_runs(paths)
            if runs != known:
                write_page(runs, runs[first], folder, REFRESH)
    runs = read_runs(paths)  # the last steps may have come meanwhile
    write_page(runs, runs[first], folder)


def _sections(runs: Sequence[RunReport], baseline: RunReport, palette: Palette, pictures: Path | None) -> list[Any]:
    """The sections with figures and what goes with them; draws the figures into the folder `pictures`, too, if any."""
    methods = by_method(runs)
    of_runs = {**palette, **{run.name: palette[name] for name, seeds in methods.items() for run in seeds}}

    def section(
        heading: str,
        listed: Sequence[Panel],
        colour: Palette = of_runs,
        lines: Sequence[str] = tuple(methods),
        **more: Any,
    ) -> dict[str, Any]:
        found = with_data(listed)
        if pictures:
            for panel in found:
                picture([panel], colour, pictures / f"{panel.name}.png")
        figures = [{"panel": panel, "svg": Markup(inline_svg(panel, colour, lines))} for panel in found]
        missing = [panel.title for panel in listed if panel not in found]
        return {"heading": heading, "figures": figures, "missing": missing, **more}

    comparison, reasons = _exploration(runs, baseline)
    explored = exploration_panels(comparison) if comparison["runs"] else []
    compared = [cells(each) for each in exploration_tables(comparison)]
    choosing = [run for run in runs if arm_shares(run.steps)]
    shares = [share_panel(f"arms_{i}", f"Completions by arm: {run.name}", run.steps) for i, run in enumerate(choosing)]
    of_arms = colours(list(dict.fromkeys(arm for run in choosing for arm in shown_arms(run.steps))))
    earned = [cells(each) for run in choosing for each in arm_tables(run.path, f": {run.name}")]
    arms = [section("Arms", shares, of_arms, (), tables=earned)] if choosing else []
    return [
        section("Learning", learning(runs)),
        section("Exploration", explored, reasons=reasons, baseline=comparison["baseline"], tables=compared),
        section("Noise", noise(runs)),
        *arms,
        section("Cost", cost(runs), tables=[cells(costs(runs))]),
    ]


def _exploration(runs: Sequence[RunReport], baseline: RunReport) -> tuple[dict[str, Any], list[str]]:
    """The analysis of all runs that can be paired with the baseline's run of their seed, and why others cannot be."""
    name, seeds = next((name, seeds) for name, seeds in by_method(runs).items() if baseline in seeds)
    comparison: dict[str, Any] = {"baseline": name, "runs": {}}
    reasons = [] if len(seeds) < len(runs) else [ALONE]
    partners, read = {run.seed: run for run in (*seeds, baseline)}, cache(read_completions)
    for run in (run for run in runs if run not in seeds):
        reference = partners.get(run.seed, baseline)
        try:
            first, second = (read(each.path / COMPLETIONS) for each in (reference, run))
            comparison["runs"][run.name] = analyse(reference.path, run.path, first, second)
        except UserError as error:
            reasons.append(f"Not compared: {error}")
    return comparison, list(dict.fromkeys(reasons))


def _steps(run: Path, most: int) -> tuple[list[Path], int]:
    """The files of completions that go into the page, the last step among them, and how many there are."""
    files = sorted((run / COMPLETIONS).glob("*.parquet"))
    texts = (read_file(file, ["completion"])["completion"] for file in files)
    size = sum(compute.sum(compute.utf8_length(column), min_count=0).as_py() + 200 * len(column) for column in texts)
    return files[::-1][:: max(1, -(-size // most))][::-1], len(files)


def _chunks(files: Sequence[Sequence[Path]]) -> Iterator[str]:
    """The groups of each run, packed; empty runs have none."""
    chunk, size = [], 0
    for run, steps in enumerate(files):
        for group in saved_groups(steps):
            chunk.append(json.dumps({"run": run} | _packed(group), separators=(",", ":")))
            size += len(chunk[-1])
            if size > _CHUNK:
                yield _pack(chunk)
                chunk, size = [], 0
    if chunk:
        yield _pack(chunk)


def _pack(chunk: Sequence[str]) -> str:
    return base64.b64encode(gzip.compress(f"[{','.join(chunk)}]".encode(), mtime=0)).decode()


def _packed(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A group as the page has it: what its completions share, the labels of its draws, and a list for each column."""
    first, addresses = group[0], [tuple(row[part] for part in DRAW) for row in group]
    draws = dict(zip(addresses, group, strict=True))  # a row of each
    numbers = {address: i for i, address in enumerate(draws)}
    return {
        "step": first["step"],
        "problem": first["problem_id"],
        "prompt": _prompt(first["prompt"]),
        "reference": first["reference_answer"],
        "draws": list(map(_label, draws.values())),
        "draw": [numbers[address] for address in addresses],
        "episode": [_episode(row.get("episode")) for row in group],
        "completion": [row["completion"] if row.get("episode") is None else None for row in group],
        **{column: [row.get(column) for row in group] for column in COLUMNS.split()},
    }


def _episode(text: str | None) -> dict[str, Any] | None:
    """An episode for the page: its turns, its end, and its metrics."""
    if text is None:
        return None
    episode = json.loads(text)
    begin, after = (
        [{"role": role, "text": said, "reward": 0} for role, said in episode[part]] for part in ("begin", "transcript")
    )
    replies = [turn for turn in after if turn["role"] == "assistant"]
    if len(replies) == len(episode["rewards"]):  # else nothing was paid, or an environment has written replies too
        for turn, reward in zip(replies, episode["rewards"], strict=True):
            turn["reward"] = reward
    shown = {key: episode[key] for key in ("status", "reason", "metrics")}
    return {"turns": begin + after, "replies": len(episode["own"]), **shown}


def _label(row: Mapping[str, Any]) -> str:
    """The draw of a completion in words."""
    if row["draw_index"] is None:
        return "mean weights"
    of_arm = f", {row['draw_arm']}" if row.get("draw_arm") else ""
    return f"draw {row['draw_index']}{' mirrored' * bool(row['draw_mirrored'])}{of_arm}"


def _prompt(text: str) -> str:
    """A prompt to read: of chat messages, which are saved as JSON, each with its role."""
    if not text.startswith('[{"'):
        return text
    try:
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in json.loads(text))
    except (ValueError, TypeError, KeyError):  # a text that only begins like messages
        return text
