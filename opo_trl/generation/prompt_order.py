"""
Which prompt comes next: a function of the seed and of the position in the run.

[`EpochSampler`] orders the prompts of the data loader. Dynamic sampling takes more of them than the data loader
offers, so it draws from a [`PromptStream`].
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from trl.trainer.utils import RepeatSampler

from ..config import OPOConfig


def check_enough_prompts(available: int, args: OPOConfig) -> None:
    """Check that a dataset fills one rollout: TRL's sampler drops an incomplete one, and would train for no step."""
    needed = args.prompts_per_rollout
    if available < needed:
        said = f"generation_batch_size={args.generation_batch_size} with num_generations={args.num_generations}"
        said += f" needs {needed} prompts for one rollout, but the dataset has {available}"
        fix = "`per_device_train_batch_size`, `steps_per_generation` or `gradient_accumulation_steps`"
        raise ValueError(f"{said}. Provide {needed}, or lower {fix}.")


def next_place(place: Mapping[str, int], count: int, n_prompts: float) -> dict[str, int]:
    """
    The place after a rollout of `count` prompts: an epoch over `n_prompts`, and how many of it have been taken. At its
    end, prompts that fill no rollout are left out.
    """
    epoch, taken = place["epoch"], place["prompts"]
    if taken + count > n_prompts:
        epoch, taken = epoch + 1, 0
    return {"epoch": epoch, "prompts": taken + count}


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler, which would begin with the first epoch's order wherever a run is resumed."""

    epoch = prompts = skipped = 0  # of the next iteration

    def begin(self, epoch: int, prompts: int, *, skipped: int) -> None:
        """
        Begin the next iteration in an epoch, after some of its prompts. The first `skipped` micro-steps come in
        addition: nobody reads their prompts.
        """
        self.epoch, self.prompts, self.skipped = epoch, prompts, skipped

    def __iter__(self) -> Iterator[int]:
        skipped = itertools.repeat(0, self.skipped * self.batch_size * self.mini_repeat_count)
        yield from itertools.islice(itertools.chain(skipped, self._samples()), len(self))

    def _samples(self) -> Iterator[int]:
        """Prompts from the place on, epoch after epoch; of an incomplete rollout none."""
        first = self.prompts
        for epoch in itertools.count(self.epoch):
            order = self._order(epoch)
            for start in range(first, self.num_samples - self.batch_size + 1, self.batch_size):
                of_rollout = order[start : start + self.batch_size]
                of_micro_step = [prompt for prompt in of_rollout for _ in range(self.mini_repeat_count)]
                yield from of_micro_step * self.repeat_count
            first = 0

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        self.generator.manual_seed(self.seed)
        for _ in range(epoch):  # TRL's order of an epoch depends on the permutations before it
            torch.randperm(self.num_samples, generator=self.generator)
        return torch.randperm(self.num_samples, generator=self.generator).tolist()

    def prompts_after(self, place: Mapping[str, int]) -> list[int]:
        """Indices of the prompts of the rollout that comes after a place ([`next_place`])."""
        end = next_place(place, self.batch_size, self.num_samples)
        return self._order(end["epoch"])[end["prompts"] - self.batch_size : end["prompts"]]


class PromptStream:
    """Endless sequence of prompts, epoch after epoch. Each has every prompt once, however many a rollout takes."""

    def __init__(self, n_prompts: int, *, seed: int, shuffle: bool = True):
        self.n_prompts, self.seed, self.shuffle = n_prompts, seed, shuffle
        self.position = 0  # of the next prompt

    def draw(self, count: int) -> list[int]:
        """Indices of the next `count` prompts."""
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, place = divmod(self.position, self.n_prompts)
            order = np.arange(self.n_prompts)
            if self.shuffle:
                order = np.random.default_rng((self.seed, epoch)).permutation(self.n_prompts)
            rest = order[place:][: count - len(drawn)].tolist()
            drawn += rest
            self.position += len(rest)
        return drawn
