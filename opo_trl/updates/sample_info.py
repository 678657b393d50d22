"""`SampleInfo`: what every process knows of the completions of all processes, so that all of them cut alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from ..batch import Batch, can_exchange, to_device
from .shared_prompts import hashes


@dataclass(frozen=True)
class SampleInfo:
    """
    Arrays whose first dimensions are those of the completions: `[processes, steps, B]`, or what an index leaves of
    them.
    """

    lengths: np.ndarray  # columns that a completion needs: of its prompt and of itself, `[…, 2]`
    left_out: np.ndarray  # bool: whether its gradient is 0, so that it is only computed to fill a micro-batch
    columns: np.ndarray  # columns of its process's tables, of prompts and of completions, `[…, 2]`
    exchangeable: np.ndarray  # bool: whether its process can exchange completions ([`can_exchange`])
    prompt: np.ndarray  # a number for its prompt ([`hashes`])

    def __len__(self) -> int:
        """Size of the first dimension."""
        return len(self.prompt)

    def __getitem__(self, index) -> "SampleInfo":
        """The completions at an index of the first dimensions."""
        return self._each(lambda values: values[index])

    def on_all_processes(self) -> "SampleInfo":
        """From `[processes, B]`, the completions in the order of the processes: `[processes · B]`."""
        return self._each(np.concatenate)

    def _each(self, function: Callable[[np.ndarray], np.ndarray]) -> "SampleInfo":
        return SampleInfo(**{name: function(values) for name, values in vars(self).items()})

    @classmethod
    def gather(cls, steps: Sequence[Batch], left_out: Iterable[Tensor], accelerator: Accelerator) -> "SampleInfo":
        """
        Gather what is known of all processes' completions in some optimizer steps, `[processes, steps, B]`, by one
        collective call and one copy to the host. `left_out` is bool `[B]` of each step, and B the same in all of them.
        """
        of_process = _table(steps, left_out, accelerator.device).unsqueeze(0)
        table = accelerator.gather(of_process).cpu().numpy()
        # Columns as `_table` puts them: two of lengths, a flag, two of columns, a flag, and the prompt's number
        lengths, left_out_flags, columns, exchangeable, prompt = np.split(table, [2, 3, 5, 6], axis=-1)
        return cls(lengths, _flags(left_out_flags), columns, _flags(exchangeable), prompt.squeeze(-1))


def _table(steps: Sequence[Batch], left_out: Iterable[Tensor], device: torch.device) -> Tensor:
    """The fields of [`SampleInfo`] in their order, of this process's completions: integers `[steps, B, 7]`."""
    # What all completions of a step have in common is copied to the device for all steps at once.
    common = torch.tensor([(*columns_of(batch), can_exchange(batch)) for batch in steps])
    tables = []
    for batch, left_out_of_step, columns_and_exchange in zip(steps, left_out, to_device(common, device), strict=True):
        lengths = lengths_of(batch).to(device)
        prompt = hashes(batch).to(device)
        repeated = columns_and_exchange.expand(len(lengths), -1)
        tables.append(torch.column_stack([lengths, left_out_of_step.to(device), repeated, prompt]))
    return torch.stack(tables)


def _flags(column: np.ndarray) -> np.ndarray:
    """A column `[…, 1]` of integers, which are 0 or 1, as bool `[…]`."""
    return column.squeeze(-1).astype(bool)


def columns_of(batch: Batch) -> tuple[int, int]:
    """Columns of a batch for the tokens of prompts and of completions."""
    return batch["prompt_mask"].size(1), batch["completion_mask"].size(1)


def lengths_of(batch: Batch) -> Tensor:
    """Columns that each completion needs, `[B, 2]`: of its prompt from the first token, of itself to the last."""
    prompt = _last_place(batch["prompt_mask"].flip(1))
    completion = _last_place(batch["completion_mask"])
    return torch.stack([prompt, completion], dim=1)


def _last_place(mask: Tensor) -> Tensor:
    """The last place of each row, counted from 1, where a mask is not 0, or 0: `[B]`."""
    places = torch.arange(1, mask.size(1) + 1, device=mask.device)
    places_of_tokens = mask.bool() * places
    # With a column of zeros, as a table without columns has no maximum.
    return pad(places_of_tokens, (1, 0)).amax(dim=1)
