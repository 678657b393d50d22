"""Recorded rollouts: what a run records, training on it, and what is rejected before it starts."""

import json
import math
import os
import re
from datetime import datetime
from pathlib import Path

import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from datasets import Dataset
from helpers import (
    PROMPTS,
    SMALL,
    RecordingOPO,
    Script,
    distance,
    even_tokens,
    logged,
    make_trainer,
    norm,
    relative_error,
    snapshot,
    trained,
    without_times,
)
from invariance.launch import launch, logs
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from opo_trl import OPOConfig
from opo_trl.batch import completion_tokens
from opo_trl.command.train import main
from opo_trl.data.arithmetic import make_problems
from opo_trl.objectives import OBJECTIVES, objective_named
from opo_trl.resume.checkpoint import checksum, settings
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
    now = snapshot(trainer.model)
    return {name: now[name].double() - trainer.initial[name] for name in now}


def written(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def replayed(model: str, folder: Path, rollouts: str | Path, trainer_arguments=None, **options) -> RecordingOPO:
    """A run on recorded rollouts."""
    arguments = dict.fromkeys(NOT_NEEDED) | (trainer_arguments or {})
    options = {**STEPS, "rollouts": rollouts and str(rollouts), **options}
    return trained(model, folder, trainer_arguments=arguments, **options)


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


def test_stale_completions_have_the_bounded_weight_in_a_single_pass_too(tiny_model, tmp_path, recorded):
    """Here the policy is another one than the behaviour policy from the first step on."""
    trained(tiny_model, tmp_path / "other", **STEPS).save_model(tmp_path / "model")
    of_pass = [
        replayed(str(tmp_path / "model"), tmp_path / str(n), recorded, num_iterations=n, max_steps=1) for n in (1, 2)
    ]
    once, first_of_two = (run.steps[0].gradient for run in of_pass)
    assert relative_error(once, first_of_two) < 1e-6  # `test_replay` compares the latter with the definition
    assert logged(of_pass[0])[0]["opo/ratio/ess"] < 0.99


def test_a_resumed_run_records_each_rollout_once(tiny_model, tmp_path):
    """Also if it goes on in other steps than before it was killed."""
    saving = {"save_rollouts": True, "save_strategy": "steps", "save_steps": 1, "trainer_arguments": GENERATES}
    trained(tiny_model, tmp_path, **STEPS, **saving)
    names = sorted(file.name for file in (tmp_path / "rollouts").iterdir())
    assert names == [f"0000000{count}-0.jsonl" for count in (16, 32, 48)]
    smaller = make_trainer(tiny_model, tmp_path, **STEPS, **saving, per_device_train_batch_size=2)
    smaller.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    names = sorted(file.name for file in (tmp_path / "rollouts").iterdir())
    assert names == [f"0000000{count}-0.jsonl" for count in (16, 24, 32)]


def record_and_repeat(model: str, folder: str) -> None:
    """Record on all processes, and train on what they have recorded, also with log-probabilities of a named model."""
    rank, processes = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", 1))
    sizes = {"per_device_train_batch_size": 4 // processes, "temperature": 0.7}
    place, fixed = Path(folder), {"learning_rate": 0.0, "save_rollouts": True, "trainer_arguments": GENERATES}
    trained(model, place / "run", **STEPS | sizes | fixed)
    for name, options in (("known", {}), ("computed", {"rollouts_model": model}), ("filled", {})):
        source = place / "run" / "rollouts"
        if name == "filled":
            source = place / f"filled_{rank}"
            source.mkdir()
            written(source, changed_logps(rows_of(place / "run" / "rollouts"), lambda logp: 0.0))
        if options:
            source = place / f"without_{rank}"
            source.mkdir()
            rows = rows_of(place / "run" / "rollouts")
            written(source, [{n: v for n, v in row.items() if n != "logprobs"} for row in rows])
        run = replayed(model, place / name, source, **STEPS | sizes | options)
        if rank == "0":
            run.model.save_pretrained(place / name)
    equal = [{**row, "reward": 1.0} for row in rows_of(place / "run" / "rollouts")]
    run = replayed(model, place / "equal", written(place, equal, f"equal_{rank}.jsonl"), **EQUAL | sizes)
    now = snapshot(run.accelerator.unwrap_model(run.model))
    assert all(torch.equal(now[name], weight) for name, weight in run.initial.items())


def test_two_processes_record_and_train_as_one(tiny_model, tmp_path):
    record_and_repeat(tiny_model, str(tmp_path / "one"))
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    (tmp_path / "two").mkdir()
    assert launch(record_and_repeat, tiny_model, str(tmp_path / "two"), **where) == [0, 0], logs(tmp_path)
    rows = [sorted(rows_of(tmp_path / name / "run" / "rollouts"), key=str) for name in ("one", "two")]
    assert len(rows[1]) == len(rows[0]) == 48
    assert {row["group"] for row in rows[1]} == {row["group"] for row in rows[0]}
    before, known, computed = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (tiny_model, tmp_path / "two" / "known", tmp_path / "two" / "computed")
    )
    assert any(not torch.equal(known[name], before[name]) for name in known)
    said = "".join(log.read_text() for log in tmp_path.glob("process_*.log"))
    assert said.count("are exactly 0 for 100% of the sampled tokens") == 1
    assert distance(known, computed) < 1e-3 * distance(known, before)


def test_the_model_that_wrote_completions_may_be_an_adapter(tiny_model, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).save_pretrained(tmp_path / "adapter")
    adapter, steps = str(tmp_path / "adapter"), {**STEPS, "max_steps": 1}
    trained(adapter, tmp_path / "run", save_rollouts=True, trainer_arguments=GENERATES, **steps)
    rows = rows_of(tmp_path / "run" / "rollouts")
    source = written(tmp_path, [{name: value for name, value in row.items() if name != "logprobs"} for row in rows])
    run = replayed(tiny_model, tmp_path / "replayed", source, rollouts_model=adapter, **steps)
    computed = {str(row["completion_ids"]): row["logprobs"] for group in run.train_dataset[RECORDED] for row in group}
    assert len(computed) > 4
    for row in rows:
        assert computed[str(row["completion_ids"])] == pytest.approx(row["logprobs"], abs=1e-5)
    assert logged(run)[0]["opo/ratio/ess"] < 0.99  # the model without the adapter is another one


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


def test_text_is_tokenized_and_scored_by_the_reward_functions(tiny_model, tmp_path):
    rows = [ROW | {"prompt": ask, "completion": text} for ask in PROMPTS[:2] for text in ("2", "22", "3", "4")]
    rows = [{n: v for n, v in row.items() if n != "reward"} | {"solution": "2"} for row in rows]
    seen = []

    def reward(completions, solution, **_):
        seen.extend(zip(completions, solution, strict=True))
        return [float(text == right) for text, right in zip(completions, solution, strict=True)]

    source = written(tmp_path, rows)
    run = replayed(
        *(tiny_model, tmp_path, source),
        **{"trainer_arguments": {"reward_funcs": reward}, "rollouts_model": tiny_model, "max_steps": 1},
        **{"steps_per_generation": 2},
    )
    assert sorted(seen) == sorted((row["completion"], "2") for row in rows)
    assert run.rollouts[0].advantages.view(2, 4)[:, 0].gt(0).all()
    end = run.processing_class.eos_token_id
    assert all(row["completion_ids"][-1] == end for row in run.train_dataset[RECORDED][0])
    # Checkpoints do not compare computed log-probabilities, which another number of processes may round otherwise.
    assert settings(run)["train_dataset.checksum"] == checksum(load_rollouts(source, 4))


def test_groups(tmp_path, caplog):
    asks = [[{"role": "user", "content": text}] for text in ("1+1=", "2+2=")]
    rows = [ROW | {"prompt": asks[0], "completion": str(i), "note": i, "level": "1"} for i in range(5)]
    rows += [ROW | {"prompt": asks[1], "note": 9, "level": "2"}]
    for seed in range(4):
        groups = load_rollouts(written(tmp_path, rows), 2, seed)
        assert len({row["note"] for group in groups[RECORDED] for row in group} & {*range(5)}) == 4
        assert groups["level"] == ["1", "1"]
        assert "level" not in groups[RECORDED][0][0]
    assert "2 of its 6 completions are left over" in caplog.text
    # Two runs may give their groups the same names.
    named = [row | {"group": i % 2} for i, row in enumerate(rows)]
    groups = load_rollouts(written(tmp_path, named), 2)
    assert [{row["note"] % 2 for row in group} for group in groups[RECORDED]] == [{0}, {1}]
    # Whole groups are as in the file.
    groups = load_rollouts(written(tmp_path, rows[:5]), 5)
    assert [row["note"] for row in groups[0][RECORDED]] == [0, 1, 2, 3, 4]


def test_divided_groups_are_drawn_by_the_seed(tmp_path):
    """Their order in the file may follow the rewards in any way: here, each second one is right."""
    completions = [{"completion": str(place), "reward": float(place % 2)} for place in range(8)]
    source = written(tmp_path, [ROW | {"prompt": ask} | completion for ask in PROMPTS for completion in completions])

    def drawn(seed: int) -> list[list[str]]:
        return [[row["completion"] for row in group] for group in load_rollouts(source, 4, seed)[RECORDED]]

    groups = drawn(1)
    assert [sorted(one + other) for one, other in zip(groups[::2], groups[1::2], strict=True)] == [[*"01234567"]] * 8
    assert sum(len({int(text) % 2 for text in group}) == 2 for group in groups) >= 14
    assert drawn(1) == groups != drawn(2)


def test_groups_without_a_learning_signal_are_counted(tiny_model, tmp_path, caplog):
    def warned(*rewards: tuple) -> str:
        """Of groups of two, with these rewards of each prompt."""
        caplog.clear()
        rows = [ROW | {"prompt": str(place), "reward": one} for place, of in enumerate(rewards) for one in of]
        load_rollouts(written(tmp_path, rows), 2)
        return caplog.text

    equal = (
        "2 of its 2 groups have equal rewards, and no learning signal: 2 already in the file, 0 only after dividing"
    )
    assert equal in warned((1, 1), (0, None))
    lost = "2 of its 4 groups have equal rewards, and no learning signal: 1 already in the file, 1 only after dividing"
    assert lost in warned((1, 0), (0, 0, 0, 0.5), (1, 1))
    assert "learning signal" not in warned((1, 0), (1, 1))
    # What is recorded does not depend on what the prompts of this run ask for.
    MultiProcessAdapter.warning_once.cache_clear()  # other tests may have had the same warning
    rows = [ROW | {"prompt": ask, "reward": 1.0} for ask in PROMPTS[:4] for _ in range(4)]
    replayed(tiny_model, tmp_path, written(tmp_path, rows), rollouts_model=tiny_model, max_steps=1)
    assert "no completion has a learning signal in the first rollout" in caplog.text
    assert "boxed" not in caplog.text


def test_reference_policy_with_one_step_per_rollout(tiny_model, tmp_path, recorded):
    """TRL then makes no pass for the behaviour policy, whose place the reference's would take."""
    run = replayed(tiny_model, tmp_path, recorded, steps_per_generation=2, beta=0.1, max_steps=2)
    assert logged(run)[0]["kl"] == 0
    # The policy itself has recorded the first rollout.
    assert [entry["opo/off_policy_steps"] for entry in logged(run)] == [0, 1]


# Where the policy has not moved, its own log-probabilities and recorded ones differ by rounding only.


def with_equal_rewards(folder: Path, recorded: Path) -> str:
    """A file with the recorded completions, whose rewards are all 1."""
    return written(folder, [{**row, "reward": 1.0} for row in rows_of(recorded)], "equal.jsonl")


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
    run = replayed(tiny_model, tmp_path, with_equal_rewards(tmp_path, recorded), **EQUAL | options)
    now = snapshot(run.model)
    assert all(torch.equal(now[name], weight) for name, weight in run.initial.items())


def test_own_completions_in_bfloat16_without_a_signal_change_nothing(tiny_model, tmp_path):
    low = {"model_init_kwargs": {"dtype": "bfloat16"}}
    trained(tiny_model, tmp_path, save_rollouts=True, **STEPS | {"max_steps": 1}, **low)
    run = replayed(tiny_model, tmp_path, with_equal_rewards(tmp_path, tmp_path / "rollouts"), **EQUAL | low)
    now = snapshot(run.model)
    assert all(torch.equal(now[name], weight) for name, weight in run.initial.items())


def test_completions_of_another_model_pull_without_a_signal(tiny_model, tmp_path, recorded):
    """Beside own ones, which rest: their rounding has no effect."""
    rows = [{**row, "reward": 1.0} for row in rows_of(recorded)]
    gradients = []
    for rounding in (0.0, 2e-6):
        shifts = [0.1 if number % 2 else rounding for number in range(len(rows))]
        shifted = [
            {**row, "logprobs": [logp - shift for logp in row["logprobs"]]}
            for row, shift in zip(rows, shifts, strict=True)
        ]
        file = written(tmp_path, shifted, f"{rounding}.jsonl")
        run = replayed(tiny_model, tmp_path, file, **EQUAL | {"max_steps": 1})
        gradients.append(run.steps[0].gradient)
    assert norm(gradients[0]) > 0.01
    assert distance(*gradients) == 0


def test_recorded_rewards_are_those_of_the_run_whatever_its_weights(tiny_model, tmp_path):
    both = {
        "trainer_arguments": {**GENERATES, "reward_funcs": [even_tokens, even_tokens]},
        "reward_weights": [0.0, 2.0],
    }
    run = trained(tiny_model, tmp_path / "run", save_rollouts=True, **STEPS | {"max_steps": 1}, **both)
    both["trainer_arguments"] = {"reward_funcs": [even_tokens, even_tokens]}
    again = replayed(tiny_model, tmp_path / "again", tmp_path / "run" / "rollouts", max_steps=1, **both)
    assert logged(again)[0]["reward"] == pytest.approx(logged(run)[0]["reward"])


def test_columns_of_the_dataset_reach_reward_functions_again(tiny_model, tmp_path):
    """As they were, whatever their types."""
    columns = {
        "text": ["007", "NA", "1.0", "", "x", "null", "true", "[]"],
        "number": [1, 2, None, 4, 5, 6, 7, 8],
        "score": [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e-9],
        "parts": [{"a": [1, 2], "b": None}, *[{"a": [], "b": "x"}] * 7],
        "same": [["1"]] * 8,
    }
    seen = []

    def reward(prompts, completion_ids, **given):
        rows = zip(prompts, *(given[name] for name in columns), strict=True)
        seen.append([dict(zip(("prompt", *columns), row, strict=True)) for row in rows])
        return even_tokens(completion_ids)

    data = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS, **columns}), "rollout_func": None}
    options = {"max_steps": 6, "steps_per_generation": 4, "shuffle_dataset": False}
    data["reward_funcs"] = reward
    trained(tiny_model, tmp_path / "run", save_rollouts=True, trainer_arguments=data, **options)
    first, seen = [row for rows in seen for row in rows], []
    rows = [{name: row[name] for name in row.keys() - {"reward"}} for row in rows_of(tmp_path / "run" / "rollouts")]
    again = {"trainer_arguments": {"reward_funcs": reward}, **options}
    replayed(tiny_model, tmp_path / "again", written(tmp_path, rows), **again)
    assert len(first) == 48
    assert [row for rows in seen for row in rows] == first


def test_a_named_model_computes_log_probabilities_in_place_of_recorded_ones(tiny_model, tmp_path, recorded, caplog):
    wrong = [row | {"logprobs": [-1.0] * len(row["logprobs"])} for row in rows_of(recorded)]
    source = written(tmp_path, wrong)
    computed = replayed(tiny_model, tmp_path / "computed", source, rollouts_model=tiny_model, max_steps=2)
    assert "computes log-probabilities, in place of those recorded in" in caplog.text
    known, believed = (
        replayed(tiny_model, tmp_path / name, rows, max_steps=2)
        for name, rows in (("known", recorded), ("believed", source))
    )
    assert relative_error(change(computed), change(known)) < 1e-3
    assert relative_error(change(believed), change(known)) > 0.1


def test_truncated_completions_are_recorded_with_their_log_probabilities(tiny_model, tmp_path):
    """Also if this run leaves them out."""
    short = {"trainer_arguments": GENERATES, "max_completion_length": 3, "mask_truncated_completions": True}
    trained(tiny_model, tmp_path, save_rollouts=True, **STEPS | {"max_steps": 1}, **short)
    rows = rows_of(tmp_path / "rollouts")
    assert all(len(row["logprobs"]) == len(row["completion_ids"]) for row in rows)
    assert all(logp < 0 for row in rows for logp in row["logprobs"])


def test_a_new_run_in_a_folder_moves_the_rollouts_of_an_earlier_one(tiny_model, tmp_path):
    def run(steps: int) -> None:
        options = {**STEPS, "max_steps": steps, "save_rollouts": True, "trainer_arguments": GENERATES}
        trained(tiny_model, tmp_path, **options)

    run(4)
    first = rows_of(tmp_path / "rollouts")
    run(2)
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["000000016-0.jsonl"]
    assert rows_of(tmp_path / "rollouts-replaced") == first


# What recorded log-probabilities look like is in `test_recorded_logps`; here, when that is said.


def changed_logps(rows: list[dict], change) -> list[dict]:
    return [row | {"logprobs": [change(logp) for logp in row["logprobs"]]} for row in rows]


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
    how = {name: value for name, value in options.items() if name == "temperature"}
    trained(tiny_model, tmp_path / "run", save_rollouts=True, trainer_arguments=GENERATES, **STEPS | how)
    rows = changed_logps(rows_of(tmp_path / "run" / "rollouts"), change)
    run = replayed(tiny_model, tmp_path / "again", written(tmp_path, rows), max_steps=6, **options)
    assert run.state.global_step == 6
    spoken = [record.getMessage() for record in caplog.records if SAID in record.getMessage()]
    assert len(spoken) == bool(said)
    assert all(text in sentence for sentence in spoken for text in said)


def test_another_model_gets_a_line_of_information(tiny_model, tmp_path, recorded, caplog, capsys):
    other = save_tiny_model(tmp_path / "other", seed=5)
    rows = [row | {"top_p": 0.9, "top_k": -1} for row in rows_of(recorded)]
    replayed(other, tmp_path, written(tmp_path, rows))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if SAID in line)
    assert re.search(
        r"above .* for \d+% of the sampled tokens, and below for \d+%, as those of another model with", line
    )
    assert "with top_p=0.9, or of another state of this one. The ratio" in line
    assert SAID not in caplog.text


def test_tokens_of_others_do_not_count_in_what_they_look_like(tiny_model, tmp_path, recorded, caplog):
    """Whose log-probabilities are 0."""
    rows = changed_logps(rows_of(recorded), lambda logp: logp + 0.1)
    replayed(tiny_model, tmp_path, written(tmp_path, masked(rows, logprobs=None)), max_steps=1)
    assert all(text in caplog.text for text in KEPT)


# What is rejected


@pytest.mark.parametrize("loaded", [False, True])
def test_a_run_goes_on_with_the_rollouts_that_it_began_with(tiny_model, tmp_path, recorded, caplog, loaded):
    """Their content decides, whether the run loads the file or gets what is in it."""
    rows = rows_of(recorded)
    options = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}

    def run(resume: int | None = None, **others) -> None:
        source = written(tmp_path, rows)
        arguments = {"train_dataset": load_rollouts(source, 4)} if loaded else {}
        arguments = dict.fromkeys(NOT_NEEDED) | arguments
        settings = {**STEPS, **options, "rollouts": source, **others}
        trainer = make_trainer(tiny_model, tmp_path, trainer_arguments=arguments, **settings)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / f"checkpoint-{resume}"))

    run(max_staleness=1)
    rows[5] |= {"logprobs": [logp - 0.1 for logp in rows[5]["logprobs"]]}  # of one completion
    said = r"goes on with rollouts\.checksum='.*', but .* rollouts\.checksum='.*'\. Use the same data, or "
    for step, fix in ((3, "resume from a checkpoint at the end of a rollout"), (4, "set `max_staleness` to 0")):
        with pytest.raises(ValueError, match=said + fix):
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
        ({"completion_ids": [1, 2], "loss_mask": [0, 1]}, "'loss_mask', which is not used."),
        ({"reward": "good"}, "`reward` is 'good'"),
        ({"temperature": "high"}, "`temperature` is 'high'"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, said):
    good = {"completion_ids": [1, 2], "completion_mask": [1, 1], "logprobs": [-1.0, -1.0], "temperature": 1.0}
    good = {name: good.get(name, 0) for name in row}
    rows = [ROW | {n: v for n, v in good.items() if n not in ROW}, ROW | row]
    with pytest.raises(ValueError, match="rollouts=") as error:
        load_rollouts(written(tmp_path, rows), 2)
    assert said in str(error.value)


def test_a_folder_is_read_whole(tmp_path):
    """Each of its files is of another policy, whose completions are in groups of their own."""
    written(tmp_path, [ROW | {"completion": "1"}] * 2, "a.jsonl")
    Dataset.from_list([ROW | {"completion": "2", "note": "new"}] * 2).to_parquet(tmp_path / "b.parquet")
    groups = load_rollouts(str(tmp_path), 2)
    assert [[row["completion"] for row in group] for group in groups[RECORDED]] == [["1", "1"], ["2", "2"]]
    assert groups["note"] == [None, "new"]
    with pytest.raises(ValueError, match="no group of num_generations=4 completions, only of up to 2"):
        load_rollouts(str(tmp_path), 4)
    written(tmp_path, [ROW, ROW | {"reward": "x"}], "d.jsonl")
    with pytest.raises(ValueError, match=r"d\.jsonl', row 2: `reward`"):
        load_rollouts(str(tmp_path), 2)


def test_folders_of_steps_are_read_each_for_itself(tmp_path):
    for step in (1, 2):
        (folder := tmp_path / f"global_step_{step}").mkdir()
        written(folder, [ROW | {"completion": f"{step} {place}"} for place in range(2)])
    groups = load_rollouts(str(tmp_path), 2)
    assert [[row["completion"] for row in group] for group in groups[RECORDED]] == [["1 0", "1 1"], ["2 0", "2 1"]]


def test_a_group_of_several_processes_is_joined(tmp_path):
    """`save_rollouts` writes a file for each process."""
    for process in (0, 1):
        written(tmp_path, [ROW | {"group": "16-0"}] * 2, f"000000016-{process}.jsonl")
    assert len(load_rollouts(str(tmp_path), 4)) == 1


def masked(rows: list[dict], **changes) -> list[dict]:
    """The rows, of whose tokens others wrote every third, with these values of these columns at their places."""
    made = []
    for row in rows:
        mask = [int(place % 3 > 0) for place in range(len(row["completion_ids"]))]
        others = {
            name: [new if own == 0 else old for old, own in zip(row[name], mask, strict=True)]
            for name, new in changes.items()
        }
        made.append({**row, "completion_mask": mask, **others})
    return made


def test_masked_tokens_are_not_trained_on(tiny_model, tmp_path, recorded):
    """As those of tools: they are in no ratio, length, mean or metric, and need no log-probability."""
    rows = rows_of(recorded)
    length = [len(row["completion_ids"]) for row in rows]

    def run(name: str, rows: list[dict]) -> RecordingOPO:
        return replayed(tiny_model, tmp_path / name, written(tmp_path, rows, f"{name}.jsonl"), max_steps=2)

    plain, of_model, unknown = run("a", rows), run("b", masked(rows)), run("c", masked(rows, logprobs=None))
    assert relative_error(change(plain), change(of_model)) > 0.01
    # What follows the last token of the model is not there either: else, the completion would seem to be truncated.
    after = {"completion_ids": [7, 8], "completion_mask": [0, 0], "logprobs": [None, None]}
    longer = [row | {name: row[name] + more for name, more in after.items()} for row in masked(rows)]
    for same in (unknown, run("d", longer)):
        assert all(value.equal(snapshot(of_model.model)[name]) for name, value in snapshot(same.model).items())
        assert [*map(without_times, logged(same))] == [*map(without_times, logged(of_model))]
    counted = [logged(trainer)[0]["completions/mean_length"] for trainer in (plain, of_model)]
    own = [sum(row["completion_mask"]) for row in masked(rows)]
    assert counted == [sum(length[:16]) / 16, sum(own[:16]) / 16]


def test_masked_tokens_have_no_gradient_in_any_objective(tiny_model, tmp_path, recorded):
    source = written(tmp_path, masked(rows_of(recorded)))
    run = replayed(tiny_model, tmp_path, source, beta=0.1, entropy_coef=0.1, max_steps=1)
    batch = run.steps[0].batches[0]
    counts = completion_tokens(batch) & batch["opo_valid"].unsqueeze(1)
    assert (batch["completion_mask"].bool() & ~counts).any()
    for name in OBJECTIVES:
        run.policy_objective = objective_named(name)(OPOConfig(str(tmp_path), bf16=False, objective=name))
        of_tokens = [torch.full(counts.shape, -1.0, requires_grad=True) for _ in range(2)]
        run._sample_losses(batch, *of_tokens)[0].sum().backward()
        for values in of_tokens:  # log-probabilities and entropies
            assert torch.equal(values.grad != 0, counts), name


def test_a_mask_of_ones_changes_no_bit(tiny_model, tmp_path, recorded):
    rows = [row | {"completion_mask": [1] * len(row["completion_ids"])} for row in rows_of(recorded)]
    without, ones = (
        replayed(tiny_model, tmp_path / name, source, num_iterations=2, max_staleness=1)
        for name, source in (("a", recorded), ("b", written(tmp_path, rows)))
    )
    assert all(value.equal(snapshot(without.model)[name]) for name, value in snapshot(ones.model).items())
    assert [*map(without_times, logged(ones))] == [*map(without_times, logged(without))]


def test_a_completion_without_a_sampled_token_is_left_out(tiny_model, tmp_path, recorded):
    """But its reward stays in the mean of its group."""
    first, *rows = [row | {"completion_mask": [1] * len(row["completion_ids"])} for row in rows_of(recorded)]
    first["completion_mask"] = [0] * len(first["completion_ids"])

    def run(name: str, **of_first) -> RecordingOPO:
        source = written(tmp_path, [first | of_first, *rows], f"{name}.jsonl")
        return replayed(tiny_model, tmp_path / name, source, max_steps=1, objective="dr_grpo", scale_rewards="none")

    one, other, higher = run("a"), run("b", completion_ids=first["completion_ids"][::-1]), run("c", reward=5.0)
    assert (~one.rollouts[0].opo_valid).sum() == 1
    assert relative_error(change(other), change(one)) == 0
    for trainer, reward in ((one, first["reward"]), (higher, 5.0)):
        group = torch.tensor([reward, *(row["reward"] for row in rows[:3])])
        assert torch.allclose(trainer.rollouts[0].advantages[:4], group - group.mean(), atol=1e-6)


def test_planned_micro_batches_share_the_prompts_of_masked_completions(tiny_model, tmp_path, recorded):
    source = written(tmp_path, masked(rows_of(recorded), logprobs=None))
    planned, plain = (
        replayed(tiny_model, tmp_path / str(plans), source, plan_micro_batches=plans, max_steps=2)
        for plans in (True, False)
    )
    assert all("opo_source" in batch for step in planned.steps for batch in step.batches)
    assert relative_error(change(planned), change(plain)) < 1e-4


def test_files_that_cannot_be_used(tmp_path):
    (pickled := tmp_path / "pickled").mkdir()
    torch.save([ROW], pickled / "rollout_0.pt")
    for source, said in (
        (str(tmp_path / "none.jsonl"), "none.jsonl"),
        (written(tmp_path, [{"completion": "2"}], "a.jsonl"), "no column 'prompt'"),
        (written(tmp_path, [{"prompt": "2"}], "b.jsonl"), "no column 'completion'"),
        (written(tmp_path, [ROW], "c.jsonl"), "num_generations=2"),
        (written(tmp_path, [ROW | {"reward": None}] * 2, "d.jsonl"), "`reward` is null in every row"),
        (written(tmp_path, [], "e.jsonl"), "has no rows"),
        (written(tmp_path, ["2"], "f.jsonl"), "row 1 is '2'. Write an object with columns"),
        (written(tmp_path, [ROW], "g.pt"), "g.pt' is a kind of file that is not read. Load it in a script of yours"),
        (str(pickled), "has .pt files only, which are not read"),
    ):
        with pytest.raises(ValueError, match="rollouts=") as error:
            load_rollouts(source, 2)
        assert said in str(error.value)


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
    rows = [ROW | {"temperature": t} for t in ((0.7, 1.0) if "temperature" in options else (1.0, 1.0))] * 8
    with pytest.raises(ValueError, match=said):
        replayed(tiny_model, tmp_path, **{"rollouts": written(tmp_path, rows), **options})


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9999.0, -200.0, 0.5, None, "0"], ids=str)
def test_an_impossible_log_probability_is_named_with_its_row(tmp_path, value):
    """But not that of another's token, the least that float32 can sample, or one that rounding puts above 0."""
    good = ROW | {"completion_ids": [1, 2, 3], "completion_mask": [1, 0, 1], "logprobs": [-103.9, None, 1e-6]}
    load_rollouts(written(tmp_path, [good] * 2, "good.jsonl"), 2)
    rows = [good, good | {"logprobs": [-1.0, -9999.0, value]}]
    said = (
        rf"rollouts=.*, row 2: `logprobs` is .* no sampled token can have {value!r}\. Record .* set `rollouts_model`"
    )
    with pytest.raises(ValueError, match=said):
        load_rollouts(written(tmp_path, rows), 2)


@pytest.mark.parametrize("name", [*KNOWN[1:], "group", RECORDED, PLACE, "loss_mask"])
def test_columns_that_a_record_has_for_itself_are_rejected(tiny_model, tmp_path, name):
    data = Dataset.from_dict({"prompt": PROMPTS, name: PROMPTS})
    with pytest.raises(ValueError, match=f"cannot record the column '{name}': that name has a meaning .* Rename it"):
        make_trainer(tiny_model, tmp_path, save_rollouts=True, trainer_arguments={"train_dataset": data})


def test_values_that_a_record_cannot_hold_are_rejected(tiny_model, tmp_path):
    data = Dataset.from_dict({"prompt": PROMPTS, "written": [datetime(2026, 1, 1)] * 8})
    with pytest.raises(ValueError, match=r"cannot record the column 'written': .*datetime.* Make its values text"):
        make_trainer(tiny_model, tmp_path, save_rollouts=True, trainer_arguments={"train_dataset": data})


def test_columns_of_a_stream_or_a_rollout_function_are_rejected_in_the_first_rollout(tiny_model, tmp_path):
    script, stream = Script(), Dataset.from_dict({"prompt": PROMPTS, "group": PROMPTS}).to_iterable_dataset()
    added = {"reward": [1.0] * 16}
    for name, arguments in (
        ("reward", {"rollout_func": lambda prompts, trainer: script.rollout(prompts, trainer) | added}),
        ("group", {"train_dataset": stream}),
    ):
        options = {**STEPS, "save_rollouts": True, "trainer_arguments": {**arguments, "reward_funcs": even_tokens}}
        with pytest.raises(ValueError, match=f"cannot record the column '{name}'"):
            trained(tiny_model, tmp_path, **options)


def test_a_column_for_recorded_completions_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"has a column 'recorded', which is not used\. Rename it"):
        load_rollouts(written(tmp_path, [ROW | {RECORDED: 1}] * 2), 2)


def test_tokens_that_do_not_say_what_their_text_says_are_rejected(tiny_model, tmp_path, recorded):
    rows = rows_of(recorded)
    rows[0]["completion"] += "?"
    replayed(tiny_model, tmp_path, written(tmp_path, rows), max_steps=1)
    other = [row | {"completion": row["completion"] + "?"} for row in rows]
    with pytest.raises(ValueError, match=r"the tokens of most completions say something else .*If they are of an"):
        replayed(tiny_model, tmp_path, written(tmp_path, other), max_steps=1)


@pytest.mark.parametrize("name", ["prompt_ids", "completion_ids"])
def test_tokens_that_the_model_does_not_have_are_rejected(tiny_model, tmp_path, recorded, name):
    rows = rows_of(recorded)
    rows[2][name][0] = 259
    with pytest.raises(ValueError, match=rf"rollouts=.*, row 3: `{name}` has 259, but the model has only 259 tokens"):
        replayed(tiny_model, tmp_path, written(tmp_path, rows))


def test_recipe_trains_on_rollouts_and_measures_on_other_problems(tmp_path):
    """Completions of the embedded task that are half right, by the embedded base model; of 20 problems, 4 are new."""
    data = tmp_path / "data"
    data.mkdir()
    problems = [*make_problems("train", ["Level 1"])]
    asked = [{"prompt": row["problem"], "solution": row["solution"]} for row in problems]
    written(data, asked[:20], "test.jsonl")
    written(data, asked[20:24], "train.jsonl")
    texts = [(row, row["solution"] if right else "1") for row in asked[:16] for right in (True, True, False, False)]
    fields = {
        **SMALL,
        "output_dir": str(tmp_path / "run"),
        "model_name_or_path": "arithmetic",
        "dataset_name": str(data),
        "report_levels": "all",
        "rollouts": written(tmp_path, [{**row, "completion": text} for row, text in texts]),
        "rollouts_model": "arithmetic",
        "reward_funcs": "arithmetic_reward",
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 32,
        "max_steps": 4,
        "learning_rate": 1e-4,
    }
    assert main([word for name, value in fields.items() for word in (f"--{name}", str(value))]) == 0
    assert "recorded in" in (tmp_path / "run" / "plan.txt").read_text()
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [entry["reward"] for entry in log if "reward" in entry] == [0.5] * 4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["all"]["greedy"]["scored"] == 4
