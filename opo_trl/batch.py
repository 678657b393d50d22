"""
The entries of a rollout and of a micro-batch, and what is done with all of them: take, concatenate, exchange, resize.

Nothing here makes the host wait for a GPU.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from . import compatibility  # noqa: F401  checks versions
from .contract import KNOWN_KEYS, MULTIMODAL_KEYS


# Entries with a column per token of the prompt, padded on the left. All others are padded on the right.
PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")


class Batch(TypedDict, total=False):
    """
    A rollout, or some of its completions, such as a micro-batch: TRL's dictionary, with our entries (`opo_…`).

    B is the number of completions, P and T the numbers of columns for the tokens of prompts and of completions. At run
    time a `Batch` is a plain dictionary, and entries of a user's own travel along: tensors and lists with a value for
    each completion, of which tensors `[B, T, …]` are cut and padded as the completions are.
    """

    # By TRL, in `_generate_and_score_completions`, unless stated otherwise

    prompt_ids: Tensor  # int64 `[B, P]`: tokens of the prompts, padded on the left
    prompt_mask: Tensor  # int64 `[B, P]`: 0 where a prompt is padded
    completion_ids: Tensor  # int64 `[B, T]`: tokens of the completions, padded on the right
    completion_mask: Tensor  # int64 `[B, T]`: 0 where a completion is padded, and in a truncated one that is masked
    tool_mask: Tensor  # int64 `[B, T]`: 0 where a tool has written the token; only with tools
    advantages: Tensor  # float32 `[B]`: NaN or infinite for a completion that does not take part
    old_per_token_logps: Tensor  # float32 `[B, T]`: by the behaviour policy; ours, or an override's; else the policy's
    ref_per_token_logps: Tensor  # float32 `[B, T]`: by the reference policy; only with `beta`
    sampling_per_token_logps: Tensor  # float32 `[B, T]`: as vLLM has sampled the tokens
    importance_sampling_ratio: Tensor  # float32 `[B, T]`, or `[B, 1]` of sequences: policy over vLLM's probabilities
    num_items_in_batch: Tensor  # int64 scalar: tokens that count in the rollouts of all processes

    # By TRL, for models with images; sizes are those of the model's processor

    pixel_values: Any  # float: the images, or patches of them
    pixel_attention_mask: Any  # int64: 0 where an image is padded
    image_grid_thw: Any  # int64 `[number of images, 3]`: patches in time, height and width
    image_sizes: Any  # int64: height and width in pixels
    image_position_ids: Any  # int64: places of the patches
    spatial_shapes: Any  # int64: height and width in patches
    num_images: list[int]  # B numbers: images in each prompt
    num_tiles: list[int]  # tiles of each image
    token_type_ids: Tensor  # int64 `[B, P + T]`: which tokens stand for an image
    mm_token_type_ids: Tensor  # int64 `[B, P + T]`: which tokens stand for an image or a video

    # Of a rollout, by `OPOTrainer`

    rewards_per_func: Tensor  # float32 `[B, number of reward functions]`: NaN for no score; by `_generate_once`
    opo_logps: Tensor  # float32 `[B, T]`: by TRL's pass over the rollout; from `_generate_once` to `_finish_rollout`
    opo_target: Tensor  # float32 `[B]`: what the objective pulls the completion to; by `_targets`
    opo_mu: Tensor  # float32 `[B]`: coefficient of the χ² term; by `_targets`
    opo_scale: Tensor  # float32 `[B]`: factor of the loss; by `_targets`, in a replaying pass by `_rows_of_pass`
    opo_valid: Tensor  # bool `[B]`: whether the completion takes part; by `_targets`
    opo_own: Tensor  # bool `[B]`: whether the policy itself has sampled the completion; by `_finish_rollout`
    opo_step: Tensor  # float32 `[B]`: number of optimizer steps before it was sampled; by `_finish_rollout`
    opo_steering: Tensor  # bool `[B, T]`: tokens of high entropy, with `top_entropy_quantile`; by `_finish_rollout`

    # Of an optimizer step or a micro-batch

    opo_at_rest: Tensor  # bool `[B]`: whether its gradient is 0 until the policy moves; by `_micro_batches`
    opo_counts: Tensor  # bool `[B]`: whether it counts in the log; by `Planner`
    opo_filler: Tensor  # bool `[B]`: whether its gradient is 0, and it only fills the micro-batch; by `Planner`
    opo_skipped: Tensor  # bool `[number left out]`: `opo_counts` of these; in the last micro-batch; by `Planner`
    opo_source: Tensor  # int64 `[rows, width]`: places of tokens where prompts are computed once; by `arrange`
    opo_completion: Tensor  # int64 `[rows, …]`: the completions of tokens in the last columns of these; by `arrange`
    opo_shape: tuple[int, int, int]  # B, T and P for which these two hold; by `arrange`


def as_batch(entries: dict[str, Any]) -> Batch:
    """The same dictionary for type checkers, which cannot follow names of entries that are not literals."""
    return cast(Batch, entries)


def carried(rollout: Mapping[str, Any]) -> Batch:
    """
    A rollout of TRL without what cannot be divided among micro-batches: entries that the package does not know, as of
    a later release, and that are not tensors with a value for each completion.
    """
    n_completions = len(rollout["completion_ids"])

    def can_travel(name: str, value: Any) -> bool:
        if name in KNOWN_KEYS:  # entries of the tested releases
            return True
        return isinstance(value, Tensor) and value.shape[:1] == (n_completions,)

    return as_batch({name: value for name, value in rollout.items() if can_travel(name, value)})


def completion_tokens(batch: Batch) -> Tensor:
    """Bool mask `[B, T]` of the tokens that the model wrote: no padding, no tool output, no masked completion."""
    mask = batch["completion_mask"].bool()
    if "tool_mask" in batch:
        mask = mask & batch["tool_mask"].bool()
    return mask


def model_inputs(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """What a model computes: tokens and mask of prompts with their completions, `[B, P + T]` each, and T."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


def image_entries(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of images, which a model takes besides the tokens."""
    return {name: batch[name] for name in MULTIMODAL_KEYS if name in batch}


def take(batch: Mapping[str, Any], order: np.ndarray) -> Batch:
    """Some completions of a batch, in a given order; values that are not per completion stay."""
    # A copy of `order` on each device: as an index, NumPy's array would be copied for every entry.
    order_on: dict[torch.device, Tensor] = {}

    def in_order(value: Any) -> Any:
        """A value of the batch in the given order; one without an entry for each completion as it is."""
        if isinstance(value, list):
            return [value[place] for place in order]
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if value.device not in order_on:
            order_on[value.device] = to_device(order, value.device)
        return value[order_on[value.device]]

    # Pixel values have a row for each patch of an image: TRL makes lists of them, with an entry for each completion,
    # and puts these together again.
    with_images_apart = split_pixel_values_by_grid(dict(batch))
    entries = {name: in_order(value) for name, value in with_images_apart.items()}
    return as_batch(unsplit_pixel_values_by_grid(entries))


def concatenate(batches: Sequence[Mapping[str, Any]]) -> Batch:
    """
    The completions of several batches with the same entries, padded to the widest. A value that is not per completion,
    such as a scalar, is that of the last batch.
    """
    entries: dict[str, Any] = {}
    for name, value in batches[-1].items():
        values = [batch[name] for batch in batches]
        if isinstance(value, list):
            entries[name] = list(itertools.chain(*values))
        elif not isinstance(value, Tensor) or not value.ndim:
            entries[name] = value
        else:
            if value.ndim > 1:
                width = max(tensor.size(1) for tensor in values)
                values = [to_width(name, tensor, width) for tensor in values]
            entries[name] = torch.cat(values)
    return as_batch(entries)


def can_exchange(batch: Mapping[str, Any]) -> bool:
    """Whether processes can exchange completions: not with images, of which one may have none, nor with lists."""
    if batch.keys() & {*MULTIMODAL_KEYS}:
        return False
    return all(isinstance(value, Tensor) for value in batch.values())


def exchange(batch: Mapping[str, Any], completions: np.ndarray, accelerator: Accelerator) -> Batch:
    """
    Some of the completions of all processes, in a given order, by one collective call. The processes' batches have the
    same number of completions, and tensors of the same names, types and shapes.
    """
    tensors = {name: batch[name].contiguous() for name in sorted(batch) if batch[name].ndim}
    # All entries become the columns of one table, so that a single call gathers them whatever their types.
    as_bytes = [tensor.reshape(len(tensor), -1).view(torch.uint8) for tensor in tensors.values()]
    of_all = accelerator.gather(torch.cat(as_bytes, dim=1))
    bytes_of_completions = of_all[to_device(completions, of_all.device)]
    parts = bytes_of_completions.split([part.size(1) for part in as_bytes], dim=1)
    entries = dict(batch)
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        # A copy, as bytes can be viewed as another type only where they begin at a multiple of its size.
        aligned = part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        entries[name] = aligned.view(len(completions), *tensor.shape[1:])
    return as_batch(entries)


def resize(batch: Mapping[str, Any], *, prompt: int, completion: int) -> Batch:
    """A batch with these numbers of columns for the tokens of prompts and completions: cut, or padded with zeros."""
    # Every entry as wide as the completions is theirs, also one of a subclass. A weight per sequence has a single
    # column; rewards have one per function, and entries of images have widths of their own.
    with_other_columns = {"rewards_per_func", *MULTIMODAL_KEYS}
    n_columns = batch["completion_mask"].size(1)
    widths = {}
    for name, width in widths_of_tables(batch).items():
        if name in PROMPT_COLUMNS:
            widths[name] = prompt
        elif width == n_columns and name not in with_other_columns:
            widths[name] = completion
    return to_widths(batch, widths)


def widths_of_tables(batch: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of columns of the tensors `[B, columns, …]` in a batch, sorted by name."""
    tables = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim > 1}
    return {name: tables[name].size(1) for name in sorted(tables)}


def to_widths(batch: Mapping[str, Any], widths: Mapping[str, int]) -> Batch:
    """
    A batch with these numbers of columns in some of its tensors (name → columns): cut, or padded with zeros, as
    [`to_width`] does it.
    """
    entries = dict(batch)
    for name, width in widths.items():
        entries[name] = to_width(name, batch[name], width)
    return as_batch(entries)


def to_width(name: str, value: Tensor, width: int) -> Tensor:
    """
    The entry `name` of a batch, `[B, T, …]`, with `width` columns: cut, or padded with zeros, on the left if its
    columns are tokens of prompts, otherwise on the right.
    """
    n_columns = value.size(1)
    is_padded_left = name in PROMPT_COLUMNS
    if width <= n_columns:
        return value[:, n_columns - width :] if is_padded_left else value[:, :width]
    missing = width - n_columns
    columns = (missing, 0) if is_padded_left else (0, missing)
    # `pad` counts dimensions from the last one; there may be some after the tokens'.
    later_dimensions = (0, 0) * (value.ndim - 2)
    return pad(value, later_dimensions + columns)


def to_device(values: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy values of the host to the device, without waiting."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
