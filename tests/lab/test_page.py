"""The page of a report: what it holds, and how it behaves in a real browser."""

import base64
import gzip
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from threepo.cli import main
from threepo.errors import UserError
from threepo.lab.figures import colours
from threepo.lab.page import PAGE, _steps, write_page
from threepo.lab.report import read_runs
from threepo.run_folder import write_parquet

CHROMIUM = shutil.which("chromium")
HOSTILE = (
    '</script><script>window.bad = 1</script><img src=x onerror="window.bad = 1"> \u202e \x00\x1b[31m & \U0001f600'
)
BY_DRAW = ["So the sum is 7", "So the sum is 7", "So the sum is 8", "Hence the sum is 7"]
"""Completions of two draws, two of each."""


def completions(step: int, problem: str, texts: list[str], draws: list[int | None], right: str) -> list[dict[str, Any]]:
    """The rows of a group; `right` has a letter R for each completion that is, and M if it is masked, too.

    Of the others, n is left out of the update, as a failed episode is.
    """
    return [
        {
            "step": step,
            "problem_id": problem,
            "prompt": f"prompt of {problem}",
            "reference_answer": "7",
            "draw_seed": None if draw is None else 0,
            "draw_step": None if draw is None else step,
            "draw_index": draw,
            "draw_mirrored": None if draw is None else False,
            "completion": text,
            "tokens": [1, 2],
            "num_tokens": 2,
            "finish_reason": "stop",
            "parsed_answer": text[-1:],
            "status": "right" if letter in "RM" else "not_a_number",
            "correct": letter in "RM",
            "reward": float(letter in "RM"),
            "rho": 3.0 if letter == "M" else 0.9,
            "correction_weight": {"M": 0.0, "n": None}.get(letter, 0.9),
        }
        for text, draw, letter in zip(texts, draws, right, strict=True)
    ]


def write_run(path: Path, steps: list[list[dict[str, Any]]], draws: int = 0) -> Path:
    """A run folder with these completions at each step."""
    path.mkdir()
    config = {"data": {"prompts_per_step": 2}, "method": {"rollouts_per_prompt": 4, "draws": draws}}
    (path / "config.json").write_text(json.dumps(config))
    metrics = []
    for step, rows in enumerate(steps):
        write_parquet(path / "completions" / f"step-{step:06d}.parquet", rows)
        reward = sum(row["reward"] for row in rows) / len(rows)
        metrics.append({"step": step, "reward/mean": reward, "groups/zero_advantage_share": 0.5, "time/step": 1.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return path


def two_runs(folder: Path) -> list[Path]:
    """A baseline of one policy, and a run of two draws with an unpleasant name and unpleasant texts."""
    one: list[int | None] = [None] * 4
    plain = [
        completions(step, "p1", ["a", "b", "c", "d 7"], one, "wwwR") + completions(step, "p10", ["x"] * 4, one, "wwww")
        for step in range(3)
    ]
    drawn = [
        completions(step, "p1", BY_DRAW, [0, 0, 1, 1], "RRnM")
        + completions(step, "p10", [HOSTILE, "x", "y", "z"], [0, 0, 1, 1], "RRRR" if step == 2 else "wwww")
        for step in range(3)
    ]
    return [write_run(folder / "grpo", plain), write_run(folder / "<b>$x_{$", drawn, draws=2)]


def groups_in(page: str) -> list[dict[str, Any]]:
    """The groups that a page holds."""
    chunks = re.findall(r'<script type="text/plain" class="chunk">(.*?)</script>', page)
    return [group for chunk in chunks for group in json.loads(gzip.decompress(base64.b64decode(chunk)))]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs, in a folder with a dot in its name."""
    folder = tmp_path_factory.mktemp("report")
    assert main(["report", *map(str, two_runs(folder)), "--output", str(folder / "qwen2.5")]) == 0
    return folder / "qwen2.5" / PAGE


def test_a_page_holds_every_completion_and_links_to_its_pictures(report: Path) -> None:
    page = report.read_text()
    groups = groups_in(page)
    assert [(group["run"], group["step"], group["problem"]) for group in groups] == [
        (run, step, problem) for run in (0, 1) for step in range(3) for problem in ("p1", "p10")
    ]
    assert groups[6]["completion"] == BY_DRAW
    assert groups[6]["draws"] == ["draw 0", "draw 1"]
    assert groups[6]["draw"] == [0, 0, 1, 1]
    assert groups[7]["completion"][0] == HOSTILE
    assert groups[0]["draws"] == ["mean weights"]
    assert "<b>$x" not in page
    pictures = re.findall(r'href="(figures/\w+\.png)"', page)
    assert {f"figures/{name}.png" for name in ("reward", "rescued", "seconds")} < set(pictures)
    for picture in pictures:
        assert (report.parent / picture).read_bytes().startswith(b"\x89PNG")
    assert "Nothing to show for these runs: Token entropy (nats)" in re.sub(r"Held-out[^;]*; ", "", page)


def test_runs_that_cannot_be_paired_do_not_break_the_page(tmp_path: Path) -> None:
    one: list[int | None] = [None] * 2
    folders = [
        write_run(tmp_path / problem, [completions(0, problem, ["a", "b"], one, "Rw")]) for problem in ("p1", "p2")
    ]
    bare = write_run(tmp_path / "bare", [])
    metrics = {"step": 0, "reward/mean": 1.0, "groups/zero_advantage_share": 0.0, "time/step": 1.0}
    (bare / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    runs = read_runs([*folders, bare])
    write_page(runs, runs[0], tmp_path / "out")
    page = (tmp_path / "out" / PAGE).read_text()
    assert f">Not compared: {folders[0]} and {folders[1]}: 2 problems are in only one of them at their step" in page
    assert "holds no completions" in page
    assert "1 of 1 steps with rollouts" in page
    assert "0 of 0 steps with rollouts" in page
    write_page(runs[:1], runs[0], tmp_path / "alone")
    alone = (tmp_path / "alone" / PAGE).read_text()
    assert ">Nothing to compare: exploration compares a method with a baseline, and this is one method.<" in alone


def test_a_file_that_is_no_picture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [completions(0, "p", ["a"], [None], "R")])
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 2
    assert "page.html: name a folder" in capsys.readouterr().err


def test_a_run_without_any_step_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert main(["report", str(tmp_path / "empty")]) == 0
    page = tmp_path / "empty" / "report" / PAGE
    assert capsys.readouterr().out.endswith(f"\nempty: has not finished a step.\npage: {page.as_uri()}\n")
    assert "<b>empty</b>: has not finished a step." in page.read_text()


@pytest.mark.parametrize("interrupted", [False, True], ids=["the run ends", "Ctrl-C"])
def test_a_live_page_follows_the_run(interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threepo.lab.page.REFRESH", 0.1)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where a shell has put the tests in the background
    run = write_run(tmp_path / "run", [completions(0, "p", ["a"], [None], "R")])
    page, seen = run / "report" / PAGE, []

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 60
        while not (page.is_file() and text in page.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        seen.append('<meta http-equiv="refresh" content="0.1">' in page.read_text() and text in page.read_text())

    def train() -> None:
        wait_for("run</b>: not evaluated, 1 step:")
        with open(run / "metrics.jsonl", "a") as file:
            file.write((run / "metrics.jsonl").read_text().replace('"step": 0', '"step": 1'))
        wait_for("run</b>: not evaluated, 2 steps:")
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            (run / "summary.json").write_text("{}")

    trainer = threading.Thread(target=train)
    trainer.start()
    assert main(["report", str(run), "--live"]) == 0
    trainer.join()
    assert seen == [True, True]
    assert "2 steps" in page.read_text()
    assert 'http-equiv="refresh"' not in page.read_text()


def test_a_page_begins_with_what_happened_and_what_differs(report: Path) -> None:
    page = report.read_text()
    words = "not evaluated, 3 steps: reward of the rollouts 0.125 in the first step, 0.125 in the last."
    assert f"<b>grpo</b>: {words}" in page
    assert page.index(words) < page.index("<table>") < page.index("Settings in which the runs differ")
    assert "<tr><td>method.draws</td><td>0</td><td>2</td></tr>" in page
    assert f"by threepo {version('threepo')}, torch {version('torch')}" in page


def test_damaged_completions_are_named(tmp_path: Path) -> None:
    folders = two_runs(tmp_path)
    file = folders[1] / "completions" / "step-000001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    runs = read_runs(folders)
    with pytest.raises(UserError, match=f"{file.name}.*remove the damaged file"):
        write_page(runs, runs[0], tmp_path / "out")


def test_of_long_runs_evenly_chosen_steps_are_kept(tmp_path: Path) -> None:
    """Eight steps of 4 completions count 8 * 4 * (8 + 200) = 6656 characters; half of that has every second."""
    rows = [completions(step, "p", ["aaaa aaa"] * 4, [None] * 4, "wwww") for step in range(8)]
    run = write_run(tmp_path / "run", rows)
    for most, expected in ((6656, list(range(8))), (3328, [1, 3, 5, 7]), (3000, [1, 4, 7]), (1, [7])):
        chosen, total = _steps(run, most)
        assert [int(file.stem.removeprefix("step-")) for file in chosen] == expected
        assert total == 8


# ---- in a browser


@pytest.fixture(scope="module")
def tab() -> Iterator[tuple[Any, list[str], list[str]]]:
    """A tab of a browser, what the pages in it complain of, and what they ask for."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        complaints: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        yield page, complaints, requests
        browser.close()


@pytest.fixture
def opened(tab: tuple[Any, list[str], list[str]]) -> Iterator[Any]:
    """Opens pages; at the end of a test none of them may have complained or asked for anything but itself."""
    page, complaints, requests = tab
    own = ["about:blank", "data:"]

    def open_page(path: Path, fragment: str = "", width: int = 1440, height: int = 900, scheme: str = "light") -> Any:
        own.append(path.as_uri())
        page.goto("about:blank")  # or another fragment would only be followed
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.goto(path.as_uri() + fragment)
        return page

    yield open_page
    page.goto("about:blank")  # what is said late is this test's
    found = complaints + [url for url in requests if not url.startswith(tuple(own))]
    complaints.clear()
    requests.clear()
    assert found == []


def ready(page: Any) -> Any:
    page.wait_for_selector("body[data-ready]")
    return page


def listed(page: Any, count: int) -> list[str]:
    """Run, step and problem of the groups in the list, once there are `count`."""
    expect(page.locator("#list button")).to_have_count(count, timeout=30_000)
    return [button.get_attribute("title") for button in page.query_selector_all("#list button")]


def filtered(page: Any, count: int, **values: str) -> list[str]:
    """The list with these filters, once it has `count` groups."""
    for name in ("run", "verdict", "draw"):
        page.select_option(f"[name={name}]", values.get(name, ""))
    for name in ("step", "problem", "text"):
        page.fill(f"[name={name}]", values.get(name, ""))
    page.wait_for_selector("#list[aria-busy=false]", state="attached")
    return listed(page, count)


def test_filters_and_links_lead_to_groups(report: Path, opened: Any) -> None:
    page = ready(opened(report))
    name = "<b>$x_{$"
    assert len(listed(page, 12)) == 12
    assert filtered(page, 6, run=name)[0] == f"{name}, step 0, p1"
    assert filtered(page, 4, step="2")[-1] == f"{name}, step 2, p10"
    assert filtered(page, 6, problem="p10")[0] == "grpo, step 0, p10"
    assert filtered(page, 1, verdict="right") == [f"{name}, step 2, p10"]
    assert filtered(page, 5, verdict="wrong")[-1] == f"{name}, step 1, p10"
    assert filtered(page, 6, verdict="mixed")[-1] == f"{name}, step 2, p1"
    assert filtered(page, 6, draw="draw 1")[0] == f"{name}, step 0, p1"
    assert page.locator(".completion").count() == 2, "those of the draw alone"
    assert filtered(page, 3, text="HENCE the")[0] == f"{name}, step 0, p1"
    assert page.locator(".completion.found").count() == 1
    assert page.locator(".completion .wrong").all_inner_texts() == ["✗ not a number"]
    assert filtered(page, 0, text="(.*") == [], "the text is no pattern"
    address = page.url
    filtered(page, 1, step="1", problem="p10", run="grpo")
    assert page.url != address
    assert page.inner_text("#group b") == "grpo, step 1"
    page = ready(opened(report, page.url.partition(PAGE)[2]))
    assert listed(page, 1) == ["grpo, step 1, p10"]
    assert page.input_value("[name=problem]") == "p10"
    filtered(page, 12)
    page.click("#list button >> nth=4")
    page.click("#next")
    bar = page.locator("#group > .bar")
    expect(bar).to_have_text("grpo, step 2p100 of 4 rightLink to this group")
    page.click("text=Link to this group")
    assert listed(page, 1) == ["grpo, step 2, p10"]
    for link in page.eval_on_selector_all("nav a", "links => links.map((link) => link.getAttribute('href'))"):
        assert page.locator(link).count() == 1, link


def test_texts_of_models_are_text(report: Path, opened: Any) -> None:
    page = ready(opened(report))
    filtered(page, 1, step="0", run="<b>$x_{$", problem="p10")
    text = page.inner_text(".completion pre >> nth=0")
    assert text == HOSTILE.replace("\x00", "\u2400").replace("\x1b", "\u241b")
    assert page.evaluate("window.bad") is None
    assert page.locator("main img, main b b").count() == 0


def episodes(told: list[list[tuple[str, str]]], **more: Any) -> list[dict[str, Any]]:
    """The rows of a group of episodes with these turns."""
    texts = ["\n".join(f"[{role}] {text}" for role, text in turns) for turns in told]
    rows = completions(0, "p", texts, list(range(len(told))), "R" * len(told))
    for row, turns in zip(rows, told, strict=True):
        own = [[0, 1]] * sum(role == "assistant" for role, _ in turns)
        parts = {"begin": [], "transcript": turns, "own": own, "rewards": [], "status": "done", "reason": ""}
        row["episode"] = json.dumps({**parts, "metrics": {}, **more})
    return rows


def turns_of(completion: Any) -> list[str]:
    """The turns of a shown episode, in a line each; of folded calls, what is seen of them."""
    return [" ".join(turn.inner_text().split()) for turn in completion.locator(":scope > .turns > .turn").all()]


CALL = '<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>'


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with episodes: calls of tools, one that was cut, and some that failed."""
    bare = '{"name": "price", "parameters": {"item": "kiwi"}}'
    told = [
        [
            ("assistant", f"<think><tool_call></think> Look: {CALL}\n{CALL}"),
            ("tool", "4\n[assistant] I am a tool"),
            ("tool", f"pears: {HOSTILE}"),
            ("assistant", "It is 7"),
        ],
        [("user", "Go \U0001f600"), ("assistant", f"<think>{{</think>\n{bare}"), ("tool", "5"), ("user", "{a}")],
        [("assistant", f"{CALL} cut\n[tool] 5")],
    ]
    turns = [("user", "Go"), ("assistant", "L"), ("user", "b"), ("assistant", "R")]
    kept = episodes([turns], rewards=[0.0, 0.5], status="turns", metrics={"kept": 1 / 3})
    failed = episodes([turns[:2]], status="failed", reason="step: raised <b>KeyError</b>", begin=[["user", "First"]])
    silent = episodes([[]], status="failed", reason="reset: time")
    groups = {"tools": episodes(told), "p": kept, "broken": failed + silent}
    for problem, rows in groups.items():
        for row in rows:
            row["problem_id"] = problem
    run = write_run(tmp_path_factory.mktemp("played") / "run", [[row for rows in groups.values() for row in rows]])
    assert main(["report", str(run)]) == 0
    return run / "report" / PAGE


def test_calls_of_tools_are_folded_with_their_results(played: Path, opened: Any) -> None:
    """Also Llama's; a call that no tool answers stays open, and a text that looks like a turn is none."""
    page = ready(opened(played, "#rollouts&problem=tools"))
    folds = page.locator(".completion .call")
    assert folds.locator("summary").all_inner_texts() == ['price {"item": "pear"} …', 'price {"item": "kiwi"} …']
    first, second, third = page.locator(".completion").all()
    asked = 'assistant <think><tool_call></think> Look: price {"item": "pear"} …'
    assert turns_of(first) == [asked, "assistant It is 7"]
    assert turns_of(second) == ["user Go \U0001f600", 'assistant <think>{</think> price {"item": "kiwi"} …', "user {a}"]
    assert turns_of(third) == [f"assistant {CALL} cut [tool] 5"]
    folds.first.locator("summary").click()
    assert [text.strip() for text in folds.first.locator("pre").all_inner_texts()][:2] == [
        f"{CALL}\n{CALL}",
        "4\n[assistant] I am a tool",
    ]
    assert filtered(page, 1, text="pears:") == ["run, step 0, tools"]
    expect(page.locator(".completion .call[open]")).to_have_count(1)
    assert first.inner_text().count("pears: </script>") == 1


def test_an_episode_says_how_it_went(played: Path, opened: Any) -> None:
    page = ready(opened(played))
    filtered(page, 1, problem="p")
    shown = page.locator(".completion")
    assert "2 replies, cut at max_turns · kept 0.333" in shown.inner_text()
    assert turns_of(shown) == ["user Go", "assistant L", "user b", "assistant reward 0.5 R"]
    filtered(page, 1, problem="broken")
    first, second = shown.all()
    assert "1 reply, failed" in first.inner_text()
    assert first.locator("div.wrong").inner_text() == "The environment failed: step: raised <b>KeyError</b>"
    assert turns_of(first) == ["user First", "user Go", "assistant L"]
    assert second.locator("div.wrong").inner_text() == "The environment failed: reset: time"
    assert turns_of(second) == []


def test_a_right_completion_that_the_correction_masked_says_so(report: Path, opened: Any) -> None:
    page = ready(opened(report, "#rollouts&run=%3Cb%3E%24x_%7B%24&step=0&problem=p1"))
    expect(page.locator("#group > .bar")).to_contain_text("3 of 4 right, 1 masked")
    told = [bar.inner_text() for bar in page.locator(".completion .bar").all()]
    assert ["masked" in text for text in told] == [False, False, False, True]
    assert page.locator(".completion .badge").all_inner_texts() == [
        *("kept · weight 0.900", "kept · weight 0.900", "left out", "masked · weight 0")
    ]
    assert "rho 0.900" in told[0]
    assert "right" in told[3]
    assert "rho 3.00" in told[3]


def test_the_grid_of_a_group_has_a_row_for_each_draw(report: Path, opened: Any) -> None:
    page = ready(opened(report, "#rollouts&run=%3Cb%3E%24x_%7B%24&step=0&problem=p1", height=300))
    assert page.locator("#grid span").all_inner_texts() == ["draw 0", "draw 1"]
    cells = page.locator("#grid button")
    titles = [cell.get_attribute("title") for cell in cells.all()]
    assert titles == [
        "draw 0: reward 1",
        "draw 0: reward 1",
        "draw 1: reward 0",
        "draw 1: reward 1, masked",
    ]
    places = [cell.bounding_box() for cell in cells.all()]
    assert places[0]["y"] == places[1]["y"] < places[2]["y"] == places[3]["y"]
    assert places[0]["x"] == places[2]["x"] < places[1]["x"] == places[3]["x"]
    right, _, wrong, _ = (cell.evaluate("(e) => getComputedStyle(e).backgroundColor") for cell in cells.all())
    assert right != wrong
    cells.last.click()
    expect(page.locator("#completion-3")).to_be_in_viewport()


def map_of(page: Any) -> list[list[int]]:
    """Rows of the map: the opacity of each cell, of 255."""
    values = page.evaluate(
        "(() => { const c = document.querySelector('#map canvas'), w = c.width;"
        "const found = [...c.getContext('2d').getImageData(0, 0, w, c.height).data].filter((_, i) => i % 4 === 3);"
        "return [w, found]; })()"
    )
    return [values[1][i : i + values[0]] for i in range(0, len(values[1]), values[0])]


def test_the_map_has_problems_and_steps(report: Path, opened: Any) -> None:
    """p1 earns 3/4 at each step, p10 nothing until it earns all; opacity is 0.1 + 0.9 x reward."""
    page = ready(opened(report, "#rollouts&run=%3Cb%3E%24x_%7B%24"))
    assert page.inner_text("#map figcaption").startswith("<b>$x_{$: mean reward of problems, steps 0 to 2;")
    for row, expected in zip(map_of(page), ([0.775] * 3, [0.1, 0.1, 1.0]), strict=True):
        assert row == pytest.approx([255 * share for share in expected], abs=1)
    box = page.locator("#map canvas").bounding_box()
    corner = box["x"] + box["width"] - 5, box["y"] + box["height"] - 5
    page.mouse.move(*corner)
    assert page.inner_text("#tip") == "step 2, p10: 1.00"
    page.mouse.click(*corner)
    page.wait_for_selector("#group b:has-text('step 2')")  # a group is shown once its words have been compared
    assert page.inner_text("#group b") == "<b>$x_{$, step 2"
    filtered(page, 1, verdict="right")
    assert not page.is_visible("#map"), "one step is no map"


def test_problems_that_never_come_back_are_sorted_in_the_map(tmp_path: Path, opened: Any) -> None:
    steps = [
        [row for p in range(8) for row in completions(s, f"p{s}-{p}", ["a"], [0], "R" if p % 4 < s else "w")]
        for s in range(6)
    ]
    runs = read_runs([write_run(tmp_path / "run", steps)])
    write_page(runs, runs[0], tmp_path / "out")
    rows = map_of(ready(opened(tmp_path / "out" / PAGE)))
    assert [[value > 200 for value in row] for row in rows] == [
        [min(s, 4) * 2 > place for s in range(6)] for place in range(8)
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_draws_have_other_colours_than_runs(scheme: str, report: Path, opened: Any) -> None:
    """Of the first 16 draws and the ten runs, the nearest two differ by at least 20 of 255 in some channel."""
    page = ready(opened(report, scheme=scheme))
    drawn = page.evaluate(
        "[...Array(16).keys()].map((draw) => { const e = document.body.appendChild(document.createElement('i'));"
        "e.style.color = drawColour(draw); const paint = document.createElement('canvas').getContext('2d');"
        "paint.fillStyle = getComputedStyle(e).color; e.remove(); paint.fillRect(0, 0, 1, 1);"
        "return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3); })"
    )
    names = [str(i) for i in range(10)]
    runs = [
        [int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours(names, dark=scheme == "dark").values()
    ]
    nearest = min(max(abs(a - b) for a, b in zip(one, other, strict=True)) for one in drawn for other in runs)
    assert nearest >= 20


def test_words_are_marked_where_draws_disagree(report: Path, opened: Any) -> None:
    """The fewer of the other draw's completions have a word after the same two words, the stronger its mark."""
    page = ready(opened(report, "#rollouts&run=%3Cb%3E%24x_%7B%24&step=0&problem=p1"))
    found = page.evaluate(
        "[...document.querySelectorAll('.completion pre')].map((pre) => [...pre.childNodes].map((node) => "
        "[node.textContent, node.className ?? '']))"
    )
    # The other draw has "So", "So the" and "So the sum" in one of two completions; "the sum is" in both; "7" in one.
    assert found[0] == [["So the sum", "m2"], [" is", ""], [" 7", "m2"]]
    assert found[1] == found[0]
    # Both of the other draw's begin with "So the sum"; none ends in 8.
    assert found[2] == [["So the sum is", ""], [" 8", "m3"]]
    assert found[3] == [["Hence the sum", "m3"], [" is 7", ""]]


@pytest.mark.parametrize(
    ("width", "height", "scheme", "colours"),
    [
        (1440, 900, "light", ("rgb(255, 255, 255)", "rgb(27, 31, 36)", "rgb(31, 111, 180)")),
        (390, 844, "dark", ("rgb(20, 23, 27)", "rgb(230, 233, 237)", "rgb(108, 180, 245)")),
    ],
    ids=["laptop", "phone"],
)
def test_it_fits_the_screen_and_follows_the_theme(
    width: int, height: int, scheme: str, colours: tuple[str, ...], report: Path, opened: Any
) -> None:
    page = ready(opened(report, width=width, height=height, scheme=scheme))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    style = "(element) => { const s = getComputedStyle(element); return [s.fill, s.stroke, s.backgroundColor]; }"
    text, line = (page.eval_on_selector(f"#learning svg {part}", style) for part in ("text", "path[style*=line-0]"))
    assert (page.eval_on_selector("body", style)[2], text[0], line[1]) == colours
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text')].map((t) => t.getBoundingClientRect().height))"
    )
    assert smallest > 8
    page.click(".legend button >> nth=0")
    hidden = page.eval_on_selector("#learning svg path[style*=line-0]", "(line) => getComputedStyle(line).stroke")
    assert hidden == "rgba(0, 0, 0, 0)"


def test_values_of_curves_are_read_off_under_the_pointer(report: Path, opened: Any) -> None:
    """grpo's reward is 1/8 at every step; the other run's is 3/8, 3/8 and 7/8, in the mean 0.542."""
    page = ready(opened(report))
    place = page.locator("#learning figure >> nth=0 >> path[style*=line-0]").last.bounding_box()
    page.mouse.move(place["x"] + 1, place["y"] + place["height"] / 2)
    assert page.inner_text("#tip").split("\n") == ["grpo: 0.125 at 1", "<b>$x_{$: 0.375 at 1"]
    page.mouse.move(place["x"] + place["width"] - 1, place["y"] + place["height"] / 2)
    assert page.inner_text("#tip").split("\n") == ["grpo: 0.125 at 3", "<b>$x_{$: 0.542 at 3"]
    page.mouse.move(1, 1)
    assert not page.is_visible("#tip")


BEATS = """() => {
    let now = performance.now();
    performance.now = () => now += 0.1; // so that on any machine the search takes long
    setInterval(() => window.beats++);
    const replace = history.replaceState.bind(history), list = document.getElementById("list");
    history.replaceState = (...address) => { window.beats = 0; replace(...address); };
    const look = () => { if (list.ariaBusy === "false") window.beaten = window.beats; };
    new MutationObserver(look).observe(list, { attributes: true });
}"""
"""Counts how often something else had its turn between the begin of a search, which sets the address, and its end."""


def test_a_hundred_thousand_completions_do_not_stop_the_page(tmp_path: Path, opened: Any) -> None:
    """While it searches, the page answers; and it never has more than a few elements."""
    steps = [
        [
            row
            for p in range(125)
            for row in completions(s, f"p{p}", [f"{s} {p} {i} word" for i in range(8)], [0] * 8, "RRRRwwww")
        ]
        for s in range(100)
    ]
    runs = read_runs([write_run(tmp_path / "run", steps)])
    write_page(runs, runs[0], tmp_path / "out")
    page = opened(tmp_path / "out" / PAGE)
    ready(page)
    page.evaluate(BEATS)
    assert page.inner_text("#count") == "1 to 25 of 12,500 groups (of 12,500 in all)"
    for text, count in (("99 124 7 word", 1), ("9 124 7 word", 10)):
        filtered(page, count, text=text)
        assert page.evaluate("window.beaten") > 5
    assert filtered(page, 25, verdict="mixed", step="50")[0] == "run, step 50, p0"
    page.click("#later")
    assert listed(page, 25)[0] == "run, step 50, p25"
    filtered(page, 25)
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
