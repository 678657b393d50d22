"""Small models for tests of images and of tools."""

from collections.abc import Callable
from pathlib import Path

import torch
import trl
from tiny import make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl.chat_template_utils import get_training_chat_template


def save_caller(model: str, folder: Path, turns: list[dict], tools: list[Callable], **template) -> str:
    """
    Save a model that has memorized what the assistant says in a conversation, with tool calls and their results.

    Args:
        model: folder of the model to begin with.
        folder: where to save; returned as a string.
        turns: messages, in turn of a user, the assistant, tools and the assistant again.
        tools: whose schemas the prompt shows.
        template: more arguments of Qwen3's chat template, with which the conversation is rendered.
    """
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    in_training = get_training_chat_template(tokenizer)  # with tools, TRL renders prompts by this one
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    policy.resize_token_embeddings(len(tokenizer))

    def rendered(number: int) -> list[int]:
        follows = number < len(turns) and turns[number]["role"] == "assistant"
        options = {"chat_template": in_training, "add_generation_prompt": follows, **template}
        return tokenizer.apply_chat_template(turns[:number], tools=tools, return_dict=False, **options)

    tokens = rendered(len(turns))
    labels = torch.full((1, len(tokens)), -100)
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            own = slice(len(rendered(number)), len(rendered(number + 1)))
            labels[:, own] = torch.tensor(tokens[own])
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for _ in range(200):
        loss = policy(torch.tensor([tokens]), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.005:
            break
    policy.config.max_position_embeddings = 1024  # TRL drops a tool's result that would not fit
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class ImageProcessor(Qwen2_5_VLProcessor):
    """Without video support, which needs torchvision."""

    def __init__(self, image_processor, tokenizer, chat_template=None):
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        for name in ("image", "video"):
            token = f"<|{name}_pad|>"
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))


IMAGE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for c in m['content'] %}"
    "{{ c['text'] if c['type'] == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vision_model() -> tuple[Qwen2_5_VLForConditionalGeneration, ImageProcessor]:
    tokenizer = make_tokenizer()
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    start, end, image, video = tokenizer.convert_tokens_to_ids(special)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=4 * 28 * 28)
    return model, ImageProcessor(images, tokenizer, chat_template=IMAGE_TEMPLATE)
