"""Follow pointers. Level: how many hops.

a>c b>e c>b d>a e>d; 3 from a       ->  e
"""

from random import Random
from string import ascii_lowercase

from threepo.data.task import Task


class Pointers(Task):
    """Every letter points to another; the answer is where a number of hops leads. Worked out by naming each stop."""

    name = "pointers"
    default_levels = (2, 3, 4, 5)
    min_level = 1

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        # One cycle through all letters: a walk shorter than it never repeats, so no hop can be skipped.
        letters = rng.sample(ascii_lowercase, level + 2)
        target = dict(zip(letters, letters[1:] + letters[:1], strict=True))
        listing = " ".join(f"{letter}>{target[letter]}" for letter in rng.sample(letters, len(letters)))
        start = rng.choice(letters)
        return f"{listing}; {level} from {start}\n", _walk(target, start, level)[-1]

    def work(self, prompt: str) -> str:
        listing, _, question = prompt.partition(";")
        target = dict(pair.split(">") for pair in listing.split())
        hops, _, start = question.split()
        return "".join(_walk(target, start, int(hops)))


def _walk(target: dict[str, str], start: str, hops: int) -> list[str]:
    """The letters visited, the start included."""
    stops = [start]
    for _ in range(hops):
        stops.append(target[stops[-1]])
    return stops
