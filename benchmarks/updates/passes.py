"""Counts the tokens of a model's forward passes."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pass:
    """A forward pass: with or without gradient; rows, columns with padding; tokens without padding, scored ones."""

    gradient: bool
    rows: int
    columns: int
    tokens: int
    scored: int

    @property
    def padded(self) -> int:
        """Tokens with padding."""
        return self.rows * self.columns


@contextlib.contextmanager
def counted_passes(model: torch.nn.Module) -> Iterator[list[Pass]]:
    """The forward passes of a model in this context, recorded as they happen."""
    passes: list[Pass] = []

    def count(_, args: tuple, inputs: dict[str, Any]) -> None:
        rows, columns = inputs["input_ids"].shape
        mask = inputs["attention_mask"]
        if mask.ndim == 4:  # prompts computed once: which token attends to which; none to padding
            mask = mask.any(dim=2)
        tokens, scored = mask.sum().item(), (inputs["labels"] != -100).sum().item()
        passes.append(Pass(torch.is_grad_enabled(), rows, columns, tokens, scored))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    yield passes
    hook.remove()


def count_tokens(passes: Sequence[Pass]) -> dict[str, int]:
    """Tokens that went through the model, with and without padding, and were scored: without and with gradient."""
    return {
        f"{name} {column}": sum(getattr(one, column) for one in passes if one.gradient == gradient)
        for name, gradient in (("forward", False), ("gradient", True))
        for column in ("padded", "tokens", "scored")
    }
