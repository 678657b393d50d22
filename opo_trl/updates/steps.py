"""Which optimizer step a completion serves: a function of the seed and of the position in the run."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from accelerate import Accelerator

from ..batch import Batch, take
from ..config import OPOConfig


def optimizer_step_of_rows(n_rows: int, n_steps: int, *, seed: int, rollout: int, passed: int = 0) -> np.ndarray:
    """
    Choose the optimizer step, in `0 … n_steps − 1`, of each completion of a rollout, over all processes: `[n_rows]`.

    Every `n_steps` consecutive completions go to different steps. Each process holds consecutive completions, so it
    has as many for each step, however many processes there are; and the completions of a prompt are spread evenly.
    `rollout` is the number of the rollout in the run, `passed` that of the passes over it so far.
    """
    # The steps are permuted within each block: a permutation of all completions could give a process more of them for
    # a step than its micro-batches have places for. Seeded by the rollout, the generator has no state to save, and all
    # processes draw the same steps without communication.
    generator = np.random.default_rng((seed, rollout, passed))
    blocks = np.tile(np.arange(n_steps), (n_rows // n_steps, 1))
    return generator.permuted(blocks, axis=1).reshape(-1)


def rows_of_steps(
    rollout: Mapping[str, Any], args: OPOConfig, accelerator: Accelerator, *, index: int, passed: int
) -> list[Batch]:
    """
    Split this process's completions of a rollout by optimizer step, the same number for each.

    The completions, TRL's tensors and lists, are in the order of the prompts. `index` is the number of the rollout in
    the run, `passed` that of the passes over it so far.
    """
    # Where steps do not divide the rollout, windows of accumulation begin at every multiple of the gcd, so only runs
    # of that length serve a single step.
    calls_of_a_step = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
    n_steps = args.steps_per_generation // calls_of_a_step
    # Drawn for the completions of all processes, so that the result does not depend on how many there are.
    n_local = len(rollout["completion_ids"])
    n_rows = n_local * accelerator.num_processes
    step_of_row = optimizer_step_of_rows(n_rows, n_steps, seed=args.seed, rollout=index, passed=passed)
    first = accelerator.process_index * n_local
    # Every step has the same number of this process's completions, so equal slices of the sorted ones are the steps.
    # Stable: within a step, completions stay in the order of the prompts.
    by_step = np.argsort(step_of_row[first : first + n_local], kind="stable")
    return [take(rollout, completions) for completions in np.split(by_step, n_steps)]
