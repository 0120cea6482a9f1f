"""Rows of the published data sets' schemas, with contents of our own, and files of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from threepo.data.published import CODE_R1_INSTRUCTIONS, DAPO_AFTER, DAPO_BEFORE

Row = dict[str, Any]


def dapo_row(problem: str, answer: str, index: str) -> Row:
    """A row of BytedTsinghua-SIA/DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{DAPO_BEFORE}\n\n{problem}\n\n{DAPO_AFTER}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def code_row(problem: str, tests: Any, instruction: str = CODE_R1_INSTRUCTIONS[1]) -> Row:
    """A row of ganler/code-r1-12k; the columns that only its LeetCode half fills are null."""
    prompt = f"{instruction}\n{problem}"
    return {
        "task_id": None,
        "entry_point": None,
        "test": None,
        "data_source": "code",
        "prompt": [
            {"content": "Think in <think>, answer in <answer>.", "role": "system"},
            {"content": prompt, "role": "user"},
        ],
        "ability": "coding",
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
        "extra_info": {
            "dataset": "likaixin/TACO-verified",
            "index": 3,
            "prompt": prompt,
            "reference": "print(1)",
            "split": "train",
        },
    }


def gsm8k_row(question: str, answer: str) -> Row:
    """A row of openai/gsm8k, main."""
    return {"question": question, "answer": answer}


def write_rows(path: Path, rows: list[Row]) -> Path:
    """A .jsonl or .parquet file of the rows; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
