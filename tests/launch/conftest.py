"""Fixtures of the tests of launch."""

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, Qwen3ForCausalLM, set_seed


@pytest.fixture(scope="session")
def small_qwen3(shared_data, tmp_path_factory) -> Path:
    """A random Qwen3 with 5 million parameters, and the real tokenizer, chat template and vocabulary."""
    source, folder = shared_data / "Qwen3-1.7B", tmp_path_factory.mktemp("qwen3")
    config = AutoConfig.from_pretrained(source)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    config.update({**sizes, "num_key_value_heads": 1, "head_dim": 32, "layer_types": config.layer_types[:1]})
    set_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    GenerationConfig.from_pretrained(source).save_pretrained(folder)
    return folder
