"""
Forward passes that compute a prompt once for all its completions in a micro-batch.

A row then holds a prompt and, one after the other, its completions. Each completion attends to the prompt and to
itself, at the positions that it has in a row of its own, so its log-probabilities are the same up to rounding. It
begins with a copy of the prompt's last token, which predicts its first.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from .rows import to_device


def is_possible(model: PreTrainedModel) -> bool:
    """Whether a model computes full attention to whatever a mask allows, at the positions that it is given."""
    config = model.config.get_text_config()
    adapters = getattr(model, "peft_config", {}).values()
    return (
        config is model.config
        and config._attn_implementation == "sdpa"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and not getattr(model, "_is_stateful", False)
        and "position_ids" in inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
        and not any(adapter.is_prompt_learning for adapter in adapters)
    )


def hashes(rows: Mapping[str, Tensor]) -> Tensor:
    """
    A number for each sample's prompt, `[B]`: equal for equal prompts, and for others with a probability of about
    2^-45 or less, whatever their padding.
    """
    ids, mask = rows["prompt_ids"], rows["prompt_mask"]
    # Drawn from the right, where prompts are not padded. The sum wraps around.
    drawn = np.random.default_rng(0).integers(-(2**63), 2**63, (ids.size(1), 2))[::-1].T.copy()
    factor, offset = to_device(torch.from_numpy(drawn), ids.device)
    return torch.where(mask.bool(), ids * factor + offset, 0).sum(dim=1)


def arrange(
    lengths: np.ndarray, prompts: np.ndarray, *, prompt: int, completion: int, multiple: int | None = None
) -> dict[str, Tensor]:
    """
    Where the tokens of samples go that are sorted by prompt.

    Args:
        lengths (`np.ndarray`): tokens of prompt and completion, `[B, 2]`.
        prompts (`np.ndarray`): of each sample its prompt, in any form of number, `[B]`.
        prompt (`int`), completion (`int`): columns of the samples.
        multiple (`int`, *optional*): of which the columns are to be a multiple.

    Returns:
        `dict[str, torch.Tensor]`: for P prompts, `[P, W]` each: `opo_source`, the place of a token among those of the
        samples, `[B · (prompt + completion)]`, −1 where there is none; `opo_segment`, 0 for the prompt, otherwise the
        number of its completion.
    """
    rows = []
    for group in np.split(np.arange(len(prompts)), 1 + np.flatnonzero(np.diff(prompts))):
        first = group[0] * (prompt + completion) + prompt
        pieces = [np.arange(first - max(lengths[group[0], 0], 1), first - 1)]
        for sample in group:
            first = sample * (prompt + completion) + prompt
            pieces.append(np.arange(first - 1, first + lengths[sample, 1]))
        segments = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        rows.append(np.stack([np.concatenate(pieces), segments]))
    width = max(row.shape[1] for row in rows)
    width = width if multiple is None else -(-width // multiple) * multiple
    table = np.stack([np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=-1) for row in rows])
    source, segment = torch.from_numpy(table).unbind(dim=1)
    return {"opo_source": source, "opo_segment": segment}


def model_for(model: Any, rows: Mapping[str, Any]) -> Any:
    """How a model computes rows: prompts once, where [`arrange`] has placed their tokens."""
    placed = {name: rows[name] for name in ("opo_source", "opo_segment") if name in rows}
    return SharedPrompts(model, **placed) if placed else model


class SharedPrompts:
    """
    A model with TRL's fused head, called as TRL calls it, that computes samples as [`arrange`] has placed them.

    The model may have DDP's, DeepSpeed's or PEFT's wrapper around it.
    """

    def __init__(self, model: Any, *, opo_source: Tensor, opo_segment: Tensor):
        self.model, self.source, self.segment = model, opo_source, opo_segment

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any) -> Any:
        """Outputs for padded rows `[B, L]`, per token `[B, L - 1]` as without sharing."""
        source, segment = self.source.clamp(min=0), self.segment
        ids, mask, wanted = (table.flatten()[source] for table in (input_ids, attention_mask, labels))
        real = (self.source >= 0) & mask.bool()
        same_or_prompt = (segment.unsqueeze(2) == segment.unsqueeze(1)) | (segment == 0).unsqueeze(1)
        seen = (same_or_prompt & real.unsqueeze(1)).tril()
        itself = torch.eye(seen.size(1), dtype=torch.bool, device=seen.device)
        seen = seen | (itself & ~seen.any(dim=2, keepdim=True))  # padding: attention to nothing would be NaN
        wanted = wanted.masked_fill(~real, -100)
        outputs = self.model(
            input_ids=ids,
            attention_mask=seen.unsqueeze(1),
            position_ids=source % input_ids.size(1),
            labels=wanted,
            **options,
        )
        for name in {"log_probs", "entropy"} & outputs.keys():  # a reference model's head has no entropy
            # The head returns one value fewer than there are tokens. Only tokens of completions, each in one place,
            # have a label.
            values = torch.where(wanted != -100, pad(outputs[name], (1, 0)), 0.0).flatten()
            rows = values.new_zeros(input_ids.numel()).scatter_add(0, source.flatten(), values)
            outputs[name] = rows.view(input_ids.shape)[:, 1:]
        return outputs
