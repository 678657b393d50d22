"""
Evaluate a trained model with lm-eval, next to our own accuracy and pass@k on the same problems.

    opo-trl evaluate runs/qwen3 --tasks gsm8k,math [--data gsm8k=FOLDER] [--limit 200] [--samples 8]

MODEL is the folder of a run, of a model or of a LoRA adapter, an id on the Hub, or `arithmetic`, the embedded model.
lm-eval generates with its own prompts and scores by its own rules. Our side asks as the run did (prompt style,
instruction, system prompt, arguments of the chat template, completion length, sampling) and scores with our reward.
Both use the same engine. What the numbers mean, and why they differ: `docs/report.md`.
"""

import argparse
import fcntl
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from ..checks import files, paths
from ..checks.environment import check_installed
from ..checks.errors import under_way
from ..checks.weights import check_adapter, check_finite, check_weights
from ..data import INSTRUCTION, gym
from ..data.arithmetic import base_model_path
from ..report import evaluation as stored
from ..report.run_folder import environment, is_run, read_settings
from ..report.run_report import write_or_say_why
from . import harness
from .harness import Subject
from .preflight import check_model, load_tokenizer, read_adapter
from .scores import Asking, measure, reward_of


logger = logging.getLogger(__name__)

_BATCH, _LENGTH = 8, 1024  # without a run
_LEAST = {"limit": 1, "samples": 1, "max_completion_length": 1, "batch_size": 1, "num_fewshot": 0}
# The embedded model's context has 128 tokens, and its completions at most 20.
_OF_EMBEDDED = {"prompt_style": "plain", "max_completion_length": 32, "per_device_eval_batch_size": 100}


def _make_parser() -> argparse.ArgumentParser:
    text = "Evaluate a model with lm-eval, next to our own accuracy and pass@k on the same problems."
    parser = argparse.ArgumentParser(prog="opo-trl evaluate", description=text)
    parser.add_argument("model", metavar="MODEL", help="folder of a run, model or adapter; Hub id; or arithmetic")
    parser.add_argument("--tasks", required=True, help="gsm8k, math, arithmetic, or names of lm-eval, with commas")
    text = "read a task's data from a file, or a folder with train.jsonl and test.jsonl, instead of the Hub"
    parser.add_argument("--data", action="append", default=[], metavar="TASK=PATH", help=text)
    parser.add_argument("--limit", type=int, help="only the first LIMIT problems of each task (default: all)")
    parser.add_argument("--samples", type=int, default=4, help="our completions per problem (default: 4)")
    parser.add_argument("--k", type=int, nargs="+", help="pass@k to report (default: 1, 2, 4 … up to --samples)")
    parser.add_argument("--num_fewshot", type=int, help="examples in lm-eval's prompt (default: the task's)")
    parser.add_argument("--prompt_style", choices=("chat", "plain"), help="default: the run's")
    parser.add_argument("--max_completion_length", type=int, help=f"in tokens (default: the run's, or {_LENGTH})")
    parser.add_argument("--batch_size", type=int, help=f"with --backend hf (default: the run's, or {_BATCH})")
    parser.add_argument("--backend", choices=("hf", "vllm"), default="hf", help="what generates (default: hf)")
    parser.add_argument("--base_model", help="model of an adapter, if it is not where the adapter says")
    parser.add_argument("--output", type=paths.path, help="folder for the results (default: MODEL, if it is a folder)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str]) -> None:
    """What `opo-trl evaluate` does."""
    arguments = _make_parser().parse_args(argv)
    names = _check_numbers(arguments)
    output = _output(arguments)
    subject = find_model(arguments.model, arguments.base_model)
    check_installed("`opo-trl evaluate`", "lm_eval", install="'opo_trl[evaluate]'")
    if arguments.backend == "vllm":
        check_installed("--backend vllm", "vllm", install="'opo_trl[vllm]'")
    if subject.adapter is not None:
        check_installed("MODEL is an adapter, which", "peft", install="'opo_trl[peft]'")
    data = _data(arguments.data, names)
    harness.check_names(names)
    config = check_model("MODEL", subject.model, revision=None, trust_remote_code=False)
    base = check_weights("MODEL", subject.model, {"use_safetensors": True})
    if subject.adapter and base is not None:
        check_adapter("MODEL", subject.adapter, base)
    tokenizer = load_tokenizer(subject.tokenizer, revision=None, trust_remote_code=False)
    asking = _asking(arguments, subject.settings, tokenizer)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and asking.length >= context:
        said = f"leaves no room for a prompt: the model's context has {context} tokens"
        raise ValueError(f"max_completion_length={asking.length} {said}. Set `--max_completion_length` to less.")
    loaded = load_tasks(names, data, subject.settings, arguments.num_fewshot)
    batch_size = arguments.batch_size or subject.settings.get("per_device_eval_batch_size") or _BATCH
    how: dict[str, Any] = {"backend": arguments.backend, "batch_size": batch_size}
    how |= {"template": asking.template if asking.style == "chat" else {}}
    how |= {"ends_thinking": "</think>" in tokenizer.get_vocab()}
    lm = harness.load_model(subject, **how)
    check_finite(None, getattr(lm, "model", None))  # that of vLLM is in another process
    output.mkdir(parents=True, exist_ok=True)
    about = {"model": subject.name, "optimizer_steps": stored.steps_trained(Path(subject.name))}
    about |= {"environment": environment()}
    ks = sorted(set(arguments.k or [2**i for i in range(arguments.samples.bit_length())]))
    measured, written = {}, []
    for name, tasks in loaded.items():
        reward = reward_of(name)
        for theirs, task in tasks.items():
            how = {"limit": arguments.limit, "num_fewshot": arguments.num_fewshot, "batch_size": batch_size}
            entry = measure(lm, task, asking, reward, samples=arguments.samples, ks=ks, **how)
            entry["settings"] |= {"lm_eval_task": theirs, "lm_eval_version": version("lm_eval")}
            entry["settings"] |= {"backend": arguments.backend, "limit": arguments.limit}
            entry["settings"] |= {"data": str(data[name]) if name in data else None}
            label = name if len(tasks) == 1 else theirs
            measured[label] = entry
            try:
                with under_way():
                    written = _add(output, about, {label: entry})  # at once: the next task may take hours, or fail
            except Exception:
                print(stored.markdown({"model": subject.name, "tasks": measured}))
                raise
    print(stored.markdown({"model": subject.name, "tasks": measured}))
    print(*written, sep="\n")


def _add(output: Path, about: Mapping[str, Any], tasks: Mapping[str, Any]) -> list[Path]:
    """
    Add tasks to the files of an evaluation, as other processes may do at the same time; returns all their paths.
    An earlier evaluation of another model, or after other optimizer steps, is kept under another name.
    """
    with files.open_to_append(output / stored.LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        earlier = stored.read_evaluation(output)
        model, steps = str(earlier.get("model", "")), earlier.get("optimizer_steps")
        if earlier and _is_of(model, output, about["model"]) and steps == about["optimizer_steps"]:
            tasks = {**earlier["tasks"], **tasks}
        elif earlier:
            kept = files.free(output / f"evaluation-{steps or 'unfinished'}.json")
            os.replace(output / stored.EVALUATION, kept)
            after = "of an unfinished run" if steps is None else f"after {steps} optimizer steps"
            logger.warning(f"The evaluation of {model!r} {after} is kept in {str(kept)!r}.")
        written = stored.write_evaluation(output, {**about, "tasks": tasks})
    if is_run(output):
        write_or_say_why(output)
    return written


def _check_numbers(arguments: argparse.Namespace) -> list[str]:
    """Check what needs no library; the names of the tasks."""
    names = [name.strip() for name in arguments.tasks.split(",")]
    if not all(names):
        raise ValueError(f"--tasks {arguments.tasks!r} has an empty name. Name tasks: `--tasks gsm8k,math`.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--tasks {arguments.tasks} names {twice[0]!r} twice. Remove one of them.")
    for name, least in _LEAST.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value} is not allowed. Set it to {least} or more.")
    for k in arguments.k or ():
        if not 1 <= k <= arguments.samples:
            fix = "Set `--k` to numbers from 1 to that, or raise `--samples`."
            raise ValueError(f"--k {k} is not possible with --samples {arguments.samples}. {fix}")
    return names


def _output(arguments: argparse.Namespace) -> Path:
    """Folder for the results; it can be written, and holds no evaluation of another model, which would be replaced."""
    output = arguments.output
    if output is None:
        output = Path(arguments.model)
        if not output.is_dir():
            said = f"MODEL={arguments.model!r} is not a folder, so there is no place for the results"
            raise ValueError(f"{said}. Set `--output` to one, or correct MODEL.")
    paths.check_folder("output", output)
    earlier = str(stored.read_evaluation(output).get("model", ""))
    lost, model = "", arguments.model
    if earlier and not _is_of(earlier, output, model):
        lost = f"{str(output / stored.EVALUATION)!r} is the evaluation of {earlier!r}, not of MODEL={model!r}"
    elif not earlier and (output / stored.EVALUATION_TABLE).exists():
        lost = f"{str(output / stored.EVALUATION_TABLE)!r} is not of an earlier evaluation"
    if lost:
        raise ValueError(f"{lost}, and would be replaced. Set `--output` to another folder.")
    return output


def _is_of(earlier: str, output: Path, model: str) -> bool:
    """Whether a folder's evaluation of the model `earlier` is of a model, which may have had another path then."""
    own = output.resolve() == Path(model).resolve() and Path(earlier).name in ("", "..", output.resolve().name)
    return own or os.path.realpath(earlier) == os.path.realpath(model)


def find_model(name: str, base_model: str | None = None) -> Subject:
    """Find the model in a folder, its base model if it is an adapter, and the settings of the run that made it."""
    paths.check_name("MODEL", name)
    folder = Path(name)
    with paths.readable("MODEL", name):
        is_folder = folder.is_dir()
        is_adapter = is_folder and (folder / "adapter_config.json").is_file()
    if base_model is not None and not is_adapter:
        raise ValueError(f"--base_model {base_model} has no effect: MODEL={name!r} is not an adapter. Remove it.")
    if name == harness.EMBEDDED and not is_folder:
        return Subject(name, base_model_path(), None, base_model_path(), _OF_EMBEDDED)
    if not is_folder:
        return Subject(name, name, None, name, {})
    near = folder.resolve().parent if folder.resolve().name.startswith("checkpoint-") else folder
    settings = read_settings(near, linked=True)  # as in the cache of the Hub
    if is_adapter:
        model = base_model or read_adapter(folder).get("base_model_name_or_path")
        if not model or (not Path(model).is_dir() and paths.is_local(model)):
            fix = "Set `--base_model` to that model's folder or Hub id"
            raise ValueError(f"MODEL={name!r} is an adapter for the model {model!r}, which is not here. {fix}.")
        tokenizer = name if (folder / "tokenizer_config.json").is_file() else model
        return Subject(name, model, name, tokenizer, settings)
    if not (folder / "config.json").is_file():
        hint = "Pass the folder of a model, which has a config.json."
        if checkpoints := sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime):
            hint = f"Its run has not finished: pass its last checkpoint, {str(checkpoints[-1])!r}."
        raise ValueError(f"MODEL={name!r} holds no model. {hint}")
    return Subject(name, name, None, name, settings)


def _data(given: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """Task → file or folder of its data."""
    data: dict[str, Path] = {}
    for entry in given:
        name, sign, path = entry.partition("=")
        if not sign or not path:
            raise ValueError(f"--data {entry!r} names no path. Write it as `--data gsm8k=FOLDER`.")
        for why, holds in {
            "is not in `--tasks`": name not in names,
            "has its data embedded": name == harness.EMBEDDED,
            "has two `--data`": name in data,
        }.items():
            if holds:
                raise ValueError(f"--data {entry}: task {name!r} {why}. Remove it.")
        paths.check_name("data", path)
        with paths.readable("data", path):
            if not Path(path).exists():
                raise ValueError(f"--data {entry}: {path!r} does not exist. Pass an existing file or folder.")
        data[name] = Path(path)
    return data


def _asking(arguments: argparse.Namespace, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Asking:
    asked = {"style": settings.get("prompt_style"), "instruction": settings.get("instruction"), "system": ""}
    asked |= settings.get("asked") or {}
    style = arguments.prompt_style or asked["style"]
    if style not in ("chat", "plain"):
        style = "chat" if tokenizer.chat_template else "plain"
    if style == "chat" and not tokenizer.chat_template:
        said = f"prompt_style='chat' is impossible: MODEL={arguments.model!r} has no chat template"
        raise ValueError(f"{said}. Set `--prompt_style plain`, or put a chat_template.jinja there.")
    # `accuracy_reward` scores these tasks, and cannot read what reasoning-gym's instruction asks for.
    instruction = INSTRUCTION if asked["instruction"] in (None, gym.INSTRUCTION) else asked["instruction"]
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: settings.get(name, GRPOConfig.__dataclass_fields__[name].default) for name in names}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    template = settings.get("chat_template_kwargs") or {}
    length = arguments.max_completion_length or settings.get("max_completion_length") or _LENGTH
    return Asking(style, instruction, template, length, sampling, asked["system"])


def load_tasks(
    names: Sequence[str], data: Mapping[str, Path], settings: Mapping[str, Any], num_fewshot: int | None
) -> dict[str, dict[str, Any]]:
    """Task → lm-eval's tasks of that name. The embedded problems have the levels that the run reported, if any."""
    levels, seed = None, settings.get("subset_seed", 42)
    if settings.get("dataset_name") == harness.EMBEDDED:
        fields = ("report_levels", "validation_levels", "levels")
        levels = next((settings[name] for name in fields if settings.get(name)), None)
    options = {"levels": levels, "seed": seed, "num_fewshot": num_fewshot}
    loaded = {name: harness.load_task(name, data=data.get(name), **options) for name in names}
    for name, path in data.items():  # examples in a prompt must not come from the problems that are evaluated
        for task in loaded[name].values() if path.is_file() else ():
            shots, fixed = task.get_config("num_fewshot") or 0, task.get_config("fewshot_config")
            shots = num_fewshot if num_fewshot is not None and shots else shots
            if shots and not (fixed and fixed.samples):
                said = f"is one file, but the task's prompt has {shots} examples from the training split"
                raise ValueError(f"--data {name}={path} {said}. Pass a folder with both, or set `--num_fewshot 0`.")
    return loaded
