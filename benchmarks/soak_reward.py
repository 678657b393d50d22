"""The reward of benchmarks/soak.py: one completion in a thousand kills its worker, which is replaced."""

import os
from typing import Any
from zlib import crc32

from opo_trl.data.arithmetic import arithmetic_reward
from opo_trl.rewards.scoring import IsolatedReward


def fragile_reward(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    """`arithmetic_reward`, which ends its process for one in a thousand pairs of solution and completion."""
    if any(crc32(f"{worked} {text}".encode()) % 1000 == 0 for worked, text in zip(solution, completions, strict=True)):
        os._exit(1)
    return arithmetic_reward(completions, solution=solution, **columns)


isolated_reward = IsolatedReward(fragile_reward, workers=2)
