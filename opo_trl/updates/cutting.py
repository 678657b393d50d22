"""
How the completions of an optimizer step are cut into micro-batches, so that the same gradient costs the least.

TRL pads every completion to the longest of the rollout. Here the completions of a step are sorted by length and cut
where that costs the least, and each micro-batch is trimmed to its longest completion. Completions whose gradient is 0
are left out, and processes exchange completions so that none waits for another. None of this changes which completions
an optimizer step has, or what their loss is divided by.

An example: six completions, with the tokens of their prompts and their own, in micro-batches of two. TRL computes six
rows of 100 + 900 tokens. The cheapest cut has the two longest completions together, then the next two, and computes
less than six tenths of these tokens:

>>> lengths = np.array([[100, 900], [100, 250], [100, 800], [100, 100], [100, 400], [100, 120]])
>>> len(lengths) * int(lengths.max(axis=0).sum())
6000
>>> cheapest = best_cut(lengths, Limits(max_rows=2))
>>> parts = np.split(cheapest.order, cheapest.bounds)
>>> [part.tolist() for part in parts]
[[0, 2], [4, 1], [5, 3]]
>>> [len(part) * int(lengths[part].max(axis=0).sum()) for part in parts]
[2000, 1000, 440]

That is 3,440 tokens. Its cost is that of these tokens and of three passes, each of which takes as long as 256 more:

>>> float(cheapest.cost)
4208.0
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..batch import Batch, as_batch, resize, take
from .sample_info import columns_of
from .shared_prompts import arrange


# Cost of a pass besides its tokens, in tokens: it launches thousands of kernels and reads every parameter. Orders of
# magnitude: the forward pass of Qwen3-1.7B's 28 layers takes 0.05 to 0.1 s on an H200 however few its tokens are, in
# which the device could compute some thousands; larger models compute fewer.
PASS_TOKENS = {"cpu": 256, "gpu": 4096}

# Where every pass communicates, as under ZeRO-2 (gradients), ZeRO-3 and FSDP (parameters as well), its cost depends on
# the network: from hundreds of tokens within a node to many thousands between nodes. It is unknown here, so this
# exceeds the cost of any padding: without a bound on their tokens, there are never more passes than without a plan.
FEWEST_PASSES = 1e12

# Share of the tokens that it must save to compute prompts once, since what else it takes is not counted.
WORTH_SHARING = 0.1

# Entries of models with images that have a column per token of prompt and completion together.
_OVER_PROMPT_AND_COMPLETION = {"token_type_ids", "mm_token_type_ids"}


def columns(lengths: np.ndarray, *, most: np.ndarray | tuple[int, int]) -> dict[str, int]:
    """
    Columns of prompts and completions for completions of these lengths `[B, 2]`: at least one, and no more than the
    two numbers of `most`.
    """
    longest = np.maximum(lengths.max(axis=0), 1)
    prompt, completion = np.minimum(longest, most).tolist()
    return {"prompt": prompt, "completion": completion}


class Shapes(NamedTuple):
    """
    The shapes of all parts of one size, an array each: the first entry is of the part that begins with the first
    completion, and so on. A part is some completions that follow each other, and may become a micro-batch.
    """

    rows: np.ndarray | int  # that the model computes: of completions, or of prompts
    width: np.ndarray  # tokens of a row, with padding
    completion: np.ndarray  # tokens of the longest completion

    @property
    def tokens(self) -> np.ndarray:
        """Tokens that a pass computes, with padding."""
        return self.rows * self.width


def _padded_shapes(lengths: np.ndarray) -> Iterator[Shapes]:
    """Shapes of the parts of 1, 2, … completions, with a row for each completion."""
    # The longest prompt and completion of each part. A part is one of the size before, with one more completion.
    longest = np.zeros_like(lengths)
    for size in range(1, len(lengths) + 1):
        n_parts = len(lengths) - size + 1
        added = lengths[size - 1 :]
        longest = np.maximum(longest[:n_parts], added)
        yield Shapes(size, longest.sum(axis=1), longest[:, 1])


@dataclass(frozen=True)
class Prompts:
    """Prompts of completions, where a model can compute them once."""

    of_completion: np.ndarray  # the prompt of each completion, as any number, `[B]`
    # Width of a row at which attention costs as much as the rest of a layer. With shared prompts, attention is
    # computed between all completions of a prompt, and masked; that of prompts to themselves is counted as much.
    break_even_width: float

    def take(self, completions: np.ndarray) -> "Prompts":
        """The prompts of some completions."""
        return Prompts(self.of_completion[completions], self.break_even_width)

    def cost(self, tokens: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Cost of some tokens in rows of this width, in tokens without attention."""
        return tokens * (1 + width / self.break_even_width)

    def order(self, lengths: np.ndarray) -> np.ndarray:
        """Order of completions with those of a prompt together, and prompts by the tokens of all their completions."""
        _, prompt = np.unique(self.of_completion, return_inverse=True)
        tokens_of_prompts = np.bincount(prompt, lengths.sum(axis=1))
        return np.lexsort((prompt, -tokens_of_prompts[prompt]))

    def shapes(self, lengths: np.ndarray) -> Iterator[Shapes]:
        """
        Shapes of the parts of 1, 2, … completions, sorted by prompt, with a row for each prompt, in which the
        completions begin behind the longest prompt.

        A part is one of the size before, with one more completion: it makes the last row longer or, if it is the first
        of its prompt, begins another row with this prompt.
        """
        # Whether each completion is the first of its prompt
        begins_prompt = np.append(True, np.diff(self.of_completion) != 0)
        prompt_lengths, completion_lengths = lengths.T
        width_of_prompt = np.maximum(prompt_lengths - 1, 0)
        width_of_completion = 1 + completion_lengths  # begins with a copy of the prompt's last token
        # Widths of the longest prompt, of the completions in the last row, and the most of those in any row
        widest_prompt = width_of_last_row = widest_row = rows = longest = np.zeros(len(lengths), dtype=int)
        for size in range(1, len(lengths) + 1):
            n_parts = len(lengths) - size + 1
            added = slice(size - 1, None)
            begins_row = begins_prompt[added] | (size == 1)
            width_before = np.where(begins_row, 0, width_of_last_row[:n_parts])
            width_of_last_row = width_before + width_of_completion[added]
            widest_prompt = np.maximum(widest_prompt[:n_parts], width_of_prompt[added])
            widest_row = np.maximum(widest_row[:n_parts], width_of_last_row)
            rows = rows[:n_parts] + begins_row
            longest = np.maximum(longest[:n_parts], completion_lengths[added])
            yield Shapes(rows, widest_prompt + widest_row, longest)


@dataclass(frozen=True)
class Limits:
    """What a part may hold, and what it costs besides its tokens."""

    max_rows: int  # completions
    max_tokens: int | None = None  # with padding; a single longer completion is a part by itself
    fill: bool = False  # whether it may hold more completions with no more tokens than `max_rows` of the longest
    pass_tokens: float = PASS_TOKENS["cpu"]  # cost besides tokens; [`FEWEST_PASSES`] gives the fewest parts

    def costs(self, lengths: np.ndarray, prompts: Prompts | None = None) -> np.ndarray:
        """Cost of the part of each size that begins at each completion, `[sizes, B]`; infinite where not allowed."""
        n_completions = len(lengths)
        largest = n_completions if self.fill else self.max_rows
        costs = np.full((largest, n_completions), np.inf)
        shapes = _padded_shapes(lengths) if prompts is None else prompts.shapes(lengths)
        for size, shapes_of_size in enumerate(itertools.islice(shapes, largest), 1):
            allowed = self._allowed(size, shapes_of_size, lengths, prompts)
            if size > self.max_rows and not allowed.any():  # nor is any larger part
                return costs[:size]
            cost = shapes_of_size.tokens
            if prompts is not None:
                cost = prompts.cost(cost, shapes_of_size.width)
            costs[size - 1, : len(allowed)] = np.where(allowed, cost, np.inf)
        return costs

    def _allowed(self, size: int, shapes: Shapes, lengths: np.ndarray, prompts: Prompts | None) -> np.ndarray:
        """Which parts of a size are allowed, bool, one for each of its `shapes`; `lengths` are of all completions."""
        allowed = np.ones(len(shapes.width), dtype=bool)
        if size == 1:
            return allowed
        # Without a plan, a micro-batch may be `max_rows` of the longest completion with its prompt, so that much fits
        # into memory. More completions than `max_rows`, or rows of several, may take no more.
        longest = lengths.sum(axis=1).max(initial=0)
        if size > self.max_rows:
            longest_completion = lengths[:, 1].max(initial=0)
            allowed &= size * shapes.completion <= self.max_rows * longest_completion
        if size > self.max_rows or prompts is not None:
            allowed &= shapes.tokens <= self.max_rows * longest
        if prompts is not None:  # attention grows with the square of the width
            most = self.max_rows * prompts.cost(longest, longest)
            allowed &= prompts.cost(shapes.tokens, shapes.width) <= most
        if self.max_tokens is not None:
            allowed &= shapes.tokens <= self.max_tokens
        return allowed


class Cut(NamedTuple):
    """A way to cut completions into parts."""

    order: np.ndarray  # the completions in order
    bounds: list[int]  # where in this order each part but the first begins
    shared: bool  # whether parts compute a prompt once for all its completions
    cost: float  # tokens with padding, and those of the passes; with [`Prompts`], also attention between tokens

    @property
    def n_parts(self) -> int:
        return len(self.bounds) + 1


def best_cut(lengths: np.ndarray, limits: Limits, prompts: Prompts | None = None) -> Cut:
    """
    The cheapest way to cut completions into parts: padded tokens, plus `pass_tokens` of the limits per part. `lengths`
    are tokens of prompts and of completions, `[B, 2]`. With `prompts`, parts may compute a prompt once.
    """
    order = np.argsort(-lengths.sum(axis=1), kind="stable")
    bounds, cost = _cheapest(limits.costs(lengths[order]), limits.pass_tokens)
    if prompts is None:
        return Cut(order, bounds, shared=False, cost=cost)
    # The cost again, with that of attention between tokens, by which shared prompts are judged
    padded_tokens = 0.0
    for part in np.split(order, bounds):
        width = lengths[part].max(axis=0, initial=0).sum()
        padded_tokens += float(prompts.cost(len(part) * width, width))
    passes = limits.pass_tokens * (len(bounds) + 1)
    padded = Cut(order, bounds, shared=False, cost=padded_tokens + passes)
    by_prompt = prompts.order(lengths)
    shared_costs = limits.costs(lengths[by_prompt], prompts.take(by_prompt))
    bounds, cost = _cheapest(shared_costs, limits.pass_tokens)
    shared = Cut(by_prompt, bounds, shared=True, cost=cost)
    shared_tokens = shared.cost - limits.pass_tokens * shared.n_parts
    # What else it takes to share prompts is not counted, so it has to save a tenth of the tokens.
    saves_tokens = shared_tokens < (1 - WORTH_SHARING) * padded_tokens
    return shared if saves_tokens and shared.cost < padded.cost else padded


def _cheapest(costs_of_parts: np.ndarray, pass_tokens: float) -> tuple[list[int], float]:
    """
    Bounds of the cheapest cut, and its cost, by the cost of the micro-batch of each size that begins at each
    completion, `[sizes, B]`.

    Dynamic programming over the completions, with a choice for each size. It is worth its lines: on MATH's lengths,
    greedily filled bins cost 2–7 % more, and up to 23 % more tokens with [`FEWEST_PASSES`] and `max_tokens`.
    """
    largest, n_completions = costs_of_parts.shape
    # For the first 0, 1, … completions: the least cost, and the size of the last part in the cut that has it
    least_cost = np.zeros(n_completions + 1)
    last_size = np.zeros(n_completions + 1, dtype=int)
    for end in range(1, n_completions + 1):
        sizes = np.arange(1, min(largest, end) + 1)
        begins = end - sizes
        costs = least_cost[begins] + costs_of_parts[sizes - 1, begins] + pass_tokens
        last_size[end] = sizes[costs.argmin()]
        least_cost[end] = costs.min()
    # Backwards from the end, part by part
    bounds = []
    end = n_completions
    while end > last_size[end]:
        end -= int(last_size[end])
        bounds.append(end)
    return bounds[::-1], least_cost[-1]


def split_further(lengths: np.ndarray, bounds: list[int], n_parts: int) -> list[int]:
    """
    Split the parts with these `bounds`, of [`best_cut`], until there are `n_parts`, as on other processes: each time
    where it saves the most padding. `lengths`, `[B, 2]`, are of the completions in the order of the cut.
    """
    while len(bounds) + 1 < n_parts:
        splits = []
        for start, end in itertools.pairwise([0, *bounds, len(lengths)]):
            change, size = _best_split(lengths[start:end])
            splits.append((change, start + size))
        _, bound = min(splits)
        bounds = sorted([*bounds, bound])
    return bounds


def _best_split(lengths: np.ndarray) -> tuple[float, int]:
    """
    Change in padded tokens (≤ 0) by the best split of a part in two, and how many completions the first one then has.
    Infinite for a part that cannot be split, so that any other is chosen before it.
    """
    if len(lengths) < 2:
        return math.inf, 0
    # Widths of parts of the first 1, 2, … completions, and of the last 1, 2, …
    width_of_first = np.maximum.accumulate(lengths).sum(axis=1)
    width_of_last = np.maximum.accumulate(lengths[::-1]).sum(axis=1)
    sizes = np.arange(1, len(lengths))
    tokens_of_first = sizes * width_of_first[:-1]
    tokens_of_last = sizes * width_of_last[:-1]
    tokens = tokens_of_first + tokens_of_last[::-1]
    best = int(tokens.argmin())
    tokens_unsplit = len(lengths) * width_of_first[-1]
    return float(tokens[best] - tokens_unsplit), int(sizes[best])


def partition(lengths: np.ndarray, left_out: np.ndarray, n_processes: int) -> np.ndarray:
    """
    Partition N completions among processes: the same number each, with about the same number of tokens to compute.

    `lengths` are tokens of prompts and of completions, `[N, 2]`; completions that are `left_out`, bool `[N]`, cost
    nothing. Returns the completions of each process, `[n_processes, N / n_processes]`.
    """
    # The longest completion goes to the process with the fewest tokens (LPT scheduling); a full process takes no more.
    tokens = np.where(left_out, 0, lengths.sum(axis=1))
    places = len(lengths) // n_processes
    members: list[list[int]] = [[] for _ in range(n_processes)]
    load = np.zeros(n_processes)
    for completion in np.argsort(-tokens, kind="stable"):
        process = int(load.argmin())
        members[process].append(int(completion))
        is_full = len(members[process]) == places
        load[process] += np.inf if is_full else tokens[completion]
    return np.array(members)


def cut(
    batch: Batch,
    lengths: np.ndarray,
    completions: np.ndarray,
    n_parts: int,
    limits: Limits,
    prompts: Prompts | None,
) -> list[tuple[np.ndarray, Batch]]:
    """
    Cut some `completions` of a batch, whose lengths are `[B, 2]`, into `n_parts` micro-batches, or more where the
    limits need more.

    Each micro-batch is without the columns that are padding in all of its completions; those with images and token
    types keep all. Those that compute a prompt once have the entries of [`arrange`]. Returns the completions of each
    micro-batch with it.
    """
    prompts_of_cut = None if prompts is None else prompts.take(completions)
    # `shared`: whether parts compute a prompt once for all its completions
    order, bounds, shared, _ = best_cut(lengths[completions], limits, prompts_of_cut)
    completions = completions[order]
    bounds = split_further(lengths[completions], bounds, n_parts)
    micro_batches = []
    for part in np.split(completions, bounds):
        micro_batch = take(batch, part)
        # Entries that have a column per token of prompt and completion together cannot be trimmed: all columns stay.
        if not batch.keys() & _OVER_PROMPT_AND_COMPLETION:
            widths = columns(lengths[part], most=columns_of(batch))
            micro_batch = resize(micro_batch, **widths)
        if shared and prompts is not None:
            places = arrange(micro_batch, lengths[part], prompts.of_completion[part])
            micro_batch = as_batch({**micro_batch, **places})
        micro_batches.append((part, micro_batch))
    return micro_batches


def spread(micro_batches: list[Batch], n_calls: int) -> list[list[Batch]]:
    """
    Give each of `n_calls` of `training_step` its micro-batches, as evenly as possible.

    If there are too few, the first ones stay empty: in the last one processes exchange gradients.
    """
    bounds = [call * len(micro_batches) // n_calls for call in range(n_calls + 1)]
    return [micro_batches[start:end] for start, end in itertools.pairwise(bounds)]
