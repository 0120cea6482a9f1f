"""`threepo push`: what would be uploaded, its card, and what is said where nothing can be."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from runs import sft_config, train_config
from threepo import api
from threepo.cli import main
from threepo.config.recipes import load_evaluation
from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.lab.hub import base_model, contents, public, write
from threepo.lab.report import shown_score
from threepo.models.loading import load_tokenizer
from threepo.posterior.gaussian import Posterior
from threepo.run_folder import CONFIG, LOCK, model_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of C3PO that was evaluated."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    return api.train(train_config(folder, "run.steps=2", "eval.every=2", "method.preset=c3po"))


def test_a_dry_run_writes_a_model_that_others_can_use(run: Path, tmp_path: Path) -> None:
    api.evaluate(load_evaluation(str(run), "", []), tmp_path / "eval")
    folder = tmp_path / "upload"
    arguments = ["push", str(run), "me/first", "--evaluations", str(tmp_path / "eval"), "--dry-run", str(folder)]
    assert main(arguments) == 0
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "curves.png", "model.safetensors", "posterior.safetensors", "tokenizer.json"} <= names
    assert not names & {"optimizer.safetensors", "train_state.json", "files.json", "metrics.jsonl"}
    assert main(["sample", str(folder), "--output", str(tmp_path / "drawn")]) == 0
    assert not Posterior.from_pretrained(folder).is_point
    with Image.open(folder / "curves.png") as image:
        assert image.width > 400
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["threepo", "rlvr", "c3po"]
    assert card.data.base_model is None
    summary = json.loads((run / "summary.json").read_text())
    after = shown_score((summary["pass_at_1_after"], summary["se_after"]))
    for text in (
        "2 steps on `sorting`",
        f"| {after} |",
        "## Evaluation",
        "hf download me/first",
        "threepo sample model",
        '"draws": 4',
        "![Training curves](curves.png)",
    ):
        assert text in card.text, text
    assert str(run.parent) not in card.content, "no folder of this machine"
    assert main(arguments) == 2, "the folder is there already"


def test_adapters_and_a_warm_start(tmp_path: Path) -> None:
    warm = api.train(sft_config(tmp_path / "warm", "run.steps=1"))
    files = dict(contents(warm, "me/warm"))
    card = files["README.md"].decode()  # type: ignore[union-attr]
    assert "supervised fine-tuning: 1 steps on `sorting`, `sums`" in card
    assert "| loss first | loss last |" in card
    settings = [f"model.path={warm}", "model.lora.rank=2", "method.preset=grpo", "run.steps=1"]
    adapted = api.train(train_config(tmp_path / "adapted", *settings))
    with pytest.warns(ThreepoWarning, match="the base model of these adapters is the folder"):
        files = dict(contents(adapted, "me/adapted"))
    assert "adapter_model.safetensors" in files
    assert "library_name: peft" in files["README.md"].decode()  # type: ignore[union-attr]
    config = json.loads((warm / "config.json").read_text())
    config["model"]["path"] = "org/model"  # with which the adapters' base began, and which is not that base
    (warm / "config.json").write_text(json.dumps(config))
    scores = load_evaluation(str(adapted), "", ["data.train=sorting", "data.levels=[2]", "eval.problems=2"])
    api.evaluate(scores, tmp_path / "scores")
    with pytest.warns(ThreepoWarning, match="upload a merged model"):
        text = dict(contents(adapted, "me/adapted", [tmp_path / "scores"]))["README.md"].decode()  # type: ignore[union-attr]
    assert "org/model" not in text.partition("```json")[0]
    assert "`adapted, step-000001`" in text


def test_a_run_that_chose_its_noise_promises_no_draws_and_brings_all_chat_templates(tmp_path: Path) -> None:
    chosen = api.train(train_config(tmp_path / "run", "method.preset=auto", "optimizer.lr=1e-3", "run.steps=1"))
    templates = model_folder(chosen) / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("tools")
    write(chosen, "me/auto", tmp_path / "pushed")
    assert "threepo sample" not in (tmp_path / "pushed" / "README.md").read_text()
    assert (tmp_path / "pushed" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"


def test_what_only_a_resumed_run_needs_is_not_uploaded(tmp_path: Path) -> None:
    """Above all not the rollouts that were made ahead, which hold answers to the run's problems."""
    settings = [
        "overlap.lag=1",
        "method.correction.kind=seq_mis",
        "objective.reference_kl=0.1",
        "objective.reference_reset_every=1",
    ]
    config = train_config(tmp_path / "run", "run.steps=3", "run.checkpoint_every=1", *settings)
    with pytest.raises(Interrupted):
        api.train(config, callbacks=[lambda row: row["step"] == 1])
    there = {path.name for path in model_folder(tmp_path / "run").iterdir()}
    kept = {"rollouts.json", "reference.safetensors", "optimizer.safetensors", "train_state.json", "files.json"}
    assert kept <= there
    assert not kept & dict(contents(tmp_path / "run", "me/run")).keys()


def test_a_card_has_all_settings_and_no_folders(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"train": "gsm8k:/home/me/copy", "prompt_template": "/think\n```\n{prompt}|x\n```"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    card = dict(contents(tmp_path / "run", "me/first"))["README.md"].decode()  # type: ignore[union-attr]
    assert "/home" not in card
    assert "steps on `gsm8k:copy`" in card
    settings = json.loads(card.partition("```json\n")[2].partition("\n```")[0])
    assert settings["data"]["train"] == "gsm8k:copy"
    assert settings["data"]["prompt_template"] == "/think\n```\n{prompt}|x\n```"
    kept = ["hf://datasets/a/b.jsonl", "org/model", "Answer A/B/C with {prompt}", "one and/or two/three words"]
    assert [public(name) for name in kept] == kept
    paths = ("/x/y/", "~/x", "../acme/x", "runs/acme/x/", "/home/me/My Client/x.jsonl", "gsm8k:/home/My Client/x")
    assert [public(name) for name in paths] == ["y", "x", "x", "x", "x.jsonl", "gsm8k:x"]


def test_the_base_model_is_on_the_hub(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    for path, base in (("org/model", "org/model"), ("tiny-qwen2", None), (str(run), None)):
        config["model"]["path"] = path
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert base_model(tmp_path) == base
    later = tmp_path / "later"
    later.mkdir()
    config["model"]["path"] = "org/model"
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (later / CONFIG).write_text(json.dumps({"model": {"path": str(tmp_path)}}))
    assert base_model(later) is None, "a folder with a config.json is no run"
    (tmp_path / LOCK).touch()
    assert base_model(later) == "org/model", "of the run that it began with"


@pytest.mark.parametrize(("more", "visibility"), [([], "private"), (["--public"], "public")])
def test_a_new_repository_is_private_unless_it_is_asked_for_a_public_one(
    run: Path, more: list[str], visibility: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What huggingface_hub asks a hub for, which is one on this machine and refuses everything."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_TOKEN", "hf_invalid")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert main(["push", str(run), "me/first", *more]) == 2
        server.shutdown()
    ((path, body),) = asked
    assert (path, body["organization"], body["name"]) == ("/api/repos/create", "me", "first")
    assert body.get("visibility", "private" if body.get("private") else "public") == visibility


def test_without_a_token_or_a_network_one_line_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main(["push", str(run), "me/first"]) == 2
    said = capsys.readouterr().err
    assert "push me/first: no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", "hf_invalid")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["push", str(run), "me/first"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("threepo: push me/first: ConnectError: ")
    with pytest.raises(UserError, match="model.path = 'org/model': no such folder, and the hub cannot be asked"):
        load_tokenizer("org/model")  # asked once: the library's own retries would take more than a minute
    assert capsys.readouterr().err.startswith("threepo: no folder org/model here")
    assert main(["push", str(run), "not a name"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["push", str(tmp_path), "me/first", "--dry-run", str(tmp_path / "out")]) == 2
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds no finished evaluation"):
        contents(run, "me/first", [tmp_path])
