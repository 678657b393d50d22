"""
A rollout without a learning signal changes nothing, for any number of processes: a term of the loss rests where it is
0 by construction, and only there.
"""

import json
from pathlib import Path

import pytest
import torch
from float64_reference import EXACT, Reference, assert_step_equals
from launched_processes import launch, logs
from named_tensors import norm, relative_error, same_weights, snapshot
from recording_trainers import RecordingGRPO, RecordingOPO, changed_weights, logged, make_trainer, metric, trained
from scripted_rollouts import Script

from opo_trl.objective import Objective, loss_terms
from opo_trl.objectives import OBJECTIVES


ROLLOUTS = {
    "all are unscored": {"script": Script([None] * 8)},
    "all are truncated": {"script": Script(truncated=range(16)), "mask_truncated_completions": True},
    "all rewards are equal": {"script": Script([1.0] * 8)},
    "all are empty": {"script": Script([0.0] * 8, min_length=1, max_length=1)},
    # In a second pass, micro-batches have other shapes, so the log-ratio is rounding, of which AdamW would make steps.
    "all rewards are equal, twice": {"script": Script([1.0] * 8), "num_iterations": 2, "max_steps": 4},
    "in bfloat16": {
        "script": Script([1.0] * 8),
        "num_iterations": 2,
        "max_staleness": 1,
        "max_steps": 6,
        "model_init_kwargs": {"dtype": "bfloat16"},
    },
    # The mean of eight rewards of 0.1 is not 0.1 in float32.
    "the mean of equal rewards is rounded": {"script": Script([0.1] * 8), "objective": "grpo", "num_generations": 8},
    # Scored in other shapes than the loss, the reference has other log-probabilities.
    "the policy is the reference": {"script": Script([1.0] * 8), "beta": 0.1, "max_steps": 4},
    "the policy is the reference, in bfloat16": {
        "script": Script([1.0] * 8),
        "beta": 0.1,
        "num_iterations": 2,
        "max_steps": 6,
        "model_init_kwargs": {"dtype": "bfloat16"},
    },
}


def run(model: str, folder: str, processes: int) -> None:
    """Train on each kind of rollout; each process writes its outcomes."""
    rank, outcomes = 0, {}
    for name, options in ROLLOUTS.items():
        trainer = trained(
            model,
            Path(folder) / name,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4 // processes,
            steps_per_generation=8 // processes,
            optim="adamw_torch",
            **{"max_steps": 2, **options},
        )
        rank = trainer.accelerator.process_index
        outcomes[name] = outcome(trainer)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(outcomes))


def outcome(trainer: RecordingOPO) -> dict:
    """What the optimizer steps changed, and which values they logged."""
    metrics = [metric(trainer, name) for name in ("loss", "grad_norm", "opo/skipped_steps")]
    values_of_steps = set(zip(*metrics, strict=True))
    return {
        "processes": trainer.accelerator.num_processes,
        "moved": bool(changed_weights(trainer)),
        "logged": sorted(values_of_steps),
    }


@pytest.mark.parametrize(("config", "processes"), [(None, 1), pytest.param("multi_gpu", 4, marks=pytest.mark.slow)])
def test_rollout_without_a_signal_changes_nothing(tiny_model, tmp_path, config, processes):
    status = launch(run, tiny_model, str(tmp_path), processes, config=config, processes=processes, folder=tmp_path)
    assert status == [0] * processes, logs(tmp_path)
    nothing = {"processes": processes, "moved": False, "logged": [[0.0, 0.0, 0]]}
    for rank in range(processes):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == dict.fromkeys(ROLLOUTS, nothing)


class Watching(RecordingOPO):
    """An override that only looks."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("trainer_class", [RecordingOPO, Watching])
def test_a_run_without_a_signal_is_resumed_between_passes(tiny_model, tmp_path, trainer_class):
    steps = {"num_iterations": 4, "steps_per_generation": 4, "optim": "adamw_torch", "learning_rate": 1e-3}
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    script = Script(rewards=[1.0] * 8, max_length=12)
    options = {"trainer_class": trainer_class, "script": script, **steps, **saved}
    trainer = trained(tiny_model, tmp_path, **options)
    rest = make_trainer(tiny_model, tmp_path, **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not changed_weights(trainer)
    assert not changed_weights(rest)


# Two groups of eight: the mean of eight equal rewards may be rounded.
PAIRS = {"num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}


class Advantage(Objective):
    """An objective of a user that keeps the default targets."""

    def terms(self, log_ratio, weights, samples):
        return loss_terms(log_ratio, samples.target, mu=1.0, ratio_form="log", weights=weights)


class WithAdvantage(RecordingOPO):
    objective_class = Advantage


@pytest.mark.parametrize("objective", [*OBJECTIVES, "an own one"])
def test_rounding_of_equal_rewards_is_no_signal(tiny_model, tmp_path, objective):
    own = {"trainer_class": WithAdvantage} if objective == "an own one" else {"objective": objective}
    trainer = trained(tiny_model, tmp_path, script=Script([0.1] * 8), **PAIRS, **ADAMW, **own)
    assert not changed_weights(trainer)
    assert logged(trainer)[0]["opo/frac_zero_drive"] == 1


def train_on_one_equal_group(model: str, folder: str) -> None:
    """Each of two processes has a group; the rewards of the second one's are equal."""
    options = {**PAIRS, **ADAMW, "per_device_train_batch_size": 8}
    trainer = trained(model, Path(folder), script=Script([*range(8), *[0.1] * 8]), objective="grpo", **options)
    rank = trainer.accelerator.process_index
    signals = trainer.rollouts[0].advantages.bool().tolist()
    Path(folder, f"{rank}.json").write_text(json.dumps(signals))


def test_rounding_is_no_signal_in_the_groups_of_a_second_process(tiny_model, tmp_path):
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(train_on_one_equal_group, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    signals = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert signals == [[True] * 8, [False] * 8]


@pytest.mark.parametrize(
    ("rewards", "options"),
    [
        ([1000.1] * 8, {}),
        ([0.1, None, 0.1, 0.1, 0.1, 0.1, 0.1, None], {}),
        ([(0.1, 0.2), (0.3, 0.0)] * 4, {}),  # the same sum, but for rounding
        ([0.1] * 8, {"scale_rewards": "none"}),
        ([0.1] * 8, {"scale_rewards": "batch"}),
        ([(0.1, 0.7), (0.1, None)] * 4, {"multi_objective_aggregation": "normalize_then_sum"}),
    ],
    ids=str,
)
def test_rounding_is_no_signal_in_any_sum(tiny_model, tmp_path, rewards, options):
    first = rewards[0]
    functions = len(first) if isinstance(first, tuple) else 1
    script = Script(rewards, functions=functions)
    for objective in ("grpo", "topr"):
        if options and objective == "topr":  # whose push does not depend on them
            continue
        trainer = trained(tiny_model, tmp_path, script=script, objective=objective, **PAIRS, **ADAMW, **options)
        assert not changed_weights(trainer)


def test_functions_that_disagree_are_a_signal_when_each_is_normalized(tiny_model, tmp_path):
    """Their sum is the same for all completions, but not that of their normalized scores."""
    rewards = [(1.0, 0.0), (0.0, 2.0), (0.0, 2.0), (0.5, 1.0)]
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5], "loss_type": "grpo"}
    ours, theirs = (
        trained(tiny_model, tmp_path, script=Script(rewards, functions=2), trainer_class=kind, **options)
        for kind in (RecordingOPO, RecordingGRPO)
    )
    assert norm(theirs.steps[0].gradient) > 1e-2
    assert relative_error(ours.steps[0].gradient, theirs.steps[0].gradient) < EXACT


class _Bonus:
    """An override that adds a constant to all advantages, also where rewards are equal."""

    bonus = 0.01

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        rollout["advantages"] = rollout["advantages"] + self.bonus
        return rollout


class BonusOPO(_Bonus, RecordingOPO):
    pass


class BonusGRPO(_Bonus, RecordingGRPO):
    pass


def test_a_constant_bonus_of_an_override_is_a_signal(tiny_model, tmp_path):
    ours, theirs = (
        trained(tiny_model, tmp_path, script=Script([1.0] * 8), trainer_class=kind, loss_type="grpo")
        for kind in (BonusOPO, BonusGRPO)
    )
    assert norm(theirs.steps[0].gradient) > 1e-3
    assert relative_error(ours.steps[0].gradient, theirs.steps[0].gradient) < EXACT


def test_a_baseline_of_an_override_is_no_signal_where_rewards_are_equal(tiny_model, tmp_path):
    class LeaveOneOut(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            rewards = rollout["rewards_per_func"].nansum(dim=1).view(-1, self.num_generations)
            others = (rewards.sum(dim=1, keepdim=True) - rewards) / (self.num_generations - 1)
            rollout["advantages"] = (rewards - others).flatten()
            assert rollout["advantages"].any()  # rounding
            return rollout

    trainer = trained(
        tiny_model, tmp_path, trainer_class=LeaveOneOut, script=Script([0.7] * 8), objective="grpo", **PAIRS, **ADAMW
    )
    assert not changed_weights(trainer)


# Steps that move the policy although their rollout has no signal: the pull-back is real.


class Once(Script):
    """All rewards are equal, except those of the first rollout."""

    def reward(self, call: int, row: int, function: int) -> float:
        return float(row % 2) if call == 0 else 1.0


SEVERAL = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "mu": 0.3}


@pytest.mark.parametrize(
    "options", [{"optim": "adamw_torch"}, {"optim": "sgd", "optim_args": "momentum=0.9"}], ids=["adamw", "momentum"]
)
def test_momentum_is_pulled_back(tiny_model, tmp_path, options):
    script = Once(seed=1)
    trainer = trained(tiny_model, tmp_path, script=script, learning_rate=3e-2, max_steps=8, **SEVERAL, **options)
    reference = Reference(trainer, script)
    assert norm(trainer.steps[4].gradient) == 0  # nothing has moved since the rollout
    for number in (5, 6, 7):
        assert_step_equals(trainer.steps[number], reference.step(number))


def test_momentum_of_an_earlier_call_is_pulled_back(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, script=Once(seed=1), max_steps=4, **SEVERAL, **ADAMW)
    trainer.train()
    trainer.train()  # its only rollout has no signal
    assert norm(trainer.steps[4].gradient) == 0
    assert norm(trainer.steps[5].gradient) > 1e-3


def test_momentum_is_pulled_back_after_resuming(tiny_model, tmp_path):
    """The checkpoint says that there has been a gradient, also if it was saved before the next rollout."""
    options = {**SEVERAL, **ADAMW, "max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    whole = trained(tiny_model, tmp_path, script=Once(seed=1), **options)
    for saved in (4, 6):
        script = Once(seed=1)
        script.calls += [None] * (1 if saved == 4 else 2)
        rest = make_trainer(tiny_model, tmp_path / "rest", script=script, **options)
        rest.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))
        assert same_weights(snapshot(rest.model), snapshot(whole.model))


def test_weight_decay_is_pulled_back_from_the_first_step(tiny_model, tmp_path):
    script = Script([1.0] * 8)
    options = {**SEVERAL, **ADAMW, "learning_rate": 0.1, "weight_decay": 0.5, "max_steps": 4}
    trainer = trained(tiny_model, tmp_path, script=script, **options)
    reference = Reference(trainer, script)
    assert norm(trainer.steps[0].gradient) == 0
    for number in (1, 2, 3):
        assert_step_equals(trainer.steps[number], reference.step(number))


def test_a_step_of_learning_rate_0_moves_nothing(tiny_model, tmp_path):
    """The first one of a warmup, with weight decay."""
    options = {**ADAMW, "weight_decay": 0.5, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
    # The second step has micro-batches of other shapes than the pass over the rollout.
    passes = {"num_iterations": 2, "max_steps": 2, "steps_per_generation": 4}
    trainer = trained(tiny_model, tmp_path, script=Script([1.0] * 8, max_length=12), **passes, **options)
    assert [norm(step.gradient) for step in trainer.steps] == [0, 0]
    assert trainer._skipped.moved_at == 2


class Drifting(torch.optim.SGD):
    """An optimizer that moves weights without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(0.9)


def test_what_an_unknown_optimizer_does_is_pulled_back(tiny_model, tmp_path):
    script = Script([1.0] * 8)
    trainer = make_trainer(tiny_model, tmp_path, script=script, max_steps=4, **SEVERAL)
    trainer.optimizer = Drifting(trainer.model.parameters(), lr=0.01)
    trainer.train()
    reference = Reference(trainer, script)
    for number in (1, 2, 3):
        assert_step_equals(trainer.steps[number], reference.step(number))


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop"])
def test_optimizers_that_rest_without_a_gradient(tiny_model, tmp_path, optim):
    trainer = trained(
        tiny_model, tmp_path, script=Script([1.0] * 8), max_steps=4, learning_rate=0.1, optim=optim, **SEVERAL
    )
    assert not changed_weights(trainer)
    assert trainer._skipped.moved_at == 0


def test_kl_to_a_reference_that_the_policy_has_left_is_trained(tiny_model, tmp_path):
    """Without a signal, weight decay moves the policy away from the reference."""
    script = Script([1.0] * 8)
    options = {**SEVERAL, **ADAMW, "learning_rate": 0.1, "weight_decay": 0.5, "max_steps": 8, "beta": 0.5}
    trainer = trained(tiny_model, tmp_path, script=script, **options)
    reference = Reference(trainer, script)
    for number in (1, 4, 6):
        assert_step_equals(trainer.steps[number], reference.step(number))
