"""
Reuse of completions: which samples a pass trains on.

The first pass over a rollout trains on its samples. With `max_staleness: 0`, so does each further pass. Otherwise a
further pass draws as many samples from the latest `max_staleness` + 1 rollouts: each place of a group in a rollout is
served by the group that one of these rollouts has there, among those whose advantages differ. So every process draws
as many samples of its own, and the same groups are drawn whatever the number of processes.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..batch import Batch, concatenate, take
from ..contract import MULTIMODAL_KEYS
from ..groups import have_spread


@dataclass
class ReplayBuffer:
    """
    The latest rollouts of this process, and of each which groups, over all processes, carry a learning signal.

    A completion is trained on at most `max_staleness` rollouts after its own; it is one rollout older with
    `prefetch_rollouts`.
    """

    max_staleness: int  # number of rollouts that are kept besides the current one
    num_generations: int  # completions of a group
    seed: int  # seed of the draws
    process: int  # index of this process

    def __post_init__(self):
        self.rollouts: deque[Batch] = deque(maxlen=self.max_staleness + 1)  # the oldest first
        # For each of these rollouts, which of its groups, over all processes, have advantages that differ
        self.useful: deque[list[bool]] = deque(maxlen=self.max_staleness + 1)

    def add(self, rollout: Batch, advantages: torch.Tensor) -> None:
        """
        Add this process's part of a rollout. Once `max_staleness` + 1 are kept, the oldest one is dropped.

        `advantages` are those of all processes' completions, `[N]`, NaN for completions that do not take part: a group
        whose advantages differ carries a learning signal and may be drawn again. A `ValueError` if the rollout cannot
        be replayed, as it has images or other entries than the one before.
        """
        if self.max_staleness:  # else only the current rollout is kept, and nothing is drawn
            images = sorted(rollout.keys() & set(MULTIMODAL_KEYS))
            if images:
                raise ValueError(
                    f"max_staleness={self.max_staleness} cannot replay samples with {', '.join(images)}. "
                    "Set `max_staleness` to 0."
                )
            if self.rollouts and rollout.keys() != self.rollouts[-1].keys():
                raise ValueError(f"max_staleness={self.max_staleness} needs the same entries in every rollout.")
            useful = have_spread(advantages, advantages.isfinite(), self.num_generations)
            self.useful.append(useful.tolist())
        self.rollouts.append(rollout)

    def clear(self) -> None:
        """Drop all rollouts."""
        self.load_state_dict({})

    def rows_of_pass(self, rollout: int, passed: int) -> Batch:
        """
        This process's completions of one more pass over the latest rollout, number `rollout` of the run, which has had
        `passed` passes. From the second pass on, the place of each group is filled from one of the kept rollouts.
        """
        latest = self.rollouts[-1]
        if passed == 0 or len(self.rollouts) == 1:
            return latest
        rollout_of_group = self._choose_rollouts(rollout, passed)  # index in the buffer, for groups of all processes
        n_local = len(latest["advantages"])
        places = self.process * n_local + np.arange(n_local)  # of this process's completions among those of all
        rollout_of_sample = rollout_of_group[places // self.num_generations]
        # A sample keeps its place in whichever rollout it comes from. Samples are taken before they are put together:
        # a copy of the buffer would double its memory.
        drawn = []
        for index in np.unique(rollout_of_sample):
            samples = np.flatnonzero(rollout_of_sample == index)
            drawn.append(take(self.rollouts[index], samples))
        # The completions are in the order of the rollouts; each goes back to its place.
        order = np.argsort(rollout_of_sample, kind="stable")
        inverse = np.argsort(order)  # where each completion of the pass is in the joined batch
        return take(concatenate(drawn), inverse)

    def _choose_rollouts(self, rollout: int, passed: int) -> np.ndarray:
        """
        For the place of each group, over all processes, the index of the kept rollout from which a pass takes its
        group, int `[groups]`: drawn, with equal chances, among the rollouts whose group there is useful, that is, has
        advantages that differ. `rollout` (its number in the run) and `passed` (passes so far) seed the draw.
        """
        useful = np.array(self.useful)  # `[rollouts, groups]`, the latest rollout last
        # The highest draw of a place wins; draws are in [0, 1).
        draws = np.random.default_rng((self.seed, rollout, passed, 1)).random(useful.shape)
        draws[~useful] = -1
        # A place without a useful group is filled from the latest rollout: 2 is above all draws.
        draws[-1, ~useful.any(axis=0)] = 2
        return draws.argmax(axis=0)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text, for [`~ReplayBuffer.load_state_dict`]."""
        return {"rollouts": list(self.rollouts), "useful": list(self.useful)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of [`~ReplayBuffer.state_dict`], or from an empty one."""
        self.rollouts.clear()
        self.rollouts.extend(state.get("rollouts", ()))
        self.useful.clear()
        self.useful.extend(state.get("useful", ()))
