"""When weight noise helps: mu / p against the diversity of the warm start, and against the size of the model.

    PYTHONPATH=src python benchmarks/when_noise_helps.py runs/when_noise_helps --picture docs/when_noise_helps.png

Makes warm starts as in the second act of the demonstration, but with 0 to 16 other words that look like `lock`, after
which all letters are capitals, or with a smaller or larger model. Then it probes: exact chances of right answers
without noise and with noise on the embedding or on all weights. A cell is done once, so a killed run continues.
docs/consistent_choice.md has the results.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from threepo import api
from threepo.config import ModelConfig, SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.data.tasks import TASKS, ChoicesNear
from threepo.files import read_json, write_json
from threepo.lab.probe import run_probe
from threepo.lab.probe_config import ProbeConfig
from threepo.models.policy import load_policy
from threepo.run_folder import SUMMARY, model_folder

NEAR = ChoicesNear.near.split()
WORDS = (0, 1, 2, 4, 8, 16)
SIZES = {(32, 2): 3e-3, (64, 3): 3e-3, (128, 4): 2e-3, (256, 4): 1e-3, (384, 6): 5e-4}
"""Width and layers, with the learning rate of the warm start."""
PLACES = {"embedding": "tab:blue", "all": "tab:orange"}
MOST_KL = 1.0


class Cell(NamedTuple):
    words: int
    width: int
    layers: int
    seed: int

    def name(self) -> str:
        return "words-{}-width-{}-layers-{}-seed-{}".format(*self)


def cells(seeds: Sequence[int], most: int) -> Iterator[Cell]:
    """All warm starts of these seeds; `most`: the largest width."""
    sizes = [size for size in SIZES if size[0] <= most]
    for seed in seeds:
        yield from (Cell(words, 64, 3, seed) for words in WORDS)
        yield from (Cell(16, width, layers, seed) for width, layers in sizes if (width, layers) != (64, 3))


def measured(cell: Cell, folder: Path) -> dict[str, Any]:
    """p and, for each place, the largest mu / p of a noise with a KL of 1 nat a token at most."""
    done = folder / f"{cell.name()}.json"
    if done.exists():
        return dict(read_json(done))
    words = ("lock",) * max(1, cell.words) + tuple(NEAR[: cell.words])
    task = f"choices_near_{cell.words}"
    TASKS[task] = type(task, (ChoicesNear,), {"name": task, "words": words})()
    start = folder / cell.name()
    tiny = {"hidden_size": cell.width, "intermediate_size": 3 * cell.width, "layers": cell.layers}
    tiny |= {"deviation": 0.64 / cell.width**0.5}  # 0.08 at a width of 64
    settings = [f"model.tiny.{key}={value}" for key, value in tiny.items()]
    settings += [f'demonstrations.tasks=["{task}"]', f"demonstrations.seed={cell.seed}", f"run.seed={cell.seed}"]
    settings += [f"optimizer.lr={SIZES[cell.width, cell.layers]}", "run.threads=1", f"run.folder={start}"]
    if not (start / SUMMARY).exists():
        api.train(load(SFTConfig, "demo/choices/warm_start", settings))
    config = load(TrainConfig, "demo/choices/replay", [f"model.path={start}", f"data.seed={cell.seed + 1}"])
    sizes = (0.1, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5, 2.2)
    asked = ProbeConfig(
        places=tuple(PLACES), sizes=sizes, temperatures=(1.5,), draws=48, rollouts=4, solved_at_most=1.0, exact=True
    )
    found = run_probe(config, asked, folder / f"{cell.name()}-probe")
    near = {place: [n for n in found["noise"] if n["place"] == place and n["kl"] <= MOST_KL] for place in PLACES}
    best = {place: max(of, key=lambda noise: noise["mu"]["value"]) for place, of in near.items() if of}
    policy = load_policy(ModelConfig(path=str(model_folder(start)), device="cpu"))
    result = {
        **cell._asdict(),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "p": found["mean"]["mu"]["value"],
        "temperature": found["temperatures"][0]["ratio"]["value"],
        **{place: {key: noise[key] for key in ("size", "kl", "ratio")} for place, noise in best.items()},
    }
    write_json(done, result)
    return result


def draw_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A point for each warm start, a line through the geometric means."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    of_words = [found for found in results if found["width"] == 64]
    of_sizes = [found for found in results if found["words"] == 16]
    for axis, chosen, key in zip(axes, (of_words, of_sizes), ("words", "parameters"), strict=True):
        groups: dict[float, list[dict[str, Any]]] = {}
        for found in chosen:
            groups.setdefault(found[key], []).append(found)
        for name, color in (*PLACES.items(), ("temperature", "tab:gray")):
            label = "temperature 1.5" if name == "temperature" else f"noise: {name}"
            means = []
            for at, group in sorted(groups.items()):
                known = [found[name] for found in group if name in found]
                ratios = known if name == "temperature" else [one["ratio"]["value"] for one in known]
                axis.plot([at] * len(ratios), ratios, ".", color=color, alpha=0.6)
                means.append(geometric_mean(ratios))
            axis.plot(sorted(groups), means, color=color, label=label)
    axes[0].set_xscale("symlog", base=2, linthresh=1)
    axes[0].set(
        xlabel="words with consistent texts, besides the one that is asked about", yscale="log", ylabel="mu / p"
    )
    axes[1].set(xlabel="parameters", xscale="log")
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--widest", type=int, default=384, help="leave out wider models, which take minutes")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    results = []
    for cell in cells(options.seeds, options.widest):
        results.append(measured(cell, options.folder))
        print(results[-1], flush=True)
    if options.picture:
        draw_picture(results, options.picture)


if __name__ == "__main__":
    main()
