"""Which checkpoints are complete, which one a run resumes, and what it says about the others."""

import datetime
import json
import logging
import math
import shutil
from collections import defaultdict, deque
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from named_tensors import relative_error, same_weights, snapshot
from peft import LoraConfig
from recording_trainers import (
    Recording,
    RecordingGRPO,
    RecordingOPO,
    logged,
    make_trainer,
    metric,
    trained,
    without_times,
)
from scripted_rollouts import PROMPTS, Script, even_tokens
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.trainer.utils import RepeatSampler

from opo_trl import OPOConfig
from opo_trl.data.prompt_ids import PROMPT_IDS
from opo_trl.metrics import unlogged
from opo_trl.resume.checkpoint import checksum, draw_random_state, fault, last_complete, resolve
from opo_trl.reuse.reading import RECORDED


@pytest.fixture(scope="module")
def run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with a checkpoint at each of three steps; one rollout serves two."""
    folder = tmp_path_factory.mktemp("run")
    trained(tiny_model, folder, max_steps=3, num_iterations=2, save_strategy="steps", save_steps=1)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


def test_which_checkpoint_is_resumed(copy: Path, caplog: pytest.LogCaptureFixture):
    """The last complete one: what a kill leaves of another has no `trainer_state.json`, or a part of it."""
    PartialState()
    folder = str(copy)
    last_file = copy / "checkpoint-3" / "trainer_state.json"
    written = {path.name: path.stat().st_mtime_ns for path in last_file.parent.iterdir()}
    trainer_state, rollout_state = written.pop(last_file.name), written.pop("rollout_state_0.pt")
    assert max(written.values()) <= rollout_state <= trainer_state
    text = last_file.read_text()
    last_file.write_text(text[:-5])
    (copy / "checkpoint-10").mkdir()
    complete = str(copy / "checkpoint-2")
    with caplog.at_level(logging.WARNING):
        assert resolve("last", folder) == complete
    assert last_complete(folder) == complete
    for name in ("checkpoint-3", "checkpoint-10"):
        assert f"{name} is skipped: it has no complete trainer_state.json" in caplog.text
        with pytest.raises(ValueError, match=r"cannot be resumed: it has no complete trainer_state\.json"):
            resolve(str(copy / name), folder)
    for requested in (True, "true", "auto", complete):
        assert resolve(requested, folder) == complete
    absent = str(copy / "none")
    for requested in ("auto", None, False):
        assert resolve(requested, absent) is None
    with pytest.raises(ValueError, match=r"resume_from_checkpoint='last'.*holds no complete checkpoint.*`auto`"):
        resolve("last", absent)


@pytest.mark.parametrize("options", [{"trainer_class": RecordingGRPO}, {"save_only_model": True}], ids=str)
def test_checkpoint_without_a_rollout_is_rejected(tiny_model: str, tmp_path: Path, options: dict):
    trained(tiny_model, tmp_path, save_strategy="steps", save_steps=1, **options)
    assert resolve("auto", str(tmp_path)) is None
    with pytest.raises(ValueError, match=r"it holds no rollout, as another trainer .*`model_name_or_path` takes it"):
        resolve(str(tmp_path / "checkpoint-1"), str(tmp_path))


def test_a_stream_is_resumed_in_any_of_its_passes(tiny_model: str, tmp_path: Path):
    # An optimizer step ends in the next rollout.
    options = {"steps_per_generation": 3, "per_device_train_batch_size": 4}

    def run(resume: int | None = None) -> tuple[list[dict], dict[str, torch.Tensor], list[str]]:
        asked: list[str] = []

        def reward(prompts: list[str], **kwargs):
            asked.extend(dict.fromkeys(prompts))
            return even_tokens(**kwargs)

        data = Dataset.from_dict({"prompt": PROMPTS[:5]}).to_iterable_dataset()
        arguments = {"train_dataset": data, "rollout_func": None, "reward_funcs": reward}
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 8}
        trainer = make_trainer(tiny_model, tmp_path, trainer_arguments=arguments, **saving, **options)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / f"checkpoint-{resume}"))
        return [without_times(entry) for entry in logged(trainer)], snapshot(trainer.model), asked

    log, weights, asked = run()
    assert len(asked) > 5  # more than a pass
    for step in (7, 3):  # those after it are set aside
        entries, resumed, rest = run(step)
        assert rest == asked[len(asked) - len(rest) :]
        assert entries == log
        assert same_weights(resumed, weights)


# A second save of the same step


class SaveAgain(TrainerCallback):
    """Asks for a second save of the same step, at the end of an epoch."""

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save = True


class Killed(BaseException):
    """Like SIGKILL, invisible to `except Exception`."""


class KilledInASecondSave(RecordingOPO):
    saves: ClassVar[list[int]] = []

    def _save_optimizer_and_scheduler(self, output_dir: str):
        if self.state.global_step in self.saves:
            raise Killed
        self.saves.append(self.state.global_step)
        super()._save_optimizer_and_scheduler(output_dir)


def test_checkpoint_stays_while_it_is_written_again(tiny_model: str, tmp_path: Path):
    # 8 prompts in rollouts of 2: an epoch is 4 steps.
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    options["trainer_arguments"] = {"callbacks": [SaveAgain()], "reward_funcs": even_tokens, "rollout_func": None}
    uninterrupted = trained(tiny_model, tmp_path / "uninterrupted", **options)
    assert [path.name for path in (tmp_path / "uninterrupted").glob("*checkpoint-*")] == ["checkpoint-5"]
    KilledInASecondSave.saves.clear()
    killed = make_trainer(tiny_model, tmp_path, trainer_class=KilledInASecondSave, **options)
    with pytest.raises(Killed):
        killed.train()
    assert fault(tmp_path / "checkpoint-4") is not None
    last = last_complete(str(tmp_path))
    assert last == str(tmp_path / "_checkpoint-4") == resolve("auto", str(tmp_path))
    resumed = make_trainer(tiny_model, tmp_path, **options)
    resumed.train(resume_from_checkpoint="last")
    assert len(resumed.steps) == 1
    one, other = snapshot(resumed.model), snapshot(uninterrupted.model)
    assert same_weights(one, other)
    assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-5")
    assert list(tmp_path.glob("_checkpoint-*")) == []


# Other settings than those that a checkpoint was saved with

DATA = Dataset.from_dict({"prompt": PROMPTS})
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LORA = LoraConfig(**ADAPTER)
REUSE = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
OTHER = {
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 4},
    "reward_funcs": {"trainer_arguments": {"reward_funcs": even_tokens}},
}


@pytest.mark.parametrize("name", OTHER)
def test_setting_of_a_rollout_changes_only_at_its_end(copy: Path, tiny_model: str, name: str):
    trainer = make_trainer(tiny_model, copy, **{**REUSE, "save_strategy": "no", "max_steps": 4, **OTHER[name]})
    with pytest.raises(
        ValueError, match=rf"in the middle of a rollout, and goes on with {name}=(.*), but .*{name}=.* Set {name}="
    ):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    assert metric(trainer, "step") == [1, 2, 3, 4]


def test_a_setting_of_rollouts_does_not_change_while_earlier_ones_are_replayed(tiny_model: str, tmp_path: Path):
    options = {"num_iterations": 2, "max_staleness": 1, "save_strategy": "steps", "save_steps": 2}
    trained(tiny_model, tmp_path, max_steps=2, **options)  # to the end of a rollout
    trainer = make_trainer(tiny_model, tmp_path, max_steps=4, temperature=0.5, **options)
    message = r"was saved with earlier rollouts, and goes on with temperature=1\.0, .* or set `max_staleness` to 0\."
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint="last")


def test_prompts_may_change_only_at_the_end_of_a_rollout(copy: Path, tiny_model: str, caplog):
    """As many others: their places are those of the former ones."""
    others = on_data(Dataset.from_dict({"prompt": [f"{prompt} " for prompt in PROMPTS]}))
    trainer = make_trainer(tiny_model, copy, **{**REUSE, "save_strategy": "no"}, **others)
    message = r"in the middle of a rollout, and goes on with train_dataset\.checksum=.* Use the same data, or resume"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    assert "The run goes on with train_dataset.checksum=" in caplog.text
    assert "so it is no longer a single trajectory" in caplog.text


def on_data(data: Dataset | IterableDataset) -> dict:
    return {"trainer_arguments": {"train_dataset": data}}


@pytest.mark.parametrize(
    ("options", "there", "here"),
    [
        ({"seed": 7}, "seed=42", "seed=7"),
        ({"shuffle_dataset": False}, "shuffle_dataset=True", "shuffle_dataset=False"),
        ({"max_sampling_rounds": 2}, "max_sampling_rounds=1", "max_sampling_rounds=2"),
        (on_data(DATA.select(range(7))), "train_dataset.rows=8", "train_dataset.rows=7"),
        (on_data(DATA.to_iterable_dataset()), "train_dataset.rows=8", "train_dataset.rows=None"),
        (
            {"optim": "adagrad"},
            "optim='sgd', optimizer='torch.optim.sgd.SGD'",
            "optim='adagrad', optimizer='torch.optim.adagrad.Adagrad'",
        ),
        ({"weight_decay": 0.1}, "weight_decay=0.0", "weight_decay=0.1"),
        ({"sync_ref_model": True, "beta": 0.1}, "sync_ref_model=False", "sync_ref_model=True"),
        ({"trainer_arguments": {"peft_config": LORA}}, "peft_config=None", "peft_config='LoraConfig'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_order_of_the_prompts_and_meaning_of_the_files_never_change(copy, tiny_model, options, there, here):
    folder = str(copy / "checkpoint-2")  # at the end of a rollout
    trainer = make_trainer(tiny_model, copy, **{**REUSE, **options})
    with pytest.raises(ValueError, match="goes on with") as error:
        trainer.train(resume_from_checkpoint=folder)
    fix = "Use the same data" if "train_dataset" in there else f"Set {there}"
    fix += ", or set `model_name_or_path` to it to start from its weights."
    assert str(error.value) == f"{folder!r} goes on with {there}, but this run has {here}. {fix}"


def test_an_adapter_keeps_its_configuration(tiny_model: str, tmp_path: Path):
    """The same tensors would be loaded, and mean something else."""

    def run(adapter: LoraConfig | None, resume: str | None = None) -> None:
        options = {"trainer_arguments": {"peft_config": adapter}, "save_strategy": "steps", "save_steps": 1}
        make_trainer(tiny_model, tmp_path, **options).train(resume_from_checkpoint=resume)

    run(LORA)
    folder = str(tmp_path / "checkpoint-1")
    run(LoraConfig(**ADAPTER, lora_dropout=0.1), folder)
    for changed, named in (
        (LoraConfig(**{**ADAPTER, "lora_alpha": 32}), r"peft_config\.lora_alpha=8, but .*=32"),
        (LoraConfig(**{**ADAPTER, "target_modules": ["o_proj"]}), r"target_modules=\['q_proj'\], but .*=\['o_proj'\]"),
        (None, "peft_config='LoraConfig', but .*=None"),
    ):
        with pytest.raises(ValueError, match=named):
            run(changed, folder)


def test_an_optimizer_of_the_same_class_goes_on(tiny_model: str, tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trained(tiny_model, tmp_path, optim="adamw_torch", **options)
    make_trainer(tiny_model, tmp_path, optim="adamw_torch_fused", **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with_sgd = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
    other = make_trainer(model, tmp_path, optim="adamw_torch", trainer_arguments=with_sgd, **options)
    with pytest.raises(ValueError, match=r"optimizer='torch\.optim\.adamw\.AdamW', but .*='torch\.optim\.sgd\.SGD'"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# Other completions per optimizer step or rollout, or passes


def rollouts_of(prompts: list[int], size: int) -> list[list[int]]:
    """Prompts in their order, `size` for each rollout; those that fill none are left out."""
    n_rollouts = len(prompts) // size
    return [prompts[number * size : (number + 1) * size] for number in range(n_rollouts)]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"gradient_accumulation_steps": 1}, marks=pytest.mark.slow),  # the next is harder
        {"gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 2, "steps_per_generation": 4, "num_generations": 2},
        {"num_iterations": 2},
    ],
    ids=str,
)
def test_prompts_go_on_where_they_were_with_other_sizes(tiny_model: str, tmp_path: Path, sizes: dict):
    """Through the end of an epoch, and when the run is resumed again."""
    data = Dataset.from_dict({"prompt": [f"{number}+1=" for number in range(9)]})
    places = {prompt: place for place, prompt in enumerate(data["prompt"])}

    def asked(resume: str | None = None, **options) -> tuple[list[list[int]], OPOConfig]:
        """The prompts of each rollout, and the settings."""
        rollouts: list[list[int]] = []

        def reward(prompts: list[str], **columns) -> list[float]:
            rollouts.append([places[prompt] for prompt in dict.fromkeys(prompts)])
            return even_tokens(**columns)

        arguments = {"train_dataset": data, "rollout_func": None, "reward_funcs": reward}
        options |= {"save_strategy": "steps", "save_steps": 1, "max_completion_length": 2}
        trainer = make_trainer(tiny_model, tmp_path, trainer_arguments=arguments, **options)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == options["max_steps"]
        return rollouts, trainer.args

    one_by_one = RepeatSampler(range(9), mini_repeat_count=1, seed=42)
    epochs = [list(one_by_one) for _ in range(3)]
    asked(max_steps=3)  # the first six prompts
    rest, args = asked(str(tmp_path / "checkpoint-3"), max_steps=9, **sizes)
    size = args.prompts_per_rollout
    expected = rollouts_of(epochs[0][6:], size) + rollouts_of(epochs[1], size) + rollouts_of(epochs[2], size)
    assert rest == expected[: len(rest)]
    n_begun = math.ceil(2 / args.optimizer_steps_per_rollout)  # in the steps 4 and 5
    again, _ = asked(str(tmp_path / "checkpoint-5"), max_steps=9, **sizes)
    assert again == rest[n_begun:]


def test_the_length_of_a_run_with_other_sizes_is_named(copy: Path, tiny_model: str):
    """An epoch has another number of optimizer steps, and the run would end early or late."""
    trainer = make_trainer(tiny_model, copy, **{**REUSE, "max_steps": -1}, gradient_accumulation_steps=1)
    with pytest.raises(ValueError, match=r"or set `max_steps`, as an epoch has another number of optimizer steps"):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))


def test_a_stream_goes_on_with_the_same_sizes_only(tiny_model: str, tmp_path: Path):
    options = {**on_data(DATA.to_iterable_dataset()), "save_strategy": "steps", "save_steps": 1}
    trained(tiny_model, tmp_path, **options)
    trainer = make_trainer(tiny_model, tmp_path, **options, gradient_accumulation_steps=1)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=1, .*`model_name_or_path` to it to start from"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_micro_batches_may_change_inside_a_rollout(copy: Path, tiny_model: str):
    """But neither the completions of an optimizer step nor those of a rollout."""

    def run(**cut) -> Recording:
        trainer = make_trainer(tiny_model, copy, **{**REUSE, "save_strategy": "no", **cut})
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
        return trainer

    same, smaller = run(), run(per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert relative_error(snapshot(smaller.model), snapshot(same.model)) < 1e-6
    with pytest.raises(ValueError, match=r"goes on with gradient_accumulation_steps=4, steps_per_generation=4, but"):
        run(per_device_train_batch_size=2)
    message = r"=3 on 1 processes does not divide the checkpoint's 8 completions .* 8 per rollout. .*product divides 8"
    with pytest.raises(ValueError, match=message):
        run(per_device_train_batch_size=3, gradient_accumulation_steps=4)


def test_log_does_not_depend_on_micro_batches_after_the_checkpoint(tiny_model: str, tmp_path: Path):
    """
    Here, no sample has a gradient. The second optimizer step computes one, in place of those that the checkpoint
    lacks. An entry of the log covers three steps, of which the first has another number of micro-batches.
    """
    options = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 3, "logging_steps": 3}
    options |= {"skip_inert_rows": True, "objective": "grpo"}

    def run(resume: str | None = None, **changed) -> dict:
        trainer = make_trainer(tiny_model, tmp_path, script=Script([1.0]), **options | changed)
        trainer.train(resume_from_checkpoint=resume)
        return without_times(logged(trainer)[-1])

    whole = run(save_strategy="steps", save_steps=1)
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 16}
    moved = run(str(tmp_path / "checkpoint-1"), **cut)
    assert [whole[f"opo/{name}"] for name in ("frac_skipped", "frac_masked")] == [1, 0]
    assert whole["opo/pass"] == pytest.approx(4 / 3)
    assert {**moved, "entropy": whole["entropy"]} == whole


def test_random_state_of_other_processes_depends_on_the_seed(copy: Path, tiny_model: str):
    """Not on what a process has drawn before: Transformers leaves its state as it is."""
    folder = copy / "checkpoint-2"  # at the end of a rollout, as if of two processes
    state = torch.load(folder / "rollout_state_0.pt", weights_only=True)
    text = json.loads(state["text"])
    text["settings"]["processes"] = 2
    for process in range(2):
        torch.save(state | {"text": json.dumps(text)}, folder / f"rollout_state_{process}.pt")
    (folder / "rng_state.pth").unlink()

    def drawn(seed: int, before: int) -> list[float]:
        trainer = make_trainer(tiny_model, copy, **REUSE, seed=seed)
        torch.rand(before)
        trainer._load_rng_state(str(folder))
        return [*torch.rand(2).tolist(), *np.random.rand(2)]

    assert drawn(1, before=0) == drawn(1, before=1) != drawn(2, before=0)


def test_random_states_that_are_drawn_differ_by_seed_step_and_process():
    def drawn(seed: int, step: int, process: int) -> float:
        draw_random_state(seed, step, process)
        return torch.rand(1).item()

    assert drawn(1, 2, 0) == drawn(1, 2, 0)
    assert len({drawn(1, 2, 0), drawn(2, 2, 0), drawn(1, 3, 0), drawn(1, 2, 1)}) == 4


def test_a_checkpoint_of_another_version_is_rejected(copy: Path, tiny_model: str):
    """A run that starts over without a word would be worse."""
    path = copy / "checkpoint-2" / "rollout_state_0.pt"
    torch.save(torch.load(path, weights_only=True) | {"format": 2}, path)
    with pytest.raises(ValueError, match=r"checkpoint-2' was saved by another version of opo_trl\. Resume"):
        make_trainer(tiny_model, copy, **REUSE).train(resume_from_checkpoint=str(copy / "checkpoint-2"))


def test_resuming_a_finished_run_trains_no_step(copy: Path, tiny_model: str):
    trainer = make_trainer(tiny_model, copy, max_steps=3, num_iterations=2)
    trainer.train(resume_from_checkpoint="last")
    assert trainer.state.global_step == 3
    assert trainer.steps == []


def test_checkpoint_loads_whatever_a_reward_function_has_logged(tiny_model: str, tmp_path: Path):
    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("number", [np.float32(0.5)] * len(completions))
        log_extra("vector", [np.ones(2)] * len(completions))
        log_extra("date", [datetime.date(2026, 1, 2)] * len(completions))
        log_metric("custom", 0.1)
        return [float(i % 3) for i in range(len(completions))]

    options = {
        "max_steps": 2,
        "num_iterations": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 2,
        "log_completions": True,
        "num_completions_to_print": 0,
        "trainer_arguments": {"reward_funcs": reward},
    }
    uninterrupted = trained(tiny_model, tmp_path, **options)
    resumed = make_trainer(tiny_model, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert list(resumed._logs["completion"]) == list(uninterrupted._logs["completion"]) != []
    one, other = ([without_times(entry) for entry in t.state.log_history] for t in (uninterrupted, resumed))
    assert json.dumps(one) == json.dumps(other)
    assert any("custom" in entry for entry in one)


def test_checkpoints_after_the_one_that_a_run_goes_on_from_are_set_aside(copy, tiny_model, caplog):
    options = {"max_steps": 2, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tiny_model, copy, **options).train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    assert last_complete(str(copy)) == str(copy / "checkpoint-2")
    assert fault(copy / "replaced-checkpoint-3") is None
    assert "checkpoint-3 is later than step 2, where the run is now: it is kept as" in caplog.text


@pytest.mark.parametrize("place", [0, 1000, 2000])
def test_every_prompt_counts_in_the_checksum_of_the_data(place):
    prompts = [f"{number}+1=" for number in range(2001)]
    whole = checksum(Dataset.from_dict({"prompt": prompts}))
    prompts[place] = "?"
    assert checksum(Dataset.from_dict({"prompt": prompts})) != whole


def test_what_makes_a_rollout_counts_in_the_checksum_of_the_data():
    """A column that only reward functions read may change, unless completions are recorded beside it."""

    def of(**columns: list) -> str:
        return checksum(Dataset.from_dict({"prompt": ["1+1=", "2+2="], **columns}))

    assert of(solution=["2", "4"]) == of(solution=["2", "5"]) == of()
    assert of(**{PROMPT_IDS: [[1], [2]]}) != of(**{PROMPT_IDS: [[1], [3]]})
    recorded = [[{"completion": "2"}], [{"completion": "4"}]]
    others = [[{"completion": "2"}], [{"completion": "5"}]]
    assert of(**{RECORDED: recorded}) != of(**{RECORDED: others})


def test_what_is_not_logged_yet_goes_on_in_a_resumed_run():
    rewards = defaultdict(deque, {"right": deque([1.0, 0.0])})
    tables = {"prompt": deque(["a", "b"]), "rewards": rewards, "images": deque([object()])}
    state = unlogged.state_of({"train": {"entropy": [0.5]}, "eval": {}}, tables)
    metrics = {"train": {}, "eval": {}}
    restored = {"prompt": deque(), "rewards": defaultdict(deque), "images": deque()}
    unlogged.load(state, metrics, restored)
    assert metrics == {"train": {"entropy": [0.5]}, "eval": {}}
    assert restored == {**tables, "images": deque()}  # images cannot be saved
