"""A small model for tests of images."""

import torch
from tiny import make_tokenizer
from transformers import ProcessorMixin, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


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
