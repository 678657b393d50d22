"""
Dynamic sampling (DAPO, section 3.2): zero-variance groups are replaced by groups of new prompts.

A group whose rewards are all equal has no advantage: it takes a place in the batch without moving the policy. Each
such place is offered to new prompts, in at most `max_sampling_rounds` rounds of generation, each for as many prompts
as there are places left, or a few more, if their completions do not divide evenly among the processes. Places that are
still left keep their zero-variance group. All processes make the same decisions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from ..batch import Batch, completion_tokens, concatenate, exchange, take, to_widths, widths_of_tables
from ..groups import equal_rewards, gather_samples
from ..trl import MULTIMODAL_KEYS
from .prompt_order import PromptStream


@dataclass
class DynamicSampling:
    """Fills rollouts with groups whose rewards differ."""

    stream: PromptStream
    accelerator: Accelerator
    num_generations: int
    max_rounds: int  # of generation for a rollout, at least 1

    def fill(
        self, generate: Callable[[list[int], bool], Batch], n_local: int, reward_weights: Tensor
    ) -> tuple[Batch, dict[str, float]]:
        """
        Generate a rollout, and replace its zero-variance groups by groups of new prompts.

        `generate` makes and scores one completion for each of this process's `n_local` prompt indices; its second
        argument is whether this is the first round. Returns the samples of this process, and metrics of the rounds.
        """
        n_processes = self.accelerator.num_processes
        n_prompts = n_local * n_processes // self.num_generations
        # The completions of a multiple of so many prompts divide evenly among the processes
        multiple = n_processes // math.gcd(n_processes, self.num_generations)
        rollout = generate(self._local_prompts(n_prompts), True)
        if rollout.keys() & {*MULTIMODAL_KEYS}:
            raise ValueError(f"max_sampling_rounds={self.max_rounds} cannot replace samples with images. Set it to 1.")
        places = self._zero_variance(rollout, reward_weights)
        first, rounds = len(places), 1
        while places and rounds < self.max_rounds:
            rounds += 1
            n_further = math.ceil(len(places) / multiple) * multiple
            further = generate(self._local_prompts(n_further), False)
            useless = self._zero_variance(further, reward_weights)
            used = [group for group in range(n_further) if group not in useless][: len(places)]
            rollout = self._replace(rollout, further, places[: len(used)], used)
            places = places[len(used) :]
        return rollout, {
            "rounds": rounds,
            "frac_replaced": (first - len(places)) / n_prompts,
            "frac_without_spread": len(places) / n_prompts,
            "epoch": self.stream.position / self.stream.n_prompts,
        }

    def _local_prompts(self, count: int) -> list[int]:
        """This process's prompt indices in a round of `count` prompts, each repeated for its completions."""
        prompts = np.repeat(self.stream.draw(count), self.num_generations)
        return np.split(prompts, self.accelerator.num_processes)[self.accelerator.process_index].tolist()

    def _zero_variance(self, rollout: Batch, reward_weights: Tensor) -> list[int]:
        """Groups, over all processes, whose valid completions all have the same reward."""
        _, length, _, _, per_func = gather_samples(rollout, None, self.accelerator)
        valid = (length > 0) & ~per_func.isnan().all(dim=1)
        equal, _ = equal_rewards(per_func, reward_weights.cpu().double(), valid, self.num_generations)
        return equal[:: self.num_generations].nonzero().flatten().tolist()

    def _replace(self, rollout: Batch, further: Batch, places: list[int], groups: list[int]) -> Batch:
        """The rollout with `groups` of the `further` one in its `places`; both are numbered over all processes."""
        accelerator = self.accelerator
        to, of = self._samples(places), self._samples(groups)
        n_local = len(rollout["advantages"])
        first = accelerator.process_index * n_local
        mine = (to >= first) & (to < first + n_local)
        # Every process has padded to its own longest sample, and has samples for the places of others.
        tables = widths_of_tables(further)
        own = torch.tensor([[*tables.values()]], device=accelerator.device)
        widths = zip(tables, accelerator.gather(own).amax(dim=0).tolist(), strict=True)
        further = to_widths(further, dict(widths))
        order = np.arange(n_local)
        order[to[mine] - first] = n_local + np.arange(mine.sum())
        merged = take(concatenate([rollout, exchange(further, of[mine], accelerator)]), order)
        merged["num_items_in_batch"] = accelerator.gather(completion_tokens(merged).sum()).sum()
        return merged

    def _samples(self, groups: list[int]) -> np.ndarray:
        n = self.num_generations
        return np.array([group * n + i for group in groups for i in range(n)], dtype=int)
