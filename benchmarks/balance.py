"""
How long processes wait for the one with the most tokens, with and without exchanging samples; counted, not timed.

    python -m benchmarks.balance      # → results/balance.md, from the planning itself; a few seconds

Samples have the lengths of MATH's solutions. As in TRL, processes hold consecutive groups of 8. Some are zero-variance
groups, whose samples the first optimizer step over a rollout leaves out. A step takes as long as the process with the
most padded tokens. The numbers are padded tokens of that process, relative to the mean number of real tokens.
"""

import json
from pathlib import Path

import numpy as np

from opo_trl.rollout.planning import Limits, best_cut, partition, split_further


RESULTS = Path(__file__).resolve().parent / "results"
GROUP, ROWS_PER_PROCESS, MICRO_BATCH = 8, 16, 4
LIMITS = Limits(MICRO_BATCH)
TRIALS = 200


def padded_tokens(lengths: np.ndarray, n_parts: int) -> int:
    """Tokens that a process passes through the model for samples `[B, 2]`, longest first, in planned micro-batches."""
    if len(lengths) <= n_parts:
        return int(lengths.sum())
    parts = np.split(lengths, split_further(lengths, best_cut(lengths, LIMITS)[1], n_parts))
    return sum(len(part) * int(part.max(axis=0).sum()) for part in parts)


def busiest(processes: int, dead: float, exchange: bool) -> float:
    """Padded tokens of the busiest process relative to the real tokens of the mean process, on average."""
    percentiles = json.loads((RESULTS / "math_lengths.json").read_text())["percentiles"]
    random = np.random.default_rng(0)
    n = processes * ROWS_PER_PROCESS
    most, mean = 0.0, 0.0
    for _ in range(TRIALS):
        problems = np.repeat(random.choice(percentiles["problem"], n // GROUP), GROUP)
        lengths = np.stack([problems, random.choice(percentiles["solution"], n)], axis=1)
        zero = np.repeat(random.random(n // GROUP) < dead, GROUP)
        parts = partition(lengths, zero, processes) if exchange else np.arange(n).reshape(processes, -1)
        active = [lengths[rows][~zero[rows]] for rows in parts]
        cuts = [best_cut(rows, LIMITS) for rows in active]
        active = [rows[order] for rows, (order, *_) in zip(active, cuts, strict=True)]
        n_parts = max(len(bounds) + 1 for _, bounds, *_ in cuts)
        most += max(padded_tokens(rows, n_parts) for rows in active)
        mean += lengths[~zero].sum() / processes
    return most / mean


def main() -> str:
    """The page."""
    lines = [
        "# Processes waiting for the busiest",
        "",
        "`python -m benchmarks.balance` makes this page; its docstring says what is counted. "
        f"{ROWS_PER_PROCESS} completions per",
        f"process and optimizer step, groups of {GROUP}, micro-batches of {MICRO_BATCH}, means of {TRIALS} rollouts.",
        "",
        "| processes | zero-variance groups | samples stay | samples are exchanged |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for processes in (2, 4, 8):
        for dead in (0.0, 0.4):
            stay, exchanged = (busiest(processes, dead, exchange) for exchange in (False, True))
            lines.append(f"| {processes} | {dead:.0%} | {stay:.2f} | {exchanged:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "balance.md").write_text(main())
