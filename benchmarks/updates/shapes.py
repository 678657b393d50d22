"""Shapes of models: arguments of a Transformers configuration."""

from typing import Any


QWEN3_1_7B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
QWEN3_0_6B = QWEN3_1_7B | {"hidden_size": 1024, "intermediate_size": 3072}


def small_qwen3(width: int, vocab_size: int = 1024) -> dict[str, Any]:
    """A Qwen3 of two layers, whose LM head has about the same share of the parameters as that of Qwen3-0.6B."""
    return QWEN3_1_7B | {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "head_dim": 32,
    }


# Eight experts, of which a token gets two
SMALL_QWEN3_MOE = small_qwen3(128) | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
}
# Five layers with a sliding window and one without, as in Gemma 3 1B, whose window has 512 tokens
SMALL_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 128,
}
