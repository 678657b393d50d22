"""Rewards and tools that run in the training process: an error names the reward, an exit does not end the run."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from trl.trainer.utils import is_async_callable

from ..trl import temporarily
from .errors import CountingReward, naming, numbers, told


if TYPE_CHECKING:
    from trl import GRPOTrainer


def checked(trainer: "GRPOTrainer") -> AbstractContextManager[None]:
    """
    Within this context, failures of a trainer's reward functions raise a [`RewardError`] that names the function.

    The functions are wrapped only while TRL calls them; otherwise the trainer holds the user's own objects.
    """
    named = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    return temporarily(trainer, reward_funcs=[checked_reward(reward, name) for reward, name in named])


def checked_reward(reward: Any, name: str) -> Any:
    """A reward function whose failures raise a [`RewardError`] that names it; models and isolated rewards are kept."""
    if isinstance(reward, Module | CountingReward):
        return reward

    async def call_async(**inputs: Any) -> list[float | None]:
        with naming(name):
            return numbers(await reward(**inputs), len(inputs["completions"]))

    def call(**inputs: Any) -> list[float | None]:
        with naming(name):
            return numbers(reward(**inputs), len(inputs["completions"]))

    return call_async if is_async_callable(reward) else call


def check_tools(trainer: "GRPOTrainer") -> None:
    """
    Show the model, as any error, that a tool of this batch exits, as code that a model writes may: TRL would end the
    run, or wait forever for an asynchronous tool. So too if no tokenizer can encode what a tool returns.
    """
    for tools in (*trainer._sync_tool_dicts, *trainer._async_tool_dicts):
        tools.update({name: _checked_tool(tool) for name, tool in tools.items()})


def _checked_tool(tool: Callable[..., Any]) -> Callable[..., Any]:
    async def call_async(**arguments: Any) -> Any:
        with _exit_is_an_error():
            return _encodable(await tool(**arguments))

    def call(**arguments: Any) -> Any:
        with _exit_is_an_error():
            return _encodable(tool(**arguments))

    return call_async if inspect.iscoroutinefunction(tool) else call


@contextmanager
def _exit_is_an_error() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(told(error)) from error


def _encodable(result: Any) -> Any:
    str(result).encode()  # half a surrogate pair, as in cut JSON
    return result
