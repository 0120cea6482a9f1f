"""What `threepo data` prints: the sources of problems, and how a policy is asked one of them.

Only a tokenizer brings torch with it; without one, problems are shown at once.
"""

import json
from collections.abc import Sequence
from typing import Any

from threepo.config import DataConfig
from threepo.config.recipes import parse_overrides
from threepo.config.records import build
from threepo.data.finite import FiniteProblems
from threepo.data.published import PUBLISHED
from threepo.data.rows import SUFFIXES
from threepo.data.source import OpenedSource, ProblemSource, has_heldout, open_source
from threepo.data.task import Split
from threepo.data.tasks import TASKS
from threepo.errors import UserError
from threepo.models.prompts import messages, prompt_text, tokenized
from threepo.types import Problem


def listing() -> str:
    """Every source of problems, a line each."""
    rows = [("SOURCE", "VERIFIER", "PROBLEMS")]
    rows += [
        (name, "its own", f"without end, from level {task.min_level}; default levels {list(task.default_levels)}")
        for name, task in TASKS.items()
    ]
    rows.append(("reasoning-gym:NAME", "its own", "without end, of any data set of reasoning-gym"))
    rows += [(name, found.verifier, f"{found.summary}; {found.hub}") for name, found in PUBLISHED.items()]
    rows.append((" or ".join(f"*{suffix}" for suffix in SUFFIXES), "yours to name", "a file of yours, one in each row"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def data_settings(source: str, overrides: Sequence[str]) -> DataConfig:
    """Settings of [data] for problems of `source`; `UserError` for those of other tables."""
    table = parse_overrides(overrides)
    data = table.pop("data", {})
    if table:
        raise UserError(f"{next(iter(table))}: `threepo data show` reads settings of [data] only, such as data.seed=1")
    for key in ("train", "eval"):
        if key in data:
            raise UserError(f"data.{key} = {data[key]!r}: `threepo data show` shows {source}; leave it out")
    return build(DataConfig, {**data, "train": source}, "data")


def shown_problem(settings: DataConfig, split: Split, index: int, model: str) -> str:
    """Problem number `index` of `settings.train`, as a policy reads it, with what its verifier has and some counts.

    `model` names the tokenizer; where it is empty, the prompt is shown as chat messages.
    """
    name = settings.train
    if split == "heldout" and not has_heldout(name):
        raise UserError(f"--heldout: {name} has no held-out half of its own; leave it out")
    opened = open_source(name, split, settings)
    problem = _problem(opened.problems, name, index)
    facts = {
        "source": opened.problems.source if isinstance(opened.problems, FiniteProblems) else name,
        "problems": _counts(opened.problems),
        "verifier": _verifier(opened),
        "problem": f"{problem.id} (index {index})",
    }
    if model:
        from threepo.models.loading import load_tokenizer

        tokenizer = load_tokenizer(model)
        facts |= _lengths(opened.problems, problem, tokenizer, settings)
        prompt = [_rule("prompt"), prompt_text(problem, tokenizer, settings)]
    else:
        prompt = [line for m in messages(problem, settings) for line in (_rule(m["role"]), m["content"])]
    lines = [f"{name:<10}{value}" for name, value in facts.items()]
    return "\n".join([*lines, *prompt, *_reference(problem)])


def _problem(source: ProblemSource, name: str, index: int) -> Problem:
    problems = source.first(index + 1) if index >= 0 else ()
    if not 0 <= index < len(problems):
        wanted = f"between 0 and {len(problems) - 1}" if index >= 0 else "0 or more"
        raise UserError(f"--index {index}: must be {wanted} for {name}")
    return problems[index]


def _counts(source: ProblemSource) -> str:
    if not isinstance(source, FiniteProblems):
        return "without end"
    kept = f"{len(source.problems)} of {source.rows} rows"
    return f"{kept} ({source.duplicates} duplicates, {source.broken} broken)"


def _verifier(opened: OpenedSource) -> str:
    if opened.verifier is None:
        return "none of its own; name one with reward.function: exact, math, code or your own"
    return "its own" if callable(opened.verifier) else opened.verifier


def _lengths(source: ProblemSource, problem: Problem, tokenizer: Any, settings: DataConfig) -> dict[str, str]:
    """Tokens of the prompt and, where all are known, of the others."""
    facts = {"tokens": str(len(tokenized([problem], tokenizer, settings)[0]))}
    if isinstance(source, FiniteProblems):
        lengths = [len(tokens) for tokens in tokenized(source.problems, tokenizer, settings)]
        facts["longest"] = f"{max(lengths)} tokens"
        if settings.max_prompt_tokens:
            dropped = sum(length > settings.max_prompt_tokens for length in lengths)
            facts["dropped"] = f"{dropped} above data.max_prompt_tokens = {settings.max_prompt_tokens}"
    return facts


def _reference(problem: Problem) -> list[str]:
    lines = [_rule("answer"), problem.answer] if problem.answer else []
    tests = problem.columns.get("tests")
    if tests is None:
        return lines
    return [*lines, _rule("tests"), tests if isinstance(tests, str) else json.dumps(tests, indent=2, default=str)]


def _rule(title: str) -> str:
    return f"--- {title} {'-' * (75 - len(title))}"
