"""What a reward function may be and return, and the error that names one that fails."""

import asyncio
import functools
import os
import signal
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import RecordingBaseline, make_trainer
from transformers import TrainerCallback

from opo_trl.rewards.errors import RewardError


def trainer_with(tiny_model: str, folder: Path, reward_funcs) -> RecordingBaseline:
    arguments = {"reward_funcs": reward_funcs}
    return make_trainer(tiny_model, folder, trainer_class=RecordingBaseline, trainer_arguments=arguments)


def rewards_of(trainer: RecordingBaseline, n: int = 3) -> torch.Tensor:
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
    "map": lambda: map(float, ("0.5", "nan", "2")),
    "tuple": (0.5, None, 2),
    "array": np.array([0.5, np.nan, 2.0], dtype=np.float32),
    "array of objects": np.array([0.5, None, 2], dtype=object),
    "tensor": torch.tensor([0.5, torch.nan, 2.0], dtype=torch.bfloat16),
    "tensor of a column": torch.tensor([[0.5], [torch.nan], [2.0]]),
    "tensor with a gradient": torch.tensor([0.5, torch.nan, 2.0], requires_grad=True),
    "other numbers": [Fraction(1, 2), None, Decimal(2)],
    "scalars": [np.float16(0.5), None, torch.tensor(2)],
}


def test_whatever_holds_one_number_for_each_completion_is_accepted_as_by_trl(tiny_model, tmp_path):
    functions = [Scorer(scores) for scores in ACCEPTED.values()]
    functions += [AsynchronousScorer([0.5, None, 2]), functools.partial(AsynchronousScorer((0.5, None, 2)))]
    rewards = rewards_of(trainer_with(tiny_model, tmp_path, functions)).nan_to_num(nan=-1.0)
    assert rewards.T.tolist() == [[0.5, -1.0, 2.0]] * len(functions)


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        (lambda: (1.0 for _ in iter(int, 1)), "Scorer has returned 4 values for 3 completions"),
        (lambda: (1 / i for i in (2, 1, 0)), "Scorer has raised ZeroDivisionError: division by zero"),
        ([1.0] * 5, "Scorer has returned 5 values for 3 completions"),
        (iter([1.0]), "Scorer has returned 1 values for 3 completions"),
        ({"a": 1, "b": 0, "c": 1}, "Scorer has returned {'a': 1, 'b': 0, 'c': 1}, not a list"),
        ({1, 2, 3}, "Scorer has returned {1, 2, 3}, not a list"),
        (b"101", "Scorer has returned b'101', not a list"),
        ("101", "Scorer has returned '101', not a list"),
        (None, "Scorer has returned None, not a list"),
        (torch.tensor(1.0), "has returned tensor"),
        ([1.0, "1", 1.0], "Scorer has returned '1' for completion 1, of type str"),
        ([1.0, np.str_("1"), 1.0], "for completion 1, of type str_"),
        ([1.0, 1j, 1.0], "Scorer has returned 1j for completion 1, of type complex"),
        ([1.0, 10**400, 1.0], "for completion 1, of type int"),
        (np.ones((3, 2)), "for completion 0, of type ndarray"),
        ([[1.0], [1.0], [1.0]], r"Scorer has returned [1.0] for completion 0, of type list"),
        (lambda: asynchronous([1, 2, 3]), "which is never awaited. Define it with `async def`"),
    ],
)
def test_anything_else_is_named(tiny_model, tmp_path, scores, says):
    trainer = trainer_with(tiny_model, tmp_path, [length_of, reward := Scorer(scores)])
    with pytest.raises(RewardError) as error:
        rewards_of(trainer)
    assert says in str(error.value)
    assert trainer.reward_funcs[1] is reward


ENDS = [
    SystemExit(),
    SystemExit(0),
    StopIteration(),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    BaseException(),
]


def raise_(error: BaseException):
    raise error


async def raise_later(error: BaseException):
    raise error


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("kind", ["function", "generator", "asynchronous"])
def test_what_would_end_the_run_without_a_word_is_named(tiny_model, tmp_path, kind, error):
    def function(completions, **columns):
        return raise_(error) if kind == "function" else (raise_(error) for _ in completions)

    async def asynchronous_function(completions, **columns):
        await raise_later(error)

    reward = asynchronous_function if kind == "asynchronous" else function
    trainer = trainer_with(tiny_model, tmp_path, reward)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # as in a run of the command
    try:
        # Python makes a `RuntimeError` of a `StopIteration` in a generator or coroutine.
        named = "(RuntimeError: .*)?" * isinstance(error, StopIteration) + type(error).__name__
        with pytest.raises(RewardError, match=f"function {reward.__name__} has raised {named}"):
            rewards_of(trainer)
    finally:
        signal.signal(signal.SIGINT, before)


def test_run_stays_in_its_folder_whatever_a_reward_does(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def reward(completions, **columns):
        os.chdir(tmp_path / "elsewhere")
        return [1.0] * len(completions)

    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tiny_model, Path("run"), trainer_arguments={"reward_funcs": reward}, **options).train()
    assert {"checkpoint-1", "checkpoint-2"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_ctrl_c_in_a_script_is_no_fault_of_the_reward(tiny_model, tmp_path):
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    trainer = trainer_with(tiny_model, tmp_path, Scorer(lambda: signal.raise_signal(signal.SIGINT)))
    try:
        with pytest.raises(KeyboardInterrupt):
            rewards_of(trainer)
    finally:
        signal.signal(signal.SIGINT, kept)


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(0)


@pytest.mark.parametrize(
    "error", [ValueError("a\x1b[2J\0b\nc" * 10**6), KeyError("\ud800" * 500), Unspeakable()], ids=type
)
def test_message_of_an_error_is_short_and_one_line_that_no_terminal_obeys(tiny_model, tmp_path, error):
    trainer = trainer_with(tiny_model, tmp_path, Scorer(lambda: raise_(error)))
    with pytest.raises(RewardError) as raised:
        rewards_of(trainer)
    said = str(raised.value)
    assert type(error).__name__ in said
    assert len(said) < 400
    assert said.isprintable()


def length_of(completions, **columns):
    """A reward function with state."""
    length_of.calls = getattr(length_of, "calls", 0) + 1
    return map(len, completions)


def test_trainer_holds_the_users_own_objects(tiny_model, tmp_path):
    rewards = (length_of, Scorer([0.0] * 8), asynchronous)
    trainer = trainer_with(tiny_model, tmp_path, rewards)
    held = []

    class Look(TrainerCallback):
        def on_step_end(self, *_, **named):
            held.append(list(trainer.reward_funcs))

    trainer.add_callback(Look())
    length_of.calls = 0
    trainer.train()
    held.append(trainer.reward_funcs)
    assert all(one is other for now in held for one, other in zip(now, rewards, strict=True))
    assert trainer.reward_funcs[0].calls == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"length": length_of}, "reward_funcs={'length':"),
        ([length_of, 0.5], "reward_funcs[1]=0.5 is of type float, not a reward"),
        (Scorer, "is a class, not a reward. Pass an instance, such as Scorer()"),
    ],
)
def test_what_is_no_reward_is_rejected(tiny_model, tmp_path, given, says):
    with pytest.raises(TypeError) as error:
        trainer_with(tiny_model, tmp_path, given)
    assert says in str(error.value)
