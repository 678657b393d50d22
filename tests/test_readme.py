"""The five lines of the README, as they stand, on a small model and on local data."""

import re
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import USE_CPU

from opo_trl.data import files


README = Path(__file__).resolve().parents[1] / "README.md"
ROWS = [{"question": f"{i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(16)]


def five_lines() -> str:
    readme = README.read_text(encoding="utf-8")
    _, _, section = readme.partition("## Five lines of Python")
    first_block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    return first_block[1]


def on_a_small_model(code: str, model: str, folder: str) -> str:
    for old, new in (
        ('"Qwen/Qwen3-0.6B"', repr(model)),
        ('"qwen3-opo"', f"{folder!r}, use_cpu={USE_CPU}, bf16=False, max_completion_length=6, max_steps=10"),
        ('{"enable_thinking": False}', "None"),  # the small model's template has no thinking
        ("accuracy_reward, args", "[accuracy_reward, length], args"),  # a random model solves nothing
        ("\nOPOTrainer(", "\ntrainer = OPOTrainer("),
        (").train()", ")\ntrainer.train()"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    return code


def length_reward(completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [float(len(text)) for text in texts]


@pytest.mark.filterwarnings("ignore")
def test_five_lines_train_off_policy_and_log_to_trackio(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    code = on_a_small_model(five_lines(), tiny_model, str(tmp_path / "run"))
    requests = []

    def load_dataset(*arguments, **options):
        requests.append((arguments, options))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(files, "load_dataset", load_dataset)
    for name, module in list(sys.modules.items()):
        if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    names = {"length": length_reward}
    exec(code, names)
    assert requests == [(("openai/gsm8k", "main"), {"split": "train"})]
    trainer = names["trainer"]
    assert trainer.train_dataset[3]["solution"] == "6"
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == 10
    assert log[0]["opo/chi2"] == 0
    for entry in log[1:8]:
        assert entry["opo/chi2"] > 0  # the regime of the χ² term
    assert [entry["opo/pass"] for entry in log[:8]] == [1, 1, 2, 2, 3, 3, 4, 4]
    databases = (tmp_path / "trackio").glob("*.db")
    assert list(databases)
