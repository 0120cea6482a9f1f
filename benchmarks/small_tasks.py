"""Data of six small tasks that no recipe was tuned on: two each of format, arithmetic and search.

    python benchmarks/small_tasks.py runs/small

writes a folder for each task, with `train.jsonl` and `heldout.jsonl` (prompt and answer) and `demonstrations.jsonl`, of
which about two in three have one wrong character. Half of the tasks are chat messages, the others plain text.
`testbeds/small_start` fine-tunes a new model on the demonstrations, so that it is right now and then, and
`testbeds/small` trains it. A prompt is held out by its hash.
"""

import argparse
import json
import random
import zlib
from calendar import month_name
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from threepo.files import atomic_file

TRAIN, HELDOUT, TOLD, RIGHT = 2048, 256, 3072, 0.35
WORDS = ["basket", "candle", "forest", "garden", "hunter", "island", "jacket", "market", "orange", "pencil", "silver"]
NAMES = ["Ada", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gil", "Hana", "Ian", "Jo", "Kim", "Leo"]
ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL"}
ROMAN |= {10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}


def as_json(rng: random.Random) -> tuple[str, str]:
    """Format: a sentence as a JSON object."""
    name, points = rng.choice(NAMES), rng.randrange(1, 1000)
    return f"{name} has {points} points. As JSON:", json.dumps({"name": name, "points": points})


def iso_date(rng: random.Random) -> tuple[str, str]:
    """Format: a date in ISO 8601."""
    day, month, year = rng.randrange(1, 29), rng.randrange(1, 13), rng.randrange(1900, 2100)
    return f"{day} {month_name[month]} {year} in ISO:", f"{year}-{month:02}-{day:02}"


def roman(rng: random.Random) -> tuple[str, str]:
    """Arithmetic: a number as a roman numeral."""
    number = rest = rng.randrange(1, 4000)
    text = ""
    for value, letters in ROMAN.items():
        text += letters * (rest // value)
        rest %= value
    return f"{number} in roman numerals:", text


def added(rng: random.Random) -> tuple[str, str]:
    """Arithmetic: a number of three digits plus one of one digit."""
    number, digit = rng.randrange(100, 1000), rng.randrange(1, 10)
    return f"{number} + {digit} =", str(number + digit)


def anagram(rng: random.Random) -> tuple[str, str]:
    """Search: the word that has these letters."""
    word = rng.choice(WORDS)
    return f"A word of {''.join(rng.sample(word, len(word)))}:", word


def largest(rng: random.Random) -> tuple[str, str]:
    """Search: the largest of three numbers."""
    numbers = rng.sample(range(10, 100), 3)
    return f"The largest of {' '.join(map(str, numbers))}:", str(max(numbers))


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    task.__name__: task for task in (as_json, iso_date, roman, added, anagram, largest)
}
PLAIN: tuple[str, ...] = ("iso_date", "anagram", "largest")
"""Tasks whose prompts are text; the others are messages for a chat template."""


def problems(name: str, heldout: bool, seed: int) -> Iterator[tuple[str, str]]:
    """Different problems of a task, or those of them that are held out."""
    rng, seen = random.Random(f"{name} {seed}"), set()
    while True:
        prompt, answer = TASKS[name](rng)
        if (zlib.crc32(prompt.encode()) % 10 == 0) == heldout and prompt not in seen:
            seen.add(prompt)
            yield prompt, answer


def with_a_slip(answer: str, rng: random.Random) -> str:
    """The answer with one character replaced by another one of such answers."""
    place = rng.randrange(len(answer))
    alphabet = (
        "0123456789" if answer[place].isdigit() else "MDCLXVI" if answer.isupper() else "abcdefghijklmnopqrstuvwxyz"
    )
    return answer[:place] + rng.choice(alphabet.replace(answer[place], "")) + answer[place + 1 :]


def asked(name: str, text: str) -> Any:
    """The prompt of a task: text, or a message of the user."""
    return text if name in PLAIN else [{"role": "user", "content": text}]


def told(name: str, text: str) -> Any:
    """The answer that a demonstration gives: text, or a message of the assistant."""
    return text if name in PLAIN else [{"role": "assistant", "content": text}]


def write(folder: Path, name: str) -> None:
    """Write the three files of a task."""
    rng = random.Random(name)
    rows: dict[str, list[Any]] = {}
    for file, heldout, count in (("train", False, TRAIN), ("heldout", True, HELDOUT)):
        own = islice(problems(name, heldout, seed=0), count)
        rows[file] = [{"prompt": asked(name, prompt), "answer": answer} for prompt, answer in own]
    rows["demonstrations"] = [
        {
            "prompt": asked(name, prompt),
            "completion": told(name, answer if rng.random() < RIGHT else with_a_slip(answer, rng)),
        }
        for prompt, answer in islice(problems(name, heldout=False, seed=1), TOLD)
    ]
    (folder / name).mkdir(parents=True, exist_ok=True)
    for file, lines in rows.items():
        with atomic_file(folder / name / f"{file}.jsonl") as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args().folder
    for task in TASKS:
        write(chosen, task)
        print(chosen / task)
