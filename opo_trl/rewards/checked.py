"""Rewards that run in the training process: an error names the reward, and an exit does not end the run silently."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from typing import Any

from torch.nn import Module
from trl.trainer.utils import is_async_callable

from ..patching import temporarily
from .errors import CountingReward, RewardError, error_text, numbers


def checked(trainer: Any, tokenizer: Any) -> AbstractContextManager[None]:
    """
    Within this context, a trainer's reward functions get its tokenizer if they ask for one ([`with_tokenizer`]), and
    their failures raise a [`RewardError`] that names the function.

    The functions are wrapped only while TRL calls them; otherwise the trainer holds the user's own objects.
    """
    named_rewards = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    checked_rewards = [checked_reward(with_tokenizer(reward, tokenizer), name) for reward, name in named_rewards]
    return temporarily(trainer, reward_funcs=checked_rewards)


def with_tokenizer(reward: Any, tokenizer: Any) -> Any:
    """
    A reward function with this tokenizer as its argument, if it has a parameter `tokenizer` without a default or with
    `None`; any other, and a reward model, as it is.
    """
    try:
        parameters = signature(reward).parameters
    except ValueError:  # a function in C may have none that can be read
        return reward
    parameter = parameters.get("tokenizer")
    asks_for_one = parameter is not None and (parameter.default is None or parameter.default is parameter.empty)
    return partial(reward, tokenizer=tokenizer) if asks_for_one else reward


def check_tokenizer(rewards: Sequence[Any], tokenizer: Any) -> None:
    """
    Before a run, call `check_tokenizer(tokenizer)` of each reward function that has such an attribute and takes a
    tokenizer; it raises an error if the function cannot work with this one.
    """
    for reward in rewards:
        function = with_tokenizer(reward, tokenizer)
        if isinstance(function, partial) and hasattr(function.func, "check_tokenizer"):
            function.func.check_tokenizer(function.keywords["tokenizer"])


def checked_reward(reward: Any, name: str) -> Any:
    """
    A reward function whose failures raise a [`RewardError`] that names it. Reward models stay as they are, since TRL
    calls them in its own way, and so does a [`CountingReward`], which never fails.

    A failure is an error, an exit, or a result that is not one number or `None` for each completion.
    """
    if isinstance(reward, Module | CountingReward):
        return reward

    async def call_async(**inputs: Any) -> list[float | None]:
        with _naming(name):
            scores = await reward(**inputs)
            return numbers(scores, len(inputs["completions"]))

    def call(**inputs: Any) -> list[float | None]:
        with _naming(name):
            scores = reward(**inputs)
            return numbers(scores, len(inputs["completions"]))

    return call_async if is_async_callable(reward) else call


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Within this context, any error or exit becomes a [`RewardError`] that names the reward function."""
    try:
        yield
    except (Exception, SystemExit) as error:  # an exit would end the run as if it had finished
        # A `RewardError` is a `RuntimeError`. If one is caused by the `StopIteration` that `contextlib` has thrown
        # into this generator, `contextlib` raises the `StopIteration` again in its place.
        cause = None if isinstance(error, StopIteration) else error
        raise RewardError(
            f"The reward function {name} has raised {error_text(error)}. "
            "Return a list with one number, or None, for each completion."
        ) from cause
