"""Environments made for TRL, in their processes, with the protocol that TRL 1.16 documents."""

import json
from contextlib import closing
from pathlib import Path

import pyarrow.parquet
import pytest

from chats import CHATML, chat_tokenizer
from runs import RLVR
from threepo.cli import main
from threepo.config import EnvironmentConfig, ModelConfig, TinyConfig
from threepo.environment import Turn
from threepo.models.policy import load_policy
from threepo.plugins.trl_environment import TRLEnvironment
from threepo.rollout.environments import Environments
from threepo.run_folder import read_metrics
from threepo.types import Problem

TOOLS = CHATML.replace("{% for m", "{% if tools %}call with <tool_call>: {{ tools | tojson }}\n{% endif %}{% for m", 1)


def test_tools_are_its_public_methods_and_get_reward_pays() -> None:
    own = {"factory": "trl_worlds:Counter", "step": 2}
    settings = EnvironmentConfig(factory="threepo.plugins.trl_environment:TRLEnvironment", settings=own)
    text = Problem("p", "Begin.", columns={"target": 6})
    chat = Problem("q", ({"role": "user", "content": "Begin."},), columns={"target": 6})
    with closing(Environments(settings)) as environments:
        assert [tool["function"]["name"] for tool in environments.tools] == ["increment"]
        environments.begin(2)
        answers = environments.call({0: ("reset", text, 1), 1: ("reset", chat, 1)})
        assert answers[0].value == "Begin. Count to 6."
        assert answers[1].value == [{"role": "user", "content": "Begin. Count to 6."}]
        calls = [("increment", {"times": 2}), ("increment", {"times": 1})]
        assert environments.call({0: ("tools", calls)})[0].value == ["now 4", "now 6"]
        environments.call({1: ("tools", calls[:1])})
        ended = environments.call({0: ("end", "done"), 1: ("end", "")})
        assert ended[0].value == Turn(reward=1.0)
        assert ended[1].value == Turn(reward=0.0)
        assert not environments.steps


def test_tools_and_get_reward_may_be_coroutines() -> None:
    own = TRLEnvironment("trl_worlds:Judged")
    own.reset(Problem("p", "Begin.", columns={"target": 2}))
    (increment,) = own.tools
    assert (increment(times=1), increment(times=1)) == ("now 1", "now 2")
    assert own.end("done") == Turn(reward=1.0)


def test_a_class_may_keep_the_prompt_and_leave_the_reward_to_a_function() -> None:
    own = TRLEnvironment("trl_worlds:Plain")
    assert own.reset(Problem("p", "Begin.", "4", {"target": 6})) is None
    (peek,) = own.tools
    assert peek() == "answer prompt target"
    assert own.end("done") is None


def test_reset_gets_the_columns_of_the_data_alone_and_no_reward_is_named() -> None:
    own = TRLEnvironment("trl_worlds:Strict")
    assert own.reset(Problem("p", "Begin.", columns={"target": 6})) == "Begin. Count to 6."
    with pytest.raises(ValueError, match="get_reward returned None; return a number"):
        own.end("done")


def test_a_reset_that_returns_more_than_text_fails_with_the_reason() -> None:
    with pytest.raises(TypeError, match="reset returned list; return a text or None"):
        TRLEnvironment("trl_worlds:Pictures").reset(Problem("p", "Begin.", columns={"target": 1}))


def test_a_run(tmp_path: Path) -> None:
    """Its rewards are those of `get_reward`, and no reply of so small a model calls a tool."""
    tokenizer = chat_tokenizer(TOOLS)
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1)))
    policy.model.resize_token_embeddings(len(tokenizer))
    policy.model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, 250, 4)]
    policy.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "Go."}], "target": i % 2} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [setting for setting in RLVR if not setting.startswith(("data.train", "data.levels", "model.", "eval."))]
    settings += [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.jsonl'}", "run.steps=1"]
    settings += ["data.prompts_per_step=4", "method.rollouts_per_prompt=2"]
    settings += ["reward.function=environment", "environment.factory=threepo.plugins.trl_environment:TRLEnvironment"]
    settings += ["environment.settings={factory='trl_worlds:Counter'}", f"run.folder={tmp_path / 'run'}"]
    assert main(["train", *settings]) == 0
    assert len(read_metrics(tmp_path / "run")) == 1
    for row in pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step-000000.parquet").to_pylist():
        episode = json.loads(row["episode"])
        assert episode["begin"][-1][1] in ("Go. Count to 0.", "Go. Count to 1.")
        assert row["reward"] == episode["reward"] == ("Count to 0" in episode["begin"][-1][1])
