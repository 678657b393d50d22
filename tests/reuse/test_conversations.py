"""Recorded conversations without tokens: which tokens the policy has sampled, by the chat template."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from guessing import TEMPLATE, guess
from helpers import logged, make_trainer, relative_error, snapshot, trained
from test_environments import playing
from tiny import make_tokenizer
from transformers import AutoTokenizer

from benchmarks.base_models import build_tokenizer
from opo_trl.reuse.conversations import UnfaithfulError, check_prompt, empty_thoughts, marking_template, tokenized
from opo_trl.reuse.reading import RECORDED


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
    with_tools = {"tools": [row | {"completion": turns, "tools": TOOLS}], "text and tools": [row | {"tools": TOOLS}]}
    for name, rows in {"text": [row], **with_tools}.items():
        (first, *_), *_ = replayed(marked, tmp_path / name, rows * 16, make=make_trainer).train_dataset[RECORDED]
        words = AutoTokenizer.from_pretrained(marked).convert_ids_to_tokens(
            first["prompt_ids"] + first["completion_ids"]
        )
        assert words == ["Game "] * (name in with_tools) + ["Game ", "1", ".", "right", "<eos>"]


def test_calls_in_a_prompt_are_rendered_as_the_model_wrote_them(marked, tmp_path):
    """Their arguments are JSON, which a template would write as a text in quotes."""
    call = {"type": "function", "function": {"name": "guess", "arguments": '{"number": 3}'}}
    asked = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "higher"}]
    row = {"prompt": [{"role": "user", "content": "Game 1."}, *asked], "completion": "right", "reward": 1.0}
    (first, *_), *_ = replayed(marked, tmp_path / "run", [row] * 16, make=make_trainer).train_dataset[RECORDED]
    text = AutoTokenizer.from_pretrained(marked).decode(first["prompt_ids"])
    assert '<tool_call>{"name": "guess", "arguments": {"number": 3}}</tool_call>' in text


def test_a_template_that_does_not_mark_the_assistant_is_rejected(player, tmp_path, played, caplog):
    with pytest.raises(ValueError, match=r"rollouts=.*does not mark each turn of the assistant by \{% generation %\}"):
        replayed(player, tmp_path / "run", [row | {"tools": []} for row in played[1]])
    assert "no column `tools` describes those that are called" in caplog.text


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}], ids=str)
def test_what_a_template_marks(shared_data, options):
    """
    With Qwen3's, of which TRL has a variant that marks: the line break after a turn was not sampled. Without thinking,
    the run's generation prompt has an empty thought, which was not sampled either.
    """
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "Qwen3-1.7B")
    args = SimpleNamespace(rollouts="rows.jsonl")
    trainer = SimpleNamespace(
        processing_class=tokenizer, chat_template_kwargs=options, eos_token_ids=[tokenizer.eos_token_id], args=args
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
    think = "<think>\n\n</think>\n\n"
    in_prompt, sampled_thought = (think, "") if options else ("", think)
    assert asked.endswith(f"user\nGuess!<|im_end|>\n<|im_start|>assistant\n{in_prompt}")
    assert '{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}' in asked
    sampled = [token for token, own in zip(row["completion_ids"], row["completion_mask"], strict=True) if own]
    said = '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call>'
    assert tokenizer.decode(sampled) == f"{sampled_thought}{said}<|im_end|>{sampled_thought}done<|im_end|>"
    assert empty_thoughts(tokenizer, row, completion) == 2 * (not options)


ASKED, LATER = {"role": "user", "content": "Game 1."}, {"role": "user", "content": "Go on."}
SAID, LAST = {"role": "assistant", "content": "a guess"}, {"role": "assistant", "content": "end"}
ARGUMENTS = json.dumps({"number": 3, "why": 'so "I" hope', "also": None})
CALLS = {**SAID, "tool_calls": [{"type": "function", "function": {"name": "guess", "arguments": ARGUMENTS}}]}
OLD_CALL = {"role": "assistant", "content": None, "function_call": {"name": "guess", "arguments": "{}"}}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"}
RESULT = {"role": "tool", "content": "higher"}
FAITHFUL = [[ASKED, CALLS, RESULT, LAST], [ASKED, SAID], [ASKED, SAID, LATER, {**LAST, "trainable": True}]]
# What Qwen3's template leaves out. Some of it stands in other messages, too.
DROPPED = {
    "leaves out something of a message of 'developer'": [{"role": "developer", "content": "user"}, ASKED, SAID],
    "of a message of 'tool-response'": [ASKED, SAID, {"role": "tool-response", "content": "end"}, LAST],
    "of a message of 'function'": [ASKED, OLD_CALL, {"role": "function", "name": "guess", "content": "3"}, LAST],
    "leaves out something of 'function_call' of a turn": [ASKED, OLD_CALL],
    "content of a message of 'tool' is not text": [ASKED, CALLS, {**RESULT, "content": {"is": "higher"}}, LAST],
    "leaves out something of 'refusal' of a turn": [ASKED, SAID, LATER, {**LAST, "refusal": "No."}],
    "empty, but for fields that are not known": [ASKED, {"role": "assistant", "content": "", "audio": {"id": "a"}}],
    "marked as not to be trained on": [ASKED, {**SAID, "trainable": False}, LATER, LAST],
    "before a turn than its generation prompt": [ASKED, SAID, LATER, THOUGHT],
    "removes an earlier thought": [ASKED, THOUGHT, LATER, LAST],
}


def tokenized_rows(model: str, folder: Path, conversations: list[list[dict]]) -> list[list[dict]]:
    """Of a run without thinking, the rows of two completions for each conversation."""
    named = [{"messages": messages, "group": str(place)} for place, messages in enumerate(conversations)]
    rows = [{**row, "reward": reward} for row in named for reward in (0.0, 1.0)]
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    options = {"chat_template_kwargs": {"enable_thinking": False}, "steps_per_generation": 1, **sizes}
    return [*replayed(model, folder, rows, make=make_trainer, **options).train_dataset[RECORDED]]


@pytest.fixture(scope="module")
def qwen(tiny_model, tmp_path_factory) -> str:
    """A small model with Qwen3's chat template."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("qwen"), dirs_exist_ok=True)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text())
    return str(folder)


def test_what_the_template_does_not_render_is_left_out_and_counted(qwen, tmp_path, caplog):
    groups = tokenized_rows(qwen, tmp_path / "run", [*FAITHFUL, *DROPPED.values()])
    tokenizer, own = AutoTokenizer.from_pretrained(qwen), []
    for row, _ in groups:
        tokens = zip(row["completion_ids"], row["completion_mask"], strict=True)
        own.append(tokenizer.decode([token for token, is_own in tokens if is_own]))
    call = f'<tool_call>\n{{"name": "guess", "arguments": {ARGUMENTS}}}\n</tool_call>'
    end = "<|im_end|>"
    assert own == [f"a guess\n{call}{end}end{end}", f"a guess{end}", f"a guess{end}end{end}"] + [""] * len(DROPPED)
    for why in DROPPED:
        assert f"{why} (2, such as row " in caplog.text
    assert f"{2 * len(DROPPED)} of its {2 * len(own)} completions cannot be trained on" in caplog.text
    assert f"For {len(DROPPED) / len(own):.1%} of completions, that depends on" in caplog.text
    # Reward functions see what the assistant has said.
    assert tokenizer.decode(groups[-1][0]["completion_ids"]).endswith("</think>\n\n3\nend")


def test_rollouts_of_which_none_can_be_rendered_are_rejected(qwen, tmp_path):
    said = r"4 of its 4 completions cannot be trained on: .*'tool-response' \(2, such as row 1\).*None is left"
    with pytest.raises(ValueError, match=rf"rollouts=.*{said}"):
        tokenized_rows(qwen, tmp_path / "run", [*DROPPED.values()][1:3])


@pytest.mark.parametrize("message", [CALLS, OLD_CALL, {"role": "user", "content": {"number": 3}}])
def test_a_prompt_that_the_template_does_not_render_is_noticed(message):
    """By one that knows no calls."""
    tokenizer = make_tokenizer()
    trainer = SimpleNamespace(processing_class=tokenizer, chat_template_kwargs={})
    check_prompt(trainer, [ASKED, SAID, RESULT])
    with pytest.raises(UnfaithfulError, match=f"of a message of '{message['role']}'"):
        check_prompt(trainer, [ASKED, message, RESULT])


@pytest.mark.parametrize("family", ["qwen3", "glm4moe"])
def test_an_earlier_thought_that_the_template_removes_is_noticed(family):
    """TRL's variant for training keeps it with Qwen3's, but the model has not read it again."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text()
    ends = [tokenizer.eos_token_id]
    trainer = SimpleNamespace(processing_class=tokenizer, chat_template_kwargs={}, eos_token_ids=ends)
    tokens = partial(tokenized, trainer, marking_template(tokenizer), [ASKED])
    in_field = {"role": "assistant", "content": "3", "reasoning_content": "hm"}
    for turn in (THOUGHT, in_field):
        assert "hm" in tokenizer.decode(tokens([turn, RESULT, LAST], TOOLS)["completion_ids"])
        with pytest.raises(UnfaithfulError, match="removes an earlier thought"):
            tokens([turn, LATER, LAST], [])
