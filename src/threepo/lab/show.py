"""Output of `threepo data`: the sources of problems, and one problem as a policy reads it.

Only a tokenizer needs torch; without one, problems are shown at once.
"""

import json
from collections.abc import Sequence
from typing import Any

from threepo.config import DataConfig
from threepo.config.recipes import parse_overrides
from threepo.config.records import build
from threepo.config.sources import KINDS
from threepo.data.finite import FiniteProblems
from threepo.data.published import CONVERSATIONS, PUBLISHED
from threepo.data.source import ProblemSet, has_heldout, open_source
from threepo.data.task import Split
from threepo.data.tasks import TASKS
from threepo.errors import UserError
from threepo.evaluation.benchmarks import BENCHMARKS
from threepo.models.prompts import messages, prompt_text, tokenized
from threepo.types import Problem


def source_table() -> str:
    """Every source of problems and conversations, and every benchmark, a line each."""
    endless = "endless, from level {}; default levels {}"
    rows = [("SOURCE", "VERIFIER", "PROBLEMS")]
    rows += [(t.name, "its own", endless.format(t.min_level, list(t.default_levels))) for t in TASKS.values()]
    rows += [("reasoning-gym:NAME", "its own", "endless, of any data set of reasoning-gym")]
    rows += [("verifiers:NAME", "its own", "of an installed environment of verifiers with one turn")]
    rows += [(name, str(found.verifier), f"{found.summary}; {found.hub}") for name, found in PUBLISHED.items()]
    rows += [("your own", "yours to name", f"a problem in each row of {KINDS}"), ("", "", "")]
    rows += [("CONVERSATIONS", "", "for conversations.source of `threepo sft`")]
    rows += [(name, "", f"{found.summary}; {found.hub}") for name, found in CONVERSATIONS.items()]
    rows += [("", "", ""), ("BENCHMARK", "VERIFIER", "for `threepo eval --benchmarks`")]
    rows += [(name, str(found.verifier), found.hub) for name, found in BENCHMARKS.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def problem_text(source: str, overrides: Sequence[str], split: Split, index: int, model: str) -> str:
    """Problem number `index` of a source as a policy reads it, with its verifier's reference and some counts.

    `overrides` are settings of [data]. `model` names the tokenizer; without one, the prompt is shown as chat messages.
    """
    settings = _data_settings(source, overrides)
    name = settings.train
    if split == "heldout" and not has_heldout(name):
        raise UserError(f"--heldout: {name} has no held-out problems of its own; leave it out")
    opened = open_source(name, split, settings)
    problems = opened.problems.first(index + 1) if index >= 0 else ()
    if not 0 <= index < len(problems):
        wanted = f"between 0 and {len(problems) - 1}" if index >= 0 else "0 or more"
        raise UserError(f"--index {index}: must be {wanted} for {name}")
    problem = problems[index]
    facts = _facts(opened, name) | {"problem": f"{problem.id} (index {index})"}
    if model:
        from threepo.models.loading import load_tokenizer

        tokenizer = load_tokenizer(model)
        facts |= _token_counts(opened, problem, tokenizer, settings)
        parts = [("prompt", prompt_text(problem, tokenizer, settings))]
    else:
        parts = [(message["role"], message["content"]) for message in messages(problem, settings)]
    if problem.answer:
        parts.append(("answer", problem.answer))
    if (tests := problem.columns.get("tests")) is not None:
        parts.append(("tests", tests if isinstance(tests, str) else json.dumps(tests, indent=2, default=str)))
    lines = [f"{key:<10}{value}" for key, value in facts.items()]
    return "\n".join(lines + [f"--- {title} {'-' * (75 - len(title))}\n{text}" for title, text in parts])


def _data_settings(source: str, overrides: Sequence[str]) -> DataConfig:
    table = parse_overrides(overrides)
    data = table.pop("data", {})
    if table:
        raise UserError(f"{next(iter(table))}: `threepo data show` reads settings of [data] only, such as data.seed=1")
    for key in data.keys() & {"train", "eval"}:
        raise UserError(f"data.{key} = {data[key]!r}: `threepo data show` shows {source}; leave it out")
    return build(DataConfig, {**data, "train": source}, "data")


def _facts(opened: ProblemSet, name: str) -> dict[str, str]:
    """Facts about the problems: their source, their number, and what judges the answers."""
    source, counts, problems = name, "endless", opened.problems
    if isinstance(problems, FiniteProblems):
        source = problems.source
        rows = f"{len(problems.problems)} of {problems.rows} rows"
        counts = f"{rows} ({problems.duplicates} duplicates, {problems.broken} broken)"
    verifier: str = opened.verifier if isinstance(opened.verifier, str) else "its own"
    if opened.verifier is None:
        verifier = "none of its own; name one with reward.function: exact, math, code, environment or your own"
    return {"source": source, "problems": counts, "verifier": verifier}


def _token_counts(opened: ProblemSet, problem: Problem, tokenizer: Any, settings: DataConfig) -> dict[str, str]:
    """Tokens of a problem's prompt, and of the longest prompt where the problems are finite."""
    counts = {"tokens": str(len(tokenized([problem], tokenizer, settings)[0]))}
    if isinstance(opened.problems, FiniteProblems):
        lengths = [len(tokens) for tokens in tokenized(opened.problems.problems, tokenizer, settings)]
        counts["longest"] = f"{max(lengths)} tokens"
        if most := settings.max_prompt_tokens:
            counts["dropped"] = f"{sum(length > most for length in lengths)} above data.max_prompt_tokens = {most}"
    return counts
