"""The completions that a report shows."""

import json
from pathlib import Path

import pytest

from opo_trl.report.examples import LONGEST, Example, examples
from opo_trl.report.run_report import describe, page


def entry(step: int, reward: float | None, completion: object = "4", prompt: object = "2 + 2 =") -> dict:
    return {"step": step, "prompt": prompt, "completion": completion, "reward": reward}


def test_best_and_worst_of_the_first_and_the_last_validation_are_shown():
    entries = [entry(0, 0.5, "a"), entry(0, None, "b"), entry(0, 1.0, "c")]
    entries += [entry(8, 0.0, "d"), entry(16, 0.25, "e"), entry(16, 0.75, "f"), entry(16, 0.5, "g")]
    shown = [(example.step, example.reward, example.completion) for example in examples(entries)]
    assert shown == [(0, "1", "c"), (0, "no score", "b"), (16, "0.75", "f"), (16, "0.25", "e")]


def test_one_completion_is_shown_once():
    assert examples([entry(0, 1.0)]) == [Example(0, "1", "2 + 2 =", "4")]
    assert examples([]) == []


def test_long_completions_are_cut_and_messages_are_named():
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    [example] = examples([entry(3, 0.0, completion="x" * (LONGEST + 1_234), prompt=messages)])
    assert example.prompt == "user: 2 + 2?\n\nassistant: 4"
    assert example.completion == "x" * LONGEST + " … (1,234 characters more)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose completions look like a page."""
    (tmp_path / "settings.json").write_text('{"seed": 1}')
    completion = "<script>alert(1)</script> and \x1b[2J"
    lines = [json.dumps(entry(step, 1.0, completion)) for step in (0, 4)]
    (tmp_path / "completions.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_completions_are_text_on_the_page(run):
    html = page(describe(run))
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; and \\x1b[2J") == 2
    assert "<script" not in html
    assert "\x1b" not in html


def test_completions_that_are_none_are_named_in_the_error(run):
    (run / "completions.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"completions\.jsonl or the log is not as opo-trl writes it: KeyError"):
        describe(run)
