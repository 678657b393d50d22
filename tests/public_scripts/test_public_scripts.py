"""
Public GRPO scripts, as docs/migrating.md lists them, and what scripts do around training: only the class names change.

A script is a function that is called with the class of a configuration, the class of a trainer, and what it would
otherwise have loaded; it returns the trainer. It runs with TRL's classes and with this package's, and all but the loss
is compared. It keeps the interface of the original at a size that a CPU trains in a second.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from datasets import Dataset, DatasetDict
from device_fields import SMALL
from named_tensors import snapshot
from peft import PeftModel
from recording_trainers import logged
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.scripts import grpo as trl_script

from opo_trl import OPOConfig, OPOTrainer


CLASSES = {"trl": (GRPOConfig, GRPOTrainer), "opo": (OPOConfig, OPOTrainer)}

FIELDS = {**SMALL, "save_strategy": "steps", "max_completion_length": 12, "max_steps": 2, "learning_rate": 0.01}

# What GRPO's clipped loss logs: OPO does not clip. `loss`, `grad_norm` and, after the first step, `entropy` differ.
OF_THE_CLIPPED_LOSS = "clip_ratio/"

# What a rollout has logged before any loss is computed, by the beginning of its name.
OF_THE_ROLLOUT = ("reward", "frac_reward", "completions/", "num_tokens", "learning_rate", "tools/", "epoch")

# What is handed to every reward function besides the dataset's columns.
ALWAYS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
OBJECTS = {"trainer_state", "log_extra", "log_metric", "environments"}


@dataclass
class Run:
    """A script's run."""

    folder: Path  # where the script writes
    trainer: Any = None  # what it returns
    # Name and arguments of each call of a recorded reward function, with the step in which it was made.
    calls: list[tuple[str, dict[str, Any], int]] = field(default_factory=list)

    def record(self, *rewards: Callable) -> list[Callable]:
        """The reward functions, with their names, recorded."""
        return [self._recorded(reward) for reward in rewards]

    def _recorded(self, reward: Callable) -> Callable:
        def note(named: dict[str, Any]) -> None:
            arguments = {name: value if name in OBJECTS else copy.deepcopy(value) for name, value in named.items()}
            self.calls.append((reward.__name__, arguments, named["trainer_state"].global_step))

        @functools.wraps(reward)
        def call(**named):
            note(named)
            return reward(**named)

        @functools.wraps(reward)
        async def call_async(**named):
            note(named)
            return await reward(**named)

        return call_async if inspect.iscoroutinefunction(reward) else call

    def arguments_of(self, name: str) -> list[dict[str, Any]]:
        """Arguments of each call of a reward function."""
        return [named for called, named, _ in self.calls if called == name]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Log entries of optimizer steps."""
        return [entry for entry in self.trainer.state.log_history if "grad_norm" in entry]

    @property
    def files(self) -> set[str]:
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        names = {str(path.relative_to(self.folder)) for path in paths}
        return {re.sub(r"events\.out\..*", "events.out", name) for name in names}

    @property
    def reward_calls(self) -> list[tuple[str, set[str], int]]:
        """Of each call of a reward function, its name, the names of its arguments and the step."""
        return [(name, set(named), step) for name, named, step in self.calls]


def side_by_side(script: Callable, folder: Path, *arguments: Any) -> tuple[Run, Run]:
    """Run a script on both sides, and check that they agree on all that is not the loss."""
    runs = []
    for side, classes in CLASSES.items():
        run = Run(folder / side / "out")
        run.folder.mkdir(parents=True)
        run.trainer = script(*classes, run, *arguments)
        runs.append(run)
    trl, opo = runs
    assert trl.reward_calls == opo.reward_calls
    for (name, of_trl, step), (_, of_opo, _) in zip(trl.calls, opo.calls, strict=True):
        assert of_trl.keys() >= ALWAYS
        if step == 0:  # the same policy has generated: afterwards the losses differ
            for argument in of_trl.keys() - OBJECTS:
                assert of_trl[argument] == of_opo[argument], f"{argument} of {name}"
    check_logs(trl.trainer.state.log_history, opo.trainer.state.log_history)
    assert trl.files <= opo.files
    for name in ("global_step", "max_steps", "epoch", "is_world_process_zero"):
        assert getattr(trl.trainer.state, name) == getattr(opo.trainer.state, name), name
    for run in runs:
        first = run.entries[0]
        assert first["grad_norm"] > 0
    return trl, opo


def check_logs(of_trl: list[dict[str, Any]], of_opo: list[dict[str, Any]]) -> None:
    """
    Check that whatever reads a log of GRPO can read that of OPO: the same entries, with all their names.

    Except that GRPO logs what it generates for every evaluation dataset under the same names, without the dataset's.
    """
    assert len(of_trl) == len(of_opo)
    for entry_of_trl, other in zip(of_trl, of_opo, strict=True):
        prefix = f"eval_{dataset_of(other)}"
        one = {}
        for name, value in entry_of_trl.items():
            own_name = name if name in other else name.replace("eval_", prefix)
            one[own_name] = value
        missing = {name for name in one.keys() - other.keys() if OF_THE_CLIPPED_LOSS not in name}
        assert not missing, missing
        # TRL logs None for its own metrics, such as the mean of a reward that has scored nothing.
        for name in other.keys() - one.keys():
            assert isinstance(other[name], int | float)
        for name, value in one.items():
            if one["step"] <= 1 and name.startswith(OF_THE_ROLLOUT):
                same = value == other[name] or math.isclose(value, other[name], rel_tol=1e-6)
                assert same, (name, value, other[name])


def dataset_of(entry: dict[str, Any]) -> str:
    """`name_` of the evaluation dataset that an entry is about; empty without one or without its name."""
    losses = [name for name in entry if name.endswith("_loss")]
    datasets = {name.removesuffix("loss").removeprefix("eval_") for name in losses}
    return "".join(datasets)


PAIRS = [(1, 1), (2, 5), (9, 3), (4, 4), (7, 6), (8, 2), (3, 0), (5, 5)]
SUMS = [(f"{a} + {b} =", a + b) for a, b in PAIRS]


# trl/scripts/grpo.py, as installed


def scripts_grpo(config_class, trainer_class, out: Run, model: str, data: Path, monkeypatch):
    monkeypatch.setattr(trl, "GRPOConfig", config_class)
    trainers = []

    def recorded_trainer(*arguments, **named):
        trainer = trainer_class(*arguments, **named)
        trainers.append(trainer)
        return trainer

    monkeypatch.setattr(trl, "GRPOTrainer", recorded_trainer)
    monkeypatch.chdir(data)  # where the dotted path of a reward is looked up
    config = {
        **FIELDS,
        "output_dir": str(out.folder),
        "model_name_or_path": model,
        "dataset_name": str(data / "problems"),
        "reward_funcs": ["think_format_reward", "get_soft_overlong_punishment", "own_rewards.vowels"],
        "reward_weights": [1.0, 0.5, 2.0],
        "dtype": "float32",
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "scale_rewards": False,
        "temperature": 0.9,
        "save_strategy": "no",
    }
    path = out.folder.parent / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    parser = trl_script.make_parser()
    arguments = parser.parse_args_and_config(["--config", str(path)], fail_with_unknown_args=False)
    trl_script.main(*arguments)
    return trainers[0]


def test_script_of_trl_grpo_trains_with_both_trainers(tiny_model, tmp_path, monkeypatch):
    """The script that `trl grpo` runs, in which only the two names are other classes."""
    problems = tmp_path / "problems"
    problems.mkdir()
    for split, rows in (("train", SUMS), ("test", SUMS[:2])):
        lines = []
        for question, value in rows:
            prompt = [{"role": "user", "content": question}]
            line = json.dumps({"prompt": prompt, "solution": f"${value}$"})
            lines.append(line)
        (problems / f"{split}.jsonl").write_text("\n".join(lines))
    (tmp_path / "own_rewards.py").write_text(
        "def vowels(completions, **kwargs):\n"
        "    return [float(sum(c[0]['content'].count(v) for v in 'aeiou')) for c in completions]\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    for run in side_by_side(scripts_grpo, tmp_path, tiny_model, tmp_path, monkeypatch):
        entry = run.entries[0]
        think_format = entry["rewards/think_format_reward/mean"]
        overlong = entry["rewards/soft_overlong_punishment_reward/mean"]
        vowels = entry["rewards/vowels/mean"]
        weighted_sum = think_format + 0.5 * overlong + 2 * vowels
        assert entry["reward"] == pytest.approx(weighted_sum)
        assert isinstance(run.trainer.model, PeftModel)
        assert "adapter_model.safetensors" in run.files
        evaluated = [entry for entry in run.trainer.state.log_history if "eval_reward" in entry]
        assert [entry["step"] for entry in evaluated] == [0, 2]


# The reward functions of the documentation


def patterns(config_class, trainer_class, out: Run, model: str):
    async def slow_reward(prompts, completions, **kwargs):
        await asyncio.sleep(0.001)
        return [1.0 if completion else 0.0 for completion in completions]

    def tokens_reward(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def reference_reward(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
        pairs = zip(completions, ground_truth, strict=True)
        rewards = [float(truth in completion) for completion, truth in pairs]
        log_extra("golden", list(ground_truth))
        log_metric("accuracy", sum(rewards) / len(rewards))
        return rewards

    def math_reward(completions, task, **kwargs):
        pairs = zip(completions, task, strict=True)
        return [float(completion.count("1")) if name == "math" else None for completion, name in pairs]

    def code_reward(completions, task, trainer_state, **kwargs):
        divisor = 1 + trainer_state.global_step
        pairs = zip(completions, task, strict=True)
        return [len(completion) / divisor if name == "code" else None for completion, name in pairs]

    rows = []
    for question, value in SUMS:
        task = ("math", "code", "none")[value % 3]
        rows.append({"prompt": question, "ground_truth": str(value), "task": task})
    trainer = trainer_class(
        model=model,
        reward_funcs=out.record(tokens_reward, slow_reward, reference_reward, math_reward, code_reward),
        args=config_class(
            str(out.folder),
            **FIELDS,
            log_completions=True,
            num_generations=4,
            per_device_train_batch_size=8,
            reward_weights=[0.1, 1.0, 1.0, 2.0, 0.5],
            scale_rewards="batch",
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    return trainer


def test_reward_functions_of_the_documentation(tiny_model, tmp_path):
    """Token IDs, references, `async def`, `None` for another task, the step, own columns and own metrics."""
    runs = side_by_side(patterns, tmp_path, tiny_model)
    for run in runs:
        assert [step for name, _, step in run.calls if name == "code_reward"] == [0, 1]
        first_call, *_ = run.arguments_of("code_reward")
        assert first_call["trainer_state"] is run.trainer.state
        entry = run.entries[0]
        assert entry["accuracy"] == entry["rewards/reference_reward/mean"]
        # 1 + 1 and 2 + 5: the tasks of the first rollout are "none" and "code".
        assert entry["rewards/math_reward/mean"] is None
        assert entry["rewards/code_reward/mean"] > 0
    of_trl, of_opo = map(logged_completions, runs)
    assert {"golden", "prompt", "completion", "advantage", "slow_reward"} <= of_trl.keys()
    assert json.dumps(of_trl) == json.dumps(of_opo)


def logged_completions(run: Run) -> dict[str, list]:
    table = Dataset.from_parquet(str(run.folder / "completions/completions_00001.parquet"))
    return table.to_dict()


# Around training


PROBLEMS = Dataset.from_list([{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)])
FEW = PROBLEMS.select(range(2))


def length(completions, **kwargs) -> list[float]:
    return [float(len(completion.encode())) for completion in completions]


def make(config_class, trainer_class, out: Run, model, *, reward_funcs=length, arguments=None, **options):
    """Two optimizer steps of two micro-batches, each on a rollout of two groups of four."""
    settings = {
        **FIELDS,
        "output_dir": str(out.folder),
        "save_strategy": "no",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        **options,
    }
    if not isinstance(reward_funcs, list):
        reward_funcs = [reward_funcs]
    rewards = out.record(*reward_funcs)
    all_arguments = {"train_dataset": PROBLEMS} | (arguments or {})
    return trainer_class(model, rewards, config_class(**settings), **all_arguments)


def trained(*arguments, **options):
    trainer = make(*arguments, **options)
    trainer.train()
    return trainer


# Callbacks


class Witness(TrainerCallback):
    """Records each event: its name, the step, what it can see, and what is asked for."""

    def __init__(self):
        self.seen = []


def _note(event: str):
    def note(self, args, state, control, **seen):
        asked = [name for name, value in vars(control).items() if value is True]
        visible = {name for name, value in seen.items() if value is not None}
        self.seen.append((event, state.global_step, visible, asked))

    return note


for event in dir(TrainerCallback):
    if event.startswith("on_"):
        setattr(Witness, event, _note(event))


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": -1, "num_train_epochs": 2, "steps_per_generation": 3, "save_strategy": "epoch"},
        {"max_steps": 5, "steps_per_generation": 4, "num_iterations": 2, "logging_steps": 2, "eval_on_start": True},
    ],
)
def test_callbacks_see_the_same_events(tiny_model, tmp_path, options):
    """In the same order, in the same steps, with the same objects, however OPO cuts its micro-batches."""

    def script(config_class, trainer_class, out: Run):
        out.witness = Witness()
        arguments = {"callbacks": [out.witness], "eval_dataset": FEW}
        often = {"eval_strategy": "steps", "eval_steps": 2, **options}
        return trained(config_class, trainer_class, out, tiny_model, arguments=arguments, **often)

    trl, opo = side_by_side(script, tmp_path)
    assert trl.witness.seen == opo.witness.seen
    assert {"on_step_begin", "on_pre_optimizer_step", "on_step_end"} <= {event for event, *_ in opo.witness.seen}
    assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= opo.witness.seen[-1][2]


# Evaluation and checkpoints


def test_evaluation_before_during_and_after_training(tiny_model, tmp_path):
    """Several datasets by name, a prefix, another dataset, `predict`; and one completion per problem."""

    def script(config_class, trainer_class, out: Run):
        arguments = {"eval_dataset": DatasetDict(easy=FEW, hard=PROBLEMS.select(range(3)))}
        options = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}
        trainer = make(config_class, trainer_class, out, tiny_model, arguments=arguments, **options)
        out.metrics = [trainer.evaluate()]
        trainer.train()
        out.metrics += [trainer.evaluate(metric_key_prefix="test"), trainer.evaluate(FEW)]
        out.metrics.append(trainer.predict(FEW).metrics)
        return trainer

    trl, opo = side_by_side(script, tmp_path)
    for of_trl, of_opo in zip(trl.metrics[2:], opo.metrics[2:], strict=True):
        assert {name for name in of_trl if "clip_ratio" not in name} <= of_opo.keys()
    # TRL returns the rewards of the last dataset without its name.
    before, after = opo.metrics[:2]
    assert {"eval_easy_loss", "eval_hard_loss", "eval_easy_reward"} <= before.keys()
    assert {"test_easy_loss", "test_hard_loss", "eval_test_easy_reward", "eval_test_hard_reward"} <= after.keys()
    of_trl = {name: value for name, value in trl.metrics[0].items() if "reward" in name}
    assert of_trl == {name: before[name.replace("eval_", "eval_hard_")] for name in of_trl}


@pytest.mark.parametrize("begun_by", [pytest.param("same", marks=pytest.mark.slow), "opo"])
def test_checkpoints_resume_in_either_trainer(tiny_model, tmp_path, begun_by):
    """A script that goes back from OPO to GRPO takes its checkpoint along."""

    def script(config_class, trainer_class, out: Run):
        classes = CLASSES.get(begun_by, (config_class, trainer_class))
        options = {"save_strategy": "steps", "save_steps": 1}
        trained(*classes, out, tiny_model, **options, max_steps=1)
        trainer = make(config_class, trainer_class, out, tiny_model, **options)
        before = snapshot(trainer.model)
        trainer.train(resume_from_checkpoint=begun_by == "same" or out.folder / "checkpoint-1")
        after = snapshot(trainer.model)
        assert not all(torch.equal(value, after[name]) for name, value in before.items())
        return trainer

    for run in side_by_side(script, tmp_path):
        assert [entry["step"] for entry in run.entries] == [1, 2]


def test_parts_that_a_script_brings(tiny_model, tmp_path):
    """A rollout function, an optimizer and schedule; and a batch that is differentiated without `train`."""

    def rollout(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        completions = [[5 + row % 3, 6, 7 + row] for row, _ in enumerate(prompts)]
        logprobs = [[-1.0, -2.0, -3.0]] * len(prompts)
        bonus = [float(row) for row, _ in enumerate(prompts)]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "bonus": bonus}

    def reward(bonus, **kwargs):
        return bonus

    def script(config_class, trainer_class, out: Run):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        arguments = {"rollout_func": rollout, "optimizers": (optimizer, schedule)}
        trainer = make(config_class, trainer_class, out, model, reward_funcs=reward, arguments=arguments)
        out.batch = next(iter(trainer.get_train_dataloader()))
        trainer.train()
        return trainer

    trl, opo = side_by_side(script, tmp_path)
    assert trl.batch == opo.batch
    for run in (trl, opo):
        assert run.entries[0]["reward"] == 3.5
        assert [entry["learning_rate"] for entry in run.entries] == pytest.approx([0.1, 0.05])


def test_reward_may_leave_the_policy_in_evaluation_mode(tiny_model, tmp_path):
    """As one does that asks the policy itself; later passes would take the moved policy for the behaviour policy."""
    trainers = []
    for switches in (False, True):

        def judge(completions, *, switches=switches, **kwargs):
            trainers[-1].model.train(not switches)
            return length(completions)

        options = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 5}
        out = Run(tmp_path / str(switches))
        trainers.append(make(OPOConfig, OPOTrainer, out, tiny_model, reward_funcs=judge, **options))
        trainers[-1].train()
    of_training_mode, of_evaluation_mode = (snapshot(trainer.model) for trainer in trainers)
    for name, value in of_training_mode.items():
        assert torch.equal(value, of_evaluation_mode[name])
    assert [entry["opo/pass"] for entry in logged(trainers[1])] == [1, 1, 2, 2, 1]
