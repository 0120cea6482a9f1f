"""Guess the number: a game of gem-llm, whose hints a policy learns to heed.

    python examples/guess_the_number/guess_the_number.py    # writes the chats of the warm start and its untrained model

The number is between 1 and 5, and there are three guesses; whoever always halves what is left wins every game.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

from threepo import Problem, Turn
from threepo.plugins.gem import Game

NAME = "game:GuessTheNumber-v0-easy"
SETTINGS = {"max_number": 5, "max_turns": 3}


class Win(Game):
    """The game, which pays for the number alone: gem also pays for a last guess that is near."""

    def step(self, reply: str) -> Turn:
        turn = super().step(reply)
        return replace(turn, reward=float(turn.reward == 1))


def chat(rng: random.Random, heeds: bool) -> list[dict[str, str]]:
    """A game whose guesses are random: all of them, or those that the last hint leaves, if the player `heeds` it."""
    game = Game()
    problem = Problem("chat", "game", columns={"game": NAME, "settings": SETTINGS, "seed": rng.randrange(2**31)})
    observation, done, left = game.reset(problem), False, (1, 5)
    said = []
    while not done:
        guess = rng.randint(*left)
        turn = game.step(f"\\boxed{{{guess}}}")
        said += [{"role": "user", "content": observation}, {"role": "assistant", "content": f"\\boxed{{{guess}}}"}]
        observation, done = str(turn.observation), turn.done
        hints = {"higher than": (guess + 1, 5), "lower than": (1, guess - 1)} if heeds else {}
        left = next((numbers for hint, numbers in hints.items() if hint in observation), (1, 5))
    return said


def main() -> None:
    """Write 4,000 chats to imitate, and a model of 0.16 M parameters whose tokens are the words of the game."""
    # Here, so that the processes of environments, which import this file, are small.
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from threepo.models.loading import make_tokenizer

    here, rng = Path(__file__).parent, random.Random(0)
    chats = [chat(rng, heeds=rng.random() < 0.5) for _ in range(4000)]
    (here / "chats.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for said in chats))
    texts = (message["content"] for said in chats for message in said)
    tokenizer = make_tokenizer().train_new_from_iterator(texts, 600)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(here / "untrained")
    tokenizer.save_pretrained(here / "untrained")


if __name__ == "__main__":
    main()
