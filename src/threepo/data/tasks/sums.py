from random import Random
from typing import ClassVar

from threepo.data.task import Task


class Sums(Task):
    """Add numbers without carrying: `sum 4821 9930 5716` -> `8467`, each digit by itself, modulo 10. Level: how many
    numbers.

    Parity with ten values: short steps lead to it, but a policy that answers at once can only guess. Worked out by
    writing the sum so far after every number but the first.
    """

    name = "sums"
    default_levels = (3, 4, 5)
    min_level = 2
    width: ClassVar[int] = 4
    """Digits of every number; few guesses are right in all of them."""

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        # Half of the digits are 0: of uniform ones, none alone tells anything about the sum, and nothing is learned.
        numbers = ["".join(rng.choices("0123456789", (9, *[1] * 9), k=self.width)) for _ in range(level)]
        prompt = f"sum {' '.join(numbers)}\n"
        return prompt, self.work(prompt).split("\n")[-1]

    def work(self, prompt: str) -> str:
        so_far, *others = prompt.split()[1:]
        sums = []
        for number in others:
            so_far = "".join(str((int(a) + int(b)) % 10) for a, b in zip(so_far, number, strict=True))
            sums.append(so_far)
        return "\n".join(sums)
