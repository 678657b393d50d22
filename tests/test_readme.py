"""The README: its Python runs as it stands on a small model and local data, and its length and width are bounded."""

import re
from pathlib import Path

import pytest
from datasets import Dataset
from device_fields import USE_CPU

from opo_trl.checks.files import read_json
from opo_trl.data import files


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
COLUMN = 84  # characters of code that a page of the site shows
ROWS = [{"question": f"{i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(16)]


def python_of_readme() -> str:
    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return block


def on_a_small_model(code: str, model: str, folder: str) -> str:
    """The code with a smaller model and budget; device and precision are chosen as a user's would be."""
    of_device = "" if USE_CPU else "bf16=False, "  # a pretend GPU has no kernels for it
    for old, new in (
        ('"Qwen/Qwen3-0.6B"', repr(model)),
        ('"qwen3-opo"', f"{folder!r}, {of_device}max_completion_length=6, logging_steps=1"),
        ('{"enable_thinking": False}', "None"),  # the small model's template has no thinking
        ("max_completions=12288", "max_completions=128"),
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
def test_python_of_readme_trains_off_policy_for_as_many_steps_as_the_bar_shows(tiny_model, tmp_path, monkeypatch):
    code = on_a_small_model(python_of_readme(), tiny_model, str(tmp_path / "run"))
    requests = []

    def load_dataset(*arguments, **options):
        requests.append((arguments, options))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(files, "load_dataset", load_dataset)
    names = {"length": length_reward}
    exec(code, names)
    assert requests == [(("openai/gsm8k", "main"), {"split": "train"})]
    trainer = names["trainer"]
    assert trainer.train_dataset[3]["solution"] == "6"
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == trainer.state.global_step == trainer.state.max_steps == 16  # two rollouts, in eight steps each
    assert 12288 // 64 * 8 == 1536
    assert "after 1,536 optimizer steps" in python_of_readme()
    assert log[0]["opo/chi2"] == 0
    for entry in log[1:8]:
        assert entry["opo/chi2"] > 0  # the regime of the χ² term
    assert [entry["opo/pass"] for entry in log[:8]] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.pages
def test_readme_is_short():
    assert len(README.split()) <= 1200


@pytest.mark.pages
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_the_column_of_the_site(page):
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    wide = [line for block in blocks for line in block.splitlines() if len(line) > COLUMN]
    assert not wide


def test_picture_is_that_of_its_record_and_shows_what_the_readme_says(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.losses.demo_figure import FIGURE, RECORD, draw

    record = read_json(RECORD)
    assert draw(record, tmp_path / "demo.png") == draw(record, tmp_path / "again.png")
    assert f"({FIGURE.relative_to(ROOT).as_posix()})" in README
    for run in record.values():
        _, first, *_ = run["points"][0]
        _, last, low, _ = run["points"][-1]
        assert first < low <= last  # both have learned, beyond the interval
    (most, *_), (fewest, *_) = (record[name]["points"][-1] for name in ("demo", "replay"))
    assert fewest == 1536 < most
