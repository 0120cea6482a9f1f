"""Data of six small tasks that no recipe was tuned on: two each of format, arithmetic and search.

    python benchmarks/small_tasks.py runs/small

writes a folder for each task, with `train.jsonl` and `heldout.jsonl` (prompt and answer) and `demonstrations.jsonl`
(conversations, of which about two in three have one wrong character). `testbeds/small_start` fine-tunes a new model on
the demonstrations, so that it is right now and then, and `testbeds/small` trains it. A prompt is held out by its hash.
"""

import argparse
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from threepo.files import atomic_file

TRAIN, HELDOUT, RIGHT = 4096, 256, 0.35
WORDS = [
    "apple",
    "bread",
    "chair",
    "dance",
    "eagle",
    "flute",
    "grape",
    "house",
    "ivory",
    "jelly",
    "knife",
    "lemon",
    "mango",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
NAMES = [
    "Ada",
    "Bob",
    "Cleo",
    "Dan",
    "Eve",
    "Finn",
    "Gil",
    "Hana",
    "Ian",
    "Jo",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pam",
]
ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V"}


def as_json(rng: random.Random) -> tuple[str, str]:
    """Format: a sentence as a JSON object."""
    name, age = rng.choice(NAMES), rng.randrange(1, 100)
    return f"{name} is {age}. As JSON:", json.dumps({"name": name, "age": age})


def iso_date(rng: random.Random) -> tuple[str, str]:
    """Format: a date in ISO 8601."""
    day, month, year = rng.randrange(1, 29), rng.randrange(12), rng.randrange(1900, 2100)
    return f"{day} {MONTHS[month]} {year} in ISO:", f"{year}-{month + 1:02}-{day:02}"


def roman(rng: random.Random) -> tuple[str, str]:
    """Arithmetic: a number as a roman numeral."""
    number = rest = rng.randrange(1, 4000)
    text = ""
    for value, letters in {**ROMAN, 4: "IV", 1: "I"}.items():
        text += letters * (rest // value)
        rest %= value
    return f"{number} in roman numerals:", text


def difference(rng: random.Random) -> tuple[str, str]:
    """Arithmetic: the difference of two numbers with three digits."""
    low, high = sorted(rng.sample(range(100, 1000), 2))
    return f"{high} - {low} =", str(high - low)


def anagram(rng: random.Random) -> tuple[str, str]:
    """Search: the word that has these letters."""
    word = rng.choice(WORDS)
    return f"A word of {''.join(rng.sample(word, len(word)))}:", word


def missing(rng: random.Random) -> tuple[str, str]:
    """Search: the digit that is not there."""
    digits = rng.sample("0123456789", 10)
    return f"Which digit is missing in {''.join(digits[1:])}?", digits[0]


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    task.__name__: task for task in (as_json, iso_date, roman, difference, anagram, missing)
}


def problems(name: str, heldout: bool, seed: int) -> Iterator[tuple[str, str]]:
    """Endless problems of a task, or its endless held-out ones."""
    rng = random.Random(f"{name} {seed}")
    while True:
        prompt, answer = TASKS[name](rng)
        if (zlib.crc32(prompt.encode()) % 10 == 0) == heldout:
            yield prompt, answer


def with_a_slip(answer: str, rng: random.Random) -> str:
    """The answer with one character replaced by another one of such answers."""
    place = rng.randrange(len(answer))
    alphabet = (
        "0123456789" if answer[place].isdigit() else "MDCLXVI" if answer.isupper() else "abcdefghijklmnopqrstuvwxyz"
    )
    return answer[:place] + rng.choice(alphabet.replace(answer[place], "")) + answer[place + 1 :]


def write(folder: Path, name: str) -> None:
    """Write the three files of a task."""
    rng, files = random.Random(name), {}
    for file, heldout, count in (("train", False, TRAIN), ("heldout", True, HELDOUT)):
        own = problems(name, heldout, seed=0)
        files[file] = [dict(zip(("prompt", "answer"), next(own), strict=True)) for _ in range(count)]
    own = problems(name, heldout=False, seed=1)
    files["demonstrations"] = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]}
        for prompt, answer in (next(own) for _ in range(TRAIN))
        for said in [answer if rng.random() < RIGHT else with_a_slip(answer, rng)]
    ]
    (folder / name).mkdir(parents=True, exist_ok=True)
    for file, rows in files.items():
        if file != "demonstrations":  # a message each, so that the chat template applies
            rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        with atomic_file(folder / name / f"{file}.jsonl") as path:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args().folder
    for task in TASKS:
        write(chosen, task)
        print(chosen / task)
