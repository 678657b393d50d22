"""What GRPO scripts do around training: callbacks, evaluation, checkpoints, subclasses, their own loops."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from helpers import USE_CPU, logged, snapshot
from side_by_side import CLASSES, Run, side_by_side
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RichProgressCallback

from opo_trl import OPOConfig, OPOTrainer


PROBLEMS = Dataset.from_list([{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)])
FEW = PROBLEMS.select(range(2))


def length(completions, **kwargs) -> list[float]:
    return [float(len(completion.encode())) for completion in completions]


def make(config_class, trainer_class, out: Run, model, *, reward_funcs=length, arguments=None, **options):
    """Two optimizer steps of two micro-batches, each on a rollout of two groups of four."""
    settings = {
        "output_dir": str(out.folder),
        "use_cpu": USE_CPU,
        "bf16": False,
        "max_completion_length": 10,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "report_to": "none",
        "save_strategy": "no",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "disable_tqdm": True,
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

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Witness(TrainerCallback):
    """Records each event: its name, the step, what it can see, and what is asked for."""

    def __init__(self):
        self.seen = []


def _note(event: str):
    def note(self, args, state, control, **seen):
        asked = [name for name, value in vars(control).items() if value is True]
        self.seen.append(
            (event, state.global_step, {name for name, value in seen.items() if value is not None}, asked)
        )

    return note


for event in EVENTS:
    setattr(Witness, event, _note(event))


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2},
        {"max_steps": -1, "num_train_epochs": 2, "steps_per_generation": 3, "logging_strategy": "epoch"},
        {"max_steps": 6, "steps_per_generation": 4, "num_iterations": 2, "logging_steps": 2, "eval_on_start": True},
        {"max_steps": 3, "steps_per_generation": 1, "gradient_accumulation_steps": 4, "save_strategy": "epoch"},
    ],
)
def test_callbacks_see_the_same_events(tiny_model, tmp_path, options):
    """In the same order, in the same steps, with the same objects, however OPO cuts its micro-batches."""

    def script(config_class, trainer_class, out: Run):
        out.witness = Witness()
        arguments = {"callbacks": [out.witness], "eval_dataset": FEW}
        return trained(config_class, trainer_class, out, tiny_model, arguments=arguments, **options)

    trl, opo = side_by_side(script, tmp_path)
    assert trl.witness.seen == opo.witness.seen
    assert {"on_step_begin", "on_pre_optimizer_step", "on_step_end"} <= {event for event, *_ in opo.witness.seen}
    assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= opo.witness.seen[-1][2]


def test_callbacks_change_the_run_alike(tiny_model, tmp_path):
    """Learning rate, rewards and their weights, metrics of their own; an evaluation, a checkpoint, and the end."""

    def script(config_class, trainer_class, out: Run):
        class Changes(TrainerCallback):
            def on_step_end(self, args, state, control, optimizer, **kwargs):
                trainer._metrics["train"]["own"].append(state.global_step)
                for group in optimizer.param_groups:
                    group["lr"] = 0.003
                if state.global_step == 1:
                    control.should_evaluate = control.should_save = control.should_log = True
                    trainer.reward_weights = torch.tensor([0.0, 3.0])
                    trainer.reward_funcs[1] = lambda completions, **kwargs: [
                        float(i) for i, _ in enumerate(completions)
                    ]
                control.should_training_stop = state.global_step == 4
                return control

        def ordinal(completions, **kwargs):
            return [float(i) for i, _ in enumerate(completions)]

        def ones(completions, **kwargs):
            return [1.0] * len(completions)

        options = {"steps_per_generation": 4, "max_steps": 10, "logging_steps": 5, "logging_first_step": False}
        arguments = {"callbacks": [Changes()], "eval_dataset": FEW}
        trainer = make(
            config_class,
            trainer_class,
            out,
            tiny_model,
            reward_funcs=[length, ones],
            arguments=arguments,
            **options,
        )
        trainer.train()
        return trainer

    for made in side_by_side(script, tmp_path):
        history = made.trainer.state.log_history
        assert history[0]["own"] == 1
        assert made.trainer.optimizer.param_groups[0]["lr"] == 0.003
        assert next(entry for entry in history if "eval_reward" in entry)["eval_reward"] == 3 * 1.5
        assert made.trainer.state.global_step == 4
        assert "checkpoint-1/trainer_state.json" in made.files


def test_callbacks_can_format_what_is_logged(tiny_model, tmp_path):
    """Also if all rewards are equal: metrics without a value are left out."""

    class Prints(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            print(*(f"{name}={value:.3f}" for name, value in logs.items()))

    def equal(completions, **kwargs):
        return [1.0] * len(completions)

    def script(config_class, trainer_class, out: Run):
        arguments = {"callbacks": [Prints()], "eval_dataset": FEW}
        options = {"eval_strategy": "steps", "eval_steps": 1}
        return trained(
            config_class, trainer_class, out, tiny_model, reward_funcs=equal, arguments=arguments, **options
        )

    _, opo = side_by_side(script, tmp_path, learns=False)
    assert opo.entries[0]["opo/frac_zero_drive"] == 1
    assert "opo/target_fit" not in opo.entries[0]


def test_early_stopping_and_best_model(tiny_model, tmp_path):
    def script(config_class, trainer_class, out: Run):
        arguments = {"callbacks": [EarlyStoppingCallback(1), RichProgressCallback()], "eval_dataset": FEW}
        return trained(
            config_class,
            trainer_class,
            out,
            tiny_model,
            reward_funcs=lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
            arguments=arguments,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_reward",
            greater_is_better=True,
            max_steps=4,
        )

    for made in side_by_side(script, tmp_path):
        state = made.trainer.state
        assert (state.global_step, state.best_global_step, state.best_metric) == (2, 1, 0.5)
        best = AutoModelForCausalLM.from_pretrained(made.folder / "checkpoint-1")
        assert all(torch.equal(value, snapshot(best)[name]) for name, value in snapshot(made.trainer.model).items())


# Evaluation


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


def test_evaluation_within_an_optimizer_step_leaves_no_trace(tiny_model, tmp_path):
    class Evaluates(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            trainers[-1].evaluate()

    trainers, entries = [], []
    for callbacks in ([], [Evaluates()]):
        out = Run(tmp_path / str(len(trainers)))
        arguments = {"callbacks": callbacks, "eval_dataset": FEW}
        trainers.append(
            make(OPOConfig, OPOTrainer, out, tiny_model, arguments=arguments, max_steps=1, plan_micro_batches=False)
        )
        trainers[-1].train()
        entries.append(logged(trainers[-1])[0])
    of_step = [name for name in entries[0] if name.startswith(("opo/", "entropy")) and "time" not in name]
    of_step.remove("opo/tokens_per_second")
    assert [entries[0][name] for name in of_step] == pytest.approx([entries[1][name] for name in of_step])
    assert any("eval_reward" in entry for entry in trainers[1].state.log_history)


# Checkpoints


@pytest.mark.parametrize("begun_by", ["same", "trl", "opo"])
@pytest.mark.parametrize("named", [True, False])
def test_checkpoints_resume_in_either_trainer(tiny_model, tmp_path, begun_by, named):
    """A script that goes from GRPO to OPO, or back, takes its checkpoint along."""

    def script(config_class, trainer_class, out: Run):
        classes = CLASSES.get(begun_by, (config_class, trainer_class))
        options = {"save_strategy": "steps", "save_steps": 1}
        trained(*classes, out, tiny_model, **options, max_steps=1)
        if begun_by == "trl" and trainer_class is OPOTrainer and not named:
            trainer = make(config_class, trainer_class, out, tiny_model, **options)
            with pytest.raises(ValueError, match="holds no complete checkpoint"):  # only its own, unless named
                trainer.train(resume_from_checkpoint=True)
        trainer = make(config_class, trainer_class, out, tiny_model, **options)
        folder = out.folder / "checkpoint-1"
        chosen = True if not named and classes[1] is trainer_class else folder
        before = snapshot(trainer.model)
        trainer.train(resume_from_checkpoint=chosen)
        assert not all(torch.equal(value, snapshot(trainer.model)[name]) for name, value in before.items())
        return trainer

    for made in side_by_side(script, tmp_path, learns=False):
        history = made.trainer.state.log_history
        assert [entry["step"] for entry in history if "grad_norm" in entry] == [1, 2]


# Subclasses and configurations


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

            def _prepare_inputs(self, generation_batch):
                out.batches = [*getattr(out, "batches", []), type(generation_batch)]
                return super()._prepare_inputs(generation_batch)

        own = functools.partial(Own, tag="mine")
        own.__dict__.update(tag=Own)
        return trained(OwnConfig, own, out, tiny_model, bonus=2.5)

    for made in side_by_side(script, tmp_path):
        assert made.trainer.tag == "mine"
        assert made.entries[0]["bonus"] == 2.5
        assert made.trainer.logged[0] >= {"reward", "rewards/length/mean", "entropy"}
        assert {*made.batches} == {list}


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
        trainer = make(config_class, trainer_class, out, tiny_model)
        trainer = trainer_class(tiny_model, rewards, trainer.args, PROBLEMS)
        trainer.train()
        return trainer

    trl, opo = side_by_side(script, tmp_path)
    assert trl.trainer.reward_func_names == opo.trainer.reward_func_names
    assert opo.trainer.reward_func_names[2:6] == ["Reward", "method", "own name", "later"]


def test_rollout_function_of_a_script(tiny_model, tmp_path):
    """It returns log-probabilities, and more that reaches the rewards."""

    def rollout(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        completions = [[5 + row % 3, 6, 7 + row] for row, _ in enumerate(prompts)]
        logprobs = [[-1.0, -2.0, -3.0]] * len(prompts)
        bonus = [float(row) for row, _ in enumerate(prompts)]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "bonus": bonus}

    def reward(bonus, **kwargs):
        return bonus

    def script(config_class, trainer_class, out: Run):
        arguments = {"rollout_func": rollout}
        return trained(config_class, trainer_class, out, tiny_model, reward_funcs=reward, arguments=arguments)

    for made in side_by_side(script, tmp_path):
        assert made.entries[0]["reward"] == 3.5


def test_own_optimizer_and_schedule(tiny_model, tmp_path):
    def script(config_class, trainer_class, out: Run):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return trained(config_class, trainer_class, out, model, arguments={"optimizers": (optimizer, schedule)})

    for made in side_by_side(script, tmp_path):
        assert [entry["learning_rate"] for entry in made.entries] == pytest.approx([0.1, 0.05])


def test_loop_of_a_script(tiny_model, tmp_path):
    """Batches of the data loader, prepared and differentiated without `train`, as notebooks do to look inside."""

    def script(config_class, trainer_class, out: Run):
        trainer = make(config_class, trainer_class, out, tiny_model)
        batch = next(iter(trainer.get_train_dataloader()))
        out.batch = batch
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        inputs = trainer._prepare_inputs(batch)
        out.names = {*inputs}
        trainer.compute_loss(trainer.model, inputs).backward()
        assert any(parameter.grad.abs().sum() > 0 for parameter in trainer.model.parameters())
        trainer.model.zero_grad()
        trainer.train()
        return trainer

    trl, opo = side_by_side(script, tmp_path)
    assert trl.batch == opo.batch
    assert trl.names <= opo.names


def test_mistakes_are_reported_as_by_trl(tiny_model, tmp_path):
    """The type of the error is the same; where the message is another, it says more."""

    def fails(side: str, **change) -> Exception:
        config_class, trainer_class = CLASSES[side]
        with pytest.raises((TypeError, ValueError, KeyError)) as raised:
            trained(config_class, trainer_class, Run(tmp_path), tiny_model, **change)
        return raised.value

    of_arguments = (
        {"train_dataset": DatasetDict(train=PROBLEMS)},
        {"train_dataset": [*PROBLEMS]},
        {"train_dataset": None},
        {"tokenizer": None},
        {"peft_config": None, "reward_processing_classes": [None, None]},
    )
    for arguments in of_arguments:
        of_trl, of_opo = (fails(side, arguments=arguments) for side in CLASSES)
        assert type(of_trl) is type(of_opo), arguments
        said = str(of_opo).replace("OPOTrainer", "OPOTrainer")  # whose constructor it is
        assert str(of_trl).replace("GRPO", "OPO") == said.replace("GRPO", "OPO")
    of_fields = (
        {"num_generations": 3},
        {"num_generations": 1},
        {"generation_batch_size": 8, "steps_per_generation": 2},
        {"reward_weights": [1.0, 2.0]},
        {"auto_find_batch_size": True},
        {"eval_strategy": "steps", "per_device_eval_batch_size": 3},
    )
    for fields in of_fields:
        of_trl, of_opo = (fails(side, **fields) for side in CLASSES)
        assert type(of_trl) is type(of_opo) is ValueError
        assert next(iter(fields)) in str(of_opo) or str(of_trl) == str(of_opo)


def test_what_is_rejected_and_not_by_trl(tiny_model, tmp_path):
    """As docs/migrating.md says."""
    for fields, said in (
        ({"temperature": 0}, "positive"),
        ({"learning_rate": "1e-5"}, "finite number"),
        ({"generation_kwargs": {"max_new_tokens": 5}}, "Set `max_completion_length` to 5"),
        ({"epsilon": 0.3}, "Remove `epsilon`"),
        ({"loss_type": "bnpo"}, "nearest is dapo"),
        ({"gradient_accumulation_steps": 12}, "needs 12 prompts"),
    ):
        make(GRPOConfig, GRPOTrainer, Run(tmp_path), tiny_model, **fields)
        with pytest.raises(ValueError, match=re.escape(said)) as raised:
            make(OPOConfig, OPOTrainer, Run(tmp_path), tiny_model, **fields)
        assert next(iter(fields)) in str(raised.value) or "generation_batch_size" in str(raised.value)


# What was found on the way


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


def test_step_without_a_scored_completion_has_no_entropy(tiny_model, tmp_path):
    """0 would look like a collapsed policy, and a watch would end the run."""

    def nothing(completions, **kwargs):
        return [None] * len(completions)

    options = {"watches": ["stop if entropy < 0.001"], "max_steps": 8, "beta": 0.1}
    trainer = trained(OPOConfig, OPOTrainer, Run(tmp_path), tiny_model, reward_funcs=nothing, **options)
    assert [(entry["entropy"], entry["kl"]) for entry in logged(trainer)] == [(None, None)] * 8


def test_plan_of_prompts_that_are_made_later(tiny_model, tmp_path, caplog):
    problems = Dataset.from_dict({"number": [*range(8)]})
    problems.set_transform(lambda rows: {"prompt": [f"{number} + 1 =" for number in rows["number"]]})
    arguments = {"train_dataset": problems}
    trainer = make(OPOConfig, OPOTrainer, Run(tmp_path), tiny_model, arguments=arguments)
    assert "(0 + 10) tokens" in trainer.plan
    assert "memory" not in caplog.text
    trainer.train()
    assert logged(trainer)[0]["grad_norm"] > 0
    assert isinstance(trainer, GRPOTrainer)
    assert isinstance(trainer.args, GRPOConfig)
    assert Path(trainer.args.output_dir) == tmp_path
