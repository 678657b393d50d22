"""
Checks before a model is loaded: templates, and a reward's signature. A `ValueError` names the field and the fix.
"""

import inspect
import logging
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..data.rollouts import RECORDED
from ..rewards.scoring import IsolatedReward
from ..rollout.recorded import as_scored


logger = logging.getLogger(__name__)


def check_template(data: Dataset, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any]) -> None:
    """Check that the tokenizer can render the prompts of a dataset, with the tools that the model can call."""
    is_text = isinstance(data[0]["prompt"], str)
    if is_text and tools:  # TRL describes none in a prompt of text
        fix = "Set `prompt_style` to 'chat', or write each prompt as messages"
        raise ValueError(f"`tools` and `environment_factory` need conversations, but the prompts are text. {fix}.")
    if not is_text and tokenizer.chat_template is None:
        said = f"prompt_style='chat', but the tokenizer of {tokenizer.name_or_path!r} has no chat template"
        raise ValueError(f"{said}. Set `prompt_style` to 'plain', or add a chat_template.jinja there.")


def warn_of_template_options(args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name those of `chat_template_kwargs` that the chat template ignores, such as a misspelt one."""
    template, known = tokenizer.chat_template, inspect.signature(tokenizer.apply_chat_template).parameters
    for key in args.chat_template_kwargs or () if isinstance(template, str) else ():
        if key not in known and not re.search(rf"\b{re.escape(key)}\b", template):
            logger.warning(f"{key!r} of `chat_template_kwargs` has no effect: this model's chat template ignores it.")


def check_columns(rewards: Sequence[Any], data: Dataset, *, environments: bool) -> None:
    """Check that TRL can call the reward functions with the columns of a dataset, or of recorded rollouts."""
    if RECORDED in data.column_names:
        data = as_scored(data)
    given = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
    given += ["environments"] * environments
    columns = sorted({*data.column_names} - {"prompt", "completion"})
    for reward in rewards:
        function = reward.reward if isinstance(reward, IsolatedReward) else reward
        if not callable(function):  # a reward model
            continue
        try:
            inspect.signature(function).bind(**dict.fromkeys([*given, *columns]))
        except (ValueError, TypeError) as error:
            named = f"reward_funcs={getattr(function, '__name__', type(function).__name__)!r}"
            called = f"It is called by keyword, with {', '.join(given)} and the columns {columns}"
            fix = "Map columns (`columns: {solution: …}`), or let the function take `**columns`"
            raise ValueError(f"{named} cannot be called: {error}. {called}. {fix}.") from error
