"""
Forward passes that compute a prompt once for all its completions in a micro-batch.

A row then holds a prompt and, one after the other, its completions. Each completion attends to the prompt and to
itself, at the positions that it has in a row of its own, so its log-probabilities are the same up to rounding. It
begins with a copy of the prompt's last token, which predicts its first.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..batch import Batch, to_device


ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")  # gated MLP, rotary positions, no other layers


def balance(model: PreTrainedModel) -> float | None:
    """
    Tokens to which attention costs as much as the rest of a layer; `None` for a model that may compute something else.

    It needs full attention to whatever a 4-D mask allows, at rotary positions that it is given.
    """
    config, adapters = model.config, getattr(model, "peft_config", {}).values()
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    sdpa = config._attn_implementation in (None, "sdpa") and getattr(config, "sliding_window", None) is None
    if config.model_type not in ARCHITECTURES or not (full and sdpa):
        return None
    if any(adapter.is_prompt_learning for adapter in adapters) or hasattr(config, "auto_map"):  # code from the Hub
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    weights = config.hidden_size * (2 * width * (heads + keys) + 3 * config.intermediate_size)  # of a layer
    return weights / (2 * width * heads)


def hashes(rows: Batch) -> Tensor:
    """
    A number for each sample's prompt, `[B]`: equal for equal prompts, and for others with a probability of about
    2^-45 or less, whatever their padding.
    """
    ids, mask = rows["prompt_ids"], rows["prompt_mask"]
    # Drawn from the right, where prompts are not padded. The sum wraps around.
    drawn = np.random.default_rng(0).integers(-(2**63), 2**63, (ids.size(1), 2))[::-1].T.copy()
    factor, offset = to_device(torch.from_numpy(drawn), ids.device)
    return torch.where(mask.bool(), ids * factor + offset, 0).sum(dim=1)


def arrange(samples: Mapping[str, Any], lengths: np.ndarray, prompts: np.ndarray) -> dict[str, Any]:
    """
    Where the tokens of B samples go that are sorted by prompt: from their tables, the tokens of prompt and completion,
    `[B, 2]`, and the prompt of each, as any number, `[B]`.

    Returns `opo_source` and `opo_segment`, `[P, W]` for P prompts: the place of a token among those of the samples'
    prompts and completions, −1 where there is none; 0 for the prompt, otherwise the number of its completion. Besides,
    `opo_shape` of the samples' tables.
    """
    _, completion, prompt = shape = _shape(samples)
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
    table = np.stack([np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=-1) for row in rows])
    source, segment = to_device(torch.from_numpy(table), samples["completion_ids"].device).unbind(dim=1)
    return {"opo_source": source, "opo_segment": segment, "opo_shape": shape}


def model_for(model: Any, rows: Mapping[str, Any]) -> Any:
    """How a model computes rows: prompts once, where [`arrange`] has placed their tokens."""
    # An override may have cut samples or columns, to which these places do not apply.
    if rows.get("opo_shape") != _shape(rows):
        return model
    return partial(_shared, model, rows["opo_source"], rows["opo_segment"])


def _shape(rows: Mapping[str, Any]) -> tuple[int, int, int]:
    return (*rows["completion_ids"].shape, rows["prompt_ids"].size(1))


def _shared(
    model: Any,
    source: Tensor,
    segment: Tensor,
    *,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    position_ids: Tensor | None = None,
    **options: Any,
) -> Any:
    """
    Outputs of a model with TRL's fused head, called as TRL calls it for padded rows `[B, L]`, that computes samples as
    [`arrange`] has placed them: per token, `[B, L - 1]`, as without sharing.

    The model may have DDP's, DeepSpeed's or PEFT's wrapper around it.
    """
    is_token, source = source >= 0, source.clamp(min=0)
    ids, mask, wanted = (table.flatten()[source] for table in (input_ids, attention_mask, labels))
    real = is_token & mask.bool()
    same_or_prompt = (segment.unsqueeze(2) == segment.unsqueeze(1)) | (segment == 0).unsqueeze(1)
    seen = (same_or_prompt & real.unsqueeze(1)).tril()
    itself = torch.eye(seen.size(1), dtype=torch.bool, device=seen.device)
    seen = seen | (itself & ~seen.any(dim=2, keepdim=True))  # padding: attention to nothing would be NaN
    wanted = wanted.masked_fill(~real, -100)
    positions = source % input_ids.size(1) if position_ids is None else position_ids.flatten()[source]
    outputs = model(input_ids=ids, attention_mask=seen.unsqueeze(1), position_ids=positions, labels=wanted, **options)
    for name in {"log_probs", "entropy"} & outputs.keys():  # a reference model's head has no entropy
        # The head returns one value fewer than there are tokens. Only tokens of completions, each in one place,
        # have a label.
        values = torch.where(wanted != -100, pad(outputs[name], (1, 0)), 0.0).flatten()
        rows = values.new_zeros(input_ids.numel()).scatter_add(0, source.flatten(), values)
        outputs[name] = rows.view(input_ids.shape)[:, 1:]
    return outputs
