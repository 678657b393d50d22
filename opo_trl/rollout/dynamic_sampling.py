"""
Dynamic sampling (DAPO, section 3.2): groups without spread of rewards are replaced by groups of further prompts.

A group whose rewards are all equal has no advantage, so it fills a place of the batch without moving the policy. Here
every place is offered to further prompts, for as many rounds of generation as the configuration allows:

1. The first round generates for as many prompts as the rollout has places.
2. Each further round generates for as many prompts as there are places left, so that no group with spread is thrown
   away. (Where these rows do not divide by the number of processes, the round is a few prompts larger; what it has too
   many goes back into the stream.)
3. After the last round, places that are still left keep the group without spread that was there.

Prompts come from a stream of their own, in which every epoch visits every prompt once, however many a rollout takes.
All processes see the same rewards and take the same decisions.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from torch import Tensor

from .rows import COMPLETION_COLUMNS, PROMPT_COLUMNS, EpochSampler, completion_tokens


logger = get_logger(__name__)

Rollout = dict[str, Any]

_ROWS = (*PROMPT_COLUMNS, *COMPLETION_COLUMNS, "advantages", "rewards_per_func")


class PromptStream:
    """
    Endless sequence of prompts: a permutation of all of them, then another one.

    The order is a function of the seed alone.

    Args:
        n_prompts (`int`):
            Number of prompts.
        seed (`int`):
            Seed of the run.
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether the epochs are permuted.

    Attributes:
        position (`int`): how many prompts have been drawn and not been given back at the end.
        returned (`list[int]`): positions of prompts that were given back; they are drawn first.
    """

    def __init__(self, n_prompts: int, *, seed: int, shuffle: bool = True):
        self.n_prompts, self.seed, self.shuffle = n_prompts, seed, shuffle
        self.position = 0
        self.returned: list[int] = []

    def draw(self, count: int) -> list[int]:
        """Take the next `count` positions."""
        drawn = [heapq.heappop(self.returned) for _ in range(min(count, len(self.returned)))]
        new = range(self.position, self.position + count - len(drawn))
        self.position += len(new)
        return [*drawn, *new]

    def give_back(self, positions: list[int]) -> None:
        """Put positions back that were drawn but not used."""
        for position in positions:
            heapq.heappush(self.returned, position)

    def prompts(self, positions: list[int]) -> list[int]:
        """Indices of the prompts at these positions."""
        orders = {epoch: self._order(epoch) for epoch in {position // self.n_prompts for position in positions}}
        return [int(orders[position // self.n_prompts][position % self.n_prompts]) for position in positions]

    def _order(self, epoch: int) -> Sequence[int] | np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_prompts)
        return np.random.default_rng((self.seed, epoch)).permutation(self.n_prompts)


class SampledPrompts(PromptStream):
    """
    Prompts in the order of a sampler: that of a subclass which overrides `_get_train_sampler`.

    Args:
        sampler (`Iterable[int]`):
            Indices of rows, repeated as [`~trl.trainer.utils.RepeatSampler`] repeats them. It is iterated once per
            epoch; [`EpochSampler`] is told the epoch. A resumed run sees the same prompts if a new sampler gives the
            same epochs again.
        rollout (`int`):
            Completions of a rollout: indices that the sampler gives before it repeats them.
        repeats (`int`):
            How often the sampler gives each rollout's indices.
        num_generations (`int`):
            Completions of a prompt: how often an index stands in a rollout.

    Raises:
        `ValueError`: an epoch of the sampler does not fill a rollout.
    """

    def __init__(self, sampler: Iterable[int], *, rollout: int, repeats: int, num_generations: int):
        self._sampler, self._rollout, self._repeats, self._num_generations = sampler, rollout, repeats, num_generations
        self._orders: list[list[int]] = []
        super().__init__(len(self._order(0)), seed=0, shuffle=False)

    def _order(self, epoch: int) -> list[int]:
        while len(self._orders) <= epoch:
            if isinstance(self._sampler, EpochSampler):
                self._sampler.epoch = len(self._orders)
            indices = list(self._sampler)
            starts = range(0, len(indices) - self._rollout + 1, self._rollout * self._repeats)
            prompts = [i for start in starts for i in indices[start : start + self._rollout : self._num_generations]]
            prompts = broadcast_object_list([prompts])[0]  # a sampler of one's own may differ between processes
            if not prompts:
                raise ValueError(
                    f"_get_train_sampler returned a sampler of {len(indices)} indices, but a rollout takes "
                    f"{self._rollout}. Return one that gives each index num_generations={self._num_generations} times."
                )
            self._orders.append(prompts)
        return self._orders[epoch]


def fill(trainer: Any, generate: Callable[[list[dict[str, Any]]], Rollout], n_local: int) -> Rollout:
    """
    Generate a rollout, and replace its groups without spread of rewards by groups of further prompts.

    Args:
        trainer ([`RolloutTrainer`]):
            Trainer whose stream gives the prompts. The metrics that `generate` logs are kept for the first round,
            whose prompts are as many, and drawn as freely, as without dynamic sampling.
        generate (`Callable`):
            Generates and scores one completion for each of this process's rows.
        n_local (`int`):
            Rows of this process.

    Returns:
        `dict[str, Any]`: rows of this process.
    """
    stream, n_generations = trainer._prompt_stream, trainer.num_generations
    n_prompts = n_local * trainer.accelerator.num_processes // n_generations
    rollout = generate(_rows(trainer, stream.draw(n_prompts)))
    _check(rollout)
    places = _without_spread(trainer, rollout)
    first, rounds = len(places), 1
    while places and rounds < trainer.args.max_sampling_rounds:
        rounds += 1
        positions = stream.draw(_divisible(trainer, len(places)))
        with trainer._metrics_kept():
            further = generate(_rows(trainer, positions))
        dead = set(_without_spread(trainer, further))
        alive = [group for group in range(len(positions)) if group not in dead]
        used, unused = alive[: len(places)], alive[len(places) :]
        stream.give_back([positions[group] for group in unused])
        rollout = _replace(trainer, rollout, further, places[: len(used)], used)
        places = places[len(used) :]
    _report(trainer, rounds=rounds, replaced=first - len(places), left=len(places), n_prompts=n_prompts)
    return rollout


def _rows(trainer: Any, positions: list[int]) -> list[dict[str, Any]]:
    """This process's rows of a round: each prompt as often as it has completions."""
    prompts = np.repeat(trainer._prompt_stream.prompts(positions), trainer.num_generations)
    mine = np.split(prompts, trainer.accelerator.num_processes)[trainer.accelerator.process_index]
    return [dict(trainer.train_dataset[int(index)]) for index in mine]


def _check(rollout: Rollout):
    unknown = rollout.keys() - {*_ROWS, "num_items_in_batch"}
    if unknown:
        raise ValueError(
            f"max_sampling_rounds does not know how to replace {', '.join(sorted(unknown))}: dynamic sampling is for "
            "text. Set `max_sampling_rounds` to 1."
        )


def _without_spread(trainer: Any, rollout: Rollout) -> list[int]:
    """Groups, over all processes, whose completions that take part have rewards that are all equal."""
    per_func = trainer.accelerator.gather(rollout["rewards_per_func"]).cpu().double()
    rewards = (per_func * trainer.reward_weights.cpu().double()).nansum(dim=1)
    has_tokens = trainer.accelerator.gather(completion_tokens(rollout).any(dim=1)).cpu()
    takes_part = (has_tokens & ~per_func.isnan().all(dim=1)).view(-1, trainer.num_generations)
    rewards = rewards.view_as(takes_part)
    highest = rewards.masked_fill(~takes_part, -torch.inf).amax(dim=1)
    lowest = rewards.masked_fill(~takes_part, torch.inf).amin(dim=1)
    return (highest <= lowest).nonzero().flatten().tolist()


def _divisible(trainer: Any, n_prompts: int) -> int:
    """The least number of prompts, from `n_prompts` on, whose completions all processes share evenly."""
    while n_prompts * trainer.num_generations % trainer.accelerator.num_processes:
        n_prompts += 1
    return n_prompts


def _rows_of_groups(groups: list[int], n_generations: int) -> Tensor:
    return torch.tensor([group * n_generations + row for group in groups for row in range(n_generations)]).long()


def _replace(trainer: Any, rollout: Rollout, further: Rollout, places: list[int], groups: list[int]) -> Rollout:
    """The rollout with its `places` taken by `groups` of a further one; both count over all processes."""
    accelerator, n_generations = trainer.accelerator, trainer.num_generations
    to, of = _rows_of_groups(places, n_generations), _rows_of_groups(groups, n_generations)
    n_local = len(rollout["advantages"])
    first = accelerator.process_index * n_local
    mine = (to >= first) & (to < first + n_local)
    to, of = to[mine] - first, of[mine]
    merged = dict(rollout)
    for name in _ROWS:  # in one order on all processes, as each is a collective call
        if name not in rollout:
            continue
        pad = trainer._tokenizer.pad_token_id if name in ("prompt_ids", "completion_ids") else 0
        left = name in PROMPT_COLUMNS
        # Every process pads to its own longest row, and holds rows that another one has a place for.
        theirs = accelerator.pad_across_processes(further[name], dim=1, pad_index=pad, pad_first=left)
        theirs = accelerator.gather(theirs)
        ours, theirs = _equally_wide(rollout[name], theirs, pad=pad, left=left)
        merged[name] = ours.clone()
        merged[name][to.to(ours.device)] = theirs[of.to(ours.device)]
    merged["num_items_in_batch"] = accelerator.gather(completion_tokens(merged).sum()).sum()
    return merged


def _equally_wide(*tables: Tensor, pad: int, left: bool) -> list[Tensor]:
    if tables[0].ndim == 1:
        return list(tables)
    width = max(table.size(1) for table in tables)
    missing = [width - table.size(1) for table in tables]
    return [
        torch.nn.functional.pad(table, (n, 0) if left else (0, n), value=pad)
        for table, n in zip(tables, missing, strict=True)
    ]


def _report(trainer: Any, *, rounds: int, replaced: int, left: int, n_prompts: int):
    stream = trainer._prompt_stream
    values: Mapping[str, float] = {
        "rounds": rounds,
        "frac_replaced": replaced / n_prompts,
        "frac_without_spread": left / n_prompts,
        "epoch": (stream.position - len(stream.returned)) / stream.n_prompts,
    }
    for name, value in values.items():
        trainer._metrics["train"][f"dynamic_sampling/{name}"].append(value)
    if left and not trainer._warned_of_bound:
        trainer._warned_of_bound = True
        logger.warning(
            f"After {rounds} rounds of generation (max_sampling_rounds={trainer.args.max_sampling_rounds}), {left} of "
            f"{n_prompts} groups still have no spread of rewards; they keep their places without moving the policy. "
            "`dynamic_sampling/frac_without_spread` counts them from here on, without a further warning."
        )
