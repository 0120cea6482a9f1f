"""The engines that ranks would have; `test_vllm_on_ranks.py` starts them."""

from pathlib import Path
from typing import Any

import pytest
from launch import launch

from factories import completion
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.ranks.dealing import SharedEngine, divide_grading, refuse_engine, server_of_each
from threepo.ranks.world import ALONE, World
from threepo.types import Draw, Problem, Request


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (VLLMConfig(replicas=2), r"^engine.vllm.replicas = 2: several ranks have a replica each, .*; remove it$"),
        (VLLMConfig(gpus=(3,)), r"^engine.vllm.gpus = \[3\]: several ranks have a replica each"),
        (VLLMConfig(tensor_parallel=3), r"^engine.vllm.tensor_parallel = 3: .* the 4 ranks of a node .* to a divisor$"),
    ],
)
def test_what_several_ranks_cannot_have_is_refused(
    settings: VLLMConfig, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    engine = VLLMEngineConfig(vllm=settings)
    with pytest.raises(UserError, match=message):
        refuse_engine(engine, World(0, 8))
    refuse_engine(engine, ALONE)


@pytest.mark.parametrize(
    ("ranks", "each", "draws", "served"),
    [
        (2, 1, 2, [[0], [1]]),
        (2, 1, 5, [[0, 2, 4], [1, 3]]),
        (5, 1, 2, [[0], [1], [0], [1], [0]]),
        (4, 2, 3, [[0, 2], [], [1], []]),
        (6, 2, 2, [[0], [], [1], [], [0], []]),
    ],
)
def test_every_draw_has_an_engine(ranks: int, each: int, draws: int, served: list[list[int]]) -> None:
    """`each` ranks share an engine, which the first of them has."""
    engine = SharedEngine(None, World(0, ranks), each)
    engine._draws = [Draw(0, 0, i) for i in range(draws)]
    assert [[i for i in range(draws) if rank in engine._ranks_of(i)] for rank in range(ranks)] == served


def test_servers_that_share_a_draw_share_its_requests() -> None:
    """Servers 0, 2 and 4 have the first draw, 1 and 3 the second; neighbours stay together."""
    draws, problem = [Draw(0, 0, i) for i in range(2)], Problem("p", "p")
    asked = [Request(problem, (1,), draws[i % 2], i) for i in range(12)]
    assert server_of_each(asked, draws, 5, range(5)) == [0, 1, 0, 1, 2, 1, 2, 3, 4, 3, 4, 3]
    assert server_of_each(asked, draws, 5, {1, 4}) == [4, 1] * 6


def test_ranks_of_a_machine_take_their_memory_in_turn_and_share_values(tmp_path: Path) -> None:
    """A rank that looked at the free memory while another takes it would count on the same memory.

    The program itself says of shared values, small and large, whether every rank has those of all.
    """
    launch(str(Path(__file__).with_name("turns_program.py")), str(tmp_path / "notes"), ranks=3)
    notes = [line for rank in range(3) for line in (f"{rank} begins 2", f"{rank} ends")]
    assert (tmp_path / "notes").read_text().splitlines() == notes


def test_a_rank_without_problems_grades_nothing() -> None:
    """A function of the user's own would get no columns. Here one process plays both ranks."""

    class Both:
        size = 2

        def deal(self, owners: list[int], compute: Any) -> Any:
            shares = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(2)]
            return [verdict for share in shares for verdict in compute(share)]

    calls = []

    def grade(completions: Any) -> list[Any]:
        calls.append(len(completions))
        return [None] * len(completions)

    one, other = completion("a"), completion("b")
    graded = divide_grading(grade, Both())  # type: ignore[arg-type]
    assert (graded([one, one]), calls) == ([None] * 2, [2])
    assert (graded([one, other]), calls) == ([None] * 2, [2, 1, 1])
