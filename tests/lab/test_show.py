"""`threepo data`: what there is, and a problem as a policy reads it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import threepo
from published_rows import code_row, dapo_row, gsm8k_row, write_rows
from threepo.cli import main
from threepo.config import ModelConfig, TinyConfig
from threepo.data.published import CODE, CONVERSATIONS, MATH_TRAINING, PUBLISHED
from threepo.data.tasks import TASKS
from threepo.evaluation.benchmarks import BENCHMARKS
from threepo.models.policy import load_policy

QUESTIONS = ["How many?", "How many are left after a while?", "How few?"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("gsm8k.parquet"), [gsm8k_row(q, f"So it is\n#### 1,00{i}") for i, q in enumerate(QUESTIONS)])


def test_every_source_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    tables = [[line.split()[0] for line in table.splitlines()] for table in capsys.readouterr().out.split("\n\n")]
    assert tables == [
        ["SOURCE", *TASKS, "reasoning-gym:NAME", "verifiers:NAME", *PUBLISHED, "your"],
        ["CONVERSATIONS", *CONVERSATIONS],
        ["BENCHMARK", *BENCHMARKS],
    ]


def test_every_source_is_explained() -> None:
    page = (Path(threepo.__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for name in TASKS:
        assert f"`{name}`" in page
    for name, published in PUBLISHED.items():
        assert f"| `{name}` | `{published.verifier}` | {published.hub}" in page
        assert f"- **{name}** reads" in page


def test_a_problem_is_shown_as_a_policy_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "gsm8k:gsm8k.parquet", "--index", "2", "data.system_prompt=Be brief."]) == 0
    head, system, user, answer = capsys.readouterr().out.split("--- ")
    assert head == (
        f"source    data file {Path.cwd()}/gsm8k.parquet\n"
        "problems  3 of 3 rows (0 duplicates, 0 broken)\n"
        "verifier  math\n"
        "problem   gsm8k/train/3 (index 2)\n"
    )
    assert system.splitlines()[1:] == ["Be brief."]
    assert user.partition("\n")[2] == MATH_TRAINING.replace("{prompt}", "How few?") + "\n"
    assert answer.splitlines()[1:] == ["1002"]


def test_counts_tell_what_became_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [dapo_row("What is $1$?", "1", "a"), dapo_row("What is $2$?", "2", "b"), {"prompt": "?"}] * 4
    write_rows(Path("dapo.jsonl"), rows)
    assert main(["data", "show", "dapo-math-17k:dapo.jsonl"]) == 2
    assert "dapo.jsonl, row 3: is not a row of dapo-math-17k as published" in capsys.readouterr().err
    assert main(["data", "show", "dapo-math-17k:dapo.jsonl", "data.broken_rows=skip"]) == 0
    assert "problems  2 of 12 rows (6 duplicates, 4 broken)\n" in capsys.readouterr().out


def test_tests_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    write_rows(Path("code.jsonl"), [code_row("Add.", cases)])
    assert main(["data", "show", "code-r1-12k:code.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "verifier  code\n" in shown
    assert CODE.partition("{prompt}")[0] + "Add." in shown
    assert json.loads(shown.rpartition("--- tests")[2].partition("\n")[2]) == cases
    assert "--- answer" not in shown


def test_with_a_model_the_prompt_is_what_its_tokenizer_reads(capsys: pytest.CaptureFixture[str]) -> None:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1)
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=shape))
    policy.tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[reply]"
    policy.save(Path("model"))
    show = ["data", "show", "gsm8k:gsm8k.parquet", "--model", "model", "data.prompt_template=Q: {prompt}"]
    assert main([*show, "data.max_prompt_tokens=30"]) == 0
    head, prompt, _ = capsys.readouterr().out.split("--- ")
    assert prompt.partition("\n")[2] == "[user]Q: How many?[reply]\n"
    lengths = [len(f"[user]Q: {question}[reply]") for question in QUESTIONS]  # a token is a byte
    assert head.endswith(
        f"tokens    {lengths[0]}\nlongest   {lengths[1]} tokens\ndropped   1 above data.max_prompt_tokens = 30\n"
    )
    assert main([*show, "data.chat_template=never", "--index", "2"]) == 0
    assert "\nQ: How few?\n" in capsys.readouterr().out
    assert main(["data", "show", "sorting", "--model", "tiny-llama", "--heldout"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("source    sorting\nproblems  endless\nverifier  its own\nproblem   sorting/heldout/")
    assert "longest" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sortin"], "did you mean sorting?"),
        (["sorting", "run.steps=1"], "run: `threepo data show` reads settings of [data] only"),
        (["sorting", "data.train=sums"], "data.train = 'sums': `threepo data show` shows sorting"),
        (["sorting", "data.sed=1"], "did you mean data.seed?"),
        (["sorting", "--index", "-1"], "--index -1: must be 0 or more for sorting"),
        (["gsm8k:gsm8k.parquet", "--index", "3"], "--index 3: must be between 0 and 2 for gsm8k:/"),
        (["gsm8k:gsm8k.parquet", "--heldout"], "gsm8k.parquet has no held-out problems of its own"),
        (["gsm8k:gsm8k.parquet", "--model", "/nowhere"], "holds no config.json"),
        (["gsm8k:nowhere.parquet"], "nowhere.parquet: no such file"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_task_is_shown_without_anything_heavy() -> None:
    """`datasets` takes seconds to import, and is for the sources that it reads."""
    program = "from threepo.cli import main; import sys; main(['data', 'show', 'sorting']); main(['data', 'list']);"
    program += "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'numpy') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]"
