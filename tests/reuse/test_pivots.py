"""Pivots: the states of logged conversations, the tokens that the model gets in them, and runs on such a dataset."""

import json
import logging
from pathlib import Path
from shutil import copy

import pytest
import torch
import trl
from datasets import Dataset
from device_fields import DEVICE_FIELDS
from launched_processes import launch, logs
from named_tensors import snapshot
from peft import LoraConfig
from recording_trainers import RecordingOPO, logged, make_trainer, without_times
from scripted_rollouts import even_tokens
from tiny import make_tokenizer, save_tiny_model
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from opo_trl import OPOConfig
from opo_trl.checks.files import read_json, read_lines, write_json, write_lines
from opo_trl.command import cli
from opo_trl.command.train import main as train
from opo_trl.data.files import load_rows
from opo_trl.generation.prompt_order import EpochSampler
from opo_trl.reuse import to_pivots
from opo_trl.rewards import action_reward


RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "qwen3-1.7b" / "pivots.yaml"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def tool(name: str) -> dict:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": city}}


def call(name: str, **arguments) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def conversation(city: str, name: str = "look", reward: float | None = 1.0, **columns) -> dict:
    messages = [
        {"role": "user", "content": f"To {city}."},
        call(name, city=city),
        {"role": "tool", "tool_call_id": "1", "content": "A room is free."},
        call("book", city=city),
        {"role": "tool", "tool_call_id": "1", "content": "Booked."},
        {"role": "assistant", "content": "It is booked."},
    ]
    row = {"messages": messages, "tools": [tool(name), tool("book")], **columns}
    if reward is not None:
        row["reward"] = reward
    return row


def written(folder: Path, *rows: dict) -> str:
    path = folder / "logs.jsonl"
    write_lines(path, rows)
    return str(path)


def n_states(source: str, tokenizer, **options) -> int:
    """How many states to train on a log has."""
    return len(to_pivots(source, tokenizer, **options)["train"])


def tokenizer_of(template: str):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with Qwen3's chat template."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "max_position_embeddings": 4096})
    copy(TEMPLATES / "qwen3.jinja", folder / "chat_template.jinja")
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(model: str):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def pivots(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Eight states of four conversations, with different tools."""
    rows = [conversation(city, f"look_{city}") for city in ("Rome", "Oslo", "Bonn", "Kyiv")]
    return to_pivots(written(tmp_path_factory.mktemp("logs"), *rows), tokenizer)["train"]


# States


def test_a_state_has_the_tokens_of_the_template_with_its_own_tools(pivots, tokenizer):
    assert len(pivots) == 8
    for row in pivots:
        text = tokenizer.apply_chat_template(
            row["prompt"], tools=row["tools"], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(row["prompt_ids"]) == text
        (called,) = row["action"]["tool_calls"]
        name = called["function"]["name"]
        assert f'"name": "{name}"' in text
        assert row["prompt"]
        assert row["turn"] == len(row["prompt"])
    assert pivots[0]["action"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look_Rome", "arguments": {"city": "Rome"}}}],
    }


def test_what_is_left_out_is_counted_by_reason(tokenizer, tmp_path, caplog):
    failed = conversation("Bonn", reward=0.5)
    unscored = {**conversation("Oslo"), "reward": None}
    untrained = conversation("Kyiv")
    untrained["messages"][3]["trainable"] = False
    source = written(tmp_path, conversation("Rome", task=7), failed, unscored, untrained, conversation("Rome"))
    with caplog.at_level(logging.WARNING):
        rows = to_pivots(source, tokenizer)["train"]
    assert rows["turn"] == [1, 3, 1]
    assert rows["task"] == [7, 7, None]
    text = caplog.text
    assert "6 of a trajectory with a reward below 1, or with none (first: row 2)" in text
    assert "3 whose logged action is a message (first: row 1, message 5)" in text
    assert "1 that are marked as not to be trained on (first: row 4, message 3)" in text
    assert "2 that repeat an earlier state and action (first: row 5, message 1)" in text
    assert n_states(source, tokenizer, min_reward=0.5) == 5
    assert n_states(source, tokenizer, messages=True) == 5
    longest = len(rows[0]["prompt_ids"])
    assert n_states(source, tokenizer, max_prompt_length=longest) == 2
    with pytest.raises(ValueError, match=r"no state to train on: .*whose prompt has more than 3 tokens"):
        to_pivots(source, tokenizer, max_prompt_length=3)


def test_a_reward_that_differs_by_rounding_is_the_best(tokenizer, tmp_path):
    almost = conversation("Oslo", reward=0.1 + 0.2)
    assert n_states(written(tmp_path, conversation("Rome", reward=0.3), almost), tokenizer) == 4


def test_a_call_that_cannot_be_read_is_left_out_with_its_place(tokenizer, tmp_path, caplog):
    broken, listed, old = map(conversation, ("Oslo", "Bonn", "Kyiv"))
    broken["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Os'
    listed["messages"][3]["tool_calls"][0]["function"]["arguments"] = "[]"
    (function,) = [called["function"] for called in old["messages"][3]["tool_calls"]]
    old["messages"][3] = {"role": "assistant", "content": None, "function_call": function}
    with caplog.at_level(logging.WARNING):
        rows = to_pivots(written(tmp_path, conversation("Rome"), broken, listed, old), tokenizer)["train"]
    assert rows["trajectory"] == ["row 1", "row 1", "row 2", "row 3", "row 4"]
    assert "2 whose logged call has arguments that are no JSON object (first: row 2, message 1)" in caplog.text
    assert "1 whose logged call is a `function_call`: write it as `tool_calls` (first: row 4," in caplog.text


@pytest.mark.parametrize("arguments", ["", None, "null", {}])
def test_a_call_without_arguments_is_one(arguments, tokenizer, tmp_path):
    row = conversation("Rome")
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    first, second = to_pivots(written(tmp_path, row), tokenizer)["train"]
    for message in (first["action"], second["prompt"][1]):
        assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_nulls_in_arguments_stay(tokenizer, tmp_path):
    row = conversation("Rome")
    row["messages"][1] = call("look", city="Rome", near={"sea": None})
    first, _ = to_pivots(written(tmp_path, row), tokenizer)["train"]
    assert first["action"]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "near": {"sea": None}}


def test_nested_nulls_are_the_same_however_arguments_are_logged(tokenizer, tmp_path):
    arguments = {"city": "Rome", "near": {"sea": None, "hill": "Celio"}}
    as_text, as_mapping = conversation("Rome"), conversation("Oslo")
    for row in (as_text, as_mapping):
        row["messages"][1] = call("look", **arguments)
    as_mapping["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    rows = to_pivots(written(tmp_path, as_text, as_mapping), tokenizer)["train"]
    actions = [row["action"] for row in rows if row["turn"] == 1]
    assert len(actions) == 2
    for done in (arguments, {"city": "Rome", "near": {"hill": "Celio"}}):
        text = f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(done)}}}\n</tool_call><|im_end|>'
        ids = [tokenizer(text)["input_ids"]] * 2
        assert action_reward(ids, actions, tokenizer=tokenizer) == [1.0, 1.0]


def test_tools_that_the_log_does_not_declare_are_warned_of(tokenizer, tmp_path, caplog):
    undeclared = conversation("Oslo")
    undeclared["tools"] = undeclared["tools"][:1]
    with caplog.at_level(logging.WARNING):
        to_pivots(written(tmp_path, conversation("Rome"), undeclared), tokenizer)
    assert "1 of its 2 trajectories call tools that are not in their `tools` (first: row 2: 'book')" in caplog.text


def test_tools_that_are_none_are_named_with_their_row(tmp_path, tokenizer):
    log = written(tmp_path, conversation("Rome"), conversation("Oslo") | {"tools": [None]})
    with pytest.raises(ValueError, match=r"row 2: `tools` is \[None\]"):
        to_pivots(log, tokenizer)


def test_a_conversation_without_an_answer_does_not_stop_the_others(tokenizer, tmp_path, caplog):
    cut = conversation("Oslo")
    cut["messages"] = cut["messages"][:1]
    empty = {**conversation("Bonn"), "messages": []}
    with caplog.at_level(logging.WARNING):
        assert n_states(written(tmp_path, conversation("Rome"), cut, empty), tokenizer) == 2
    assert "2 of its 3 conversations are left out: the assistant answers nothing (2, such as row 2)" in caplog.text


def test_without_rewards_a_warning_counts_the_states(tokenizer, tmp_path, caplog):
    source = written(tmp_path, conversation("Rome", reward=None))
    with caplog.at_level(logging.WARNING):
        assert n_states(source, tokenizer) == 2
    assert "has no rewards: all 3 states of its 1 trajectories are taken" in caplog.text
    with pytest.raises(ValueError, match=r"min_reward=1, but .* has no rewards"):
        to_pivots(source, tokenizer, min_reward=1.0)


@pytest.mark.parametrize(("rewards", "warns"), [((0, 0), True), ((-1, -1), True), ((1, 1), False), ((0, 1), False)])
def test_a_warning_says_that_all_conversations_have_failed(tokenizer, tmp_path, caplog, rewards, warns):
    first, second = rewards
    source = written(tmp_path, conversation("Rome", reward=first), conversation("Oslo", reward=second))
    with caplog.at_level(logging.WARNING):
        to_pivots(source, tokenizer)
    assert (f"all 2 rewards are {first}, so trajectories that have failed" in caplog.text) == warns
    caplog.clear()
    if warns:
        with pytest.raises(ValueError, match="no state"):
            to_pivots(source, tokenizer, min_reward=0.5)
        to_pivots(source, tokenizer, min_reward=first)
        assert "have failed" not in caplog.text


def tasks_of(split: Dataset) -> set[str]:
    """What users ask for first."""
    first_messages = [prompt[0] for prompt in split["prompt"]]
    return {message["content"] for message in first_messages}


def test_trajectories_that_begin_alike_are_held_out_together(tokenizer, tmp_path):
    cities = [f"city {number}" for number in range(10)]
    rows = [conversation(city) for city in cities]
    for city in cities:  # another way for the same task
        row = conversation(city)
        row["messages"][2]["content"] = "Nothing is known."
        rows.append(row)
    source = written(tmp_path, *rows)
    splits = to_pivots(source, tokenizer, test_fraction=0.3, seed=1)
    trained, held_out = tasks_of(splits["train"]), tasks_of(splits["test"])
    assert tasks_of(to_pivots(source, tokenizer, test_fraction=0.3, seed=2)["test"]) != held_out
    assert len(held_out) == 3
    assert len(trained) == 7
    assert trained.isdisjoint(held_out)
    with pytest.raises(ValueError, match="leaves none to train on"):
        to_pivots(written(tmp_path, rows[0]), tokenizer, test_fraction=0.3)


def test_with_other_tools_it_is_another_task(tokenizer, tmp_path):
    rows = [conversation("Rome", f"look_{number}") for number in range(4)]
    splits = to_pivots(written(tmp_path, *rows), tokenizer, test_fraction=0.25)
    assert (len(splits["train"]), len(splits["test"])) == (6, 2)


def test_a_greeting_is_no_beginning(tokenizer, tmp_path):
    rows = [conversation(city) for city in ("Rome", "Oslo", "Bonn", "Kyiv")]
    for row in rows:
        row["messages"].insert(0, {"role": "assistant", "content": "Hello."})
    splits = to_pivots(written(tmp_path, *rows), tokenizer, test_fraction=0.25)
    assert len(splits["train"]) == 6
    assert len(splits["test"]) == 2


def test_a_beginning_token_is_not_doubled(tmp_path):
    tokenizer = tokenizer_of("llama3_2")
    row, _ = to_pivots(written(tmp_path, conversation("Rome")), tokenizer)["train"]
    assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1


def test_an_action_that_the_template_cannot_write_is_left_out(tmp_path, caplog):
    """Llama's template has one call in a turn, and smolvlm's none, though a response template could read them."""
    two = conversation("Rome")
    two["messages"][1]["tool_calls"] *= 2
    with caplog.at_level(logging.WARNING):
        rows = to_pivots(written(tmp_path, two, conversation("Oslo")), tokenizer_of("llama3_2"))["train"]
    assert {row["trajectory"] for row in rows} == {"row 2"}
    assert "chat template" in caplog.text


@pytest.mark.parametrize(("template", "n_apostrophes"), [("lfm2_v2", 1), ("lfm2_2_5", 0)])
def test_constants_of_python_are_read_as_logged(template, n_apostrophes, tmp_path, caplog):
    """LFM2's templates write `True` for true. That of LFM2.5 does not escape an apostrophe."""
    constants, apostrophe = conversation("Rome"), conversation("Oslo")
    constants["messages"][1] = call("look", city="Rome", near=[True, None], free=False)
    apostrophe["messages"][1] = call("look", city="L'Aquila,\tAbruzzo\n")
    with caplog.at_level(logging.WARNING):
        assert n_states(written(tmp_path, constants, apostrophe), tokenizer_of(template)) == 3 + n_apostrophes
    assert ("such that it is read as: malformed" in caplog.text) == (n_apostrophes == 0)


def test_rows_of_nemo_gym_are_taken_as_they_are(tokenizer, shared_data, caplog):
    folder = shared_data / "nemo_gym"
    with caplog.at_level(logging.WARNING):
        rows = to_pivots(str(folder / "terminal_multi_harness" / "example.jsonl"), tokenizer)["train"]
    names = []
    for row in rows:
        names.append([called["function"]["name"] for called in row["action"]["tool_calls"]])
    assert names == [["exec_command"], ["update_plan"], ["write_stdin", "exec_command"], ["exec_command"]]
    assert "no rewards" not in caplog.text
    source = folder / "single_step_tool_use_with_argument_comparison" / "example.jsonl"
    rows = to_pivots(str(source), tokenizer, messages=True)["train"]
    assert [len(row["tools"]) for row in rows] == [14] * 5


def test_the_command_writes_what_a_recipe_names(model, pivots, tmp_path, capsys):
    source = written(tmp_path, *map(conversation, ("Rome", "Oslo", "Bonn", "Kyiv")))
    output = tmp_path / "pivots"
    words = ["pivots", source, "--model", model, "--output", str(output), "--test-fraction", "0.25"]
    assert cli.main([*words, "--overlap", "book.city=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "train: 6 states of 3 trajectories" in printed
    assert "test: 2 states of 1 trajectories" in printed
    train, test = load_rows(str(output)), load_rows(str(output), split="test")
    assert len(train) == 6
    assert len(test) == 2
    assert train.column_names == [*pivots.column_names, "overlap"]
    assert train[0]["overlap"] == {"book.city": 0.5}
    assert cli.main(words) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main([*words[:-4], "--output", str(tmp_path / "other"), "--overlap", "city=2"]) == 2
    assert "TOOL.PARAMETER=SHARE" in capsys.readouterr().err


def test_text_is_refused(tokenizer, tmp_path):
    source = written(tmp_path, {"prompt": "1 + 1 =", "completion": "2", "reward": 1.0})
    with pytest.raises(ValueError, match=r"row 1: this is text, and states are made of messages"):
        to_pivots(source, tokenizer)


# Runs


class Watching(RecordingOPO):
    """Notes the tokens with which the model generates, and what the rows say that they are."""

    seen: list
    stated: list

    def _generate_once(self, inputs):
        vars(self).setdefault("stated", []).extend(row["prompt_ids"] for row in inputs)
        return super()._generate_once(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **named):
        policy = self.accelerator.unwrap_model(self.model)
        generate = policy.generate
        seen = vars(self).setdefault("seen", [])

        def watched(*inputs, **options):
            ids, mask = options["input_ids"], options["attention_mask"].bool()
            seen.extend(prompt[real].tolist() for prompt, real in zip(ids, mask, strict=True))
            return generate(*inputs, **options)

        policy.generate = watched
        try:
            return super()._generate_single_turn(prompt_ids, *args, **named)
        finally:
            del policy.generate


def some_reward(completion_ids, action, **columns):
    assert all(message["tool_calls"] for message in action)
    return even_tokens(completion_ids)


def run(model: str, folder: Path, dataset: Dataset, **options) -> Watching:
    arguments = {"train_dataset": dataset, "reward_funcs": [some_reward, action_reward], "rollout_func": None}
    arguments |= options.pop("trainer_arguments", {})
    fields = {"max_completion_length": 6, "max_steps": 4, **options}
    return make_trainer(model, folder, trainer_class=Watching, trainer_arguments=arguments, **fields)


LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"trainer_arguments": LORA},
        {"num_iterations": 2, "max_staleness": 1, "trainer_arguments": LORA},
        {"max_sampling_rounds": 3},
        {"use_transformers_continuous_batching": False, "objective": "grpo", "num_iterations": 2},
        {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 2},
        {"save_rollouts": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_model_gets_exactly_the_tokens_of_the_rows(options, model, pivots, tmp_path):
    if "eval_strategy" in options:
        options = {**options, "trainer_arguments": {"eval_dataset": pivots}}
    trainer = run(model, tmp_path, pivots, **options)
    trainer.train()
    assert trainer.seen == trainer.stated
    of_rows = list(pivots["prompt_ids"])
    assert all(ids in of_rows for ids in trainer.seen)
    assert any(entry["grad_norm"] > 0 for entry in logged(trainer))
    for rollout in trainer.rollouts:
        for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask.bool(), strict=True):
            prompt_ids = ids[mask].tolist()
            assert prompt_ids in trainer.stated


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(model, pivots, tmp_path):
    options = {"num_iterations": 2, "max_staleness": 1, "save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    whole = run(model, tmp_path, pivots, **options, trainer_arguments=LORA)
    whole.train()
    rest = run(model, tmp_path, pivots, **options, trainer_arguments=LORA)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    weights = snapshot(rest.model)
    for name, weight in snapshot(whole.model).items():
        assert torch.equal(weight, weights[name])
    logs_of_whole, logs_of_rest = (map(without_times, logged(trainer)[-2:]) for trainer in (whole, rest))
    assert list(logs_of_rest) == list(logs_of_whole)


def test_a_checkpoint_of_other_tokens_is_not_resumed(model, pivots, tmp_path):
    options = {"num_iterations": 2, "max_steps": 1}
    run(model, tmp_path, pivots, save_strategy="steps", save_steps=1, **options).train()
    others = pivots.map(lambda row: {"prompt_ids": [*row["prompt_ids"][1:], 5]})
    with pytest.raises(ValueError, match=r"train_dataset\.checksum"):
        run(model, tmp_path, others, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def train_on_processes(model: str, folder: str, processes: int) -> None:
    dataset = load_rows(f"{folder}/pivots.parquet")
    sizes = {"per_device_train_batch_size": 4 // processes, "max_sampling_rounds": 2, "num_iterations": 2}
    name = f"{folder}/run-{processes}"
    trainer = run(model, Path(name), dataset, **sizes, max_staleness=1, trainer_arguments=LORA)
    trainer.train()
    assert trainer.seen == trainer.stated
    if trainer.accelerator.is_main_process:
        torch.save(trainer.seen, f"{name}.pt")


def test_two_processes_get_the_tokens_of_their_rows(model, pivots, tmp_path):
    pivots.to_parquet(tmp_path / "pivots.parquet")
    for processes, config in ((1, None), (2, "cpu")):
        options = {"config": config, "processes": processes, "folder": tmp_path}
        statuses = launch(train_on_processes, model, str(tmp_path), processes, **options)
        assert statuses == [0] * processes, logs(tmp_path)
    alone = torch.load(tmp_path / "run-1.pt")
    together = torch.load(tmp_path / "run-2.pt")
    assert together[:4] == alone[:4]


def test_prompts_of_the_next_rollout_are_the_rows_tokens(model, pivots, tmp_path):
    trainer = run(model, tmp_path, pivots)
    trainer._get_train_sampler()
    trainer.state.max_steps = 4
    trainer.model.train()
    indices = trainer._sampler.prompts_after(trainer._place)
    assert isinstance(trainer._sampler, EpochSampler)
    assert trainer._prompts_of_next_rollout() == [pivots[index]["prompt_ids"] for index in indices]


def look_up(city: str) -> str:
    """
    Look something up.

    Args:
        city: a city.
    """
    return city


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"trainer_arguments": {"tools": [look_up]}}, "tools"),
        ({"trainer_arguments": {"rollout_func": lambda prompts, trainer: {}}}, "rollout_func"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"remove_unused_columns": True}, "remove_unused_columns"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_decide_the_prompt_beside_them_is_rejected(options, name, model, pivots, tmp_path):
    with pytest.raises(ValueError, match=f"{name} cannot be combined with a dataset that has the column 'prompt_ids'"):
        run(model, tmp_path, pivots, **options)


def test_images_are_rejected(model, pivots, tmp_path):
    with pytest.raises(ValueError, match="images cannot be combined"):
        run(model, tmp_path, pivots.add_column("image", [None] * len(pivots)))


@pytest.mark.parametrize(
    ("ids", "message"),
    [([5, 100_000], "not a list of tokens of this model"), ([], "not a list"), ([5, 6, 7], "of another tokenizer")],
)
def test_tokens_of_another_tokenizer_are_rejected(ids, message, model, pivots, tmp_path):
    others = pivots.remove_columns("prompt_ids").add_column("prompt_ids", [ids] * len(pivots))
    with pytest.raises(ValueError, match=message):
        run(model, tmp_path, others)


def test_a_subclass_that_changes_prompts_is_told(model, pivots, tmp_path):
    class Changes(Watching):
        def _generate(self, prompts, **named):
            return super()._generate([[{"role": "user", "content": "Another."}]] * len(prompts), **named)

    arguments = {"train_dataset": pivots, "reward_funcs": even_tokens, "rollout_func": None}
    trainer = make_trainer(model, tmp_path, trainer_class=Changes, trainer_arguments=arguments)
    with pytest.raises(ValueError, match=r"prompt_ids: the prompt .* is none of the dataset's"):
        trainer.train()


def test_plan_and_length_limit_count_the_rows_tokens(model, pivots, tmp_path, tokenizer):
    from opo_trl.data import drop_long_prompts

    shortest, *_, longest = sorted(map(len, pivots["prompt_ids"]))
    trainer = run(model, tmp_path, pivots)
    assert f"({longest:,} + 6) tokens" in trainer.plan
    assert isinstance(trainer.args, OPOConfig)
    assert drop_long_prompts(pivots, tokenizer, shortest).num_rows >= 1
    assert drop_long_prompts(pivots, tokenizer, longest - 1).num_rows < pivots.num_rows


def test_recipe_takes_two_steps_on_real_logs_with_the_real_tokenizer(shared_data, tmp_path, capsys):
    model = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "Qwen3-1.7B")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=151_936, num_attention_heads=2, num_key_value_heads=1, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    source = shared_data / "nemo_gym" / "terminal_multi_harness" / "example.jsonl"
    dataset = tmp_path / "pivots"
    words = ["pivots", str(source), "--model", str(model), "--output", str(dataset), "--test-fraction", "0.25"]
    assert cli.main(words) == 0
    fields = {
        **DEVICE_FIELDS,
        "model_name_or_path": model,
        "dataset_name": dataset,
        "output_dir": tmp_path / "run",
        "use_vllm": "false",
        "dtype": "float32",
        "bf16": "false",
        "attn_implementation": "sdpa",
        "optim": "sgd",
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "max_completion_length": 4,
        "vllm_max_model_length": 512,
        "max_steps": 2,
        "save_strategy": "no",
    }
    words = ["--config", str(RECIPE)]
    for name, value in fields.items():
        words += [f"--{name}", str(value)]
    assert train([*words, "--plan"]) == 0
    assert "prompt_style: dataset" in capsys.readouterr().out
    assert train(words) == 0
    steps = [line for line in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[0]["rewards/action_reward/mean"] == 0  # one rollout serves both
