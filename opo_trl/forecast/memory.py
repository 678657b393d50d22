"""
Peak memory of a process, computed from the shape of the model; nothing is measured.

Ψ is the number of trained parameters and b the bytes of each, P and B are the number and bytes of all weights, c the
bytes of an element in matrix products, N the number of processes, R and L DeepSpeed's `reduce_bucket_size` (5e8) and
`stage3_max_live_parameters` (1e9). With gradient accumulation and AdamW:

| sharding | weights | gradients | optimizer | buckets | gathered weights | optimizer step |
|---|---|---|---|---|---|---|
| none | B | bΨ | 2bΨ | | | |
| DDP | B | bΨ | 2bΨ | bΨ | | |
| ZeRO-1 | B | bΨ | 12Ψ/N | (R + min(R, Ψ))b | | (4 + b)Ψ/N |
| ZeRO-2 | B | 2bΨ/N | 12Ψ/N | (R + min(R, Ψ))b | | (4 + b)Ψ/N |
| ZeRO-3 | B/N | bΨ/N | 12Ψ/N | (R + min(R, Ψ))b | min(P, L)·B/P | (4 + b)Ψ/N |
| FSDP2 | B/N | cΨ, then bΨ/N | 2bΨ/N | | embedding and three layers, in c | |

- ZeRO's 12 are a float32 master copy and two float32 moments (Rajbhandari et al., 2020, arXiv:1910.02054). Otherwise
  the moments have the dtype of the parameters, without a master copy. FSDP2 under bf16 makes trained weights float32.
- ZeRO-2 holds its part of the gradients twice: the accumulated ones, and those of the micro-batch. FSDP2 reduces only
  in the last micro-batch of a step, and holds unsharded gradients until then.
- DDP's buckets are a second copy of the gradients. ZeRO's are one buffer and a copy of what is being reduced; ZeRO-3
  never frees the buffer. ZeRO's step makes a flat copy of its part of the gradients, and one in float32.

Activations are those of a Llama-style decoder (RMSNorm, gated MLP, rotary positions) as Transformers runs it, op by
op (`_layer`, `_head`). `HEADROOM`, a tenth of the device, is for the CUDA context, NCCL's buffers, workspaces and
fragmentation of the allocator. Rollouts are small: 30 bytes a token.
"""

from dataclasses import dataclass
from typing import Any


HEADROOM = 0.1  # share of the device, for what is not computed here

_HELD_ASLEEP = 0.1  # vLLM's documentation: sleeping frees "up to 90%+" of what the engine holds
_TILE = (4096, 32768)  # tokens and words of the tiles in which TRL's fused LM head makes logits

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")  # with the layers that `_layer` counts


class Decoder:
    """Shape of a dense Llama-style decoder: widths in elements, `query` and `key` over all heads."""

    def __init__(self, config: Any):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.layers: int = config.num_hidden_layers
        self.hidden: int = config.hidden_size
        self.query: int = width * config.num_attention_heads
        self.key: int = width * config.num_key_value_heads
        self.intermediate: int = config.intermediate_size
        # Elements of the linear layers of one block
        self.layer_weights = self.hidden * (2 * self.query + 2 * self.key + 3 * self.intermediate)
        self.vocabulary: int = config.vocab_size
        self.embedding = self.vocabulary * self.hidden  # elements, as many as those of the LM head
        self.tied: bool = config.tie_word_embeddings
        self.normalized_heads = config.model_type == "qwen3"
        self.attention: str = config._attn_implementation or "sdpa"


def decoder(config: Any) -> Decoder | None:
    """Shape of the text model of a Transformers configuration; `None` if its layers are not Llama-style."""
    config = config.get_text_config()
    return Decoder(config) if config.model_type in ARCHITECTURES else None


@dataclass(frozen=True)
class Run:
    """What the memory of a process depends on."""

    shape: Decoder | None  # `None` leaves the activations out
    parameters: int  # number of parameters
    trained: int  # Ψ, number of those that are trained
    total: float  # B, bytes of all weights, whole
    # Bytes per element: of the weights and the residual stream; c, less than that under autocast of float32 weights;
    # and b, more than both for LoRA adapters that PEFT keeps in float32
    weights: int = 2
    compute: int = 2
    trained_width: float = 2
    sharding: str = "none"  # or "ddp", "zero1", "zero2", "zero3" or "fsdp2", over `processes`
    processes: int = 1
    moments: float | None = None  # bytes of optimizer state per trained parameter; AdamW's by default
    bucket: float = 5e8  # R, elements of DeepSpeed's `reduce_bucket_size`
    live: float = 1e9  # L, elements of DeepSpeed's `stage3_max_live_parameters`
    rows: int = 1  # rows of a micro-batch, each with a prompt and a completion
    prompt: int = 0  # tokens of a prompt
    completion: int = 0  # tokens of a completion
    checkpointing: bool = True  # whether layers are computed again in the backward pass
    fused_kernels: bool = True  # whether TRL's fused LM head runs in Triton, that is on a GPU
    reference: bool = False  # whether a reference model is held
    vllm: float = 0.0  # bytes of a colocated vLLM
    vllm_sleeps: bool = False  # whether it gives its memory back during updates
    generated_rows: int = 0  # completions that Transformers generates at once

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def full(self) -> bool:
        """Whether all weights are trained, and not adapters."""
        return self.shape is not None and self.trained >= self.shape.layers * self.shape.layer_weights

    @property
    def copies(self) -> bool:
        """
        Whether every linear layer keeps a cast of its input, since products have fewer bytes than its weights. Not
        under ZeRO-3 and FSDP2, where gathered weights come in the dtype of products.
        """
        width = self.weights if self.full else self.trained_width
        return self.sharding not in ("zero3", "fsdp2") and self.compute < width


def memory_plan(run: Run) -> dict[str, dict[str, float]]:
    """
    Bytes that one process holds at each moment that can be the peak of a run: moment → component → bytes. The moments
    are `"generation"`, `"optimizer step"`, and two of a backward pass while the gradients of earlier micro-batches are
    held, `"LM head"` and `"layers"`.
    """
    shape, c = run.shape, run.compute  # c: bytes of an element in matrix products
    weights_are_sharded = run.sharding in ("zero3", "fsdp2")
    held, update, step = _states(run)
    held["weights"] = run.total / run.processes if weights_are_sharded else run.total
    held["reference model"] = held["weights"] if run.reference else 0.0
    awake = {"vLLM": run.vllm}
    asleep = {"vLLM": run.vllm * _HELD_ASLEEP} if run.vllm_sleeps else awake
    plan: dict[str, dict[str, float]] = {"generation": held | awake, "optimizer step": held | step | asleep}
    if shape is not None:
        if run.sharding == "zero3":
            # At most `live` elements at once
            update["gathered weights"] = min(1, run.live / run.parameters) * run.total
        elif run.sharding == "fsdp2":
            embeddings = (2 - shape.tied) * shape.embedding  # tied, embedding and LM head are one matrix
            update["gathered weights"] = c * (embeddings + 3 * shape.layer_weights)
        for moment, parts in _activations(run, shape).items():
            plan[moment] = held | update | asleep | parts
        # A key and a value in each layer.
        bytes_per_token = 2 * shape.layers * shape.key * run.weights
        plan["generation"]["KV cache"] = bytes_per_token * run.generated_rows * run.length
    if run.sharding == "zero3" and run.generated_rows:
        plan["generation"]["gathered weights"] = run.total  # `ds3_gather_for_generation`
    return {moment: _without_zeros(parts) for moment, parts in plan.items()}


def _without_zeros(components: dict[str, float]) -> dict[str, float]:
    """The components that hold any bytes."""
    return {name: size for name, size in components.items() if size}


def _states(run: Run) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """
    Bytes of gradients, optimizer and DDP's or ZeRO's buckets in one process, by component, as in the table of this
    file: what is held always, what comes to that in forward and backward passes, and what in the optimizer step.
    """
    trained, b = run.trained, run.trained_width  # number of trained parameters, and bytes of each
    part = trained / run.processes
    moments = run.moments  # bytes of optimizer state per trained parameter
    if moments is None:  # AdamW has two: float32 under ZeRO, and else as wide as the parameters
        moments = 8 if run.sharding.startswith("zero") else 2 * b
    if run.sharding in ("none", "ddp"):
        gradients = {"gradients": trained * b}
        bucket_bytes = trained * b if run.sharding == "ddp" else 0
        return {"optimizer": trained * moments, "buckets": bucket_bytes}, gradients, gradients
    if run.sharding == "fsdp2":
        gradients = {"gradients": max(run.compute * trained, b * part)}
        return {"optimizer": part * moments}, gradients, {"gradients": b * part}
    always = {"optimizer": part * (4 + moments)}  # 4: ZeRO's copy of the parameters in float32
    buckets = (run.bucket + min(run.bucket, trained)) * b
    flat_width = 4 + b if b < 4 else 4  # A copy in the gradients' dtype, and one in float32 if that is another.
    flat = {"float32 gradients": flat_width * part}
    if run.sharding == "zero3":
        return always | {"gradients": b * part, "buckets": run.bucket * b}, {"buckets": buckets}, flat
    held_gradients = trained if run.sharding == "zero1" else 2 * part  # ZeRO-2: the accumulated and the new ones
    during = {"gradients": b * held_gradients, "buckets": buckets}
    return always, during, {"gradients": b * part} | flat


def _activations(run: Run, d: Decoder) -> dict[str, dict[str, float]]:
    """
    Bytes that the forward and backward pass of a micro-batch add to what is held, at their two peaks, `"LM head"` and
    `"layers"`: peak → component → bytes. `d` is the shape of the model.
    """
    tokens, w = run.rows * run.length, run.weights  # of a micro-batch; w: bytes of an element of the residual stream
    stored, in_use = _layer(run, d)  # per token: kept for the backward pass, and besides at its peak
    forward, backward, pending = _head(run, d)
    # Casts of float32 weights under autocast live as long as the forward pass, or as the activations that it keeps.
    casts = run.compute * d.layer_weights if run.copies and run.full else 0
    # The attention mask of a micro-batch, a byte for each pair of tokens of a row.
    mask = float(tokens * run.length if d.attention == "sdpa" else 0)
    if run.checkpointing:
        checkpoint = w * d.hidden  # bytes per token; a layer is computed again from it, and so holds its all only then
        # The checkpoint is the layer's input, which the norm of a float32 model uses without a copy.
        counted_twice = checkpoint if w == 4 else 0
        layer = tokens * (stored + in_use - counted_twice) + casts
        activations = tokens * d.layers * checkpoint + mask
        forward += d.layers * casts
    else:
        layer = tokens * in_use
        activations = d.layers * (tokens * stored + casts) + mask
    return {
        "LM head": {"activations": activations, "LM head": max(forward, backward)},
        # The gradient of a tied embedding is made next to the LM head's, when no activation is left.
        "layers": {"activations": activations, "one layer": max(layer, pending - activations), "LM head": pending},
    }


def _layer(run: Run, d: Decoder) -> tuple[float, float]:
    """
    Bytes per token that one layer keeps for its backward pass, and those in use besides at the peak of this pass. `d`
    is the shape of the model.
    """
    # Bytes of an element of the residual stream and in matrix products; all weights are trained; tokens of a row.
    w, c, full, length = run.weights, run.compute, run.full, run.length
    # The input of both norms in float32: a copy of it, or the residual stream itself.
    norms = 8 * d.hidden
    normalized = 2 * w * d.hidden if full else 0  # for the gradient of the norms' weights
    outputs = (5 if run.copies else 2) * c * d.hidden
    heads = 0
    if d.normalized_heads:  # Qwen3 has norms of queries and keys, too
        heads = (4 + c if full else 4) * (d.query + d.key)
    # With a mask, keys and values are repeated for every head; only flash attention reads them as groups.
    keys = d.key if d.attention.startswith("flash") else d.query
    attention = 2 * c * (d.query + keys)
    if run.copies and not full:
        attention += c * d.query
    mask = c * length if d.attention == "sdpa" else 0  # the mask as numbers that are added to scores
    mlp = 4 * c * d.intermediate  # gate, its activation, the other factor, and their product
    # In the MLP's backward pass: gradients of both factors, and of the residual stream.
    in_use = 2 * c * d.intermediate + w * d.hidden
    if run.copies and not full:
        in_use += c * d.intermediate + 4 * c * d.hidden  # the forward pass holds casts and their sources at once
    return norms + normalized + outputs + heads + attention + mask + mlp, in_use


def _head(run: Run, d: Decoder) -> tuple[float, float, float]:
    """
    Bytes of the final norm and TRL's fused LM head in the forward pass and at the peak of the backward pass, and of
    the gradient that a tied head holds until the embedding adds its own. `d` is the shape of the model.
    """
    w, c = run.weights, run.compute  # bytes of an element of the residual stream, and in matrix products
    full = run.full
    tokens = run.rows * run.length
    # Tokens whose log-probabilities are computed: without Triton, those of prompts, too.
    scored = run.rows * (run.completion if run.fused_kernels else max(run.length - 1, 0))
    # Bytes per element: the norm's input in float32 and, if the norm is trained, what it made of it.
    norm_width = 4 + w if full else 4
    norm = norm_width * d.hidden * tokens + w * d.hidden * scored
    tile_tokens, tile_words = _TILE  # logits are made tile by tile, never all at once
    chunk = min(scored, tile_tokens)
    width = min(d.vocabulary, tile_words)
    tile = c * chunk * tile_words  # logits
    # The part of the head's weights for a tile, cast if autocast computes in fewer bytes.
    weight_tile = c * width * d.hidden if c < w else 0
    weight = d.embedding if full else 0
    inputs_and_weight = d.hidden * scored + weight
    gradients = 4 * inputs_and_weight  # summed in float32, then cast
    cast = w * inputs_and_weight if w < 4 else 0
    # Without Triton, torch ops on the tile leave seven float32 copies and a mask.
    unfused = 0 if run.fused_kernels else 29 * chunk * width
    pending = w * weight if d.tied else 0
    forward = norm + tile + weight_tile
    return forward, forward + gradients + max(cast, unfused), pending
