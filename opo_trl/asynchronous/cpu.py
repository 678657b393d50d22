"""What TRL's asynchronous trainer takes from a GPU, for processes without one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from ..evaluate import temporarily


@contextmanager
def without_gpu() -> Iterator[None]:
    """Build an `AsyncGRPOTrainer` for a CPU. It looks up its GPU, and its attention is a GPU's kernel."""
    with temporarily(async_grpo_trainer, get_peak_flops_per_device=lambda *_: None):
        yield
    AttentionInterface.register(TREE_ATTENTION, tree_attention)  # after the trainer has registered its own


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **named,
) -> tuple[Tensor, None]:
    """
    Attention of tokens that are packed as a prefix tree, to the tokens on their own path from its root.

    The mask is dense, `[N, N]` for N packed tokens: right for any tree, and fast enough for the rows of a test.

    Args:
        query, key, value (`torch.Tensor`): `[1, heads, N, size]` each.
        tree_kv_index (`torch.Tensor`): positions on the paths of all segments, one path after the other.
        tree_cu_seqlens_q (`torch.Tensor`), tree_cu_seqlens_k (`torch.Tensor`): bounds of the segments among the packed
            tokens, and of their paths in `tree_kv_index`. A path ends with its segment.

    Returns:
        `tuple[torch.Tensor, None]`: `[1, N, heads, size]`, and no attention weights.

    Raises:
        `NotImplementedError`: the model's attention has a window or a soft cap.
    """
    if sliding_window or softcap:
        raise NotImplementedError(
            "Attention with a sliding window or a soft cap needs a GPU, which TRL's kernel runs on."
        )
    packed = query.shape[2]
    mask = torch.zeros(packed, packed, dtype=torch.bool, device=query.device)
    rows, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for start, end, first, last in zip(rows, rows[1:], paths, paths[1:], strict=False):
        path, own = tree_kv_index[first:last], end - start
        mask[start:end, path] = torch.ones(own, len(path), dtype=torch.bool).tril(len(path) - own)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None
