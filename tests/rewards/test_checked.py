"""What a reward function may be and return, the error that names one that fails, and counts of its failures."""

import functools
import os
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from recording_trainers import RecordingOPO, make_trainer

from opo_trl.generation.failures import RewardFailures
from opo_trl.rewards.errors import CountingReward, RewardError


def trainer_with(tiny_model: str, folder: Path, reward_funcs) -> RecordingOPO:
    arguments = {"reward_funcs": reward_funcs}
    return make_trainer(tiny_model, folder, trainer_class=RecordingOPO, trainer_arguments=arguments)


def rewards_of(trainer: RecordingOPO, n: int = 3) -> torch.Tensor:
    """`[n, number of reward functions]`, of n completions."""
    inputs = [{"prompt": "1+1="} for _ in range(n)]
    return trainer._calculate_rewards(inputs, ["1+1="] * n, ["2"] * n, [[5]] * n)


class Scorer:
    """A callable object."""

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, **columns):
        return self.scores() if callable(self.scores) else self.scores


class AsynchronousScorer(Scorer):
    async def __call__(self, **columns):
        return self.scores


async def asynchronous(completions, **columns):
    return (0.5 for _ in completions)


ACCEPTED = {
    "generator": lambda: (score for score in (0.5, None, 2)),
    "tuple": (0.5, None, 2),
    "array": np.array([0.5, np.nan, 2.0], dtype=np.float32),
    "tensor": torch.tensor([0.5, torch.nan, 2.0], dtype=torch.bfloat16),
    "other numbers": [Fraction(1, 2), None, torch.tensor(2)],
}


def test_whatever_holds_one_number_for_each_completion_is_accepted_as_by_trl(tiny_model, tmp_path):
    functions = [Scorer(scores) for scores in ACCEPTED.values()]
    functions += [AsynchronousScorer([0.5, None, 2]), functools.partial(AsynchronousScorer((0.5, None, 2)))]
    trainer = trainer_with(tiny_model, tmp_path, functions)
    rewards = rewards_of(trainer).nan_to_num(nan=-1.0)
    for function, function_of_user in zip(trainer.reward_funcs, functions, strict=True):
        assert function is function_of_user
    assert rewards.T.tolist() == [[0.5, -1.0, 2.0]] * len(functions)


async def exits(completions, **columns):
    raise SystemExit(0)


def divides_by_zero():
    return (1 / divisor for divisor in (2, 1, 0))


def fails():
    raise ValueError("a\x1b[2J\0b\nc\ud800" * 10**6)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (Scorer(divides_by_zero), "Scorer has raised ZeroDivisionError: division by zero"),
        (Scorer([1.0]), "Scorer has raised ValueError: 1 values for 3 completions"),  # TRL would give it to all
        (Scorer(None), "Scorer has raised TypeError: 'NoneType' object is not iterable"),
        (Scorer(lambda: asynchronous([1, 2, 3])), "'coroutine' object is not iterable"),
        # These would end the run without a word.
        (Scorer(lambda: sys.exit(0)), "Scorer has raised SystemExit: 0"),
        (exits, "function exits has raised SystemExit: 0"),
        (Scorer(lambda: next(iter(()))), "Scorer has raised StopIteration"),
        (Scorer(fails), r"ValueError: a\x1b[2J"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_anything_else_is_named_in_a_short_line_that_no_terminal_obeys(tiny_model, tmp_path, reward, says):
    trainer = trainer_with(tiny_model, tmp_path, [Scorer([1.0] * 3), reward])
    with pytest.raises(RewardError) as error:
        rewards_of(trainer)
    assert says in str(error.value)
    assert len(str(error.value)) < 400
    assert str(error.value).isprintable()
    assert trainer.reward_funcs[1] is reward


def test_run_stays_in_its_folder_and_in_training_mode_whatever_a_reward_does(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def reward(completions, **columns):
        os.chdir(tmp_path / "elsewhere")
        trainer.model.eval()  # as one that scores with the policy itself
        return [1.0] * len(completions)

    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tiny_model, Path("run"), trainer_arguments={"reward_funcs": reward}, **options)
    trainer.train()
    assert trainer.completions_generated == 16  # An evaluation's do not count.
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert os.listdir(tmp_path / "elsewhere") == []


# A tokenizer for those that ask for one


def vocabulary(completions, tokenizer, **columns):
    return [len(tokenizer) for _ in completions]


def optional(completions, tokenizer=None, **columns):
    return vocabulary(completions, tokenizer)


async def asynchronous_vocabulary(completions, *, tokenizer, **columns):
    return vocabulary(completions, tokenizer)


class VocabularyOf:
    def __call__(self, completions, tokenizer, **columns):
        return vocabulary(completions, tokenizer)


def test_a_reward_with_a_parameter_for_the_tokenizer_gets_the_trainers(tiny_model, tmp_path):
    functions = [vocabulary, optional, asynchronous_vocabulary, VocabularyOf(), functools.partial(vocabulary, other=1)]
    trainer = trainer_with(tiny_model, tmp_path, functions)
    assert rewards_of(trainer).tolist() == [[len(trainer.processing_class)] * len(functions)] * 3
    assert trainer.reward_funcs == functions  # the trainer holds the user's own


def test_a_tokenizer_that_a_reward_has_stays(tiny_model, tmp_path):
    def with_default(completions, tokenizer="ab", **columns):
        return vocabulary(completions, tokenizer)

    functions = [functools.partial(vocabulary, tokenizer="abc"), with_default]
    trainer = trainer_with(tiny_model, tmp_path, functions)
    assert rewards_of(trainer).tolist() == [[3, 2]] * 3
    column = [{"prompt": "1+1=", "tokenizer": "abcd"}]  # of the dataset, as in TRL
    trainer = trainer_with(tiny_model, tmp_path, vocabulary)
    assert trainer._calculate_rewards(column, ["1+1="], ["2"], [[5]]).tolist() == [[1]]


def test_a_reward_checks_its_tokenizer_before_a_run(tiny_model, tmp_path):
    def checked_vocabulary(completions, tokenizer, **columns):
        return vocabulary(completions, tokenizer)

    checked = []
    checked_vocabulary.check_tokenizer = checked.append
    trainer = trainer_with(
        tiny_model, tmp_path, [checked_vocabulary, functools.partial(checked_vocabulary, tokenizer="abc")]
    )
    assert checked == [trainer.processing_class, "abc"]


# Counts of completions that rewards fail to score


def test_each_entry_of_the_log_counts_the_failures_since_the_one_before():
    failures = RewardFailures()
    reward = CountingReward()
    taken = []
    for timeouts, errors in ((1, 0), (0, 2), (0, 0)):
        reward.timeouts, reward.errors = timeouts, errors
        failures.add([reward], n_completions=8, accelerator=Accelerator(cpu=True))
        taken.append(failures.take())
    assert taken == [
        {"reward/timeouts": 1, "reward/errors": 0},
        {"reward/timeouts": 0, "reward/errors": 2},
        {"reward/timeouts": 0, "reward/errors": 0},
    ]


def test_rounds_of_one_entry_are_added_up():
    failures = RewardFailures()
    reward = CountingReward()
    reward.errors = 3
    for _ in range(2):
        failures.add([reward, lambda completions: [0.0]], n_completions=8, accelerator=Accelerator(cpu=True))
    assert failures.take() == {"reward/timeouts": 0, "reward/errors": 6}
