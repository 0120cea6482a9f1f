"""Look-up: a price list that only a tool can read. The policy learns to ask it instead of guessing.

python examples/lookup/lookup.py          # writes the chats of the warm start and the problems
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

from threepo import Problem

ITEMS = "abcdefghij"


class PriceList:
    """Prices of a problem, which the tool knows."""

    def __init__(self) -> None:
        self.tools: list[Callable[..., str]] = [self.price]

    def reset(self, problem: Problem) -> None:
        self.prices = problem.columns["prices"]

    def price(self, item: str) -> str:
        """Look up the price of an item.

        Args:
            item: The letter of the item.
        """
        return str(self.prices[item])


def problem(rng: random.Random) -> tuple[str, dict[str, str], str]:
    """A question, the price list, and the answer."""
    item, prices = rng.choice(ITEMS), {item: str(rng.randrange(10, 100)) for item in ITEMS}
    return f"price {item}", prices, prices[item]


def chat(rng: random.Random, share: float = 0.25) -> list[dict[str, str]]:
    """A chat that calls the tool in this share of cases, and guesses in the others."""
    prompt, prices, answer = problem(rng)
    asked = {"role": "user", "content": prompt}
    if rng.random() > share:
        return [asked, {"role": "assistant", "content": str(rng.randrange(10, 100))}]
    call = json.dumps({"name": "price", "arguments": {"item": prompt[-1]}})
    return [
        asked,
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": prices[prompt[-1]]},
        {"role": "assistant", "content": answer},
    ]


def main() -> None:
    """Write 4,000 chats to imitate, and 512 problems."""
    here, rng = Path(__file__).parent, random.Random(0)
    chats = [json.dumps({"messages": chat(rng)}) for _ in range(4000)]
    (here / "chats.jsonl").write_text("\n".join(chats) + "\n")
    rows = []
    for number in range(512):
        prompt, prices, answer = problem(rng)
        rows.append(json.dumps({"id": str(number), "prompt": prompt, "prices": prices, "answer": answer}))
    (here / "problems.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
