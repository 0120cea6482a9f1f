from random import Random
from string import ascii_lowercase

from threepo.data.task import Task, read_question


class Pointers(Task):
    """Every letter points to another; where does a number of hops lead? `a>c b>e c>b d>a e>d; 3 from a` -> `e`.

    Level: how many hops. Worked out by naming each stop.
    """

    name = "pointers"
    default_levels = (2, 3, 4, 5)
    min_level = 1

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        # One cycle through all letters: a walk shorter than it never repeats, so no hop can be skipped.
        letters = rng.sample(ascii_lowercase, level + 2)
        target = dict(zip(letters, letters[1:] + letters[:1], strict=True))
        listing = " ".join(f"{letter}>{target[letter]}" for letter in rng.sample(letters, len(letters)))
        prompt = f"{listing}; {level} from {rng.choice(letters)}\n"
        return prompt, self.work(prompt)[-1]

    def work(self, prompt: str) -> str:
        pointers, hops, start = read_question(prompt)
        target = dict(pair.split(">") for pair in pointers)
        stops = start
        for _ in range(int(hops)):
            stops += target[stops[-1]]
        return stops
