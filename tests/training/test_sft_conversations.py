"""Fine-tuning on conversations: what is prepared, in what order it comes, and that a resumed run repeats bitwise."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from chats import CHATML, chat
from runs import RLVR, TINY, outcome, resume
from threepo import api
from threepo.cli import main
from threepo.config import DataConfig, ModelConfig, SFTConfig
from threepo.config.recipes import load, load_resumed
from threepo.errors import ThreepoWarning, UserError
from threepo.files import read_json
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import Posterior
from threepo.run_folder import RunFolder, checkpoints, read_metrics
from threepo.training import sft
from threepo.training.conversations import PreparedConversations, prepare
from threepo.types import Problem

TEMPLATE = CHATML.replace("<|im_start|>", "").replace("<|im_end|>", "<|endoftext|>")
ROWS = [{"messages": chat(f"say {'ab'[i % 2] * (i % 5 + 1)}", "ab"[i % 2] * (i % 5 + 1))} for i in range(21)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """Settings of a small run, on a file of 21 conversations."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return [
        *TINY,
        f"conversations.source={write(tmp_path / 'chats.jsonl', ROWS)}",
        "conversations.batch_size=5",
        f"conversations.chat_template={tmp_path / 'chat.jinja'}",
        f"conversations.cache={tmp_path / 'cache'}",
        f"run.folder={tmp_path / 'run'}",
        "optimizer.kind=adamw",
        "optimizer.lr=1e-2",
    ]


def run_of(settings: list[str]) -> sft.FineTuning:
    return sft.assemble(load(SFTConfig, "", settings))


def test_it_learns_the_answers_and_counts_what_it_read(base: list[str], tmp_path: Path) -> None:
    settings = [*base, "run.steps=25", "optimizer.lr=2e-2", f"conversations.eval={tmp_path / 'chats.jsonl'}"]
    with pytest.warns(ThreepoWarning, match="conversations.eval: 21 of the 21 held-out ones are also trained on"):
        api.train(load(SFTConfig, "", settings))
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["sft/loss"] < 0.5 * rows[0]["sft/loss"]
    assert rows[-1]["sft/eval_loss"] == pytest.approx(rows[-1]["sft/loss"], rel=0.5)
    assert [row["step"] for row in rows if "sft/eval_loss" in row] == [24], "every 100 steps, and at the end"
    record = read_json(tmp_path / "run" / "conversations.json")
    assert record["source"]["kept"] == record["source"]["rows"] == 21
    assert record["source"]["dropped"] == {}
    answers = sum(len(row["messages"][1]["content"]) + 1 for row in ROWS)  # a token a byte, and the end
    assert record["source"]["loss_tokens"] == answers
    assert record["source"]["digest"] == record["eval"]["digest"]


def test_plain_text_needs_no_chat_template(base: list[str], tmp_path: Path) -> None:
    """The prompt has the tokens that it has in reinforcement learning, and the answer ends with the end token."""
    rows = write(tmp_path / "plain.jsonl", [{"prompt": f"{n} is ", "completion": f"{n}."} for n in range(6)])
    run = run_of([*base, f"conversations.source={rows}", "conversations.chat_template=", "run.steps=1"])
    for row in run.material.rows(0):
        [(first, end)] = row.loss_ranges
        completion = run.policy.tokenizer.decode(row.tokens[first:end])
        problem = Problem(id="", prompt=f"{completion[0]} is ")
        assert completion == f"{completion[0]}.<|endoftext|>"
        assert tuple(row.tokens[:first]) == run.policy.prompt_tokens([problem], DataConfig(train="sorting"))[0]
        assert end == len(row.tokens)
    empty = write(tmp_path / "empty.jsonl", [{"prompt": "", "completion": ""}])
    own = [f"conversations.source={empty}", "conversations.chat_template=", f"run.folder={tmp_path / 'empty'}"]
    with pytest.raises(UserError, match=r"empty.jsonl, row 1: prompt and completion are empty"):
        run_of([*base, *own, "run.steps=1"])


def test_a_row_is_the_conversation_and_the_loss_counts_its_answer(base: list[str]) -> None:
    run = run_of([*base, "run.steps=1"])
    run.folder.close()
    for row in run.material.rows(0):
        ((first, end),) = row.loss_ranges
        decode = run.policy.tokenizer.decode
        question = decode(row.tokens[:first])
        answer = question.removeprefix("user\nsay ").removesuffix("<|endoftext|>\nassistant\n")
        assert set(answer) in ({"a"}, {"b"})
        assert decode(row.tokens[first:end]) == f"{answer}<|endoftext|>"
        assert decode(row.tokens[end:]) == "\n"


def of_step(run: Any, step: int) -> list[tuple[int, ...]]:
    """The tokens of a step's rows."""
    return [tuple(row.tokens) for row in run.material.rows(step)]


def test_an_epoch_takes_every_conversation_once_in_an_order_of_its_own(base: list[str], tmp_path: Path) -> None:
    run = run_of([*base, "run.steps=0", "conversations.epochs=3"])
    run.folder.close()
    assert run.material.steps == 3 * (21 // 5)
    epochs = [[row for step in range(4 * e, 4 * e + 4) for row in of_step(run, step)] for e in range(3)]
    distinct = Counter(tuple(row.tokens) for row in prepared(run.policy, base).batch(range(21)))
    for epoch in epochs:
        assert len(epoch) == 20, "the last batch would be incomplete"
        assert Counter(epoch) <= distinct
    assert epochs[0] != epochs[1] != epochs[2]
    assert of_step(run, 9) == epochs[2][5:10]
    other = run_of([*base, "conversations.seed=1", f"run.folder={tmp_path / 'other'}"])
    other.folder.close()
    assert [row for step in range(4) for row in of_step(other, step)] != epochs[0]


@pytest.mark.parametrize(("kind", "call", "saved"), [(["optimizer.kind=ivon", "optimizer.lr=5e3"], 5, 2), ([], 4, 3)])
def test_stopping_and_resuming_equals_never_stopping_bitwise(
    kind: list[str], call: int, saved: int, base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop is before the end of an epoch; afterwards the source and the template are gone.

    The fifth call is that of step 3, which nothing saves; the fourth is the evaluation before, which is made up.
    """
    held = write(tmp_path / "held.jsonl", [{"messages": chat("say c", "c")}])
    settings = [*base, *kind, "run.steps=5", "run.checkpoint_every=2"]
    settings += [f"conversations.eval={held}", "conversations.eval_every=3"]
    api.train(load(SFTConfig, "", [*settings, f"run.folder={tmp_path / 'whole'}"]))
    inner, calls = sft.cross_entropy, []

    def fail(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) == call:
            raise ZeroDivisionError
        return inner(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "cross_entropy", fail)
        with pytest.raises(ZeroDivisionError):
            api.train(load(SFTConfig, "", settings))
    assert checkpoints(tmp_path / "run")[-1][0] == saved
    for name in ("chats.jsonl", "held.jsonl", "chat.jinja"):
        (tmp_path / name).unlink()
    resume(tmp_path / "run", SFTConfig)
    whole, parts = outcome(tmp_path / "whole"), outcome(tmp_path / "run")
    for key in whole:
        assert parts[key] == whole[key], key
    for name in ("tokenizer.json", "chat_template.jinja"):
        one, other = (checkpoints(tmp_path / run)[-1][1] / name for run in ("whole", "run"))
        assert one.read_bytes() == other.read_bytes()


def test_a_resumed_run_refuses_other_conversations(base: list[str], tmp_path: Path) -> None:
    api.train(load(SFTConfig, "", [*base, "run.steps=1"]))
    folder, config = RunFolder(tmp_path / "run"), load_resumed(SFTConfig, tmp_path / "run")
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    write(tmp_path / "chats.jsonl", ROWS[:-1])
    with (
        folder,
        pytest.raises(UserError, match=r"chats.jsonl have changed .*\(20 now, 21 then\); restore the old"),
    ):
        sft.assemble(config, folder)


def test_without_its_cache_a_resumed_run_reads_again(base: list[str], tmp_path: Path) -> None:
    api.train(load(SFTConfig, "", [*base, "run.steps=1"]))
    before = read_json(tmp_path / "run" / "conversations.json")["source"]
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    resume(tmp_path / "run", SFTConfig)
    after = read_json(tmp_path / "run" / "conversations.json")["source"]
    assert after == before
    assert Path(after["file"]).is_file()


def prepared(policy: Policy, settings: list[str], template: str = TEMPLATE) -> PreparedConversations:
    policy.tokenizer.chat_template = template
    config = load(SFTConfig, "", [*settings, "run.steps=1", "conversations.batch_size=1"])
    assert config.conversations
    return prepare(policy, config.conversations, "source", "")


def file_of(found: PreparedConversations) -> Path:
    return Path(found.record["file"])


def test_the_cache_is_shared_until_anything_that_matters_changes(
    policy: Policy, base: list[str], tmp_path: Path
) -> None:
    first = file_of(prepared(policy, base))
    made = first.stat().st_mtime_ns
    assert file_of(prepared(policy, [*base, "conversations.batch_size=2", "conversations.seed=4"])) == first
    assert first.stat().st_mtime_ns == made, "it was not read again"
    others = {
        file_of(prepared(policy, [*base, *changed]))
        for changed in (
            ["conversations.max_tokens=60"],
            ["conversations.loss_on=last"],
            ["conversations.broken_rows=skip"],
            ["conversations.too_long=drop"],
        )
    }
    held = [f"conversations.eval={tmp_path / 'chats.jsonl'}", "conversations.eval_rows=2", "run.steps=1"]
    few = load(SFTConfig, "", [*base, *held]).conversations
    assert few
    others.add(file_of(prepare(policy, few, "eval", "")))
    others.add(file_of(prepared(policy, base, TEMPLATE + "{# another #}")))
    write(tmp_path / "chats.jsonl", ROWS[:-1])
    others.add(file_of(prepared(policy, base)))
    policy.model.resize_token_embeddings(len(policy.tokenizer) + 9)
    others.add(file_of(prepared(policy, base)))
    policy.tokenizer.add_tokens(["say"])
    policy.model.resize_token_embeddings(len(policy.tokenizer))
    others.add(file_of(prepared(policy, base)))
    assert len(others | {first}) == 10
    assert set((tmp_path / "cache").iterdir()) == others | {first}, "nothing half written is left"


def test_without_a_folder_of_ones_own_the_cache_is_that_of_datasets(policy: Policy, base: list[str]) -> None:
    settings = [setting for setting in base if not setting.startswith("conversations.cache")]
    file = file_of(prepared(policy, settings))
    assert file.is_relative_to(os.environ["HF_DATASETS_CACHE"])
    made = file.stat().st_mtime_ns
    assert file_of(prepared(policy, settings)) == file
    assert file.stat().st_mtime_ns == made


def test_what_is_too_long_or_broken_is_refused_or_counted(
    policy: Policy, base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, over = ({"messages": chat("say", "a" * n)} for n in (106, 107))
    write(tmp_path / "chats.jsonl", [*ROWS, full, over, {"messages": chat("say")}, {"text": ""}])
    with pytest.raises(UserError, match=r"chats.jsonl, row 22: 128 tokens, more than 127, .*too_long = 'drop'"):
        prepared(policy, [*base, "conversations.max_tokens=127", "conversations.broken_rows=skip"])
    with pytest.raises(UserError, match=r"row 23: 129 tokens, more than 128, .*the model's context"):
        prepared(policy, [*base, "conversations.broken_rows=skip"])
    with pytest.raises(UserError, match=r"chats.jsonl, row 24: has no message.*broken_rows = 'skip'"):
        prepared(policy, [*base, "conversations.too_long=drop"])
    lenient = [*base, "conversations.too_long=drop", "conversations.broken_rows=skip"]
    found = prepared(policy, lenient)
    counts = {key: found.record[key] for key in ("rows", "kept", "dropped", "longest")}
    assert counts == {"rows": 25, "kept": 22, "dropped": {"too_long": 1, "broken": 2}, "longest": 128}
    said = capsys.readouterr().err
    assert "kept 22 of 25 rows (left out: broken 2, too_long 1)" in said
    assert "chats.jsonl: left out 2 of 25 rows as broken: row 24: has no message" in said
    assert "; row 25: has neither messages" in said
    with pytest.raises(UserError, match="every row was left out; see the counts above"):
        prepared(policy, [*lenient, "conversations.max_tokens=3"])


def test_a_conversation_of_which_the_template_marks_nothing_is_broken(
    policy: Policy, base: list[str], tmp_path: Path
) -> None:
    """A step of such alone would have no gradient, and its loss no divisor."""
    template = TEMPLATE.replace("m.content + ", "").replace(
        "{% endfor %}",
        "{% if m.content == 'b' %}{% generation %}b<|endoftext|>{% endgeneration %}{% endif %}{% endfor %}",
    )
    write(tmp_path / "chats.jsonl", [{"messages": chat("a", "b")}, {"messages": chat("a", "c")}])
    with pytest.raises(UserError, match=r"chats.jsonl, row 2: the chat template marks no part of it"):
        prepared(policy, base, template)
    record = prepared(policy, [*base, "conversations.broken_rows=skip"], template).record
    assert (record["kept"], record["dropped"], record["loss_tokens"]) == (1, {"broken": 1}, 2)


def test_the_papers_set_is_counted_by_reason(
    policy: Policy, base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input": "q", "output": output} for output in ("<think>a</think>b", "b", "c", "<think>x</think>y")]
    rows += [{"input": [{"role": "system", "content": "s"}], "output": "<think>a</think>b"}, rows[0]]
    rows = [row | {"generator": f"DeepSeek-R1{'-Zero' if i == 5 else ''}"} for i, row in enumerate(rows)]
    settings = [*base, f"conversations.source=llama-nemotron:{write(tmp_path / 'n.jsonl', rows)}"]
    found = prepared(policy, settings)
    assert found.record["dropped"] == {"no_thought": 2, "not_two_messages": 1, "other_generator": 1}
    answers = ("<think>a</think>b", "<think>x</think>y")
    for row, answer in zip(found.batch([0, 1]), answers, strict=True):
        text = policy.tokenizer.decode(row.tokens)
        assert text == f"user\nq<|endoftext|>\nassistant\n{answer}<|endoftext|>\n"
    assert "kept 2 of 6 rows (left out: no_thought 2, not_two_messages 1, other_generator 1)" in capsys.readouterr().err


def test_more_rows_than_are_tokenised_at_once(policy: Policy, base: list[str], tmp_path: Path) -> None:
    rows = [{"messages": chat(f"{i}", f"{i * i}")} for i in range(300)]
    write(tmp_path / "chats.jsonl", rows)
    found = prepared(policy, base)
    assert found.record["kept"] == 300
    numbers = (299, 0, 127, 128, 255, 256)
    for index, (number, row) in enumerate(zip(numbers, found.batch(numbers), strict=True)):
        assert (row.index, policy.tokenizer.decode(row.tokens)) == (
            index,
            f"user\n{number}<|endoftext|>\nassistant\n{number * number}<|endoftext|>\n",
        )


def test_the_heldout_loss_is_that_of_the_mean_over_its_first_rows(base: list[str], tmp_path: Path) -> None:
    """The loss is computed by hand at the saved weights, over a file whose first rows are longer than the rest."""
    held = write(tmp_path / "held.jsonl", [{"messages": chat("say x", "a" * n)} for n in (9, 7, 5, 3)])
    held.write_text("\n\n" + held.read_text().replace("\n", "\n\n"))  # empty lines are no rows
    settings = [f"conversations.eval={held}", "conversations.eval_rows=2", "optimizer.kind=ivon", "optimizer.ess=1e4"]
    run = run_of([*base, *settings, "optimizer.lr=100", "run.steps=2"])
    with run.folder:
        sft.fine_tune(run)
    assert len(run.material.heldout) == 2
    nats = tokens = 0.0
    for row in run.material.heldout:
        ((first, end),) = row.loss_ranges
        logits = run.policy.model(torch.tensor([row.tokens])).logits[0].detach().log_softmax(-1)
        nats -= sum(float(logits[t - 1, row.tokens[t]]) for t in range(first, end))
        tokens += end - first
    assert tokens == 10 + 8
    logged = read_metrics(tmp_path / "run")[-1]["sft/eval_loss"]
    assert logged == pytest.approx(nats / tokens, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.steps=0"], "run.steps = 0: must be greater than 0"),
        (["conversations.epochs=2"], "run.steps = 100: conversations.epochs = 2 gives the length"),
        (['demonstrations.tasks=["sorting"]'], "both given"),
        (["conversations.source="], "conversations.source = ''"),
        (["conversations.batch_size=22"], "21 rows are left, fewer than conversations.batch_size = 22"),
        (["conversations.chat_template=/nowhere"], "conversations.chat_template = '/nowhere': cannot be read"),
        (["conversations.chat_template="], "no chat template"),
        (["conversations.eval=nowhere.jsonl"], "no such file"),
        (["model.tokenizer=x"], "has its own tokenizer"),
    ],
)
def test_refusals_come_before_a_folder_is_made(
    settings: list[str], message: str, base: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run_of([*base, *settings])
    assert not (tmp_path / "run").exists()


def test_neither_demonstrations_nor_conversations() -> None:
    with pytest.raises(UserError, match=r"\[demonstrations\] and \[conversations\]: neither given"):
        load(SFTConfig, "", ["model.path=m", "run.folder=r"])


def test_another_tokenizer_is_used_and_saved(base: list[str], policy: Policy, tmp_path: Path) -> None:
    """A base model, and a tokenizer with a chat template from elsewhere; a resumed run has it from its checkpoint."""
    for name in ("base", "chatty"):
        policy.tokenizer.chat_template = TEMPLATE if name == "chatty" else None
        policy.save(tmp_path / name)
    for file in (tmp_path / "base").glob("*token*"):
        os.unlink(file)
    settings = [s for s in base if not s.startswith(("model.", "conversations.chat"))]
    names = [f"model.path={tmp_path / 'base'}", f"model.tokenizer={tmp_path / 'chatty'}"]
    with pytest.raises(UserError, match=r"holds a model but no tokenizer.*model.tokenizer"):
        run_of([*settings, names[0]])
    api.train(load(SFTConfig, "", [*settings, *names, "run.steps=1"]))
    saved = checkpoints(tmp_path / "run")[-1][1]
    assert (saved / "chat_template.jinja").read_text() == TEMPLATE
    for file in (tmp_path / "chatty").iterdir():
        file.unlink()
    resume(tmp_path / "run", SFTConfig)


def test_the_example_then_reinforcement_learning_from_its_posterior(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documented commands run; training prompts then have the chat template of the fine-tuning."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    warm, rl = tmp_path / "warm", tmp_path / "rl"
    settings = [f"run.folder={warm}", f"conversations.cache={tmp_path / 'cache'}", "conversations.epochs=4"]
    ivon = ["optimizer.kind=ivon", "optimizer.lr=1e3", "optimizer.betas=[0.9, 0.99]"]
    assert main(["sft", "examples/conversations.toml", *settings, *ivon]) == 0
    assert capsys.readouterr().out.startswith(f"finished: {warm}: 12 steps in ")
    losses = [row["sft/loss"] for row in read_metrics(warm)]
    assert losses[-1] < losses[0]
    assert main(["train", "--resume", str(warm)]) == 2
    assert "is a run of `threepo sft`" in capsys.readouterr().err
    assert main(["sft", "--resume", str(warm)]) == 0
    longer = tmp_path / "longer"
    shutil.copytree(warm, longer)
    for steps in (13, 14):  # what the first has written must be readable
        assert main(["sft", "--resume", str(longer), f"run.steps={steps}"]) == 0
    assert checkpoints(longer)[-1][0] == 14
    settings = [setting for setting in RLVR if not setting.startswith("model.")]
    learned = [f"model.path={warm}", "method.preset=c3po", f"optimizer.load_hessian={warm}", "run.steps=1"]
    assert main(["train", *settings, *learned, f"run.folder={rl}"]) == 0
    posterior = Posterior.from_pretrained(checkpoints(warm)[-1][1])
    assert posterior.step == 12
    assert all(h.std() > 0 for h in posterior.hessian.values())
    hessian = Posterior.from_pretrained(checkpoints(rl)[-1][1]).hessian
    for name, learned_h in posterior.hessian.items():
        assert float((hessian[name] / learned_h).log().abs().median()) < 0.05, name
    (first, *_) = pyarrow.parquet.read_table(rl / "completions" / "step-000000.parquet").to_pylist()
    policy = load_policy(ModelConfig(path=str(warm)))
    problem = Problem(id="", prompt=first["prompt"])
    prompt = policy.tokenizer.decode(policy.prompt_tokens([problem], DataConfig(train="sorting"))[0])
    assert prompt == f"user: {first['prompt']}\nassistant: "
