"""Guess the number, a game of gem-llm in three turns: the policy learns to use the hints.

python examples/guess/guess.py          # writes the chats of the warm start; needs gem-llm
"""

import json
import random
from pathlib import Path

from threepo.plugins.gem import Game
from threepo.types import Problem

NAME, SETTINGS = "game:GuessTheNumber-v0-easy", {"min_number": 1, "max_number": 6, "max_turns": 3}


def chat(seed: int, rng: random.Random) -> list[dict[str, str]]:
    """A game of a player who thinks of the hints in every second turn, and otherwise guesses anything."""
    game = Game()
    columns = {"game": NAME, "settings": SETTINGS, "seed": seed}
    messages = [{"role": "user", "content": game.reset(Problem(str(seed), "", columns=columns))}]
    low, high = 1, 6
    while True:
        guess = rng.randint(low, high) if rng.random() < 0.5 else rng.randint(1, 6)
        messages.append({"role": "assistant", "content": f"\\boxed{{{guess}}}"})
        turn = game.step(messages[-1]["content"])
        if turn.done:
            return messages
        messages.append({"role": "user", "content": str(turn.observation)})
        if f"higher than {guess}." in str(turn.observation):
            low = max(low, guess + 1)
        elif f"lower than {guess}." in str(turn.observation):
            high = min(high, guess - 1)


def main() -> None:
    """Write 4,000 chats to imitate."""
    rng = random.Random(0)
    chats = [json.dumps({"messages": chat(seed, rng)}) for seed in range(4000)]
    (Path(__file__).parent / "chats.jsonl").write_text("\n".join(chats) + "\n")


if __name__ == "__main__":
    main()
