"""Recorded conversations without tokens: which tokens the policy has sampled, by the chat template."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import trl
from guessing_game import GAMES, TEMPLATE, guess
from named_tensors import relative_error, snapshot
from recording_trainers import logged, make_trainer, trained
from tiny import make_tokenizer
from transformers import AutoTokenizer

from benchmarks.models.base_models import build_tokenizer
from opo_trl.checks.files import write_lines
from opo_trl.reuse import turns
from opo_trl.reuse.conversations import UnfaithfulError
from opo_trl.reuse.reading import RECORDED


# Has a word for each tool.
WITH_TOOLS = "{% for tool in tools or [] %}Game {% endfor %}" + TEMPLATE
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [{"type": "function", "function": {"name": "guess", "description": "", "parameters": {"type": "object"}}}]
OPTIONS = {"max_completion_length": 60, "steps_per_generation": 4, "max_steps": 2, "learning_rate": 0.1}


def replayed(model: str, folder: Path, rows: list[dict], make=trained, **options):
    folder.mkdir()
    file = folder / "rows.jsonl"
    write_lines(file, rows)
    nothing = dict.fromkeys(("rollout_func", "reward_funcs", "train_dataset"))
    options = {"rollouts": str(file), "rollouts_model": model, "shuffle_dataset": False, **OPTIONS, **options}
    return make(model, folder, trainer_arguments=nothing, **options)


def first_completion(trainer) -> dict:
    """The first of its recorded completions, with tokens."""
    groups = trainer.train_dataset[RECORDED]
    return groups[0][0]


@pytest.fixture(scope="module")
def with_tools(player, tmp_path_factory) -> str:
    """The player, with a chat template that renders tools."""
    folder = shutil.copytree(player, tmp_path_factory.mktemp("with_tools"), dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(player)
    tokenizer.chat_template = WITH_TOOLS
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def played(with_tools, tmp_path_factory):
    """A run with a tool, and its conversations as messages."""
    rows = []

    def number_of_messages(prompts, completions, **_) -> list[float]:
        rewards = [float(len(answer)) for answer in completions]
        for prompt, answer, reward in zip(prompts, completions, rewards, strict=True):
            row = {"messages": [*prompt, *answer], "tools": TOOLS, "reward": reward}
            rows.append(copy.deepcopy(row))  # TRL may change its messages.
        return rewards

    arguments = {
        "rollout_func": None,
        "reward_funcs": [number_of_messages],
        "train_dataset": GAMES,
        "tools": [guess],
    }
    options = {"max_tool_calling_iterations": 4, "shuffle_dataset": False, **OPTIONS}
    run = trained(with_tools, tmp_path_factory.mktemp("played"), trainer_arguments=arguments, **options)
    return run, rows


def sampled_text(tokenizer, row: dict) -> str:
    """What the policy has sampled of a completion."""
    tokens = zip(row["completion_ids"], row["completion_mask"], strict=True)
    return tokenizer.decode([token for token, is_sampled in tokens if is_sampled])


def change(trainer) -> dict:
    weights = snapshot(trainer.model)
    return {name: weight.double() - trainer.initial[name] for name, weight in weights.items()}


def test_training_on_the_messages_of_a_run_repeats_it(with_tools, tmp_path, played, caplog):
    run, rows = played
    assert max(len(row["messages"]) for row in rows) >= 6
    again = replayed(with_tools, tmp_path / "again", rows)
    played_rollout = vars(run.rollouts[0])
    recorded_rollout = vars(again.rollouts[0])
    for name in ("prompt_ids", "completion_ids", "tool_mask"):
        assert played_rollout[name].equal(recorded_rollout[name])
    assert relative_error(change(again), change(run)) < 1e-3
    assert logged(again)[0]["completions/mean_length"] == logged(run)[0]["completions/mean_length"]
    assert "For 0.0% of completions, that depends on" in caplog.text
    assert "no column `tools`" not in caplog.text


def test_text_whose_tokens_depend_on_its_prompt_is_counted(player, tmp_path, caplog):
    """After the prompt 1, the text 2 is not the token 2: that would be read as 12."""
    folder = shutil.copytree(player, tmp_path / "model")
    build_tokenizer(["1", "2", "12"], "12|1|2", max_length=64).save_pretrained(folder)
    rows = [{"prompt": "1", "completion": text, "reward": float(text)} for text in ("1", "2")]
    run = replayed(str(folder), tmp_path / "run", rows * 8)
    assert "For 50.0% of completions, that depends on" in caplog.text
    ids = []
    for group in run.train_dataset[RECORDED]:
        ids += [completion["completion_ids"] for completion in group]
    assert sorted(ids) == [[3, 1]] * 8 + [[4, 1]] * 8


def test_tools_are_in_the_prompt_of_an_answer_without_calls(with_tools, tmp_path):
    row = {"prompt": [{"role": "user", "content": "Game 1."}], "completion": "right", "reward": 1.0}
    turns = [{"role": "assistant", "content": "right"}]
    rows = {
        "text": row,
        "text and tools": {**row, "tools": TOOLS},
        "tools": {**row, "completion": turns, "tools": TOOLS},
    }
    tokenizer = AutoTokenizer.from_pretrained(with_tools)
    for name, row in rows.items():
        completion = first_completion(replayed(with_tools, tmp_path / name, [row] * 16, make=make_trainer))
        words = tokenizer.convert_ids_to_tokens(completion["prompt_ids"] + completion["completion_ids"])
        word_of_tool = ["Game "] if "tools" in row else []
        assert words == [*word_of_tool, "Game ", "1", ".", "right", "<eos>"]


def test_calls_in_a_prompt_are_rendered_as_the_model_wrote_them(with_tools, tmp_path):
    """Their arguments are JSON, which a template would write as a text in quotes."""
    call = {"type": "function", "function": {"name": "guess", "arguments": '{"number": 3}'}}
    asked = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "higher"}]
    row = {"prompt": [{"role": "user", "content": "Game 1."}, *asked], "completion": "right", "reward": 1.0}
    completion = first_completion(replayed(with_tools, tmp_path / "run", [row] * 16, make=make_trainer))
    text = AutoTokenizer.from_pretrained(with_tools).decode(completion["prompt_ids"])
    assert '<tool_call>{"name": "guess", "arguments": {"number": 3}}</tool_call>' in text


ASKED = {"role": "user", "content": "Game 1."}
LATER = {"role": "user", "content": "Go on."}
SAID = {"role": "assistant", "content": "a guess"}
LAST = {"role": "assistant", "content": "end"}
ARGUMENTS = json.dumps({"number": 3, "why": 'so "I" hope', "also": None})
CALLS = {**SAID, "tool_calls": [{"type": "function", "function": {"name": "guess", "arguments": ARGUMENTS}}]}
OLD_CALL = {"role": "assistant", "content": None, "function_call": {"name": "guess", "arguments": "{}"}}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"}
RESULT = {"role": "tool", "content": "higher"}
FAITHFUL = [
    [ASKED, CALLS, RESULT, LAST],
    [ASKED, SAID],
    [ASKED, SAID, LATER, {**LAST, "trainable": True}],
    [ASKED, {**SAID, "trainable": False}, LATER, LAST],
]
# What Qwen3's template leaves out. Some of it stands in other messages, too.
DROPPED = {
    "leaves out something of a message of 'developer'": [{"role": "developer", "content": "user"}, ASKED, SAID],
    "of a message of 'tool-response'": [ASKED, {"role": "tool-response", "content": "end"}, LAST],
    "of a message of 'function'": [ASKED, {"role": "function", "name": "guess", "content": "3"}, LAST],
    "leaves out something of 'function_call' of a turn": [ASKED, OLD_CALL],
    "content of a message of 'tool' is not text": [ASKED, {**RESULT, "content": {"is": "higher"}}, LAST],
    "leaves out something of 'refusal' of a turn": [ASKED, {**LAST, "refusal": "No."}],
    "empty, but for fields that are not known": [ASKED, {"role": "assistant", "content": "", "audio": {"id": "a"}}],
    "no turn of the assistant is to be trained on": [ASKED, {**SAID, "trainable": False}],
    "before a turn than its generation prompt": [ASKED, THOUGHT],
}


def tokenized_rows(model: str, folder: Path, conversations: list[list[dict]]) -> list[list[dict]]:
    """Of a run without thinking, the rows of two completions for each conversation."""
    rows = []
    for number, messages in enumerate(conversations):
        for reward in (0.0, 1.0):
            rows.append({"messages": messages, "group": str(number), "reward": reward})
    trainer = replayed(
        model,
        folder,
        rows,
        make=make_trainer,
        chat_template_kwargs={"enable_thinking": False},
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
    )
    return list(trainer.train_dataset[RECORDED])


@pytest.fixture(scope="module")
def qwen(tiny_model, tmp_path_factory) -> str:
    """A small model with Qwen3's chat template."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("qwen"), dirs_exist_ok=True)
    shutil.copy(TEMPLATES / "qwen3.jinja", folder / "chat_template.jinja")
    return str(folder)


def test_what_the_template_does_not_render_is_left_out_and_counted(qwen, tmp_path, caplog):
    groups = tokenized_rows(qwen, tmp_path / "run", [*FAITHFUL, *DROPPED.values()])
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    sampled = [sampled_text(tokenizer, completion) for completion, _ in groups]
    call = f'<tool_call>\n{{"name": "guess", "arguments": {ARGUMENTS}}}\n</tool_call>'
    end = "<|im_end|>"
    n_left_out = len(DROPPED)
    # Without thinking, Qwen3's template changes each turn when the next one follows: it removes the empty thought.
    of_faithful = [f"a guess\n{call}{end}", f"end{end}", f"a guess{end}", f"a guess{end}", f"end{end}", f"end{end}"]
    assert sampled[:-n_left_out] == of_faithful
    assert sampled[-n_left_out:] == [""] * n_left_out
    for reason in DROPPED:
        assert f"{reason} (2, such as row " in caplog.text
    assert f"{2 * n_left_out} of its {2 * len(groups)} completions cannot be trained on" in caplog.text
    assert f"For {n_left_out / len(groups):.1%} of completions, that depends on" in caplog.text
    # Reward functions see what the assistant has said.
    last_completion, _ = groups[-1]
    assert tokenizer.decode(last_completion["completion_ids"]).endswith("</think>\n\n3")


def test_conversations_of_several_rows_have_a_group_for_each(qwen, tmp_path):
    """A conversation that has no more rows is masked, so that its reward counts in each group's mean."""
    long = [ASKED, SAID, LATER, LAST]
    short = [{**ASKED, "content": "Game 2."}, LAST]
    rows = [{"messages": long, "group": "a", "reward": 0.0}, {"messages": short, "group": "a", "reward": 1.0}]
    trainer = replayed(
        qwen, tmp_path / "run", rows, make=make_trainer, num_generations=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=1, steps_per_generation=1, chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    end = "<|im_end|>"
    texts = []
    for group in trainer.train_dataset[RECORDED]:
        assert sorted(completion["reward"] for completion in group) == [0.0, 1.0]
        in_order = sorted(group, key=lambda completion: completion["reward"])
        texts.append([sampled_text(tokenizer, completion) for completion in in_order])
        assert ["Game 2." in tokenizer.decode(completion["prompt_ids"]) for completion in in_order] == [False, True]
    assert texts == [[f"a guess{end}", f"end{end}"], [f"end{end}", ""]]
    assert all(len(completion["logprobs"]) == len(completion["completion_ids"]) for completion in in_order)


def test_a_conversation_of_several_rows_needs_a_reward(qwen, tmp_path):
    """A reward function would see a part of it."""
    file = tmp_path / "rows.jsonl"
    write_lines(file, [{"messages": [ASKED, SAID, LATER, LAST]}] * 16)
    arguments = {"rollout_func": None, "train_dataset": None, "reward_funcs": [lambda completions, **_: [0.0]]}
    options = {"rollouts": str(file), "rollouts_model": qwen, "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ValueError, match="gives several rows has no `reward`"):
        make_trainer(qwen, tmp_path / "run", trainer_arguments=arguments, **options)


def test_rollouts_of_which_none_can_be_rendered_are_rejected(qwen, tmp_path):
    conversations = list(DROPPED.values())[1:3]
    error = r"4 of its 4 completions cannot be trained on: .*'tool-response' \(2, such as row 1\).*None is left"
    with pytest.raises(ValueError, match=rf"rollouts=.*{error}"):
        tokenized_rows(qwen, tmp_path / "run", conversations)


@pytest.mark.parametrize("message", [CALLS, OLD_CALL, {"role": "user", "content": {"number": 3}}])
def test_a_prompt_that_the_template_does_not_render_is_noticed(message):
    """By one that knows no calls."""
    tokenizer = make_tokenizer()
    turns.check_prompt(tokenizer, [ASKED, SAID, RESULT], {})
    with pytest.raises(UnfaithfulError, match=f"of a message of '{message['role']}'"):
        turns.check_prompt(tokenizer, [ASKED, message, RESULT], {})
