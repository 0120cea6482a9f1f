"""What arms learn: tables of the studies `arms_learned`, `arms_learned_sea` and `arms_learned_sorting`.

    threepo study arms_learned
    python benchmarks/arms_learned.py runs/studies/arms_learned

- The mean weights *begin* in the first step in which they earn 0.1, and *have learned* from the first with 0.9; draws
  with noise *find* it in the first in which they earn 0.1 together.
- The *leader* is the arm that earned most, over its completions, before the mean weights begin.
- *Late* are the last ten steps. The leader's reward less the mean weights' is over the steps in which both wrote.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from threepo.run_folder import read_metrics

MEAN, REWARD, SHARE = "mean", "arms/reward/", "arms/share/"
BEGIN, LEARNED, LATE = 0.1, 0.9, 10
Step = dict[str, tuple[float, float]]
"""Share of the completions and mean reward, by arm."""


@dataclass(frozen=True)
class Learned:
    """A finished run."""

    line: str
    method: str
    steps: Sequence[Step]
    end: float
    """Held-out pass@1 after the last step."""
    area: float
    """Mean reward of all rollouts."""

    def first(self, holds: Callable[[Step], bool]) -> int | None:
        """The first step of which this holds."""
        return next((number for number, step in enumerate(self.steps) if holds(step)), None)

    @property
    def found(self) -> int | None:
        """The step in which draws with noise find it."""
        return self.first(lambda step: earned(step, step.keys() - {MEAN}) >= BEGIN)

    @property
    def begun(self) -> int | None:
        """The step in which the mean weights begin."""
        return self.first(lambda step: step[MEAN][1] >= BEGIN)

    @property
    def learned(self) -> int | None:
        """The step from which the mean weights have learned."""
        return self.first(lambda step: step[MEAN][1] >= LEARNED)

    @property
    def early(self) -> Counter[str]:
        """What each arm has earned before the mean weights begin."""
        return Counter(
            {
                arm: sum(
                    share * reward for step in self.steps[: self.begun] for share, reward in [step.get(arm, (0, 0))]
                )
                for arm in {arm for step in self.steps for arm in step} - {MEAN}
            }
        )

    @property
    def leader(self) -> str:
        """The arm that earned most before the mean weights begin; empty if none has earned anything."""
        [(arm, most)] = self.early.most_common(1)
        return arm if most > 0 else ""


def read(folder: Path, study: str) -> Learned | None:
    """A run in `runs/[<line>/]<method>/seed-<n>`; None if it has not ended."""
    rows = read_metrics(folder)
    ends = [row["eval/pass_at_1"] for row in rows if row["step"] > 0 and "eval/pass_at_1" in row]
    trained = [row for row in rows if f"{SHARE}{MEAN}" in row]
    if not (folder / "summary.json").is_file() or not ends:
        return None
    arms = [key.removeprefix(SHARE) for row in trained for key in row if key.startswith(SHARE)]
    steps = [
        {arm: (row[SHARE + arm], row[REWARD + arm]) for arm in dict.fromkeys(arms) if SHARE + arm in row}
        for row in trained
    ]
    line = folder.parent.parent.name
    area = sum(row["reward/mean"] for row in trained) / len(trained)
    return Learned(study if line == "runs" else line, folder.parent.name, steps, ends[-1], area)


def earned(step: Step, arms: Iterable[str]) -> float:
    """Mean reward of the completions of these arms."""
    found = [step[arm] for arm in arms]
    wrote = sum(share for share, _ in found)
    return sum(share * reward for share, reward in found) / wrote if wrote else 0.0


def compared(steps: Sequence[Step], arm: str) -> tuple[float, float] | None:
    """An arm's reward less the mean weights', in steps in which both wrote, and its share; None if it wrote nothing."""
    both = [step for step in steps if arm in step and MEAN in step]
    wrote = sum(step[arm][0] for step in both)
    if not wrote:
        return None
    return sum(step[arm][0] * (step[arm][1] - step[MEAN][1]) for step in both) / wrote, wrote / len(steps)


def middle(values: Iterable[int | None], others: Iterable[int | None] | None = None) -> str:
    """Median and range of numbers, or of their differences to others, where there are both."""
    pairs = zip(values, others, strict=True) if others is not None else ((value, 0) for value in values)
    known = [value - other for value, other in pairs if value is not None and other is not None]
    return f"{median(known):g} ({min(known)} to {max(known)})" if known else "-"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="+")
    runs: dict[tuple[str, str], list[Learned]] = defaultdict(list)
    for study in parser.parse_args().studies:
        for folder in sorted(study.glob("runs/**/seed-*")):
            if run := read(folder, study.name):
                runs[run.line, run.method].append(run)
    print("| line | arms | runs | pass@1 above 0.5 | pass@1 | reward | found at step | begins after | learned after |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for (line, method), own in runs.items():
        end, area = (sum(values) / len(own) for values in ([run.end for run in own], [run.area for run in own]))
        found, begun, learned = ([getattr(run, name) for run in own] for name in ("found", "begun", "learned"))
        times = f"{middle(found)} | {middle(begun, found)} | {middle(learned, begun)}"
        passed = sum(run.end > 0.5 for run in own)
        print(f"| {line} | {method} | {len(own)} | {passed} | {end:.3f} | {area:.3f} | {times} |")
    print("\n| line | arms | leaders | leader less the mean weights, late | its share, late |")
    print("| --- | --- | --- | --- | --- |")
    for (line, method), own in runs.items():
        led = [run for run in own if run.leader]
        leaders = ", ".join(f"{arm} ({count})" for arm, count in Counter(run.leader for run in led).most_common())
        late = [compared(run.steps[-LATE:], run.leader) for run in led]
        differences = ", ".join(f"{value[0]:+.2f}" if value else "-" for value in late)
        shares = ", ".join(f"{value[1]:.2f}" if value else "0" for value in late)
        print(f"| {line} | {method} | {leaders} | {differences} | {shares} |")
    for (line, method), own in runs.items():
        total: Counter[str] = Counter()
        for run in own:
            total.update({arm: value / (sum(run.early.values()) or 1) / len(own) for arm, value in run.early.items()})
        print(f"\n{line}, {method}: share of what was earned early, by arm (mean over runs);", end=" ")
        print("and reward less the mean weights' over all steps")
        for arm, share in sorted(total.items()):
            found = [value[0] for run in own if (value := compared(run.steps, arm))]
            print(f"  {arm}: {share:.2f}; {sum(found) / len(found):+.3f} ({min(found):+.3f} to {max(found):+.3f})")


if __name__ == "__main__":
    main()
