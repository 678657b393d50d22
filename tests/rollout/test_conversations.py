"""Recorded conversations without tokens: which tokens the policy has sampled, by the chat template."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from guessing import TEMPLATE, guess
from helpers import logged, make_trainer, relative_error, snapshot, trained
from test_environments import playing
from transformers import AutoTokenizer

from benchmarks.base_models import build_tokenizer
from opo_trl.data.rollouts import RECORDED
from opo_trl.rollout.conversations import marking_template, tokenized


# Marks what the assistant writes, and has a word for each tool.
MARKED = "{% for tool in tools or [] %}Game {% endfor %}" + TEMPLATE.replace(
    "{% else %}", "{% elif m.role == 'user' %}{{ m.content }}{% else %}{% generation %}"
).replace("{% endif %}{% endif %}{% endfor %}", "{% endif %}{% endgeneration %}{% endif %}{% endfor %}")
TOOLS = [{"type": "function", "function": {"name": "guess", "description": "", "parameters": {"type": "object"}}}]
OPTIONS = {"max_completion_length": 60, "steps_per_generation": 4, "max_steps": 2, "learning_rate": 0.1}


def replayed(model: str, folder: Path, rows: list[dict], make=trained, **options):
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    nothing = dict.fromkeys(("rollout_func", "reward_funcs", "train_dataset"))
    source = {"rollouts": str(folder / "rows.jsonl"), "rollouts_model": model}
    return make(model, folder, trainer_arguments=nothing, shuffle_dataset=False, **OPTIONS | source | options)


@pytest.fixture(scope="module")
def marked(player, tmp_path_factory) -> str:
    """The player, with a chat template that marks what it writes."""
    folder = shutil.copytree(player, tmp_path_factory.mktemp("marked"), dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(player)
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def played(marked, tmp_path_factory):
    """A run with a tool, and its conversations as messages."""
    rows = []

    def keeping(prompts, completions, **_) -> list[float]:
        rewards = [float(len(turns)) for turns in completions]
        for prompt, turns, reward in zip(prompts, completions, rewards, strict=True):
            rows.append(json.loads(json.dumps({"messages": [*prompt, *turns], "tools": TOOLS, "reward": reward})))
        return rewards

    options = {**OPTIONS, "shuffle_dataset": False, "tools": [guess]}
    run = playing(marked, tmp_path_factory.mktemp("played"), reward_funcs=[keeping], **options)
    return run, rows


def change(trainer) -> dict:
    return {name: value.double() - trainer.initial[name] for name, value in snapshot(trainer.model).items()}


def test_training_on_the_messages_of_a_run_repeats_it(marked, tmp_path, played, caplog):
    run, rows = played
    assert max(len(row["messages"]) for row in rows) >= 6
    again = replayed(marked, tmp_path / "again", rows)
    for name in ("prompt_ids", "completion_ids", "tool_mask"):
        assert vars(run.rollouts[0])[name].equal(vars(again.rollouts[0])[name])
    assert relative_error(change(again), change(run)) < 1e-3
    assert logged(again)[0]["completions/mean_length"] == logged(run)[0]["completions/mean_length"]
    assert "For 0.0% of completions, that depends on" in caplog.text
    assert "no column `tools`" not in caplog.text


def test_text_whose_tokens_depend_on_its_prompt_is_counted(player, tmp_path, caplog):
    """After the prompt 1, the text 2 is not the token 2: that would be read as 12."""
    folder = shutil.copytree(player, tmp_path / "model")
    build_tokenizer(["1", "2", "12"], "12|1|2", max_length=64).save_pretrained(folder)
    rows = [{"prompt": "1", "completion": text, "reward": float(text)} for text in ("1", "2")] * 8
    run = replayed(str(folder), tmp_path / "run", rows)
    assert "For 50.0% of completions, that depends on" in caplog.text
    ids = [row["completion_ids"] for group in run.train_dataset[RECORDED] for row in group]
    assert sorted(ids) == [[3, 1]] * 8 + [[4, 1]] * 8


def test_tools_are_in_the_prompt_of_an_answer_without_calls(marked, tmp_path):
    row = {"prompt": [{"role": "user", "content": "Game 1."}], "completion": "right", "reward": 1.0}
    turns = [{"role": "assistant", "content": "right"}]
    for name, rows in (("text", [row] * 16), ("tools", [row | {"completion": turns, "tools": TOOLS}] * 16)):
        (first, *_), *_ = replayed(marked, tmp_path / name, rows, make=make_trainer).train_dataset[RECORDED]
        words = AutoTokenizer.from_pretrained(marked).convert_ids_to_tokens(
            first["prompt_ids"] + first["completion_ids"]
        )
        assert words == ["Game "] * (name == "tools") + ["Game ", "1", ".", "right", "<eos>"]


def test_a_template_that_does_not_mark_the_assistant_is_rejected(player, tmp_path, played, caplog):
    with pytest.raises(ValueError, match=r"rollouts=.*does not mark each turn of the assistant by \{% generation %\}"):
        replayed(player, tmp_path / "run", [row | {"tools": []} for row in played[1]])
    assert "no column `tools` describes those that are called" in caplog.text


def test_what_a_template_marks(shared_data):
    """With Qwen3's, of which TRL has a variant that marks: the line break after a turn was not sampled."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "Qwen3-1.7B")
    args = SimpleNamespace(rollouts="rows.jsonl")
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id], args=args
    )
    example = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    prompt = [*example, {"role": "user", "content": "Guess!"}]
    call = {"type": "function", "function": {"name": "guess", "arguments": '{"number":3}'}, "id": None}
    completion = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "higher", "tool_calls": None},
        {"role": "assistant", "content": "done", "tool_calls": None},
    ]
    tool = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object", "title": None}}}
    row = tokenized(trainer, marking_template(tokenizer), prompt, completion, [tool])
    asked = tokenizer.decode(row["prompt_ids"])
    assert asked.endswith("user\nGuess!<|im_end|>\n<|im_start|>assistant\n")
    assert '{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}' in asked
    sampled = [token for token, own in zip(row["completion_ids"], row["completion_mask"], strict=True) if own]
    think = "<think>\n\n</think>\n\n"
    said = '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call>'
    assert tokenizer.decode(sampled) == f"{think}{said}<|im_end|>{think}done<|im_end|>"
