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
from ..contract import MULTIMODAL_KEYS
from ..groups import equal_rewards, gather_samples
from .prompt_order import PromptStream


@dataclass
class DynamicSampling:
    """Fills rollouts with groups whose rewards differ."""

    stream: PromptStream
    accelerator: Accelerator
    num_generations: int
    max_rounds: int  # most rounds of generation for a rollout, at least 1

    def fill(
        self, generate: Callable[[list[int], bool], Batch], n_local: int, reward_weights: Tensor
    ) -> tuple[Batch, dict[str, float]]:
        """
        Generate a rollout, and replace its zero-variance groups by groups of new prompts.

        `generate` makes and scores one completion for each of this process's `n_local` prompt indices; its second
        argument is whether this is the first round. `reward_weights` are those of the reward functions. Returns the
        samples of this process, and metrics of the rounds.
        """
        n_processes = self.accelerator.num_processes
        n_prompts = n_local * n_processes // self.num_generations
        # The completions of so many prompts, or a multiple of them, divide evenly among the processes: with 6
        # processes and 4 completions of a prompt, those of 3 prompts do, 2 on each.
        fewest_prompts = n_processes // math.gcd(n_processes, self.num_generations)
        rollout = generate(self._local_prompts(n_prompts), True)
        if rollout.keys() & {*MULTIMODAL_KEYS}:  # entries of images
            raise ValueError(f"max_sampling_rounds={self.max_rounds} cannot replace samples with images. Set it to 1.")
        places = self._zero_variance(rollout, reward_weights)  # numbers of the groups that are to be replaced
        n_without_spread = len(places)
        n_rounds = 1
        while places and n_rounds < self.max_rounds:
            n_rounds += 1
            n_multiples = math.ceil(len(places) / fewest_prompts)
            n_further = n_multiples * fewest_prompts
            further = generate(self._local_prompts(n_further), False)
            without_spread = self._zero_variance(further, reward_weights)
            with_spread = [group for group in range(n_further) if group not in without_spread]
            n_replaced = min(len(with_spread), len(places))
            rollout = self._replace(rollout, further, places[:n_replaced], with_spread[:n_replaced])
            places = places[n_replaced:]
        n_replaced_in_all = n_without_spread - len(places)
        return rollout, {
            "rounds": n_rounds,
            "frac_replaced": n_replaced_in_all / n_prompts,
            "frac_without_spread": len(places) / n_prompts,
            "epoch": self.stream.position / self.stream.n_prompts,
        }

    def _local_prompts(self, count: int) -> list[int]:
        """This process's prompt indices in a round of `count` prompts, each repeated for its completions."""
        prompts = np.repeat(self.stream.draw(count), self.num_generations)
        of_processes = np.split(prompts, self.accelerator.num_processes)
        return of_processes[self.accelerator.process_index].tolist()

    def _zero_variance(self, rollout: Batch, reward_weights: Tensor) -> list[int]:
        """Numbers of the groups, over all processes, whose valid completions all have the same reward."""
        _, lengths, _, _, rewards = gather_samples(rollout, None, self.accelerator)
        is_unscored = rewards.isnan().all(dim=1)
        valid = (lengths > 0) & ~is_unscored
        equal, _ = equal_rewards(rewards, reward_weights.cpu().double(), valid, self.num_generations)
        of_groups = equal[:: self.num_generations]  # all completions of a group have the same value
        return of_groups.nonzero().flatten().tolist()

    def _replace(self, rollout: Batch, further: Batch, places: list[int], groups: list[int]) -> Batch:
        """The rollout with `groups` of the `further` one in its `places`; both are numbered over all processes."""
        accelerator = self.accelerator
        replaced = self._completions(places)
        replacing = self._completions(groups)
        n_local = len(rollout["advantages"])
        first = accelerator.process_index * n_local  # number of this process's first completion
        is_local = (replaced >= first) & (replaced < first + n_local)
        replacements = exchange(self._equally_wide(further), replacing[is_local], accelerator)
        # Of this process's completions and, behind them, their replacements: in each place of the rollout the one that
        # belongs there.
        order = np.arange(n_local)
        local_places = replaced[is_local] - first
        order[local_places] = n_local + np.arange(len(local_places))
        merged = take(concatenate([rollout, replacements]), order)
        # TRL's count of the tokens that are trained, over all processes
        n_local_tokens = completion_tokens(merged).sum()
        merged["num_items_in_batch"] = accelerator.gather(n_local_tokens).sum()
        return merged

    def _equally_wide(self, rollout: Batch) -> Batch:
        """
        A rollout with as many columns on every process. Each has padded to its own longest completion, and has
        completions for the places of others.
        """
        columns = widths_of_tables(rollout)
        local_widths = torch.tensor([[*columns.values()]], device=self.accelerator.device)
        widths = self.accelerator.gather(local_widths).amax(dim=0).tolist()
        return to_widths(rollout, dict(zip(columns, widths, strict=True)))

    def _completions(self, groups: list[int]) -> np.ndarray:
        """Numbers of the completions of some groups, over all processes."""
        firsts = np.array(groups, dtype=int) * self.num_generations
        return (firsts[:, None] + np.arange(self.num_generations)).reshape(-1)
