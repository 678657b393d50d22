"""Accuracy with its interval, measured without a trace in the training."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from invariance.launch import launch, logs
from scipy.stats import binomtest

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.evaluate import evaluate, wilson_interval


PROBLEMS = Dataset.from_list([{"prompt": f"{i}+1=", "solution": str(i)} for i in range(7)])
SEEN: list[list[int]] = []


def parity_reward(completions, completion_ids, solution, **kwargs):
    """Note what was generated; `None` for the problem 0, else 1.0 or 0.0 by the first token."""
    SEEN.extend(completion_ids)
    return [None if s == "0" else float(ids[0] % 2) for ids, s in zip(completion_ids, solution, strict=True)]


def make_trainer(model: str, folder: str) -> OPOTrainer:
    args = OPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,  # the last batch is a short one
        num_generations=4,
        max_completion_length=4,
    )
    return OPOTrainer(model, parity_reward, args, PROBLEMS)


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    return make_trainer(tiny_model, str(tmp_path_factory.mktemp("evaluate")))


@pytest.mark.parametrize(("correct", "total"), [(0, 5), (5, 5), (3, 8), (187, 200), (1, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_wilson_interval_is_that_of_scipy(correct, total, confidence):
    expected = binomtest(correct, total).proportion_ci(confidence, method="wilson")
    assert wilson_interval(correct, total, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("total", [1, 8, 250, 500, 1000])
def test_interval_holds_the_share_at_both_ends(total):
    assert wilson_interval(0, total)[0] == 0.0
    assert wilson_interval(total, total)[1] == 1.0


def test_no_trial_says_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_every_problem_is_solved_once_and_counted(trainer):
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


def test_several_completions_of_a_problem_give_pass_at_k(trainer):
    result = evaluate(trainer, PROBLEMS, samples=5)
    assert [s["prompt"] for s in result.samples] == [prompt for prompt in PROBLEMS["prompt"] for _ in range(5)]
    assert (result.scored, result.unscorable) == (30, 5)
    rewards = [[s["reward"] for s in result.samples[i : i + 5]] for i in range(5, 35, 5)]
    assert 0 < sum(map(sum, rewards)) < 30
    summary = result.summary()
    assert summary["pass_at"].keys() == {"1", "2", "4"}
    for k in (1, 2, 4):
        # By definition: the share of all draws of k completions with a right one among them.
        draws = [max(draw) for group in rewards for draw in itertools.combinations(group, k)]
        assert summary["pass_at"][str(k)] == pytest.approx(sum(draws) / len(draws))
    assert summary["accuracy"] == pytest.approx(summary["pass_at"]["1"])
    shares = [sum(group) / 5 for group in rewards]
    half = 1.959964 * statistics.stdev(shares) / 6**0.5
    expected = [max(summary["accuracy"] - half, 0.0), min(summary["accuracy"] + half, 1.0)]
    assert [summary["low"], summary["high"]] == pytest.approx(expected, abs=1e-6)


def test_greedy_is_greedy(trainer):
    """The first token of every completion is the likeliest one under the model itself, whatever the seed."""
    for seed in (1, 2):
        SEEN.clear()
        evaluate(trainer, PROBLEMS, decoding="greedy", seed=seed)
        for problem, completion_ids in zip(PROBLEMS, SEEN, strict=True):
            ids = trainer.processing_class(problem["prompt"], return_tensors="pt")["input_ids"]
            assert completion_ids[0] == trainer.model(input_ids=ids).logits[0, -1].argmax().item()


def test_sampling_follows_its_seed(trainer):
    first, same, other = (
        [sample["completion"] for sample in evaluate(trainer, PROBLEMS, seed=seed).samples] for seed in (3, 3, 4)
    )
    assert first == same
    assert first != other


def evaluate_greedily(model: str, folder: str) -> None:
    """In each process; the main one writes the samples."""
    trainer = make_trainer(model, folder)
    result = evaluate(trainer, PROBLEMS, decoding="greedy")
    if trainer.accelerator.is_main_process:
        processes = trainer.accelerator.num_processes
        Path(folder, "result.json").write_text(json.dumps({"processes": processes, "samples": result.samples}))


def test_two_processes_share_the_problems_and_count_each_once(trainer, tiny_model, tmp_path):
    """Seven problems on two processes: one of them solves the last problem twice, to keep step with the other."""
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(evaluate_greedily, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    two = json.loads((tmp_path / "result.json").read_text())
    assert two["processes"] == 2
    assert two["samples"] == evaluate(trainer, PROBLEMS, decoding="greedy").samples


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
def test_training_goes_on_as_if_nothing_had_been_evaluated(trainer, decoding):
    trainer.model.train()
    before = (trainer.generation_config.to_dict(), trainer.num_generations_eval, dict(trainer._metrics["train"]))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    evaluate(trainer, PROBLEMS, decoding=decoding)
    assert torch.equal(torch.rand(3), expected)
    assert trainer.model.training
    assert (
        trainer.generation_config.to_dict(),
        trainer.num_generations_eval,
        dict(trainer._metrics["train"]),
    ) == before
    assert not trainer._metrics["eval"]


def test_nothing_scorable_is_not_an_accuracy_of_zero(trainer):
    assert math.isnan(evaluate(trainer, PROBLEMS.select([0])).accuracy)


def test_empty_data_set_and_unknown_decoding_are_refused(trainer):
    with pytest.raises(ValueError, match="0 rows"):
        evaluate(trainer, PROBLEMS.select([]))
    with pytest.raises(ValueError, match=r"decoding='beam'.*'greedy' or 'sampled'"):
        evaluate(trainer, PROBLEMS, decoding="beam")
