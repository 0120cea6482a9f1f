"""Deep sea: one move a turn, none can be taken back, and only whoever has made every move right finds the treasure.

    python examples/deep_sea/deep_sea.py          # writes the chats of the warm start and the problems

A policy that moves at random finds the treasure of depth d once in 2^d episodes. Three versions of what is right:
`same`: always R; `rule`: R after `a`, and L after `b`; `secret`: a move for each turn that nothing tells.
"""

import json
import random
from pathlib import Path

from threepo import Problem, Turn

DEPTHS = (8, 12, 16, 24)


class DeepSea:
    """The environment: answers a move with the sign of the next turn."""

    def __init__(self, version: str = "same") -> None:
        self.version = version

    def reset(self, problem: Problem) -> str:
        self.depth = int(problem.columns["depth"])
        self.signs = random.Random(problem.id)
        self.secret = random.Random(0)
        self.kept, self.lost, self.made = 0, False, 0
        return f"{problem.prompt}{self._sign()}"

    def step(self, reply: str) -> Turn:
        self.lost |= reply != self.right
        self.kept += not self.lost
        self.made += 1
        done = self.made == self.depth
        return Turn(self._sign(), float(done and not self.lost), done, {"kept": self.kept / self.depth})

    def _sign(self) -> str:
        sign = self.signs.choice("ab")
        self.right = {"same": "R", "rule": "R" if sign == "a" else "L", "secret": self.secret.choice("LR")}[
            self.version
        ]
        return sign


def chat(rng: random.Random, depth: int) -> list[dict[str, str]]:
    """An episode of random moves."""
    said = [
        {"role": "user", "content": f"{depth}:{rng.choice('ab')}"},
        {"role": "assistant", "content": rng.choice("LR")},
    ]
    for _ in range(depth - 1):
        said += [{"role": "user", "content": rng.choice("ab")}, {"role": "assistant", "content": rng.choice("LR")}]
    return said


def main() -> None:
    """Write 2,000 chats to imitate, and of each depth 512 problems to train on and 64 to evaluate."""
    here, rng = Path(__file__).parent, random.Random(0)
    chats = [json.dumps({"messages": chat(rng, rng.choice(DEPTHS))}) for _ in range(2000)]
    (here / "chats.jsonl").write_text("\n".join(chats) + "\n")
    for depth in DEPTHS:
        for part, numbers in (("problems", range(512)), ("heldout", range(512, 576))):
            rows = [json.dumps({"prompt": f"{depth}:", "depth": depth, "id": f"{depth}-{i}"}) for i in numbers]
            (here / f"{part}-{depth}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
