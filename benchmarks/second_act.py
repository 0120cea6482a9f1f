"""Whose noise solves the task of the second act: every warm start's exact chances, and the picture of the study.

    threepo study second_act
    PYTHONPATH=src python benchmarks/second_act.py runs/studies/second_act --picture docs/second_act.png

The chance of a right answer is its probability in one forward pass, a mean over 16 prompts and, with noise, over draws.
Noise on some rows of the embedding only says which tokens it has to touch. docs/second_act.md has the results.
"""

import argparse
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import torch

from threepo.config import ModelConfig
from threepo.data.task import ProceduralProblems
from threepo.data.tasks import TASKS
from threepo.files import read_json, write_json
from threepo.models.policy import Policy, load_policy
from threepo.run_folder import model_folder, read_metrics

DRAWS, PROMPTS, SIZE, LETTERS = 128, 16, 0.65, 10
METHODS = {
    "grpo": ("GRPO", "tab:gray"),
    "replay": ("C3PO-replay", "tab:blue"),
    "entreg": ("GRPO, entropy bonus", "tab:orange"),
}


def problem_rows(policy: Policy) -> tuple[torch.Tensor, int]:
    """Prompts with their right answers [PROMPTS, tokens], and how many tokens of them are the prompt's."""
    tokenizer = policy.tokenizer
    problems = ProceduralProblems(TASKS["choices"], "heldout", 0, (LETTERS,)).first(PROMPTS)

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompts = [tokens(str(problem.prompt)) for problem in problems]
    answers = torch.tensor([[*tokens(problem.answer), tokenizer.eos_token_id] for problem in problems])
    return torch.cat([torch.tensor(prompts), answers], 1), len(prompts[0])


def right_chance(model: Any, rows: torch.Tensor, length: int, temperature: float = 1.0) -> float:
    """The probability of a right answer, a mean over prompts."""
    logprobs = (model(rows).logits[:, length - 1 : -1] / temperature).log_softmax(-1)
    return float(logprobs.gather(-1, rows[:, length:, None]).sum((1, 2)).double().exp().mean())


@torch.no_grad()
def chances(start: Path) -> dict[str, float]:
    """The chance of a right answer of a warm start: as it is, hotter, and with noise on rows of the embedding."""
    policy = load_policy(ModelConfig(path=str(model_folder(start)), device="cpu"), 0)
    model, (rows, length) = policy.model, problem_rows(policy)

    embedding = model.get_input_embeddings().weight
    mean, everything = embedding.clone(), torch.ones(len(embedding), dtype=torch.bool)
    word = torch.zeros_like(everything)
    word[policy.tokenizer("lock", add_special_tokens=False)["input_ids"]] = True
    noise = torch.Generator().manual_seed(0)
    found = {"no noise": right_chance(model, rows, length), "temperature 1.5": right_chance(model, rows, length, 1.5)}
    draws = SIZE * mean.square().mean().sqrt() * torch.randn(DRAWS, *mean.shape, generator=noise)
    for name, touched in {
        "noise on all tokens": everything,
        "on l, o, c, k alone": word,
        "on all but these": ~word,
    }.items():
        total = 0.0
        for draw in draws:
            embedding.copy_(mean + touched[:, None] * draw)
            total += right_chance(model, rows, length)
        found[name] = total / DRAWS
    return found


def draw_picture(study: Path, found: dict[str, dict[str, float]], path: Path) -> None:
    """Chances before training; reward; held-out pass@1: a point or a thin line for every seed, thick ones for means."""
    figure, (before, reward, after) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    names = list(next(iter(found.values())))
    for i, name in enumerate(names):
        values = [one[name] for one in found.values()]
        before.plot([i + 0.05 * (j - len(values) / 2) for j in range(len(values))], values, ".", color="tab:blue")
        before.text(i, 2e-9, f"{torch.tensor(values).log().mean().exp():.0e}", ha="center", fontsize=8)
    before.set_xticks(range(len(names)), [fill(name, 13) for name in names])
    before.tick_params(axis="x", labelsize=8)
    before.set(yscale="log", ylim=(1e-9, 1), title="Chance of a right answer before training")
    before.set(xlabel=f"{len(found)} warm starts; numbers are geometric means")
    metrics = {
        "reward/mean": (reward, "Share of right rollouts in training"),
        "eval/pass_at_1": (after, "Held-out pass@1 of the mean policy"),
    }
    for metric, (axis, title) in metrics.items():
        for method, (label, colour) in METHODS.items():
            runs = [
                [(row["step"] + 1, row[metric]) for row in read_metrics(folder) if metric in row]
                for folder in sorted((study / "runs" / method).iterdir())
                if (folder / "summary.json").is_file()
            ]
            for run in runs:
                axis.plot(*zip(*run, strict=True), color=colour, alpha=0.3, linewidth=0.8)
            means = [sum(value for _, value in points) / len(points) for points in zip(*runs, strict=True)]
            axis.plot(
                [step for step, _ in runs[0]], means, color=colour, linewidth=2.5, label=f"{label}, {len(runs)} seeds"
            )
        axis.set(xlabel="training steps of 256 rollouts", ylim=(-0.03, 1.03), title=title)
        axis.legend(loc="lower right", bbox_to_anchor=(1, 0.07), frameon=False, handlelength=1)
    for axis in (before, reward, after):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure the warm starts that are not measured yet, print them, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.study / "chances.json"
    found = read_json(file) if file.is_file() else {}
    for start in sorted((options.study / "start").iterdir()):
        if start.name not in found and (start / "summary.json").is_file():
            found[start.name] = chances(start)
            write_json(file, found)
    for name, values in found.items():
        print(name, " ".join(f"{key}: {value:.1e};" for key, value in values.items()))
    if options.picture:
        draw_picture(options.study, found, options.picture)


if __name__ == "__main__":
    main()
