"""What GRPO scripts do around training: callbacks, evaluation, checkpoints, subclasses, their own loops."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from helpers import logged, snapshot
from side_by_side import CLASSES, SMALL, Run, side_by_side
from transformers import AutoModelForCausalLM, TrainerCallback

from opo_trl import OPOConfig, OPOTrainer


PROBLEMS = Dataset.from_list([{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)])
FEW = PROBLEMS.select(range(2))


def length(completions, **kwargs) -> list[float]:
    return [float(len(completion.encode())) for completion in completions]


def make(config_class, trainer_class, out: Run, model, *, reward_funcs=length, arguments=None, **options):
    """Two optimizer steps of two micro-batches, each on a rollout of two groups of four."""
    settings = {
        **SMALL,
        "output_dir": str(out.folder),
        "save_strategy": "no",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        **options,
    }
    given = {"train_dataset": PROBLEMS, **(arguments or {})}
    rewards = out.record(*(reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]))
    return trainer_class(model, rewards, config_class(**settings), **given)


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
        given = {name for name, value in seen.items() if value is not None}
        self.seen.append((event, state.global_step, given, asked))

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
    assert {"eval_easy_loss", "eval_hard_loss"} <= opo.metrics[0].keys()
    of_trl = {name: value for name, value in trl.metrics[0].items() if "reward" in name}
    assert of_trl == {name: opo.metrics[0][name] for name in of_trl}


@pytest.mark.parametrize("begun_by", ["same", "opo"])
def test_checkpoints_resume_in_either_trainer(tiny_model, tmp_path, begun_by):
    """A script that goes back from OPO to GRPO takes its checkpoint along."""

    def script(config_class, trainer_class, out: Run):
        classes = CLASSES.get(begun_by, (config_class, trainer_class))
        options = {"save_strategy": "steps", "save_steps": 1}
        trained(*classes, out, tiny_model, **options, max_steps=1)
        trainer = make(config_class, trainer_class, out, tiny_model, **options)
        before = snapshot(trainer.model)
        trainer.train(resume_from_checkpoint=begun_by == "same" or out.folder / "checkpoint-1")
        assert not all(torch.equal(value, snapshot(trainer.model)[name]) for name, value in before.items())
        return trainer

    for made in side_by_side(script, tmp_path, learns=False):
        assert [entry["step"] for entry in made.entries] == [1, 2]


# Subclasses, configurations and parts of a script


def test_subclasses_with_their_own_arguments(tiny_model, tmp_path):
    def script(config_class, trainer_class, out: Run):
        @dataclass
        class OwnConfig(config_class):
            bonus: float = 0.0

        class Own(trainer_class):
            def __init__(self, *inputs, tag: str, **named):
                super().__init__(*inputs, **named)
                self.tag, self.logged = tag, []

            def log(self, logs, start_time=None):
                logs["bonus"] = self.args.bonus
                self.logged.append({*self._metrics["train"]})
                super().log(logs, start_time)

        return trained(OwnConfig, functools.partial(Own, tag="mine"), out, tiny_model, bonus=2.5)

    for made in side_by_side(script, tmp_path):
        assert made.trainer.tag == "mine"
        assert made.entries[0]["bonus"] == 2.5
        assert made.trainer.logged[0] >= {"reward", "rewards/length/mean", "entropy"}


def test_reward_functions_of_every_kind_have_the_names_of_trl(tiny_model, tmp_path):
    class Reward:
        def __call__(self, completions, **kwargs):
            return (score for score in length(completions))

        def method(self, completions, **kwargs):
            return torch.tensor(length(completions))

    class Named(Reward):
        __name__ = "own name"

        async def later(self, completions, **kwargs):
            return np.array(length(completions))

    def script(config_class, trainer_class, out: Run):
        rewards = [functools.partial(length, scale=2), lambda completions, **kwargs: [True] * len(completions)]
        rewards += [Reward(), Reward().method, Named(), Named().later, length, length]
        args = make(config_class, trainer_class, out, tiny_model).args
        trainer = trainer_class(tiny_model, rewards, args, PROBLEMS)
        trainer.train()
        return trainer

    trl, opo = side_by_side(script, tmp_path)
    assert trl.trainer.reward_func_names == opo.trainer.reward_func_names
    assert opo.trainer.reward_func_names[2:6] == ["Reward", "method", "own name", "later"]


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
    for made in (trl, opo):
        assert made.entries[0]["reward"] == 3.5
        assert [entry["learning_rate"] for entry in made.entries] == pytest.approx([0.1, 0.05])


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
    one, other = (snapshot(trainer.model) for trainer in trainers)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert [entry["opo/pass"] for entry in logged(trainers[1])] == [1, 1, 2, 2, 1]


def test_prompts_that_are_made_when_they_are_read(tiny_model, tmp_path):
    problems = Dataset.from_dict({"number": [*range(8)]})
    problems.set_transform(lambda rows: {"prompt": [f"{number} + 1 =" for number in rows["number"]]})
    trainer = trained(OPOConfig, OPOTrainer, Run(tmp_path), tiny_model, arguments={"train_dataset": problems})
    assert logged(trainer)[0]["grad_norm"] > 0
