"""A small random Qwen3 with a byte-level tokenizer and a chat template, for tests of plumbing."""

import gzip
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(folder: Path, seed: int = 0) -> str:
    """Save a Qwen3 (about 70,000 parameters) and its tokenizer; returns the folder as a string."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention accepts
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # With the default initialization, all next tokens are equally likely after any prefix.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_short_problems(source: Path, folder: Path, count: int = 60) -> str:
    """Save the shortest problems of both splits of a folder of zipped ones; returns the folder as a string."""
    folder.mkdir()
    for split in ("train", "test"):
        with gzip.open(source / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = sorted(file, key=len)
        (folder / f"{split}.jsonl").write_text("".join(rows[:count]), encoding="utf-8")
    return str(folder)


def save_recipe_without(source: Path, folder: Path, *fields: str) -> str:
    """Save a recipe without some fields, such as the configuration of a dataset on the Hub; returns its path."""
    names = tuple(f"{field}:" for field in fields)
    with source.open(encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith(names)]
    path = folder / "recipe.yaml"
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)
