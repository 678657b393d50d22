"""
Which prompt comes next: a function of the seed and of the position in the run.

[`EpochSampler`] orders the prompts of the data loader. Dynamic sampling takes more of them than the data loader
offers, so it draws from a [`PromptStream`].
"""

from collections.abc import Iterator

import numpy as np
import torch
from trl.trainer.utils import RepeatSampler

from ..config import OPOConfig


def check_enough_prompts(available: int, args: OPOConfig) -> None:
    """Check that a dataset fills one rollout: TRL's sampler drops an incomplete one, and would train for no step."""
    needed = args.generation_batch_size // args.num_generations
    if available < needed:
        said = f"generation_batch_size={args.generation_batch_size} with num_generations={args.num_generations}"
        said += f" needs {needed} prompts for one rollout, but the dataset has {available}"
        fix = "`per_device_train_batch_size`, `steps_per_generation` or `gradient_accumulation_steps`"
        raise ValueError(f"{said}. Provide {needed}, or lower {fix}.")


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler, which would begin with the first epoch's order when a run is resumed in a later one."""

    epoch = 0  # of the next iteration

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):  # TRL's order of an epoch depends on the permutations before it
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


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
