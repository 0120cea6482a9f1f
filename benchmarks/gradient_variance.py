"""How much the gradient varies that replay and a fresh draw make of the same rollouts.

    threepo sft demo/warm_start
    PYTHONPATH=src python benchmarks/gradient_variance.py

Nothing is trained: all gradients are taken at the warm start of the demonstration. A batch has other problems, other
draws and other sampling than the one before; its rollouts (16 prompts x 16, four draws) are fixed. From them each way
makes its gradient; those with a fresh draw make several, with other draws. Of the gradients g[b, k] of batch b:

    signal    mean of <g[b], g[b']> over pairs of batches: the squared norm of the expected gradient, without bias
    noise     mean of |g[b, k]|^2, less the signal: the total variance, summed over parameters
    of which  mean over batches of the variance over k: what the choice of the fresh draw alone adds
    cosine    of the expected gradient with replay's, from pairs of batches as well

signal / noise says how many batches it takes to see the gradient. Intervals resample batches. Results are in
docs/records/sorting.md.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from threepo.config import TrainConfig
from threepo.config.method import Correction, Method
from threepo.config.recipes import load
from threepo.methods.method import credit, training_batch
from threepo.training import rlvr
from threepo.training.update import update_policy
from threepo.types import Group

LR = 1e3
"""So large that the difference of two float32 weights has all digits of the gradient."""
MIS = Correction(kind="seq_mis")
WAYS: Mapping[str, dict[str, Any]] = {
    "replay": {"gradient_at": "generator"},
    "fresh draw": {"gradient_at": "fresh"},
    "fresh draw, Seq-MIS": {"gradient_at": "fresh", "correction": MIS},
    "mean": {"gradient_at": "mean"},
    "mean, Seq-MIS": {"gradient_at": "mean", "correction": MIS},
}


def gradient(run: rlvr.RLRun, method: Method, groups: list[Group], seed: int, step: int) -> tuple[np.ndarray, float]:
    """The gradient [parameters] at the weights that the run has, which are put back; and the share of rows kept."""
    parameters = list(run.policy.model.parameters())
    before = [p.detach().clone() for p in parameters]
    batch = training_batch(
        method, run.config.sampling, credit(method, [c for group in groups for c in group.completions]), seed, step
    )
    record = update_policy(run.policy, run.optimizer, batch, run.config.objective, run.config.batching.tokens)
    with torch.no_grad():
        moved = torch.cat([(b - p).flatten() / LR for b, p in zip(before, parameters, strict=True)])
        for p, b in zip(parameters, before, strict=True):
            p.copy_(b)
    return moved.numpy().astype(np.float64), float(np.mean([row.weight > 0 for row in record.rows]))


def figures(grams: np.ndarray, squares: np.ndarray, within: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Signal, noise, noise of the fresh draw alone, signal over noise, cosine; of batches that may come repeatedly.

    grams: inner products of the batches' mean gradients, own with own, own with replay, replay with replay, [3, B, B];
    squares: mean squared norm of a batch's gradients, [B]; within: their variance over fresh draws, [B].
    """
    pairs = chosen[:, None] != chosen[None, :]
    signal, across, of_replay = (gram[np.ix_(chosen, chosen)][pairs].mean() for gram in grams)
    noise = squares[chosen].mean() - signal
    return np.array([signal, noise, within[chosen].mean(), signal / noise, across / np.sqrt(signal * of_replay)])


def measure(start: Path, size: float, batches: int, fresh: int, folder: Path) -> None:
    """Print the rows of one size of the noise."""
    more = [f"model.path={start}", "method.draws=4", "method.gradient_at=generator", "method.optimizer=sgd"]
    more += [f"optimizer.lr={LR}", "schedule.warmup_share=0", "eval.every=0"]
    more += ["noise.unit=absolute", f"noise.size={size}", f"run.folder={folder / f'{size}'}", "run.steps=1000"]
    run = rlvr.assemble(load(TrainConfig, "demo/_base", more))
    methods = {way: replace(run.config.method, **{"correction": Correction(), **axes}) for way, axes in WAYS.items()}
    found: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    kept: dict[str, list[float]] = {way: [] for way in WAYS}
    with run.folder:
        for batch in range(batches):
            run.set_rates(batch, batches)
            groups = list(rlvr.begin_rollouts(run, batch)().groups)
            for way, method in methods.items():
                seeds = range(1, 1 + fresh) if method.gradient_at == "fresh" else [run.config.run.seed]
                gradients, shares = zip(*(gradient(run, method, groups, seed, batch) for seed in seeds), strict=True)
                found[way].append(np.stack(gradients))
                kept[way].append(float(np.mean(shares)))
    generator = np.random.default_rng(0)
    resamples = [generator.integers(0, batches, batches) for _ in range(1000)]
    replay = np.stack(found["replay"]).mean(axis=1)
    for way, made in found.items():
        means, several = np.stack([g.mean(axis=0) for g in made]), len(made[0]) > 1
        squares = np.array([(g * g).sum(axis=1).mean() for g in made])
        within = np.array([g.var(axis=0, ddof=1).sum() if several else 0.0 for g in made])
        grams = np.stack([means @ means.T, means @ replay.T, replay @ replay.T])
        signal, noise, draws, *values = figures(grams, squares, within, np.arange(batches))
        ends = np.quantile(
            [figures(grams, squares, within, chosen)[3:] for chosen in resamples], (0.025, 0.975), axis=0
        )
        cells = [f"{signal:.2e}", f"{noise:.2e}", f"{draws / noise:.0%}"]
        cells += [f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in zip(values, *ends, strict=True)]
        print(f"| {size:g} | {way} | {' | '.join(cells)} | {np.mean(kept[way]):.0%} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=Path("runs/demo/warm_start"), help="run folder of the warm start")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--fresh", type=int, default=3, help="fresh draws for each batch")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="sigma of the noise")
    options = parser.parse_args()
    print("| sigma | gradient at | signal | noise | of which the draw | signal / noise | cosine with replay | kept |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            measure(options.start, size, options.batches, options.fresh, Path(folder))


if __name__ == "__main__":
    main()
