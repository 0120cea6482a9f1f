"""The tables and the picture of a study, from its summary and its runs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from threepo.evaluation import tables
from threepo.evaluation.tables import number, with_interval
from threepo.files import write_json, write_text
from threepo.lab.curves import mean_curve
from threepo.lab.figures import Curve, Panel, colours, picture, with_data
from threepo.lab.report import series
from threepo.lab.statistics import smoothed, t_interval
from threepo.lab.study_config import Cell, Study
from threepo.lab.study_summary import finished_runs
from threepo.run_folder import SUMMARY, read_metrics

PANELS = {
    "reward/mean": "Reward of the rollouts",
    "eval/pass_at_1": "Held-out pass@1",
    "groups/zero_advantage_share": "Share of prompts without any advantage",
    "policy/entropy": "Token entropy (nats)",
}
"""Further metrics to plot after the study's metric and curve, with titles."""
FINAL = ("method", "seeds", "final", "difference", "p", "p of signs", "verdict", "finds")
LEARNING = ("method", "to target", "reached", "at half", "ahead at half", "area", "rollouts", "seconds")
SHOWN = ("method", "seeds", "final", "difference", "p", "verdict", "to target")
"""Columns of the two tables of the page, and of the terminal's; docs/studies.md explains them."""
Summary = Mapping[str, Any]


def write_results(study: Study, summary: Summary) -> None:
    """Write summary.json, table.md and curves.png into the folder of the study."""
    write_json(study.folder / SUMMARY, summary)
    write_text(study.folder / "table.md", markdown(summary))
    panels, palette = with_data(_panels(study)), colours(list(study.tables.methods))
    if panels:
        picture(panels, palette, study.folder / "curves.png")


def markdown(summary: Summary) -> str:
    """All tables as one page."""
    settings = summary["tables"]["study"]
    seeds = ", ".join(map(str, settings["seeds"]))
    parts = [
        f"# {summary['study']}",
        f"`{settings['metric']}` after the last step, seeds {seeds}: mean and 95 % t interval. Differences are to "
        f"{settings['baseline']} with the same seed; p is from the paired t-test, p of signs from the randomisation "
        f"test, each adjusted for all methods of a table (Holm).",
    ]
    if summary["average"]:
        parts += ["## All settings", "Mean and standard error over seeds.", _page(across(summary))]
    for name, variant in summary["variants"].items():
        rows = table_rows(variant)
        parts += [f"## {name}" if name else "", _page(rows, FINAL)]
        if variant["target"] is not None:
            parts.append(f"The target is {settings['curve']} = {variant['target']:.3f}.")
        parts += [_page(rows, LEARNING), f"Digest of all metrics but times: {variant['digest']}."]
    if summary["tuning"]:
        parts += ["## Tuning", _page([_tuned(name, entry) for name, entry in summary["tuning"].items()])]
    parts += ["## Runs that are not in the tables", _page(summary["left_out"]) if summary["left_out"] else "None."]
    return "\n\n".join(filter(None, parts)) + "\n"


def _page(rows: Sequence[tables.TableRow], columns: Sequence[str] = ()) -> str:
    return tables.markdown(tables.table("", rows, columns=columns))


def shown_tables(summary: Summary) -> list[Table]:
    """Tables that the terminal shows."""
    metric = summary["tables"]["study"]["metric"]
    found = []
    if summary["average"]:
        found.append(tables.table(f"{summary['study']} all settings {metric}", across(summary)))
    for name, variant in summary["variants"].items():
        title = " ".join(filter(None, [summary["study"], name, metric]))
        found.append(tables.table(title, table_rows(variant), columns=SHOWN))
    return found


def table_rows(variant: Summary) -> list[dict[str, str]]:
    """A row for each method in one setting, the baseline included."""
    rows = []
    for method, figures in variant["methods"].items():
        row = {"method": method, "seeds": str(figures["n"])}
        if figures["n"]:
            row["final"] = _interval(figures["final"], "mean", ".3f")
            row["area"] = _interval(figures["area"], "mean", ".3f")
            row["rollouts"] = f"{figures['rollouts']:,}"
            row["seconds"] = f"{figures['seconds']:.0f}"
        if figures["n"] and variant["target"] is not None:
            median = figures["median_steps_to_target"]
            reached = [steps for steps in figures["steps_to_target"].values() if steps is not None]
            row["to target"] = f"> {figures['steps']}" if median is None else f"{median:g}"
            row["reached"] = f"{len(reached)} of {figures['n']}"
        if metric := variant["metric"].get(method):
            row["difference"] = _interval(metric, "difference", "+.3f")
            row["p"] = f"{metric['p_adjusted']:.2g}"
            row["p of signs"] = f"{metric['p_sign_flip_adjusted']:.2g}"
            row["verdict"] = metric["verdict"]
            row["finds"] = number(metric["detectable"], ".3f")
        if half := variant["half"].get(method):
            row["at half"] = _interval(half, "difference", "+.3f")
            row["ahead at half"] = {"better": "yes", "worse": "no"}.get(half["verdict"], "undecided")
        rows.append(row)
    return rows


def _interval(figure: Summary, name: str, form: str) -> str:
    return with_interval(figure[name], [figure["low"], figure["high"]], form)


def across(summary: Summary) -> list[dict[str, str]]:
    """Methods x settings, as the paper's Table 1: the best in bold."""
    columns = {**summary["variants"], "average": summary["average"]}
    rows = []
    for method in summary["average"]["methods"]:
        row = {"method": method}
        for name, part in columns.items():
            finals = {m: figures["final"] for m, figures in part["methods"].items() if figures["n"]}
            if method in finals:
                mean, error = finals[method]["mean"], finals[method]["se"]
                text = f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"
                is_best = mean == max(final["mean"] for final in finals.values())
                row[name] = tables.bold(text) if is_best else text
        if metric := summary["average"]["metric"].get(method):
            row["p of the average"] = f"{metric['p_adjusted']:.2g}"
        rows.append(row)
    return rows


def _tuned(cell: str, entry: Summary) -> dict[str, str]:
    metrics = [point["metric"] for point in entry["points"]]
    means = [tables.MISSING if None in values else f"{fmean(values):.3f}" for values in metrics]
    return {
        "method": cell,
        "chosen": ", ".join(entry["chosen"]) or "the recipe as it is",
        "mean of the metric, point by point": ", ".join(means),
    }


def _panels(study: Study) -> list[Panel]:
    """A panel for each metric in each variant, the study's own first."""
    settings, panels = study.tables.study, []
    for variant in study.variants:
        for metric in dict.fromkeys([settings.metric, settings.curve, *PANELS]):
            curves = [found for method in study.tables.methods for found in _mean_curve(study, variant, method, metric)]
            panels.append(Panel(metric, f"{variant} {PANELS.get(metric, metric)}".strip(), "", curves))
    return panels


def _mean_curve(study: Study, variant: str, method: str, metric: str) -> list[Curve]:
    """A metric's mean over the finished seeds with the 95 % t interval; what is known at every step is smoothed."""
    evaluated = metric.startswith("eval/")
    width = 1 if evaluated else study.tables.study.smoothing
    found = [series(read_metrics(run.folder), metric) for run in finished_runs(study, Cell(variant, method))]
    style = {"marker": "o"} if evaluated else {}  # with a band, as bars of few seeds would stretch the axis
    return mean_curve(method, [smoothed(x, y, width) for x, y in found], t_interval, style=style)
