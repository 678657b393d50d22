"""Recorded rollouts: what a run records, training on it, and what is rejected before it starts."""

import json
import math
import os
import re
from datetime import datetime
from itertools import chain
from pathlib import Path

import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from datasets import Dataset
from device_fields import SMALL
from launched_processes import launch, logs
from named_tensors import distance, norm, relative_error, snapshot
from peft import LoraConfig, get_peft_model
from recording_trainers import RecordingOPO, logged, make_trainer, trained, without_times
from safetensors.torch import load_file
from scripted_rollouts import PROMPTS, Script, even_tokens
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from opo_trl import OPOConfig
from opo_trl.batch import completion_tokens
from opo_trl.checks.files import read_json, read_lines, write_lines
from opo_trl.command.train import main
from opo_trl.data.arithmetic import make_problems
from opo_trl.objectives import OBJECTIVES, objective_named
from opo_trl.resume.checkpoint import checksum
from opo_trl.reuse.agent_logs import PLACE
from opo_trl.reuse.reading import KNOWN, RECORDED, load_rollouts


# Two optimizer steps per rollout, each with another policy than the one that has written its completions.
STEPS = {"steps_per_generation": 4, "max_steps": 6, "shuffle_dataset": False, "learning_rate": 0.02}
# Makes full steps of any gradient, also of rounding.
EQUAL = {**STEPS, "optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 2}
NOT_NEEDED = ("train_dataset", "reward_funcs", "rollout_func")
GENERATES = {"rollout_func": None, "reward_funcs": even_tokens}
ROW = {"prompt": "1+1=", "completion": "2", "reward": 1.0}
IMAGES = Dataset.from_dict({"prompt": PROMPTS, "image": PROMPTS})


def change(trainer) -> dict[str, torch.Tensor]:
    """What training has done to the parameters."""
    weights = snapshot(trainer.model)
    return {name: weight.double() - trainer.initial[name] for name, weight in weights.items()}


def assert_unchanged(trainer) -> None:
    """Check that training has changed no bit of the parameters."""
    weights = snapshot(trainer.accelerator.unwrap_model(trainer.model))
    for name, weight in trainer.initial.items():
        assert weights[name].equal(weight)


def assert_same_run(one, other) -> None:
    """Check that two runs have the same weights and logs, to the bit."""
    weights = snapshot(other.model)
    for name, weight in snapshot(one.model).items():
        assert weight.equal(weights[name])
    assert list(map(without_times, logged(one))) == list(map(without_times, logged(other)))


def written(folder: Path, rows: list, name: str = "rows.jsonl") -> str:
    file = folder / name
    write_lines(file, rows)
    return str(file)


def rows_of(folder: Path) -> list[dict]:
    rows = []
    for file in sorted(folder.iterdir()):
        rows += map(json.loads, file.read_text().splitlines())
    return rows


def without(name: str, rows: list[dict]) -> list[dict]:
    """The rows without one of their columns."""
    return [{column: value for column, value in row.items() if column != name} for row in rows]


def with_mask_of_ones(rows: list[dict]) -> list[dict]:
    masked_rows = []
    for row in rows:
        n_tokens = len(row["completion_ids"])
        masked_rows.append({**row, "completion_mask": [1] * n_tokens})
    return masked_rows


def with_equal_rewards(rows: list[dict]) -> list[dict]:
    return [{**row, "reward": 1.0} for row in rows]


def changed_logps(rows: list[dict], change) -> list[dict]:
    return [{**row, "logprobs": list(map(change, row["logprobs"]))} for row in rows]


def of_completions(groups: Dataset, name: str) -> list[list]:
    """The values of a column, for the completions of each group."""
    return [[completion[name] for completion in group] for group in groups[RECORDED]]


def replayed(model: str, folder: Path, rollouts: str | Path, trainer_arguments=None, **options) -> RecordingOPO:
    """A run on recorded rollouts."""
    arguments = dict.fromkeys(NOT_NEEDED) | (trainer_arguments or {})
    source = None if rollouts is None else str(rollouts)
    return trained(model, folder, trainer_arguments=arguments, **{**STEPS, "rollouts": source, **options})


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory) -> Path:
    """The rollouts of a run, three of two groups of four."""
    folder = tmp_path_factory.mktemp("recorded")
    trained(tiny_model, folder, save_rollouts=True, **STEPS)
    return folder / "rollouts"


# Recording, and training on what was recorded


@pytest.mark.parametrize(
    "options", [{"num_iterations": 2, "max_staleness": 1}, {"loss_type": "grpo", "epsilon": 0.01}], ids=str
)
def test_training_on_its_recorded_rollouts_repeats_a_run(tiny_model, tmp_path, options):
    run = trained(tiny_model, tmp_path / "run", save_rollouts=True, **STEPS, **options)
    repeated = replayed(tiny_model, tmp_path / "again", tmp_path / "run" / "rollouts", **options)
    assert relative_error(change(repeated), change(run)) < 1e-3
    for entry, same in zip(logged(run), logged(repeated), strict=True):
        assert same["opo/ratio/ess"] == pytest.approx(entry["opo/ratio/ess"], abs=1e-3)


@pytest.mark.parametrize("ratio_form", ["truncated", "log"])
def test_stale_completions_have_the_bounded_weight_in_a_single_pass_too(tiny_model, tmp_path, recorded, ratio_form):
    """Here the policy is another one than the behaviour policy from the first step on."""
    trained(tiny_model, tmp_path / "other", **STEPS).save_model(tmp_path / "model")
    model = str(tmp_path / "model")
    options = {"max_steps": 1, "ratio_form": ratio_form}
    once = replayed(model, tmp_path / "once", recorded, num_iterations=1, **options)
    twice = replayed(model, tmp_path / "twice", recorded, num_iterations=2, **options)
    gradient = once.steps[0].gradient
    first_of_two = twice.steps[0].gradient
    assert relative_error(gradient, first_of_two) < 1e-6  # `test_replay` compares the latter with the definition
    (log,) = logged(once)
    assert log["opo/ratio/ess"] < 0.99


def test_a_resumed_run_records_each_rollout_once(tiny_model, tmp_path):
    """Also if it goes on in other steps than before it was killed."""
    saving = {"save_rollouts": True, "save_strategy": "steps", "save_steps": 1, "trainer_arguments": GENERATES}
    trained(tiny_model, tmp_path, **STEPS, **saving)
    rollouts = tmp_path / "rollouts"
    assert sorted(os.listdir(rollouts)) == ["000000016-0.jsonl", "000000032-0.jsonl", "000000048-0.jsonl"]
    smaller = make_trainer(tiny_model, tmp_path, **STEPS, **saving, per_device_train_batch_size=2)
    smaller.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(os.listdir(rollouts)) == ["000000016-0.jsonl", "000000024-0.jsonl", "000000032-0.jsonl"]


def record_and_repeat(model: str, folder: str) -> None:
    """Record on all processes, and train on what they have recorded, also with log-probabilities of a named model."""
    rank = os.environ.get("RANK", "0")
    n_processes = int(os.environ.get("WORLD_SIZE", 1))
    options = {**STEPS, "per_device_train_batch_size": 4 // n_processes, "temperature": 0.7}
    place = Path(folder)
    recording = {**options, "learning_rate": 0.0, "save_rollouts": True, "trainer_arguments": GENERATES}
    trained(model, place / "run", **recording)
    rows = rows_of(place / "run" / "rollouts")

    def file(name: str, rows: list[dict]) -> str:
        return written(place, rows, f"{name}_{rank}.jsonl")

    def replay(name: str, source: str | Path, **changes) -> None:
        run = replayed(model, place / name, source, **{**options, **changes})
        if rank == "0":
            run.model.save_pretrained(place / name)

    replay("known", place / "run" / "rollouts")
    replay("computed", file("without", without("logprobs", rows)), rollouts_model=model)
    replay("filled", file("filled", changed_logps(rows, lambda logp: 0.0)))
    equal = file("equal", with_equal_rewards(rows))
    assert_unchanged(replayed(model, place / "equal", equal, **{**options, **EQUAL}))


def test_two_processes_record_and_train_as_one(tiny_model, tmp_path):
    record_and_repeat(tiny_model, str(tmp_path / "one"))
    one = tmp_path / "one"
    two = tmp_path / "two"
    two.mkdir()
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(record_and_repeat, tiny_model, str(two), **where) == [0, 0], logs(tmp_path)
    rows_of_one = rows_of(one / "run" / "rollouts")
    rows_of_two = rows_of(two / "run" / "rollouts")
    assert len(rows_of_one) == len(rows_of_two) == 48
    assert {row["group"] for row in rows_of_one} == {row["group"] for row in rows_of_two}
    before = load_file(Path(tiny_model, "model.safetensors"))
    known = load_file(two / "known" / "model.safetensors")
    computed = load_file(two / "computed" / "model.safetensors")
    change_of_known = distance(known, before)
    assert change_of_known > 0
    assert distance(known, computed) < 1e-3 * change_of_known
    output = "".join(log.read_text() for log in tmp_path.glob("process_*.log"))
    assert output.count("are exactly 0 for 100% of the sampled tokens") == 1


def test_the_model_that_wrote_completions_may_be_an_adapter(tiny_model, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter = str(tmp_path / "adapter")
    get_peft_model(base, lora).save_pretrained(adapter)
    steps = {**STEPS, "max_steps": 1}
    trained(adapter, tmp_path / "run", save_rollouts=True, trainer_arguments=GENERATES, **steps)
    rows = rows_of(tmp_path / "run" / "rollouts")
    source = written(tmp_path, without("logprobs", rows))
    run = replayed(tiny_model, tmp_path / "replayed", source, rollouts_model=adapter, **steps)
    computed = {}
    for group in run.train_dataset[RECORDED]:
        for completion in group:
            computed[str(completion["completion_ids"])] = completion["logprobs"]
    assert len(computed) > 4
    for row in rows:
        key = str(row["completion_ids"])
        assert computed[key] == pytest.approx(row["logprobs"], abs=1e-5)
    (log,) = logged(run)
    assert log["opo/ratio/ess"] < 0.99  # The model without the adapter is another one.


def test_text_is_tokenized_and_scored_by_the_reward_functions(tiny_model, tmp_path):
    texts = ["2", "22", "3", "4"]
    rows = []
    for prompt in PROMPTS[:2]:
        rows += [{"prompt": prompt, "completion": text, "solution": "2"} for text in texts]
    scored = []

    def reward(completions, solution, **_):
        pairs = list(zip(completions, solution, strict=True))
        scored.extend(pairs)
        return [float(text == right) for text, right in pairs]

    source = written(tmp_path, rows)
    run = replayed(
        tiny_model,
        tmp_path,
        source,
        trainer_arguments={"reward_funcs": reward},
        rollouts_model=tiny_model,
        max_steps=1,
        steps_per_generation=2,
    )
    assert sorted(scored) == sorted((text, "2") for text in texts * 2)
    advantages = run.rollouts[0].advantages.view(2, 4)
    assert (advantages[:, 0] > 0).all()
    end = run.processing_class.eos_token_id
    assert all(completion["completion_ids"][-1] == end for completion in run.train_dataset[RECORDED][0])
    # Checkpoints do not compare computed log-probabilities, which another number of processes may round otherwise.
    assert run.current_settings["train_dataset.checksum"] == checksum(load_rollouts(source, 4))


def test_each_completion_of_a_named_group_is_scored_with_its_own_prompt(tiny_model, tmp_path):
    rows = []
    for prompt, text in zip(PROMPTS[:2] * 4, "23456789", strict=True):
        rows.append({"prompt": prompt, "completion": text, "group": f"group {len(rows) // 4}"})
    scored = []

    def reward(prompts, completions, **_):
        scored.extend(zip(prompts, completions, strict=True))
        return [float(text) for text in completions]

    replayed(
        tiny_model,
        tmp_path,
        written(tmp_path, rows),
        trainer_arguments={"reward_funcs": reward},
        rollouts_model=tiny_model,
        max_steps=1,
        steps_per_generation=2,
    )
    assert sorted(scored) == sorted((row["prompt"], row["completion"]) for row in rows)


def test_completions_of_a_prompt_or_a_name_become_groups(tmp_path, caplog):
    first_prompt = [{"role": "user", "content": "1+1="}]
    second_prompt = [{"role": "user", "content": "2+2="}]
    of_first = ROW | {"prompt": first_prompt, "level": "1"}
    rows = [of_first | {"completion": str(number), "note": number} for number in range(5)]
    rows.append(ROW | {"prompt": second_prompt, "note": 9, "level": "2"})
    source = written(tmp_path, rows)
    for seed in range(4):
        groups = load_rollouts(source, 2, seed)
        notes = set(chain.from_iterable(of_completions(groups, "note")))
        assert len(notes) == 4
        assert notes < set(range(5))
        assert groups["level"] == ["1", "1"]
        assert "level" not in groups[RECORDED][0][0]
    assert "2 of its 6 completions are left over" in caplog.text
    # Two runs may give their groups the same names.
    named = [row | {"group": number % 2} for number, row in enumerate(rows)]
    groups = load_rollouts(written(tmp_path, named), 2)
    parities = [{note % 2 for note in notes} for notes in of_completions(groups, "note")]
    assert parities == [{0}, {1}]
    # Whole groups are as in the file.
    groups = load_rollouts(written(tmp_path, rows[:5]), 5)
    assert of_completions(groups, "note") == [[0, 1, 2, 3, 4]]


def test_divided_groups_are_drawn_by_the_seed(tmp_path):
    """Their order in the file may follow the rewards in any way: here, each second one is right."""
    rows = []
    for prompt in PROMPTS:
        for place in range(8):
            rows.append({"prompt": prompt, "completion": str(place), "reward": float(place % 2)})
    source = written(tmp_path, rows)
    groups = load_rollouts(source, 4, seed=1)
    completions = of_completions(groups, "completion")
    for one, other in zip(completions[::2], completions[1::2], strict=True):
        assert sorted(one + other) == list("01234567")
    rewards = of_completions(groups, "reward")
    assert sum(set(rewards_of_group) == {0.0, 1.0} for rewards_of_group in rewards) >= 14
    assert completions == of_completions(load_rollouts(source, 4, seed=1), "completion")
    assert completions != of_completions(load_rollouts(source, 4, seed=2), "completion")


def test_groups_without_a_learning_signal_are_counted(tiny_model, tmp_path, caplog):
    def warned(*rewards: tuple) -> str:
        """Of groups of two, with these rewards of each prompt."""
        caplog.clear()
        rows = []
        for number, rewards_of_prompt in enumerate(rewards):
            rows += [ROW | {"prompt": str(number), "reward": reward} for reward in rewards_of_prompt]
        load_rollouts(written(tmp_path, rows), 2)
        return caplog.text

    no_signal = "groups have equal rewards, and no learning signal:"
    warning = warned((1, 1), (0, None))
    assert f"2 of its 2 {no_signal} 2 already in the file, 0 only after dividing" in warning
    warning = warned((1, 0), (0, 0, 0, 0.5), (1, 1))
    assert f"2 of its 4 {no_signal} 1 already in the file, 1 only after dividing" in warning
    assert "learning signal" not in warned((1, 0), (1, 1))
    # What is recorded does not depend on what the prompts of this run ask for.
    MultiProcessAdapter.warning_once.cache_clear()  # Other tests may have had the same warning.
    rows = [ROW | {"prompt": prompt, "reward": 1.0} for prompt in PROMPTS[:4]]
    replayed(tiny_model, tmp_path, written(tmp_path, rows * 4), rollouts_model=tiny_model, max_steps=1)
    assert "no completion has a learning signal in the first rollout" in caplog.text
    assert "boxed" not in caplog.text


def test_reference_policy_with_one_step_per_rollout(tiny_model, tmp_path, recorded):
    """TRL then makes no pass for the behaviour policy, whose place the reference's would take."""
    run = replayed(tiny_model, tmp_path, recorded, steps_per_generation=2, beta=0.1, max_steps=2)
    first, second = logged(run)
    assert first["kl"] == 0
    # The policy itself has recorded the first rollout.
    assert first["opo/off_policy_steps"] == 0
    assert second["opo/off_policy_steps"] == 1


# Where the policy has not moved, its own log-probabilities and recorded ones differ by rounding only.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2},
        {"steps_per_generation": 2, "objective": "grpo"},
        {"beta": 0.1},
        {"trainer_arguments": {"peft_config": LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")}},
        {"adaptive_temperature": True},
    ],
    ids=["opo", "two passes", "grpo", "kl", "lora dropout", "escort weights of log-probabilities"],
)
def test_own_completions_without_a_signal_change_nothing(tiny_model, tmp_path, recorded, options):
    source = written(tmp_path, with_equal_rewards(rows_of(recorded)))
    assert_unchanged(replayed(tiny_model, tmp_path, source, **EQUAL | options))


def test_own_completions_in_bfloat16_without_a_signal_change_nothing(tiny_model, tmp_path):
    low = {"model_init_kwargs": {"dtype": "bfloat16"}}
    trained(tiny_model, tmp_path, save_rollouts=True, **STEPS | {"max_steps": 1}, **low)
    source = written(tmp_path, with_equal_rewards(rows_of(tmp_path / "rollouts")))
    assert_unchanged(replayed(tiny_model, tmp_path, source, **EQUAL | low))


@pytest.mark.parametrize("moved", [0.1, 1e-3])
@pytest.mark.parametrize("are_equal", [True, False])
def test_completions_of_another_model_pull(tiny_model, tmp_path, recorded, are_equal, moved):
    """Without a signal, and with one. The rounding of the policy's own has no effect beside them."""
    rows = rows_of(recorded)
    if are_equal:
        rows = with_equal_rewards(rows)

    def gradient(rounding: float) -> dict[str, torch.Tensor]:
        of_policy = changed_logps(rows[::2], lambda logp: logp - rounding)
        of_another = changed_logps(rows[1::2], lambda logp: logp - moved)
        both = list(chain.from_iterable(zip(of_policy, of_another, strict=True)))
        source = written(tmp_path, both, f"{rounding}.jsonl")
        run = replayed(tiny_model, tmp_path, source, **EQUAL | {"max_steps": 1})
        return run.steps[0].gradient

    without_rounding = gradient(0.0)
    assert norm(without_rounding) > moved / 10
    assert distance(without_rounding, gradient(2e-6)) == 0


def test_recorded_rewards_are_those_of_the_run_whatever_its_weights(tiny_model, tmp_path):
    def but_the_first(completion_ids, **columns):
        return [None, *even_tokens(completion_ids)[1:]]

    functions = {"reward_funcs": [but_the_first, but_the_first]}
    both = {"trainer_arguments": {**GENERATES, **functions}, "reward_weights": [0.0, 2.0]}
    run = trained(tiny_model, tmp_path / "run", save_rollouts=True, **STEPS | {"max_steps": 1}, **both)
    recorded_rewards = [row["reward"] for row in rows_of(tmp_path / "run" / "rollouts")]
    assert [reward is None for reward in recorded_rewards] == [True] + [False] * 15
    both["trainer_arguments"] = functions
    again = replayed(tiny_model, tmp_path / "again", tmp_path / "run" / "rollouts", max_steps=1, **both)
    (log,) = logged(run)
    (log_again,) = logged(again)
    assert log_again["reward"] == pytest.approx(log["reward"])


def test_columns_of_the_dataset_reach_reward_functions_again(tiny_model, tmp_path):
    """As they were, whatever their types."""
    columns = {
        "text": ["007", "NA", "1.0", "", "x", "null", "true", "[]"],
        "number": [1, 2, None, 4, 5, 6, 7, 8],
        "score": [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e-9],
        "parts": [{"a": [1, 2], "b": None}, *[{"a": [], "b": "x"}] * 7],
        "same": [["1"]] * 8,
    }
    inputs = []

    def reward(prompts, completion_ids, **further):
        for place, prompt in enumerate(prompts):
            row = {name: further[name][place] for name in columns}
            inputs.append({"prompt": prompt, **row})
        return even_tokens(completion_ids)

    dataset = Dataset.from_dict({"prompt": PROMPTS, **columns})
    arguments = {"train_dataset": dataset, "rollout_func": None, "reward_funcs": reward}
    trained(tiny_model, tmp_path / "run", save_rollouts=True, trainer_arguments=arguments, **STEPS)
    inputs_of_first = list(inputs)
    assert len(inputs_of_first) == 48
    inputs.clear()
    rows = without("reward", rows_of(tmp_path / "run" / "rollouts"))
    source = written(tmp_path, rows)
    replayed(tiny_model, tmp_path / "again", source, trainer_arguments={"reward_funcs": reward})
    assert inputs == inputs_of_first


def test_a_named_model_computes_log_probabilities_in_place_of_recorded_ones(tiny_model, tmp_path, recorded, caplog):
    source = written(tmp_path, changed_logps(rows_of(recorded), lambda logp: -1.0))
    computed = replayed(tiny_model, tmp_path / "computed", source, rollouts_model=tiny_model, max_steps=2)
    assert "computes log-probabilities, in place of those recorded in" in caplog.text
    known = replayed(tiny_model, tmp_path / "known", recorded, max_steps=2)
    believed = replayed(tiny_model, tmp_path / "believed", source, max_steps=2)
    assert relative_error(change(computed), change(known)) < 1e-3
    assert relative_error(change(believed), change(known)) > 0.1


def test_truncated_completions_are_recorded_with_their_log_probabilities(tiny_model, tmp_path):
    """Also if this run leaves them out."""
    short = {"trainer_arguments": GENERATES, "max_completion_length": 3, "mask_truncated_completions": True}
    trained(tiny_model, tmp_path, save_rollouts=True, **STEPS | {"max_steps": 1}, **short)
    for row in rows_of(tmp_path / "rollouts"):
        assert len(row["logprobs"]) == len(row["completion_ids"])
        assert max(row["logprobs"]) < 0


def test_a_new_run_in_a_folder_moves_the_rollouts_of_an_earlier_one(tiny_model, tmp_path):
    saving = {"save_rollouts": True, "trainer_arguments": GENERATES}
    rollouts = tmp_path / "rollouts"
    trained(tiny_model, tmp_path, **{**STEPS, **saving, "max_steps": 4})
    rows = rows_of(rollouts)
    trained(tiny_model, tmp_path, **{**STEPS, **saving, "max_steps": 2})
    assert os.listdir(rollouts) == ["000000016-0.jsonl"]
    assert rows_of(tmp_path / "rollouts-replaced") == rows


# What recorded log-probabilities look like is in `test_recorded_logps`; here, when that is said.


SAID = "the log-probabilities"
FILLED_IN = [f"{SAID} are exactly 0 for 100% of the sampled tokens", "(ESS) ", "Set `rollouts_model`"]
KEPT = [f"{SAID} are above the policy's for 100% of the sampled tokens", "(ESS) ", "Set `rollouts_model`"]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda logp: 0.0, {}, FILLED_IN),
        (lambda logp: logp + 0.1, {"num_iterations": 2, "max_staleness": 1}, KEPT),
        (lambda logp: logp + 0.1, {"plan_micro_batches": False, "objective": "grpo"}, KEPT),
        (lambda logp: logp, {}, []),
        (lambda logp: logp, {"bf16": True}, []),
        (lambda logp: logp, {"bf16": True, "temperature": 0.7}, []),
        (lambda logp: logp, {"temperature": 0.7}, []),
    ],
)
def test_what_recorded_log_probabilities_look_like_is_said_once(tiny_model, tmp_path, caplog, change, options, said):
    """And the run goes on."""
    recording = {"save_rollouts": True, "trainer_arguments": GENERATES, **STEPS}
    if "temperature" in options:
        recording["temperature"] = options["temperature"]
    trained(tiny_model, tmp_path / "run", **recording)
    rows = changed_logps(rows_of(tmp_path / "run" / "rollouts"), change)
    run = replayed(tiny_model, tmp_path / "again", written(tmp_path, rows), max_steps=6, **options)
    assert run.state.global_step == 6
    warnings = [message for message in caplog.messages if SAID in message]
    assert len(warnings) == bool(said)
    for text in said:
        assert text in warnings[0]


def test_another_model_gets_a_line_of_information(tiny_model, tmp_path, recorded, caplog, capsys):
    other = save_tiny_model(tmp_path / "other", seed=5)
    rows = [row | {"top_p": 0.9, "top_k": -1} for row in rows_of(recorded)]
    replayed(other, tmp_path, written(tmp_path, rows))
    output = capsys.readouterr().out
    (line,) = (line for line in output.splitlines() if SAID in line)
    assert re.search(
        r"above .* for \d+% of the sampled tokens, and below for \d+%, as those of another model with", line
    )
    assert "with top_p=0.9, or of another state of this one. The ratio" in line
    assert SAID not in caplog.text


def test_tokens_of_others_do_not_count_in_what_they_look_like(tiny_model, tmp_path, recorded, caplog):
    """Whose log-probabilities are 0."""
    rows = changed_logps(rows_of(recorded), lambda logp: logp + 0.1)
    source = written(tmp_path, masked(rows, logprobs=None))
    replayed(tiny_model, tmp_path, source, max_steps=1)
    assert all(text in caplog.text for text in KEPT)


# What is rejected


@pytest.mark.parametrize("loaded", [False, True])
def test_a_run_goes_on_with_the_rollouts_that_it_began_with(tiny_model, tmp_path, recorded, caplog, loaded):
    """Their content decides, whether the run loads the file or gets what is in it."""
    rows = rows_of(recorded)
    options = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}

    def run(step: int | None = None, **others) -> None:
        source = written(tmp_path, rows)
        arguments = dict.fromkeys(NOT_NEEDED)
        if loaded:
            arguments["train_dataset"] = load_rollouts(source, 4)
        settings = {**STEPS, **options, "rollouts": source, **others}
        trainer = make_trainer(tiny_model, tmp_path, trainer_arguments=arguments, **settings)
        checkpoint = None if step is None else str(tmp_path / f"checkpoint-{step}")
        trainer.train(resume_from_checkpoint=checkpoint)

    run(max_staleness=1)
    rows[5:6] = changed_logps(rows[5:6], lambda logp: logp - 0.1)
    error = r"goes on with rollouts\.checksum='.*', but .* rollouts\.checksum='.*'\. Use the same data, or "
    for step, fix in ((3, "resume from a checkpoint at the end of a rollout"), (4, "set `max_staleness` to 0")):
        with pytest.raises(ValueError, match=error + fix):
            run(step, max_staleness=1)
    run(4, max_steps=5)
    assert "The run goes on with max_staleness=0, rollouts.checksum=" in caplog.text
    del rows[-4:]
    with pytest.raises(ValueError, match=r"rollouts\.rows=12, but this run has rollouts\.rows=11\. Use the same data"):
        run(4, max_steps=5)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": [{"role": "user", "content": "1"}, {"content": "2"}]}, "`prompt` is [{"),
        ({"completion_ids": []}, "`completion_ids` is"),
        ({"logprobs": [-1.0]}, "'logprobs', which is not used. Add `completion_ids`"),
        ({"completion_ids": [1, 2], "logprobs": [-1.0]}, "`logprobs` is [-1.0]"),
        ({"completion_ids": [1, 2], "completion_mask": [1, 2]}, "`completion_mask` is [1, 2]"),
        ({"completion_ids": [1, 2], "group_mask": [0, 1]}, "'group_mask', which is not used."),
        ({"reward": "good"}, "`reward` is 'good'"),
        ({"temperature": "high"}, "`temperature` is 'high'"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, said):
    columns = {"completion_ids": [1, 2], "completion_mask": [1, 1], "logprobs": [-1.0, -1.0], "temperature": 1.0}
    usable = {name: columns.get(name, 0) for name in row} | ROW
    source = written(tmp_path, [usable, ROW | row])
    with pytest.raises(ValueError, match="rollouts=") as error:
        load_rollouts(source, 2)
    assert said in str(error.value)


def test_a_folder_is_read_whole(tmp_path):
    """Each of its files is of another policy, whose completions are in groups of their own."""
    written(tmp_path, [ROW | {"completion": "1"}] * 2, "a.jsonl")
    rows = [ROW | {"completion": "2", "note": "new"}] * 2
    Dataset.from_list(rows).to_parquet(tmp_path / "b.parquet")
    groups = load_rollouts(str(tmp_path), 2)
    assert of_completions(groups, "completion") == [["1", "1"], ["2", "2"]]
    assert groups["note"] == [None, "new"]
    with pytest.raises(ValueError, match="no group of num_generations=4 completions, only of up to 2"):
        load_rollouts(str(tmp_path), 4)
    written(tmp_path, [ROW, ROW | {"reward": "x"}], "d.jsonl")
    with pytest.raises(ValueError, match=r"d\.jsonl', row 2: `reward`"):
        load_rollouts(str(tmp_path), 2)


def test_folders_of_steps_are_read_each_for_itself(tmp_path):
    for step in (1, 2):
        folder = tmp_path / f"global_step_{step}"
        folder.mkdir()
        written(folder, [ROW | {"completion": f"{step} {place}"} for place in range(2)])
    groups = load_rollouts(str(tmp_path), 2)
    assert of_completions(groups, "completion") == [["1 0", "1 1"], ["2 0", "2 1"]]


def test_a_group_of_several_processes_is_joined(tmp_path):
    """`save_rollouts` writes a file for each process."""
    for process in (0, 1):
        written(tmp_path, [ROW | {"group": "16-0"}] * 2, f"000000016-{process}.jsonl")
    assert len(load_rollouts(str(tmp_path), 4)) == 1


def masked(rows: list[dict], **changes) -> list[dict]:
    """The rows, of whose tokens others wrote every third, with these values of these columns at their places."""
    masked_rows = []
    for row in rows:
        mask = [int(place % 3 > 0) for place in range(len(row["completion_ids"]))]
        masked_row = {**row, "completion_mask": mask}
        for name, value_of_others in changes.items():
            pairs = zip(row[name], mask, strict=True)
            masked_row[name] = [value if is_sampled else value_of_others for value, is_sampled in pairs]
        masked_rows.append(masked_row)
    return masked_rows


def test_masked_tokens_are_not_trained_on(tiny_model, tmp_path, recorded):
    """As those of tools: they are in no ratio, length, mean or metric, and need no log-probability."""
    rows = rows_of(recorded)
    masked_rows = masked(rows)
    unknown_rows = masked(rows, logprobs=None)
    # What follows the last token of the model is not there either: else, the completion would seem to be truncated.
    longer_rows = []
    for row in masked_rows:
        longer = dict(row)
        longer["completion_ids"] = row["completion_ids"] + [7, 8]
        longer["completion_mask"] = row["completion_mask"] + [0, 0]
        longer["logprobs"] = row["logprobs"] + [None, None]
        longer_rows.append(longer)

    def run(name: str, rows: list[dict]) -> RecordingOPO:
        return replayed(tiny_model, tmp_path / name, written(tmp_path, rows, f"{name}.jsonl"), max_steps=2)

    of_all = run("all", rows)
    of_sampled = run("sampled", masked_rows)
    assert relative_error(change(of_all), change(of_sampled)) > 0.01
    assert_same_run(run("unknown", unknown_rows), of_sampled)
    assert_same_run(run("longer", longer_rows), of_sampled)
    n_tokens = sum(len(row["completion_ids"]) for row in rows[:16])
    n_sampled = sum(sum(row["completion_mask"]) for row in masked_rows[:16])
    assert logged(of_all)[0]["completions/mean_length"] == n_tokens / 16
    assert logged(of_sampled)[0]["completions/mean_length"] == n_sampled / 16


def test_masked_tokens_have_no_gradient_in_any_objective(tiny_model, tmp_path, recorded):
    source = written(tmp_path, masked(rows_of(recorded)))
    run = replayed(tiny_model, tmp_path, source, beta=0.1, entropy_coef=0.1, max_steps=1)
    batch = run.steps[0].batches[0]
    counts = completion_tokens(batch) & batch["opo_valid"].unsqueeze(1)
    assert (batch["completion_mask"].bool() & ~counts).any()
    for name in OBJECTIVES:
        args = OPOConfig(str(tmp_path), bf16=False, objective=name)
        run.policy_objective = objective_named(name)(args)
        logps = torch.full(counts.shape, -1.0, requires_grad=True)
        entropies = torch.full(counts.shape, -1.0, requires_grad=True)
        losses, _ = run._sample_losses(batch, logps, entropies)
        losses.sum().backward()
        assert torch.equal(logps.grad != 0, counts), name
        assert torch.equal(entropies.grad != 0, counts), name


def test_a_mask_of_ones_changes_no_bit(tiny_model, tmp_path, recorded):
    source = written(tmp_path, with_mask_of_ones(rows_of(recorded)))
    options = {"num_iterations": 2, "max_staleness": 1}
    unmasked = replayed(tiny_model, tmp_path / "unmasked", recorded, **options)
    ones = replayed(tiny_model, tmp_path / "ones", source, **options)
    assert_same_run(ones, unmasked)


def test_a_completion_without_a_sampled_token_is_left_out(tiny_model, tmp_path, recorded):
    """But its reward stays in the mean of its group."""
    first, *rows = with_mask_of_ones(rows_of(recorded))
    first["completion_mask"] = [0] * len(first["completion_ids"])

    def run(name: str, **of_first) -> RecordingOPO:
        source = written(tmp_path, [first | of_first, *rows], f"{name}.jsonl")
        return replayed(tiny_model, tmp_path / name, source, max_steps=1, objective="dr_grpo", scale_rewards="none")

    one = run("one")
    (rollout,) = one.rollouts
    assert rollout.opo_valid.logical_not().sum() == 1
    reversed_ids = first["completion_ids"][::-1]
    other = run("other", completion_ids=reversed_ids)
    assert relative_error(change(other), change(one)) == 0
    higher = run("higher", reward=5.0)
    others_of_group = [row["reward"] for row in rows[:3]]
    for trainer, reward in ((one, first["reward"]), (higher, 5.0)):
        rewards = torch.tensor([reward, *others_of_group])
        advantages = trainer.rollouts[0].advantages[:4]
        assert torch.allclose(advantages, rewards - rewards.mean(), atol=1e-6)


def test_planned_micro_batches_share_the_prompts_of_masked_completions(tiny_model, tmp_path, recorded):
    source = written(tmp_path, masked(rows_of(recorded), logprobs=None))
    planned = replayed(tiny_model, tmp_path / "planned", source, plan_micro_batches=True, max_steps=2)
    plain = replayed(tiny_model, tmp_path / "plain", source, plan_micro_batches=False, max_steps=2)
    for step in planned.steps:
        assert all("opo_source" in batch for batch in step.batches)
    assert relative_error(change(planned), change(plain)) < 1e-4


def test_files_that_cannot_be_used(tmp_path):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save([ROW], pickled / "rollout_0.pt")
    unscored = ROW | {"reward": None}
    files = {
        "a.jsonl": ([{"completion": "2"}], "no column 'prompt'"),
        "b.jsonl": ([{"prompt": "2"}], "no column 'completion'"),
        "c.jsonl": ([ROW], "num_generations=2"),
        "d.jsonl": ([unscored, unscored], "`reward` is null in every row"),
        "e.jsonl": ([], "has no rows"),
        "f.jsonl": (["2"], "row 1 is '2'. Write an object with columns"),
        "g.pt": ([ROW], "g.pt' is a kind of file that is not read. Load it in a script of yours"),
    }
    errors = {written(tmp_path, rows, name): error for name, (rows, error) in files.items()}
    errors[str(tmp_path / "none.jsonl")] = "none.jsonl"
    errors[str(pickled)] = "has .pt files only, which are not read"
    for source, expected in errors.items():
        with pytest.raises(ValueError, match="rollouts=") as error:
            load_rollouts(source, 2)
        assert expected in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "rollouts_model"),
        ({"rollouts": None, "save_rollouts": True, "trainer_arguments": {"train_dataset": IMAGES}}, "record images"),
        ({"trainer_arguments": {"tools": [print]}}, "tools"),
        ({"trainer_arguments": {"train_dataset": Dataset.from_dict({"prompt": PROMPTS})}}, "train_dataset"),
        ({"max_sampling_rounds": 2}, "max_sampling_rounds"),
        ({"use_vllm": True}, "use_vllm"),
        ({"save_rollouts": True}, "save_rollouts=True cannot record rollouts"),
        ({"rollouts": None, "rollouts_model": "mine"}, "rollouts_model='mine' is not allowed. .* to None without"),
        ({"temperature": 0.5}, r"temperature=0\.5, .* at a temperature of 0\.7 and 1\. Keep those of one"),
    ],
)
def test_what_does_not_fit_is_rejected(tiny_model, tmp_path, options, said):
    temperatures = (0.7, 1.0) if "temperature" in options else (1.0, 1.0)
    rows = [ROW | {"temperature": temperature} for temperature in temperatures]
    options = {"rollouts": written(tmp_path, rows * 8), **options}
    with pytest.raises(ValueError, match=said):
        replayed(tiny_model, tmp_path, **options)


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9999.0, -200.0, 0.5, None, "0"], ids=str)
def test_an_impossible_log_probability_is_named_with_its_row(tmp_path, value):
    """But not that of another's token, the least that float32 can sample, or one that rounding puts above 0."""
    good = ROW | {"completion_ids": [1, 2, 3], "completion_mask": [1, 0, 1], "logprobs": [-103.9, None, 1e-6]}
    load_rollouts(written(tmp_path, [good] * 2, "good.jsonl"), 2)
    source = written(tmp_path, [good, good | {"logprobs": [-1.0, -9999.0, value]}])
    error = (
        rf"rollouts=.*, row 2: `logprobs` is .* no sampled token can have {value!r}\. Record .* set `rollouts_model`"
    )
    with pytest.raises(ValueError, match=error):
        load_rollouts(source, 2)


TAKEN = [name for name in KNOWN if name not in ("prompt", "prompt_ids", "tools")]  # these are recorded as they are


@pytest.mark.parametrize("name", [*TAKEN, "group", RECORDED, PLACE, "group_mask"])
def test_columns_that_a_record_has_for_itself_are_rejected(tiny_model, tmp_path, name):
    data = Dataset.from_dict({"prompt": PROMPTS, name: PROMPTS})
    with pytest.raises(ValueError, match=f"cannot record the column '{name}': that name has a meaning .* Rename it"):
        make_trainer(tiny_model, tmp_path, save_rollouts=True, trainer_arguments={"train_dataset": data})


def test_values_that_a_record_cannot_hold_are_rejected(tiny_model, tmp_path):
    data = Dataset.from_dict({"prompt": PROMPTS, "written": [datetime(2026, 1, 1)] * 8})
    with pytest.raises(ValueError, match=r"cannot record the column 'written': .*datetime.* Make its values text"):
        make_trainer(tiny_model, tmp_path, save_rollouts=True, trainer_arguments={"train_dataset": data})


def test_columns_of_a_stream_or_a_rollout_function_are_rejected_in_the_first_rollout(tiny_model, tmp_path):
    script = Script()

    def rollout_with_rewards(prompts, trainer):
        return script.rollout(prompts, trainer) | {"reward": [1.0] * 16}

    dataset = Dataset.from_dict({"prompt": PROMPTS, "group": PROMPTS})
    for name, arguments in (
        ("reward", {"rollout_func": rollout_with_rewards}),
        ("group", {"train_dataset": dataset.to_iterable_dataset()}),
    ):
        options = {**STEPS, "save_rollouts": True, "trainer_arguments": {**arguments, "reward_funcs": even_tokens}}
        with pytest.raises(ValueError, match=f"cannot record the column '{name}'"):
            trained(tiny_model, tmp_path, **options)


def test_a_column_for_recorded_completions_is_rejected(tmp_path):
    source = written(tmp_path, [ROW | {RECORDED: 1}] * 2)
    with pytest.raises(ValueError, match=r"has a column 'recorded', which is not used\. Rename it"):
        load_rollouts(source, 2)


def test_tokens_that_do_not_say_what_their_text_says_are_rejected(tiny_model, tmp_path, recorded):
    rows = rows_of(recorded)
    rows[0]["completion"] += "?"
    replayed(tiny_model, tmp_path, written(tmp_path, rows), max_steps=1)
    other_texts = [f"{row['completion']}?" for row in rows]
    other = written(tmp_path, [row | {"completion": text} for row, text in zip(rows, other_texts, strict=True)])
    with pytest.raises(ValueError, match=r"the tokens of most completions say something else .*If they are of an"):
        replayed(tiny_model, tmp_path, other, max_steps=1)


@pytest.mark.parametrize("name", ["prompt_ids", "completion_ids"])
def test_tokens_that_the_model_does_not_have_are_rejected(tiny_model, tmp_path, recorded, name):
    rows = rows_of(recorded)
    rows[2][name][0] = 259
    source = written(tmp_path, rows)
    with pytest.raises(ValueError, match=rf"rollouts=.*, row 3: `{name}` has 259, but the model has only 259 tokens"):
        replayed(tiny_model, tmp_path, source)


def test_recipe_trains_on_rollouts_and_measures_on_other_problems(tmp_path):
    """Completions of the embedded task that are half right, by the embedded base model; of 20 problems, 4 are new."""
    data = tmp_path / "data"
    data.mkdir()
    problems = make_problems("train", ["Level 1"])
    prompts = [{"prompt": row["problem"], "solution": row["solution"]} for row in problems[:24]]
    written(data, prompts[:20], "test.jsonl")
    written(data, prompts[20:], "train.jsonl")
    rows = []
    for row in prompts[:16]:
        right = {**row, "completion": row["solution"]}
        wrong = {**row, "completion": "1"}
        rows += [right, right, wrong, wrong]
    fields = {
        **SMALL,
        "output_dir": str(tmp_path / "run"),
        "model_name_or_path": "arithmetic",
        "dataset_name": str(data),
        "report_levels": "all",
        "rollouts": written(tmp_path, rows),
        "rollouts_model": "arithmetic",
        "reward_funcs": "arithmetic_reward",
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 32,
        "max_steps": 4,
        "learning_rate": 1e-4,
    }
    arguments = []
    for name, value in fields.items():
        arguments += [f"--{name}", str(value)]
    assert main(arguments) == 0
    folder = tmp_path / "run"
    assert "recorded in" in (folder / "plan.txt").read_text()
    rewards = [entry["reward"] for entry in read_lines(folder / "log.jsonl") if "reward" in entry]
    assert rewards == [0.5] * 4
    summary = read_json(folder / "summary.json")
    assert summary["after"]["all"]["greedy"]["scored"] == 4
