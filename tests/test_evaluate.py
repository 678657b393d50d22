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
from device_fields import CONTINUOUS, SMALL
from launched_processes import launch, logs
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.evaluate import Evaluation, _decoding_as, _own_random_state, evaluate, wilson_interval
from opo_trl.rewards.errors import RewardError


PROBLEMS = Dataset.from_list([{"prompt": f"{i}+1=", "solution": str(i)} for i in range(7)])
SEEN: list[list[int]] = []


def parity_reward(completions, completion_ids, solution, **kwargs):
    """Record what was generated; `None` for problem 0, otherwise 1.0 or 0.0 by the first token."""
    SEEN.extend(completion_ids)
    rewards = []
    for ids, text in zip(completion_ids, solution, strict=True):
        parity = float(ids[0] % 2)
        rewards.append(None if text == "0" else parity)
    return rewards


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
        variance = bound * (1 - bound) / total
        distance = abs(correct / total - bound)
        assert distance == pytest.approx(z * variance**0.5, abs=1e-12)
    lowest, _ = wilson_interval(0, total)
    _, highest = wilson_interval(total, total)
    assert lowest == 0.0
    assert highest == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


def column(result: Evaluation, name: str) -> list:
    return [sample[name] for sample in result.samples]


def test_every_problem_is_solved_and_counted_once(trainer):
    result = evaluate(trainer, PROBLEMS)
    assert column(result, "prompt") == PROBLEMS["prompt"]
    first, *others = column(result, "reward")
    assert first is None
    assert result.scored == 6
    assert result.unscorable == 1
    assert result.correct == others.count(1.0)
    summary = result.summary()
    assert summary["accuracy"] == result.correct / 6
    assert (summary["low"], summary["high"]) == wilson_interval(result.correct, 6)
    assert "samples" not in summary


def test_several_completions_of_a_problem_give_an_interval_over_problems(trainer):
    result = evaluate(trainer, PROBLEMS, samples=5)
    assert column(result, "prompt") == np.repeat(PROBLEMS["prompt"], 5).tolist()
    assert result.scored == 30
    assert result.unscorable == 5
    rewards = column(result, "reward")[5:]  # without those of problem 0
    assert 0 < sum(rewards) < 30
    accuracies = np.mean(np.reshape(rewards, (6, 5)), axis=1)
    summary = result.summary()
    mean = statistics.mean(accuracies)
    assert summary["accuracy"] == pytest.approx(mean)
    half_width = 1.959964 * statistics.stdev(accuracies) / 6**0.5
    low = max(mean - half_width, 0.0)
    high = min(mean + half_width, 1.0)
    assert summary["low"] == pytest.approx(low, abs=1e-6)
    assert summary["high"] == pytest.approx(high, abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_interval_over_problems_without_spread_is_not_a_point(reward):
    samples = [{"prompt": "", "completion": "", "reward": reward}] * 12
    summary = Evaluation(samples, per_problem=2).summary()
    expected = wilson_interval(6 * int(reward), 6)
    assert (summary["low"], summary["high"]) == expected


def test_only_rewards_of_1_and_more_are_correct():
    samples = [{"prompt": "", "completion": "", "reward": reward} for reward in (0.5, 1.0, None, 1.2, -1.0)]
    result = Evaluation(samples)
    assert (result.correct, result.scored, result.unscorable) == (2, 4, 1)
    assert result.accuracy == 0.5


def test_vllm_is_greedy_in_an_evaluation_and_samples_afterwards():
    """Also where `generation_kwargs` of the run have a temperature."""
    engine = SimpleNamespace(temperature=0.7, generation_kwargs={"temperature": 1.3, "seed": 1})
    with _decoding_as(SimpleNamespace(use_vllm=True, vllm_generation=engine), "greedy"):
        assert vars(engine) == {"temperature": 0.0, "generation_kwargs": {"seed": 1}}
    assert vars(engine) == {"temperature": 0.7, "generation_kwargs": {"temperature": 1.3, "seed": 1}}


def most_likely_token(trainer: OPOTrainer, prompt: str) -> int:
    inputs = trainer.processing_class(prompt, return_tensors="pt")
    ids = inputs["input_ids"].to(trainer.model.device)
    logits = trainer.model(input_ids=ids).logits
    return logits[0, -1].argmax().item()


def test_greedy_is_greedy(trainer):
    """The first token of every completion is the model's most likely one, with any seed."""
    for seed in (1, 2):
        SEEN.clear()
        evaluate(trainer, PROBLEMS, decoding="greedy", seed=seed)
        for problem, completion_ids in zip(PROBLEMS, SEEN, strict=True):
            assert completion_ids[0] == most_likely_token(trainer, problem["prompt"])


def completions_with(trainer: OPOTrainer, seed: int) -> list[str]:
    result = evaluate(trainer, PROBLEMS, seed=seed)
    return column(result, "completion")


def test_sampling_follows_its_seed(trainer):
    completions = completions_with(trainer, seed=3)
    assert completions_with(trainer, seed=3) == completions
    assert completions_with(trainer, seed=4) != completions


def evaluate_greedily(model: str, folder: str) -> None:
    """In each process; the main process writes the samples."""
    trainer = make_trainer(model, folder)
    result = evaluate(trainer, PROBLEMS, decoding="greedy")
    if trainer.accelerator.is_main_process:
        content = {"processes": trainer.accelerator.num_processes, "samples": result.samples}
        text = json.dumps(content)
        Path(folder, "result.json").write_text(text)


def test_two_processes_share_the_problems_and_count_each_once(trainer, tiny_model, tmp_path):
    """Seven problems on two processes: one process solves the last one twice, to make as many calls as the other."""
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(evaluate_greedily, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    two = json.loads((tmp_path / "result.json").read_text())
    assert two["processes"] == 2
    one = evaluate(trainer, PROBLEMS, decoding="greedy")
    assert two["samples"] == one.samples


# Generated and scored as in training


async def asynchronous_reward(completion_ids, solution, **columns):
    return parity_reward(None, completion_ids, solution)


class TalkativeReward:
    """Logs metrics and columns, and draws random numbers."""

    def __call__(self, completion_ids, solution, log_metric, log_extra, **columns):
        log_metric("talk", 1.0)
        log_extra("solution", solution)
        random.random()
        np.random.rand()
        return parity_reward(None, completion_ids, solution)


def failing_reward(completions, log_metric, **columns):
    log_metric("talk", 1.0)
    raise ArithmeticError("no score")


# Attributes of a trainer that hold what it has logged, reported or counted.
RECORDS = (
    "_metrics",
    "_logs",
    "_pending_metrics",
    "_pending_extra_logs",
    "completions_generated",
    "_reports",
    "num_generations_eval",
    "_step",
    "_reward_failures",
)


def state_of(trainer: GRPOTrainer) -> dict:
    """All that an evaluation might leave behind in a trainer."""
    attributes = vars(trainer)
    records = {name: copy.deepcopy(attributes[name]) for name in RECORDS if name in attributes}
    skipped = attributes.get("_skipped", SimpleNamespace())
    return {
        **records,
        "skipped": dict(vars(skipped)),
        "attributes": sorted(attributes),
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
        assert result.scored == 6
        assert result.unscorable == 1
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
        questions = [{**row, "prompt": f"What is {row['prompt']}"} for row in inputs]
        return super()._generate_and_score_completions(questions)

    def _generate(self, prompts):
        ids, completion_ids, mask, completions, *others = super()._generate(prompts)
        exclamations = [f"{completion}!" for completion in completions]
        return ids, completion_ids, mask, exclamations, *others

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rows = [[float(row["solution"]), torch.inf] for row in inputs]
        rewards = torch.tensor(rows, device=self.accelerator.device)
        return self.accelerator.gather(rewards)


def test_overrides_of_a_subclass_act_in_evaluation(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, str(tmp_path), trainer_class=Overriding)
    trainer._metrics["train"]["own"].append(torch.ones(1, requires_grad=True) * 2)  # of a graph: no copy can be made
    result = evaluate(trainer, PROBLEMS)
    assert column(result, "prompt") == [f"What is {prompt}" for prompt in PROBLEMS["prompt"]]
    for completion in column(result, "completion"):
        assert completion.endswith("!")
    assert column(result, "reward") == [float(solution) for solution in PROBLEMS["solution"]]
    assert result.correct == 6
    assert result.scored == 7


def size(completions, solution, **columns) -> list[float | None]:
    """The number in the solution; no score for 0."""
    return [float(text) or None for text in solution]


def counts_of_training(trainer: OPOTrainer) -> tuple[int, int, dict]:
    """Tokens that the model has seen, completions that it has generated, and metrics that are not logged yet."""
    metrics = dict(trainer._metrics["train"])
    return trainer.state.num_input_tokens_seen, trainer.completions_generated, metrics


def test_evaluation_of_transformers_is_not_taken_for_training(tiny_model, tmp_path):
    """Several batches: after the first one, TRL's continuous batching leaves the model in training mode."""
    settings = {"per_device_eval_batch_size": 4, "num_generations_eval": 2, "max_steps": 1, **CONTINUOUS}
    trainer = make_trainer(tiny_model, str(tmp_path), reward_funcs=size, reward_weights=[0.5], **settings)
    trainer.train()
    before = counts_of_training(trainer)
    trainer._metrics["eval"]["left"].append(1.0)  # by an evaluation that was interrupted
    four_problems = PROBLEMS.select(range(4))
    trainer.evaluate(four_problems)
    entry = trainer.state.log_history[-1]
    assert {"eval_loss", "eval_completions/mean_length", "eval_opo/mu"} <= entry.keys()
    assert "eval_left" not in entry
    assert (entry["eval_reward"], entry["eval_rewards/size/mean"]) == (1, 2)  # the first problem has no score
    assert counts_of_training(trainer) == before
    assert not trainer.model.training
    assert trainer._reports == []
    trainer.evaluate(PROBLEMS.select([4, 5]))
    assert trainer.state.log_history[-1]["eval_rewards/size/mean"] == 4.5  # of its own problems only


def evaluate_three_problems(model: str, folder: str) -> None:
    """In each process, by Transformers' evaluation of two completions at a time; the main process writes the log."""
    settings = {"per_device_eval_batch_size": 2, "num_generations_eval": 2}
    trainer = make_trainer(model, folder, reward_funcs=size, **settings)
    trainer.evaluate(PROBLEMS.select([1, 2, 3]))
    if trainer.accelerator.is_main_process:
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history[-1]))


def test_rows_that_fill_the_last_batch_do_not_count_in_an_evaluation(tiny_model, tmp_path):
    """Of four groups in two batches on two processes, the last one only repeats the first problem."""
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(evaluate_three_problems, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    entry = json.loads((tmp_path / "log.json").read_text())
    assert (entry["eval_reward"], entry["eval_rewards/size/mean"]) == (2, 2)


def draws_of_processes(**engine) -> list[tuple[float, float, float]]:
    """Random numbers of PyTorch, Python and NumPy in each of four processes."""
    draws = []
    for process in range(4):
        accelerator = SimpleNamespace(process_index=process, device=torch.device("cpu"))
        trainer = SimpleNamespace(accelerator=accelerator, **engine)
        with _own_random_state(trainer, seed=1):
            draws.append((torch.rand(1).item(), random.random(), np.random.rand()))
    return draws


def test_processes_that_share_an_engine_draw_the_same_numbers():
    first, second, third, fourth = draws_of_processes(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=2)
    assert first == second != third == fourth
    separate = draws_of_processes(use_vllm=False)
    assert len(set(separate)) == 4


def test_accuracy_without_scores_is_not_zero(trainer):
    unscorable = PROBLEMS.select([0])
    assert math.isnan(evaluate(trainer, unscorable).accuracy)
    with pytest.raises(ValueError, match=r"decoding='beam'.*'greedy' or 'sampled'"):
        evaluate(trainer, PROBLEMS, decoding="beam")
