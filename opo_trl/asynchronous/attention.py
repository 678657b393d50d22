"""
PyTorch's attention in asynchronous training, in place of TRL's kernel.

TRL packs a micro-batch as a prefix tree, and attends along its paths with FlashAttention 3, which the package
`kernels` takes from the Hub at the first step. That kernel is made for Hopper GPUs, and takes 16-bit numbers only.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl.experimental.async_grpo import async_grpo_trainer, packing

from ..trl import temporarily


@contextmanager
def in_pytorch(device: torch.device) -> Iterator[None]:
    """Build an `AsyncGRPOTrainer` whose attention is PyTorch's, on any device."""
    # TRL looks up what a GPU can do, for a metric, and knows those of CUDA only.
    unknown = temporarily(async_grpo_trainer, get_peak_flops_per_device=lambda *_: None)
    with nullcontext() if device.type == "cuda" else unknown:
        yield
    AttentionInterface.register(packing.TREE_ATTENTION, tree_attention)  # after the trainer has registered its own


def tree_attention(
    module, query, key, value, attention_mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, **named
) -> tuple[Tensor, None]:
    """
    Attention of tokens that are packed as a prefix tree, to the tokens on their own path from its root.

    It computes with a dense mask, `[N, N]` for N packed tokens. `tree_kv_index` has the positions on the paths of all
    segments, one path after the other, each ending with its segment; the other two are bounds of the segments among
    the tokens, and of the paths.
    """
    mask = _mask(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, query.shape[2], named.get("sliding_window"))
    own = {name: named.get(name) for name in ("scaling", "softcap")}  # no dropout, as in TRL's
    return sdpa_attention_forward(module, query, key, value, mask, **own)


@lru_cache(maxsize=2)  # the same tensors in all layers of a forward pass, with and without a window
def _mask(index: Tensor, bounds_q: Tensor, bounds_k: Tensor, packed: int, window: int | None) -> Tensor:
    mask = torch.zeros(packed, packed, dtype=torch.bool, device=index.device)
    rows, paths = bounds_q.tolist(), bounds_k.tolist()
    for start, end, first, last in zip(rows, rows[1:], paths, paths[1:], strict=False):
        path, own = index[first:last], end - start
        seen = torch.ones(own, len(path), dtype=torch.bool, device=index.device).tril(len(path) - own)
        mask[start:end, path] = seen.triu(len(path) - own + 1 - window) if window else seen
    return mask
