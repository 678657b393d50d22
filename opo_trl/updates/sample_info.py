"""`SampleInfo`: what every process knows of the completions of all processes, so that all of them cut alike."""

from collections.abc import Iterable, Sequence
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
    at_rest: np.ndarray  # bool: whether its gradient is 0, so that it need not be computed
    columns: np.ndarray  # columns of its process's tables, of prompts and of completions, `[…, 2]`
    exchangeable: np.ndarray  # bool: whether its process can exchange completions ([`can_exchange`])
    prompt: np.ndarray  # a number for its prompt ([`hashes`])

    def __len__(self) -> int:
        """Size of the first dimension."""
        return len(self.prompt)

    def __getitem__(self, index) -> "SampleInfo":
        """Those at an index of the dimensions of completions."""
        return SampleInfo(**{name: values[index] for name, values in vars(self).items()})

    def on_all_processes(self) -> "SampleInfo":
        """From `[processes, B]`, the completions in the order of the processes: `[processes · B]`."""
        n_completions = self.prompt.size
        return SampleInfo(
            **{name: values.reshape(n_completions, *values.shape[2:]) for name, values in vars(self).items()}
        )

    @classmethod
    def gather(cls, steps: Sequence[Batch], at_rest: Iterable[Tensor], accelerator: Accelerator) -> "SampleInfo":
        """
        Of all processes' completions in some optimizer steps, `[processes, steps, B]`, by one collective call and one
        copy to the host. `at_rest` is bool `[B]` of each step, and B the same in all of them.
        """
        device = accelerator.device
        of_process = [[*columns_of(batch), can_exchange(batch)] for batch in steps]
        tables = []
        for batch, rests, numbers in zip(steps, at_rest, to_device(torch.tensor(of_process), device), strict=True):
            lengths = lengths_of(batch).to(device)
            numbers = numbers.expand(len(lengths), -1)
            prompt = hashes(batch).to(device)
            tables.append(torch.column_stack([lengths, rests.to(device), numbers, prompt]))
        table = accelerator.gather(torch.stack(tables)[None]).cpu().numpy()
        return cls(
            lengths=table[..., :2],
            at_rest=table[..., 2].astype(bool),
            columns=table[..., 3:5],
            exchangeable=table[..., 5].astype(bool),
            prompt=table[..., 6],
        )


def columns_of(batch: Batch) -> tuple[int, int]:
    """Columns of a batch for the tokens of prompts and of completions."""
    return batch["prompt_mask"].size(1), batch["completion_mask"].size(1)


def lengths_of(batch: Batch) -> Tensor:
    """Columns that each completion needs, `[B, 2]`: of its prompt from the first token, of itself to the last."""
    lengths = [_last_place(mask) for mask in (batch["prompt_mask"].flip(1), batch["completion_mask"])]
    return torch.stack(lengths, dim=1)


def _last_place(mask: Tensor) -> Tensor:
    """The last place of each row, counted from 1, where a mask is not 0, or 0: `[B]`."""
    places = torch.arange(1, mask.size(1) + 1, device=mask.device)
    # A table without columns has no maximum.
    return pad(mask.bool() * places, (1, 0)).amax(dim=1)
