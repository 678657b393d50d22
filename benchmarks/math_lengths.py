"""
Lengths of the MATH dataset's problems and solutions in tokens of Qwen3, for the benchmarks.

    python -m benchmarks.math_lengths DATA/math DATA/Qwen3-1.7B      # → benchmarks/results/math_lengths.json
"""

import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from opo_trl.data import load_problems


RESULT = Path(__file__).resolve().parent / "results" / "math_lengths.json"


def main(data: str, tokenizer_folder: str) -> None:
    """Write the percentiles 0, 1, … 100 of both lengths, over the training split."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    problems = load_problems(data)
    percentiles = {}
    for column in ("problem", "solution"):
        lengths = [len(ids) for ids in tokenizer(list(problems[column]))["input_ids"]]
        percentiles[column] = np.percentile(lengths, range(101), method="nearest").astype(int).tolist()
    content = {"rows": len(problems), "tokenizer": "Qwen3-1.7B", "percentiles": percentiles}
    RESULT.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
