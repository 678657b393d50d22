"""
Which prompt comes next: a function of the seed and of the position in the run.

[`EpochSampler`] orders the prompts of the data loader. Dynamic sampling takes more of them than the data loader
offers, so it draws from a [`PromptStream`].
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import RepeatSampler

from ..config import OPOConfig


def check_enough_prompts(available: int | None, args: OPOConfig) -> None:
    """
    Check that a dataset fills one rollout: TRL's sampler drops an incomplete one, and would train for no step. `None`:
    a stream that has been found to fill none.
    """
    needed = args.prompts_per_rollout
    if available is None or available < needed:
        found = "fewer" if available is None else available
        raise ValueError(
            f"generation_batch_size={args.generation_batch_size} with num_generations={args.num_generations} needs "
            f"{needed} prompts for one rollout, but the dataset has {found}. Provide {needed}, or lower "
            "`per_device_train_batch_size`, `steps_per_generation` or `gradient_accumulation_steps`."
        )


@dataclass(frozen=True)
class Place:
    """A place in the data: an epoch, and how many prompts of it have been taken."""

    epoch: int = 0
    prompts: int = 0

    def after_rollout(self, count: int, n_prompts: float) -> "Place":
        """
        The place after a rollout of `count` prompts, in epochs over `n_prompts`. At the end of an epoch, prompts that
        fill no rollout are left out.
        """
        begin = self if self.prompts + count <= n_prompts else self.next_epoch()
        return Place(begin.epoch, begin.prompts + count)

    def next_epoch(self) -> "Place":
        """The beginning of the next epoch."""
        return Place(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Numbers; `Place(**state)` is the place again."""
        return asdict(self)


class InOneShard(torch.utils.data.IterableDataset):
    """A stream of data that hides of how many files it is."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def set_epoch(self, epoch: int) -> None:
        """Of the order in which the stream is shuffled."""
        self._stream.set_epoch(epoch)


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler, which would begin with the first epoch's order wherever a run is resumed."""

    start = Place()  # place in the data at which the next iteration begins
    skipped = 0  # number of micro-steps with which it begins, and whose prompts nobody reads

    def begin(self, place: Place, *, skipped: int) -> None:
        """
        Begin the next iteration at a place. The first `skipped` micro-steps come in addition: nobody reads their
        prompts.
        """
        self.start = place
        self.skipped = skipped

    def __iter__(self) -> Iterator[int]:
        unread = itertools.repeat(0, self.skipped * self.batch_size * self.mini_repeat_count)
        yield from itertools.islice(itertools.chain(unread, self._samples()), len(self))

    def _samples(self) -> Iterator[int]:
        """
        Indices of prompts, one for each completion, from the place on, epoch after epoch. A rollout has `batch_size`
        prompts, each repeated for its completions, and all of it is repeated `repeat_count` times, as in TRL. Prompts
        at the end of an epoch that fill no rollout are left out.
        """
        first = self.start.prompts
        for epoch in itertools.count(self.start.epoch):
            order = self._order(epoch)
            for begin in range(first, self.num_samples - self.batch_size + 1, self.batch_size):
                prompts_of_rollout = order[begin : begin + self.batch_size]
                samples = [prompt for prompt in prompts_of_rollout for _ in range(self.mini_repeat_count)]
                yield from samples * self.repeat_count
            first = 0

    def _order(self, epoch: int) -> list[int]:
        """Order of all prompts in an epoch: TRL's, which depends on the seed and the number of the epoch."""
        if not self.shuffle:
            return list(range(self.num_samples))
        self.generator.manual_seed(self.seed)
        for _ in range(epoch):  # TRL's order of an epoch depends on the permutations before it
            torch.randperm(self.num_samples, generator=self.generator)
        return torch.randperm(self.num_samples, generator=self.generator).tolist()

    def prompts_after(self, place: Place) -> list[int]:
        """Indices of the prompts of the rollout that comes after a place."""
        end = place.after_rollout(self.batch_size, self.num_samples)
        return self._order(end.epoch)[end.prompts - self.batch_size : end.prompts]


class PromptStream:
    """Endless sequence of prompts, epoch after epoch. Each has every prompt once, however many a rollout takes."""

    def __init__(self, n_prompts: int, *, seed: int, shuffle: bool = True):
        self.n_prompts = n_prompts
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0  # number of prompts that have been drawn, over all epochs

    def state_dict(self) -> dict[str, Any]:
        """Numbers, for [`~PromptStream.load_state_dict`]."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of [`~PromptStream.state_dict`]."""
        self.position = state["position"]

    def draw(self, count: int) -> list[int]:
        """Indices of the next `count` prompts."""
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, place = divmod(self.position, self.n_prompts)
            order = np.arange(self.n_prompts)
            if self.shuffle:
                order = np.random.default_rng((self.seed, epoch)).permutation(self.n_prompts)
            n_missing = count - len(drawn)
            prompts = order[place : place + n_missing].tolist()
            drawn += prompts
            self.position += len(prompts)
        return drawn
