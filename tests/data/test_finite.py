"""The order of a finite list of problems, and the treatment of rows that are no problems."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from published_rows import write_rows
from threepo.config import DataConfig
from threepo.data.finite import FiniteProblems, _epoch_order, collect, column_problems, warn_of_shared_problems
from threepo.data.rows import BrokenRow
from threepo.errors import ThreepoWarning, UserError
from threepo.types import Problem


def numbered(count: int, seed: int = 0) -> FiniteProblems:
    return FiniteProblems("numbers", tuple(Problem(id=str(i), prompt=f"{i}") for i in range(count)), seed, count)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5), st.integers(0, 2**63))
def test_an_epoch_takes_everything_once_but_its_incomplete_last_batch(
    count: int, size: int, epoch: int, seed: int
) -> None:
    if size > count:
        with pytest.raises(UserError, match=f"numbers: holds {count} problems, fewer than data.prompts_per_step"):
            numbered(count, seed).batch(0, size)
        return
    steps = count // size
    batches = [numbered(count, seed).batch(step, size) for step in range(epoch * steps, (epoch + 1) * steps)]
    taken = Counter(problem.id for batch in batches for problem in batch)
    assert all(len(batch) == size for batch in batches)
    assert set(taken.values()) == {1}
    assert len(taken) == steps * size


@given(st.integers(0, 200), st.integers(0, 2**63))
def test_a_step_has_the_same_problems_whatever_came_before(step: int, seed: int) -> None:
    """So a resumed run gets the same problems: their order is a function of the seed and the step only."""
    source = numbered(17, seed)
    in_turn = [source.batch(i, 4) for i in range(step + 1)][step]
    _epoch_order.cache_clear()  # a resumed run is another process
    assert numbered(17, seed).batch(step, 4) == in_turn


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(p.id for p in numbered(20, seed).batch(epoch, 20)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert {frozenset(order) for order in orders} == {frozenset(map(str, range(20)))}


def read(row: dict[str, str], number: int) -> Problem:
    if "text" not in row:
        raise BrokenRow("has no text")
    return Problem(id=row.get("id", str(number)), prompt=row["text"])


def test_broken_rows_are_counted_and_the_first_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{}, {"text": "a"}, {}, BrokenRow("not valid JSON"), {"text": "b"}, {}, {}]
    with pytest.raises(UserError, match=r"^my data, row 1: has no text; .*data.broken_rows = 'skip'$"):
        collect("my data", rows, read, DataConfig(train="x"))
    source = collect("my data", rows, read, DataConfig(train="x", broken_rows="skip"))
    assert [p.prompt for p in source.problems] == ["a", "b"]
    assert source.counts() == {"problems": 2, "rows": 7, "duplicates": 0, "broken": 5, "too_long": 0}
    assert capsys.readouterr().err == (
        "threepo: my data: left out 5 of 7 rows as broken: row 1: has no text; row 3: has no text; row 4: not valid "
        "JSON; and 2 more\n"
    )
    with pytest.raises(UserError, match="my data: holds no problems"):
        collect("my data", rows[:1], read, DataConfig(train="x", broken_rows="skip"))


def test_rows_with_one_id_are_one_problem_or_a_mistake() -> None:
    rows = [{"text": "a", "id": "x"}, {"text": "b", "id": "y"}, {"text": "c", "id": "x"}]
    source = collect("my data", rows, read, DataConfig(train="x"), deduplicate=True)
    assert ([p.prompt for p in source.problems], source.duplicates) == (["a", "b"], 1)
    with pytest.raises(UserError, match="my data, row 3: has the id 'x' of my data, row 1; ids must differ"):
        collect("my data", rows, read, DataConfig(train="x"))


def test_broken_rows_of_a_file_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": 3}\n["b"]\n{"question": "c"}\n{"prompt": "d"}\n{"prompt": "cut o')
    source = column_problems(str(path), DataConfig(train="x", broken_rows="skip"))
    assert [(p.id, p.prompt) for p in source.problems] == [("p.jsonl:1", "a"), ("p.jsonl:5", "d")]
    assert (source.rows, source.broken) == (6, 4)


def test_training_problems_among_the_held_out_ones_give_a_warning() -> None:
    problems = [Problem(id=str(i), prompt=f"What is {i}?", answer=str(i)) for i in range(5)]
    chat = Problem(id="c", prompt=({"role": "user", "content": "Hi"},), answer="Hi")
    training = [*problems[:3], chat]
    others = [problems[4], Problem(id="o", prompt="What is 1?", answer="another"), Problem(id="p", prompt="?")]
    warn_of_shared_problems("data.eval", training, others, environment=False)
    heldout = [*others, Problem(id="other", prompt="What is 1?", answer="1"), problems[2], chat]
    with pytest.warns(ThreepoWarning, match="data.eval: 3 of the 6 held-out ones are also trained on"):
        warn_of_shared_problems("data.eval", training, heldout, environment=False)


def test_problems_of_an_environment_are_the_same_only_in_all_columns() -> None:
    one, other = (Problem(id=name, prompt="go", columns={"depth": 8, "id": name}) for name in "ab")
    warn_of_shared_problems("data.eval", [one], [other], environment=True)
    for problem, environment in ((replace(one), True), (other, False)):
        with pytest.warns(ThreepoWarning, match="1 of the 1 held-out ones"):
            warn_of_shared_problems("data.eval", [one], [problem], environment)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_of_tests_has_the_name_that_the_verifier_knows(suffix: str, tmp_path: Path) -> None:
    cases = {"inputs": ["1"], "outputs": ["2"]}
    path = write_rows(tmp_path / f"p{suffix}", [{"prompt": "Add.", "cases": cases, "tests": "other"}])
    tests = column_problems(str(path), DataConfig(train="x")).problems[0].columns
    assert tests == {"cases": cases, "tests": "other"}
    assert column_problems(str(path), DataConfig(train="x", tests_column="cases")).problems[0].columns["tests"] == cases
    with pytest.raises(UserError, match="no column 'case'; it has 'prompt', 'cases', 'tests'; set data.tests_column"):
        column_problems(str(path), DataConfig(train="x", tests_column="case"))
