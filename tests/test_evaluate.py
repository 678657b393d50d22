"""Accuracy with its interval, measured without a trace in training."""

import copy
import json
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import CONTINUOUS, SMALL, even_tokens
from invariance.launch import launch, logs
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.evaluate import Evaluation, _own_random_state, evaluate, wilson_interval
from opo_trl.rewards.errors import RewardError


PROBLEMS = Dataset.from_list([{"prompt": f"{i}+1=", "solution": str(i)} for i in range(7)])
SEEN: list[list[int]] = []


def parity_reward(completions, completion_ids, solution, **kwargs):
    """Record what was generated; `None` for problem 0, otherwise 1.0 or 0.0 by the first token."""
    SEEN.extend(completion_ids)
    return [None if s == "0" else float(ids[0] % 2) for ids, s in zip(completion_ids, solution, strict=True)]


def make_trainer(
    model: str, folder: str, *, reward_funcs=parity_reward, trainer_class: type = OPOTrainer, **options
) -> OPOTrainer:
    settings = {
        **SMALL,
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,  # the last batch is a short one
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 2,
        **options,
    }
    config = OPOConfig if issubclass(trainer_class, OPOTrainer) else GRPOConfig
    return trainer_class(model, reward_funcs, config(**settings), PROBLEMS)


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    return make_trainer(tiny_model, str(tmp_path_factory.mktemp("evaluate")))


@pytest.mark.parametrize(("correct", "total"), [(0, 5), (5, 5), (3, 8), (187, 200), (1, 1000)])
def test_bounds_of_the_wilson_interval_are_shares_at_which_the_result_is_just_plausible(correct, total):
    z = statistics.NormalDist().inv_cdf(0.975)
    for bound in wilson_interval(correct, total):
        error = (bound * (1 - bound) / total) ** 0.5
        assert abs(correct / total - bound) == pytest.approx(z * error, abs=1e-12)
    assert wilson_interval(0, total)[0] == 0.0
    assert wilson_interval(total, total)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_every_problem_is_solved_and_counted_once(trainer):
    result = evaluate(trainer, PROBLEMS)
    assert [sample["prompt"] for sample in result.samples] == PROBLEMS["prompt"]
    rewards = [sample["reward"] for sample in result.samples]
    assert rewards[0] is None
    assert (result.scored, result.unscorable) == (6, 1)
    assert result.correct == sum(reward == 1.0 for reward in rewards[1:])
    summary = result.summary()
    assert summary["accuracy"] == result.correct / 6
    assert (summary["low"], summary["high"]) == wilson_interval(result.correct, 6)
    assert "samples" not in summary


def test_several_completions_of_a_problem_give_an_interval_over_problems(trainer):
    result = evaluate(trainer, PROBLEMS, samples=5)
    assert [s["prompt"] for s in result.samples] == [prompt for prompt in PROBLEMS["prompt"] for _ in range(5)]
    assert (result.scored, result.unscorable) == (30, 5)
    rewards = [[s["reward"] for s in result.samples[i : i + 5]] for i in range(5, 35, 5)]
    assert 0 < sum(map(sum, rewards)) < 30
    summary = result.summary()
    accuracies = [sum(group) / 5 for group in rewards]
    assert summary["accuracy"] == pytest.approx(statistics.mean(accuracies))
    half = 1.959964 * statistics.stdev(accuracies) / 6**0.5
    expected = [max(summary["accuracy"] - half, 0.0), min(summary["accuracy"] + half, 1.0)]
    assert [summary["low"], summary["high"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_interval_over_problems_without_spread_is_not_a_point(reward):
    samples = [{"prompt": "", "completion": "", "reward": reward}] * 12
    result = Evaluation(samples, per_problem=2)
    expected = wilson_interval(6 * int(reward), 6)
    assert (result.summary()["low"], result.summary()["high"]) == expected


def test_greedy_is_greedy(trainer):
    """The first token of every completion is the model's most likely one, with any seed."""
    for seed in (1, 2):
        SEEN.clear()
        evaluate(trainer, PROBLEMS, decoding="greedy", seed=seed)
        for problem, completion_ids in zip(PROBLEMS, SEEN, strict=True):
            ids = trainer.processing_class(problem["prompt"], return_tensors="pt")["input_ids"].to(
                trainer.model.device
            )
            assert completion_ids[0] == trainer.model(input_ids=ids).logits[0, -1].argmax().item()


def test_sampling_follows_its_seed(trainer):
    first, same, other = (
        [sample["completion"] for sample in evaluate(trainer, PROBLEMS, seed=seed).samples] for seed in (3, 3, 4)
    )
    assert first == same
    assert first != other


def evaluate_greedily(model: str, folder: str) -> None:
    """In each process; the main process writes the samples."""
    trainer = make_trainer(model, folder)
    result = evaluate(trainer, PROBLEMS, decoding="greedy")
    if trainer.accelerator.is_main_process:
        processes = trainer.accelerator.num_processes
        Path(folder, "result.json").write_text(json.dumps({"processes": processes, "samples": result.samples}))


def test_two_processes_share_the_problems_and_count_each_once(trainer, tiny_model, tmp_path):
    """Seven problems on two processes: one process solves the last one twice, to make as many calls as the other."""
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(evaluate_greedily, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    two = json.loads((tmp_path / "result.json").read_text())
    assert two["processes"] == 2
    assert two["samples"] == evaluate(trainer, PROBLEMS, decoding="greedy").samples


# Generated and scored as in training


async def asynchronous_reward(completion_ids, solution, **columns):
    return parity_reward(None, completion_ids, solution)


class TalkativeReward:
    """Logs metrics and columns, and draws random numbers."""

    def __call__(self, completion_ids, solution, log_metric, log_extra, **columns):
        log_metric("talk", 1.0)
        log_extra("solution", solution)
        random.random(), np.random.rand()
        return parity_reward(None, completion_ids, solution)


def failing_reward(completions, log_metric, **columns):
    log_metric("talk", 1.0)
    raise ArithmeticError("no score")


def state_of(trainer: GRPOTrainer) -> dict:
    """All that an evaluation might leave behind in a trainer."""
    records = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "completions_generated")
    records += ("_reports", "num_generations_eval", "_step", "_reward_failures")
    kept = {name: copy.deepcopy(vars(trainer)[name]) for name in records if name in vars(trainer)}
    return {
        **kept,
        "skipped": {**vars(trainer._skipped)} if hasattr(trainer, "_skipped") else {},
        "attributes": sorted(vars(trainer)),
        "decoding": trainer.generation_config.to_dict(),
        "training": {name: module.training for name, module in trainer.model.named_modules()},
        "tokens": trainer.state.num_input_tokens_seen,
        "history": trainer.state.log_history,
        "random": [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()],
    }


@pytest.mark.parametrize(
    ("trainer_class", "options", "training"),
    [
        pytest.param(OPOTrainer, CONTINUOUS, True, id="OPO, continuous batching, in training mode"),
        pytest.param(GRPOTrainer, {}, False, id="GRPO, in evaluation mode"),
    ],
)
def test_evaluation_leaves_no_trace_in_training(tiny_model, tmp_path, trainer_class, options, training):
    rewards = [TalkativeReward(), asynchronous_reward]
    trainer = make_trainer(
        tiny_model, str(tmp_path), reward_funcs=rewards, trainer_class=trainer_class, beta=0.1, **options
    )
    trainer.train()
    trainer.model.train(training)
    trainer._metrics["train"]["loss"].append(1.0)
    trainer._logs["prompt"].append("1+1=")
    before = state_of(trainer)
    for decoding in ("greedy", "sampled"):
        result = evaluate(trainer, PROBLEMS, decoding=decoding)
        assert (result.scored, result.unscorable) == (6, 1)
        assert state_of(trainer) == before


def test_failed_evaluation_leaves_no_trace(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, str(tmp_path), reward_funcs=failing_reward)
    trainer.model.train()
    before = state_of(trainer)
    with pytest.raises(RewardError, match="failing_reward has raised ArithmeticError: no score"):
        evaluate(trainer, PROBLEMS, decoding="greedy")
    assert state_of(trainer) == before


class Overriding(OPOTrainer):
    """Changes prompts and completions, and computes its own rewards."""

    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(
            [{**row, "prompt": f"What is {row['prompt']}"} for row in inputs]
        )

    def _generate(self, prompts):
        ids, completion_ids, mask, completions, *others = super()._generate(prompts)
        return ids, completion_ids, mask, [f"{completion}!" for completion in completions], *others

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = [[float(row["solution"]), torch.inf] for row in inputs]
        return self.accelerator.gather(torch.tensor(rewards, device=self.accelerator.device))


def test_overrides_of_a_subclass_act_in_evaluation(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, str(tmp_path), trainer_class=Overriding)
    trainer._metrics["train"]["own"].append(torch.ones(1, requires_grad=True) * 2)  # of a graph: no copy can be made
    result = evaluate(trainer, PROBLEMS)
    assert [sample["prompt"] for sample in result.samples] == [f"What is {prompt}" for prompt in PROBLEMS["prompt"]]
    assert all(sample["completion"].endswith("!") for sample in result.samples)
    assert [sample["reward"] for sample in result.samples] == [float(s) for s in PROBLEMS["solution"]]
    assert (result.correct, result.scored) == (6, 7)


def test_evaluation_of_transformers_is_not_taken_for_training(tiny_model, tmp_path):
    """Several batches: after the first one, TRL's continuous batching leaves the model in training mode."""
    settings = {"per_device_eval_batch_size": 4, "num_generations_eval": 2, "max_steps": 1, **CONTINUOUS}
    trainer = make_trainer(tiny_model, str(tmp_path), reward_funcs=even_tokens, **settings)
    trainer.train()
    before = (trainer.state.num_input_tokens_seen, trainer.completions_generated, dict(trainer._metrics["train"]))
    trainer.evaluate(PROBLEMS.select(range(4)))
    logged = {"eval_loss", "eval_completions/mean_length", "eval_reward", "eval_opo/mu"}
    assert logged <= trainer.state.log_history[-1].keys()
    after = (trainer.state.num_input_tokens_seen, trainer.completions_generated, dict(trainer._metrics["train"]))
    assert after == before
    assert not trainer.model.training
    assert trainer._reports == []


def test_processes_that_share_an_engine_draw_the_same_numbers():
    def drawn(process: int, **engine) -> tuple:
        accelerator = SimpleNamespace(process_index=process, device=torch.device("cpu"))
        with _own_random_state(SimpleNamespace(accelerator=accelerator, **engine), seed=1):
            return torch.rand(1).item(), random.random(), np.random.rand()

    shared = {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}
    draws = [drawn(process, **shared) for process in range(4)]
    assert draws[0] == draws[1] != draws[2] == draws[3]
    assert len({drawn(process, use_vllm=False) for process in range(4)}) == 4


def test_accuracy_without_scores_is_not_zero(trainer):
    assert math.isnan(evaluate(trainer, PROBLEMS.select([0])).accuracy)
    with pytest.raises(ValueError, match=r"decoding='beam'.*'greedy' or 'sampled'"):
        evaluate(trainer, PROBLEMS, decoding="beam")
