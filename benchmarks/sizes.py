"""Data of the study `sizes`: words of six letters from their letters in another order, in prompts of seven characters.

    python benchmarks/sizes.py runs/small

writes runs/small/bare_anagram as small_tasks.py writes its tasks: one demonstration in three is right, and the others
have one wrong letter. Prompts are short, so that a model of 50 M weights can be trained on a CPU.
"""

import argparse
import random
from pathlib import Path

import small_tasks


def bare_anagram(rng: random.Random) -> tuple[str, str]:
    """Search: the word that has these letters, which are all of the prompt."""
    word = rng.choice(small_tasks.WORDS)
    return f"{''.join(rng.sample(word, len(word)))}:", word


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    small_tasks.TASKS["bare_anagram"] = bare_anagram
    small_tasks.PLAIN = (*small_tasks.PLAIN, "bare_anagram")
    small_tasks.write(folder, "bare_anagram")
