"""
What `opo-trl evaluate` takes from lm-eval, EleutherAI's evaluation harness: its tasks, models and scores.

Only lm-eval's documented interface is used: `TaskManager`, `simple_evaluate`, `Instance`, the model classes, and
groups that change a task. It is an extra, so it is imported where it is used.
"""

import difflib
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, DatasetDict

from ..data.arithmetic import make_problems
from ..data.files import is_single_file, load_rows
from ..evaluate import wilson_interval
from ..rewards.errors import is_ctrl_c, told
from . import foreign
from .preflight import read_adapter


if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

# Our name of a task → lm-eval's; every other name is lm-eval's own.
ALIASES = {"math": "hendrycks_math500"}
EMBEDDED = "arithmetic"  # made here, from the embedded problems; lm-eval's tag of that name has other tasks
_SPLITS = ("train", "validation", "test")

# As `arithmetic_reward`: everything after the last `=` of the completion is the answer.
_ARITHMETIC = {
    "task": "arithmetic_embedded",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{problem}}",
    "doc_to_target": "{{solution.split('=')[-1]}}",
    "generation_kwargs": {"until": ["\n"], "do_sample": False},
    "filter_list": [
        {"name": "answer", "filter": [{"function": "regex", "regex_pattern": "([^=]*)$"}, {"function": "take_first"}]}
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "num_fewshot": 0,
    "metadata": {"version": 1.0},
}

# They repeat what was asked for here.
for _name in ("lm_eval.evaluator", "lm_eval.api.task", "lm_eval.config.task", "lm_eval.tasks"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@dataclass(frozen=True)
class Subject:
    """The model to evaluate: a folder or Hub id, maybe an adapter for it, and the settings of the run that made it."""

    name: str
    model: str
    adapter: str | None
    tokenizer: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """lm-eval's judgement of one problem."""

    doc: dict[str, Any]  # the problem's row
    prompt: str
    target: str  # its gold answer
    completion: str
    answer: str  # what the task's filter takes from the completion
    right: float  # the metric


Verdicts = dict[tuple[str, str], list[Verdict]]  # of each metric and filter


@functools.cache
def _manager(defaults: bool) -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=defaults)


def check_names(names: Sequence[str]) -> None:
    """Check that lm-eval has each task."""
    for name in names:
        if name != EMBEDDED and ALIASES.get(name, name) not in (known := _manager(True).all_tasks):
            near = difflib.get_close_matches(name, [EMBEDDED, *ALIASES, *known], n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "`lm_eval ls tasks` lists them."
            raise ValueError(f"--tasks {name}: lm-eval {version('lm_eval')} has no task {name!r}. {hint}")


def load_task(
    name: str, *, data: Path | None, levels: Sequence[str] | None, seed: int, num_fewshot: int | None
) -> dict[str, Any]:
    """
    Load a task with its data; a group or tag is several tasks.

    `name` is `"arithmetic"`, a key of [`ALIASES`], or a name of lm-eval; `data` is read instead of the Hub
    ([`_read`]); `levels` are those of the embedded problems, and `seed` shuffles them; `num_fewshot` are the examples
    in the prompt, instead of the task's own number.
    """
    theirs = ALIASES.get(name, name)
    manager = _manager(name != EMBEDDED)
    spec: Any = theirs
    if name == EMBEDDED:
        problems = Dataset.from_list(make_problems("test", levels)).shuffle(seed=seed)
        spec = {**_ARITHMETIC, "custom_dataset": lambda **_: DatasetDict(test=problems)}
    elif data is not None:
        if theirs not in manager.all_subtasks:
            raise ValueError(f"--data {name}={data}: {theirs!r} is a group of tasks. Name one of them in `--tasks`.")
        splits = _read(name, data)
        task = {"task": theirs, "custom_dataset": lambda **_: splits, "dataset_kwargs": None}
        if data.is_file():
            task |= {"test_split": "test", "training_split": None, "validation_split": None, "fewshot_split": None}
            task |= {"num_fewshot": 0} if num_fewshot == 0 else {}
        spec = {"group": "local", "task": [task]}  # lm-eval's own, with what is changed here
    try:
        tasks = manager.load([spec])["tasks"]
    except BaseException as error:  # a task's own code may raise anything, and exit
        if is_ctrl_c(error):
            raise
        raise ValueError(_why(name, data, error)) from error
    check_kind(name, tasks)
    return tasks


def _read(name: str, data: Path) -> DatasetDict:
    """
    The data of a task in a folder with files `train`, `validation` or `test`, in the formats of [`load_rows`], or in
    one such file, which is then the test split of a task without examples in the prompt.
    """
    files = {"test": data}
    if data.is_dir():
        files = {split: path for split in _SPLITS for path in data.glob(f"{split}.*") if is_single_file(str(path))}
    if not files:
        raise ValueError(f"--data {name}={data} has none of test.jsonl, .json, .parquet and .csv. Put one there.")
    try:
        return DatasetDict({split: load_rows(str(path)) for split, path in files.items()})
    except ValueError as error:
        raise ValueError(f"--data {name}={data}: {error}") from error


def check_kind(name: str, tasks: Mapping[str, Any]) -> None:
    """Check that tasks only need a model that reads and writes text."""
    for theirs, task in tasks.items():
        for attribute, what in (("UNSAFE_CODE", "runs the code that the model writes"), ("MULTIMODAL", "has images")):
            if getattr(task, attribute, False):
                raise ValueError(f"--tasks {name}: lm-eval's task {theirs!r} {what}. Use `lm_eval` itself.")


def _why(name: str, data: Path | None, error: BaseException) -> str:
    said = told(error).rstrip(".")
    if "lm-eval[math]" in str(error):
        said = "needs antlr4-python3-runtime 4.11, with which our reward cannot read `50\\%`"
        return f"--tasks {name} {said}. Use `math`, or run `lm_eval` in an environment of its own."
    if data is not None:
        fix = "Pass files with the splits and columns of the task's dataset on the Hub"
        return f"--data {name}={data} does not fit the task: {said}. {fix}."
    fix = f"Without a connection to the Hub, pass a folder with its data: `--data {name}=FOLDER`"
    return f"--tasks {name} cannot be loaded: {said}. {fix}."


def load_model(
    subject: Subject, *, backend: str, batch_size: int, template: Mapping[str, Any], ends_thinking: bool
) -> "LM":
    """
    Load a model with lm-eval's class for the backend, `"hf"` or `"vllm"`.

    `template` are arguments of the chat template. With `ends_thinking`, lm-eval reads only what follows `</think>`.
    """
    from lm_eval.api.registry import get_model

    adapter = subject.adapter
    options: dict[str, Any] = {"pretrained": subject.model, "tokenizer": subject.tokenizer}
    options |= {"think_end_token": "</think>"} if ends_thinking else {}
    if backend == "hf":
        options |= {"batch_size": batch_size, "chat_template_args": dict(template)}
        options |= {"device": "cuda" if torch.cuda.is_available() else "cpu"}
        options |= {"use_safetensors": True}  # pickled weights could run code
        options |= {"peft": adapter} if adapter else {}
    else:
        # This class takes `enable_thinking` only here, and loses it among the arguments of the template.
        rest = dict(template)
        thinking = rest.pop("enable_thinking", None)
        options |= {"enable_thinking": thinking, "chat_template_args": rest, "batch_size": "auto"}
        if adapter:
            rank = max(read_adapter(Path(adapter)).get("r") or 0, 16)
            options |= {"lora_local_path": adapter, "max_lora_rank": rank}
    with foreign.library(f"MODEL={subject.model!r} cannot be loaded with --backend {backend}"):
        return get_model(backend)(**options)


def score(lm: "LM", task: Any, *, length: int, **options: Any) -> tuple[dict[str, Any], Verdicts]:
    """
    Have lm-eval generate and score a task with its own prompts, in completions of at most `length` tokens.

    `options` are arguments of `simple_evaluate`, such as `limit`. Returns how lm-eval measured, and the verdicts of
    each metric and filter, in the order of the problems.
    """
    from lm_eval import evaluator, simple_evaluate

    # It would ask git for the commit of the current folder, and git complains where there is none.
    evaluator.get_git_commit_hash = lambda: None
    generates = task.OUTPUT_TYPE == "generate_until"
    options |= {"gen_kwargs": {"max_gen_toks": length}} if generates else {}
    results = simple_evaluate(model=lm, tasks=[task], task_manager=_manager(False), bootstrap_iters=0, **options)
    name = task.task_name
    verdicts: Verdicts = {}
    for sample in sorted(results["samples"][name], key=lambda sample: sample["doc_id"]):
        for metric in sample["metrics"]:
            answer = sample["filtered_resps"][0]
            verdict = Verdict(
                doc=sample["doc"],
                prompt=str(sample["arguments"][0][0]),
                target=str(sample["target"]),
                completion=sample["resps"][0][0] if generates else str(sample["resps"]),
                answer=str(answer[0] if isinstance(answer, list) and answer else answer),
                right=sample[metric],
            )
            verdicts.setdefault((metric, sample["filter"]), []).append(verdict)
    samples = (results["configs"][name].get("generation_kwargs") or {}).get("do_sample")
    about = {
        "num_fewshot": results["n-shot"][name],
        "lm_eval_task_version": results["versions"].get(name),
        "lm_eval_decoding": "likelihood" if not generates else "sampled" if samples else "greedy",
    }
    return about, verdicts


def generate(lm: "LM", prompts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Completions of prompts, by the same engine that serves lm-eval's tasks; `options` are `generation_kwargs`."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance("generate_until", doc={}, arguments=(prompt, {"until": [], **options}), idx=index)
        for index, prompt in enumerate(prompts)
    ]
    return lm.generate_until(requests)


def count_cut(lm: "LM", prompts: Sequence[str], length: int) -> int:
    """How many prompts leave no room for `length` tokens in the context: lm-eval cuts them on the left."""
    context = getattr(lm, "max_length", None)  # a scripted model has none
    return sum(len(lm.tok_encode(prompt)) > context - length for prompt in prompts) if context else 0


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Mean of a metric over problems with its 95 % interval: Wilson's if it is right or wrong, otherwise none."""
    numbers = [float(value) for value in values if isinstance(value, bool | int | float) or hasattr(value, "item")]
    if len(numbers) < len(values) or not numbers:  # such as the counts that perplexity is made of
        return {"score": math.nan, "low": None, "high": None, "problems": len(values)}
    mean, binary = sum(numbers) / len(numbers), set(numbers) <= {0.0, 1.0}
    low, high = wilson_interval(int(sum(numbers)), len(numbers)) if binary else (None, None)
    return {"score": mean, "low": low, "high": high, "problems": len(numbers)}
