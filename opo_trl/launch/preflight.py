"""
Checks before a model is loaded: packages, vLLM server, model files, tokenizer, prompts and reward functions.

Each raises a `ValueError` that names the field, its value and the fix; an `ImportError` if a package is missing.
"""

import inspect
import math
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from trl import ModelConfig

from ..checks import paths
from ..checks.addresses import without_secrets
from ..checks.environment import check_installed
from ..checks.files import TEXT, read_json
from ..config import RolloutConfig
from ..data import tokenize_prompts
from ..data.prompts import shown
from ..data.rollouts import RECORDED
from ..rewards.scoring import IsolatedReward
from ..rollout import vllm_server
from ..rollout.prompts import check_columns as check_reserved
from ..rollout.recorded import as_scored
from . import foreign


# Arguments of `apply_chat_template` that TRL sets itself.
_GIVEN_TO_TEMPLATE = (
    *("conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict"),
    *("return_tensors", "padding"),
)

# Further arguments that the trainer passes to a reward function.
OF_TRAINER = ("trainer_state", "log_extra", "log_metric")

# Field of a recipe → the package that it needs, and what installs that.
_PACKAGES = {
    "use_vllm": ("vllm", "'opo_trl[vllm]'"),
    "use_peft": ("peft", "'opo_trl[peft]'"),
    "load_in_4bit": ("bitsandbytes", "'opo_trl[quantization]'"),
    "load_in_8bit": ("bitsandbytes", "'opo_trl[quantization]'"),
    "use_liger_kernel": ("liger_kernel", "liger-kernel"),
}


def check_packages(args: RolloutConfig, model_config: ModelConfig) -> None:
    """Check that the optional packages that a recipe needs are installed."""
    for name, (package, install) in _PACKAGES.items():
        if getattr(args, name, False) or getattr(model_config, name, False):
            check_installed(f"{name}=True", package, install=install, otherwise=f", or remove `{name}`")


def check_vllm_server(args: RolloutConfig) -> None:
    """Wait for TRL's vLLM server, and check that the port for sending it weights is free."""
    if not (args.use_vllm and args.vllm_mode == "server"):
        return
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    by_url = f"vllm_server_base_url={without_secrets(url)!r}"
    field = by_url if args.vllm_server_base_url else f"vllm_server_port={args.vllm_server_port}"
    await_health(url, field, args.vllm_server_timeout, start="trl vllm-serve")
    host, port = urlsplit(url).hostname, args.vllm_group_port
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        said = f"vllm_group_port={port} is taken: something on {host!r} already listens there"
        raise ValueError(f"{said}. Set `vllm_group_port` to a free port, through which weights are sent.")


def await_health(url: str, field: str, timeout: float, *, start: str) -> None:
    """Wait for a vLLM server, which the command `start` starts, as long as TRL would."""

    def decided(said: int | str | None) -> bool:
        return isinstance(said, str) or (said is not None and said < 500)  # a proxy answers before its server does

    said, shown = vllm_server.wait(url, timeout, until=decided), without_secrets(url)
    if not decided(said):
        answered = "nothing answered" if said is None else f"only status {said} was answered"
        seen = f"{answered} at {shown}/health within vllm_server_timeout={timeout} seconds"
        raise ValueError(f"{field}: {seen}. Start `{start}` there, or set the address of a running server.")
    if said != 200:
        raise ValueError(
            f"{field}: {shown}/health answered {said}; a healthy vLLM server answers 200. If another program listens "
            f"there, start `{start}` on a free port, and set the field to it. If it is a proxy, check the scheme, "
            "user and password of the address."
        )


def check_model(field: str, name: str, *, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """Check that a model, a folder or an id on the Hub, exists; returns its configuration."""
    folder = Path(name)
    with paths.readable(field, name):
        is_folder, is_adapter = folder.is_dir(), (folder / "adapter_config.json").is_file()
    if not is_folder and paths.is_local(name):
        raise paths.absent(field, name, f"Set `{field}` to a model's folder or Hub id.")
    if is_adapter:
        with paths.readable(field, name):
            base = read_adapter(folder).get("base_model_name_or_path")
        fix = f"Set `{field}` to that model or to a merged one, or `resume_from_checkpoint` to resume from it"
        raise ValueError(f"{field}={name!r} is an adapter for {base!r}, not a model. {fix}.")
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:
        fix = f"Set `{field}` to a model's folder or Hub id"
        if "trust_remote_code" in str(error):
            fix = "Set `trust_remote_code` to true if you have read that code and trust it"
        raise ValueError(f"{field}={name!r} cannot be loaded: {error} {fix}.") from error


def read_adapter(folder: Path) -> dict[str, Any]:
    """The configuration of a LoRA adapter; empty if the folder has none."""
    return read_json(folder / "adapter_config.json", {"base_model_name_or_path?": TEXT}, linked=True)


def load_tokenizer(name: str, *, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, and check that it has a vocabulary and a token that ends completions."""
    named, fix = f"model_name_or_path={name!r}", "Put the tokenizer files there."
    with foreign.library(f"{named} has no usable tokenizer", fix):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if len(tokenizer) < 2:
        raise ValueError(f"{named} has no tokenizer. {fix}")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{named}: no eos_token would end completions. Set `eos_token` in tokenizer_config.json.")
    return tokenizer


def check_template(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a dataset has prompts, and that the tokenizer can render them."""
    if "prompt" not in data.column_names:
        said = f"prompt_style='dataset', but the dataset has no column 'prompt', only {data.column_names}"
        raise ValueError(f"{said}. Rename its column, or set `prompt_style` to 'chat' or 'plain'.")
    if tokenizer.chat_template is None and not isinstance(data[0]["prompt"], str):
        said = f"prompt_style='chat', but the tokenizer of {tokenizer.name_or_path!r} has no chat template"
        raise ValueError(f"{said}. Set `prompt_style` to 'plain', or add a chat_template.jinja there.")


def check_template_options(args: RolloutConfig, tokenizer: PreTrainedTokenizerBase, prompt: Any) -> None:
    """Check that a chat template uses each of `chat_template_kwargs`."""
    options = cast(dict, args.chat_template_kwargs or {})
    named = f"chat_template_kwargs={options!r}"
    if options and isinstance(prompt, str):
        raise ValueError(f"{named} has no effect: plain-text prompts use no chat template. Remove it.")
    template, read = tokenizer.chat_template, inspect.signature(tokenizer.apply_chat_template).parameters
    for key in options:
        if key in _GIVEN_TO_TEMPLATE:
            raise ValueError(f"{named}: TRL sets {key!r} itself. Remove {key!r}.")
        if isinstance(template, str) and key not in read and not re.search(rf"\b{re.escape(key)}\b", template):
            whose = f"the chat template of {tokenizer.name_or_path!r}"
            raise ValueError(f"{named}: {key!r} has no effect: {whose} does not use it. Remove {key!r}.")


def check_prompts(
    splits: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    args: RolloutConfig,
    max_prompt_length: int | None,
    **in_template: Any,
) -> None:
    """
    Check the prompts as the model gets them: rendered up to the answer, of tokens that the model has, and in training
    short enough for its context with their completion.

    `splits` is field → prompts, first those for training, of at most `max_prompt_length` tokens; `in_template` are
    further arguments of the chat template, such as `tools`.
    """
    of_model = config.get_text_config()
    unknown = _unknown_tokens(tokenizer, getattr(of_model, "vocab_size", None))
    context = getattr(of_model, "max_position_embeddings", None) or math.inf
    room = context - (args.max_completion_length or 0)
    template_kwargs = cast(dict, args.chat_template_kwargs or {}) | in_template
    fits = max_prompt_length is not None and max_prompt_length <= room
    for position, (field, data) in enumerate(splits.items()):
        prompts = list(data["prompt"])
        measured = position == 0 and fits and not unknown  # all have been rendered, which takes long
        ids = [] if measured else tokenize_prompts(prompts, tokenizer, template_kwargs)
        if not isinstance(prompts[0], str):
            _check_turns(prompts, tokenizer, template_kwargs)
        for prompt, row in zip(prompts, ids, strict=False) if unknown else ():
            if absent := [token for token in row if token in unknown]:
                said = f"contains {unknown[absent[0]]!r}, token {absent[0]}, which the model does not have"
                raise ValueError(
                    f"{field}: {shown(prompt)} {said}. Remove it from the prompt, or resize the model's embedding."
                )
        longest = max(range(len(ids)), key=lambda index: len(ids[index]), default=None)
        if longest is not None and position == 0 and len(ids[longest]) > room:
            tokens = f"has {len(ids[longest])} tokens, the context has {context}"
            said = f"the longest prompt, {shown(prompts[longest])}, {tokens}"
            fix = "Shorten `max_completion_length`"
            if room > 0:
                fix = f"Set `max_prompt_length` to {room} to drop longer prompts, or shorten `max_completion_length`"
            raise ValueError(f"max_completion_length={args.max_completion_length} does not fit: {said}. {fix}.")


def _unknown_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int | None) -> dict[int, str]:
    """Tokens of a tokenizer that the model has no embedding of, which is harmless unless one is used."""
    if vocabulary is None:
        return {}
    unknown = {token: text for text, token in tokenizer.get_vocab().items() if token >= vocabulary}
    for name in ("eos_token", "pad_token"):
        if (token := getattr(tokenizer, f"{name}_id")) in unknown:
            said = f"{name}={unknown[token]!r} of its tokenizer is token {token}, but the model has {vocabulary}"
            fix = "Use the model's own tokenizer, or resize the model's embedding"
            raise ValueError(f"model_name_or_path={tokenizer.name_or_path!r}: {said}. {fix}.")
    return unknown


def _check_turns(
    prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> None:
    """Check that a template renders every turn and the start of an answer, once for each sequence of roles."""

    def render(turns: list[Any], start: bool = True) -> str:
        how: Any = {"add_generation_prompt": start, "tokenize": False, **template_kwargs}
        return str(tokenizer.apply_chat_template(turns, **how))

    named = f"The chat template of {tokenizer.name_or_path!r}"
    for prompt in {tuple(turn["role"] for turn in prompt): prompt for prompt in reversed(prompts)}.values():
        asked = render(prompt)
        for index, turn in enumerate(prompt):
            role, content = turn["role"], turn.get("content")
            if role == "assistant" or not isinstance(content, str):
                continue  # of earlier answers, some templates drop the reasoning
            if render([*prompt[:index], turn | {"content": f"{content} ?"}, *prompt[index + 1 :]]) == asked:
                raise ValueError(f"{named} leaves out the {role} turn {content[:60]!r}. Use the model's own.")
        rest = ""
        if render(prompt, start=False) == asked:
            with suppress(Exception):  # it may have no answers at all
                answered = render([*prompt, {"role": "assistant", "content": "Answer"}], start=False)
                rest = answered.removeprefix(asked) if answered.startswith(asked) else ""
        if "Answer" in rest and not rest.lstrip().startswith("Answer"):
            said = f"the model would have to write {rest.partition('Answer')[0]!r} before its answer"
            fix = "Add `{% if add_generation_prompt %}` with that to its chat_template.jinja"
            raise ValueError(f"{named} ignores add_generation_prompt: {said}. {fix}.")


def check_columns(rewards: Sequence[Any], data: Dataset, of_trainer: Sequence[str] = OF_TRAINER) -> None:
    """
    Check that TRL can call the reward functions with the columns of a dataset, or of recorded rollouts.

    `of_trainer` are the further arguments that the trainer passes, except to an [`IsolatedReward`].
    """
    whose, rename, fix = "the dataset", "`columns: {{{new}: {old}}}`", "Map yours: `columns: {solution: …}`"
    if RECORDED in data.column_names:
        whose, rename, fix = "the dataset of rollouts", "{new!r} in each row", "Add `solution` or `reward` to each row"
        data = as_scored(data)
    check_reserved(data, whose, rename=rename)
    columns = sorted({*data.column_names} - {"prompt", "completion"})
    for reward in rewards:
        isolated = isinstance(reward, IsolatedReward)
        function = reward.reward if isolated else reward
        if not callable(function):  # a reward model
            continue
        named = f"reward_funcs={getattr(function, '__name__', type(function).__name__)!r}"
        given = ["prompts", "completions", "completion_ids", *(() if isolated else of_trainer)]
        try:
            inspect.signature(function).bind(**dict.fromkeys([*given, *columns]))
        except (ValueError, TypeError) as error:
            if "'solution'" in str(error) and "solution" not in columns:
                said = f"{named} needs answers, and {whose} has no column with them, only {data.column_names}"
                raise ValueError(f"{said}. {fix}; or set `reward_funcs` to one that needs none.") from error
            called = f"It is called by keyword, with {', '.join(given)} and the columns {columns}"
            fix = "Rename a column, or set `reward_funcs` to a function such as `def reward(completions, **columns)`"
            raise ValueError(f"{named} cannot be called: {error}. {called}. {fix}.") from error
