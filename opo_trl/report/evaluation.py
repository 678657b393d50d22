"""
The evaluation of a model by `opo-trl evaluate`: its files, table and sentences.

    evaluation.json      scores of lm-eval and our own with intervals, and both verdicts on each problem, by task
    evaluation.md        the table, and how each task was measured
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checks.files import LONGEST, read_json, write, write_json, write_lines
from ..checks.text import one_line
from .pages import in_markdown, table
from .run_folder import read_summary


EVALUATION, EVALUATION_TABLE, LOCK = "evaluation.json", "evaluation.md", "_evaluation_lock"

logger = logging.getLogger(__name__)


def read_evaluation(folder: Path) -> dict[str, Any]:
    """`evaluation.json`; empty if there is none. A `ValueError` if it is not what [`write_evaluation`] writes."""
    path = folder / EVALUATION
    content = read_json(path)
    try:
        return described(content) and content if content else {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: {type(error).__name__}: {one_line(str(error))}. Delete that file, and run "
            "`opo-trl evaluate` again."
        ) from error


def steps_trained(folder: Path) -> int | None:
    """Optimizer steps of the finished run in a folder; a resumed run has more of them, and another model."""
    return read_summary(folder, linked=True).get("optimizer_steps")  # in the cache of the Hub, all files are links


def write_evaluation(folder: Path, content: Mapping[str, Any]) -> list[Path]:
    """
    Write `evaluation.json` and `evaluation.md`; returns their paths. If the first would be too large to be read again,
    the verdicts on each problem, with all completions, go to a file for each task, `evaluation-samples-TASK.jsonl`.
    """
    if len(json.dumps(content, indent=2, default=str)) >= LONGEST:
        shorter = {}
        for name, task in content["tasks"].items():
            shorter[name] = {part: found for part, found in task.items() if part != "samples"}
            if "samples" in task:
                stem = re.sub(r"[^\w.-]", "_", name)
                path = folder / f"evaluation-samples-{stem}.jsonl"
                write_lines(path, task["samples"])
                logger.warning(f"{EVALUATION} would be too large: the verdicts on each problem are in {str(path)!r}.")
        content = {**content, "tasks": shorter}
    write_json(folder / EVALUATION, content)
    write(folder / EVALUATION_TABLE, markdown(content))
    return [folder / EVALUATION, folder / EVALUATION_TABLE]


def described(content: Mapping[str, Any]) -> dict[str, Any]:
    """A table with a row per score, and sentences on how each task was measured and how many verdicts are the same."""
    rows, sentences = [], []
    for name, task in content["tasks"].items():
        rows += _rows(name, task)
        sentences.append(_how(name, task))
        if agreed := task.get("agreement"):
            same = f"{agreed['same']} of {agreed['problems']} problems the same verdict"
            sentences.append(f"{name}: lm-eval ({_metric(agreed)}) and our reward give {same}.")
    head = ["task", "measured by", "prompt", "decoding", "problems", "score [95 % interval]"]
    return {"table": table(head, rows), "sentences": sentences}


def markdown(content: Mapping[str, Any]) -> str:
    """The table and the sentences, as Markdown that reads as text."""
    said = described(content)
    rows = [[in_markdown(cell) for cell in row] for row in [said["table"]["head"], *said["table"]["rows"]]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    sentences = [f"- {in_markdown(sentence)}" for sentence in said["sentences"]]
    return "\n".join([f"# Evaluation of {in_markdown(content['model'])}", "", *lines, "", *sentences, ""])


def _rows(name: str, task: Mapping[str, Any]) -> list[list[str]]:
    settings, is_chat = task["settings"], task["settings"]["prompt_style"] == "chat"
    theirs = f"{settings['num_fewshot']}-shot, {'chat template' if is_chat else 'plain'}"
    decoding = settings["lm_eval_decoding"]
    found = [(f"lm-eval: {_metric(score)}", theirs, decoding, score["problems"], score) for score in task["lm_eval"]]
    if "opo_trl" in task:
        ours, problems, sampled = task["opo_trl"], settings["problems"], f"{settings['samples']} sampled"
        prompt = f"chat template{', instruction' if settings['instruction'] else ''}" if is_chat else "plain"
        found.append((f"opo_trl: {ours['reward']}", prompt, "greedy", problems, ours["greedy"]))
        found += [(f"opo_trl: pass@{k}", prompt, sampled, problems, passed) for k, passed in ours["pass_at"].items()]
    return [[name, *how, str(problems), interval(score)] for *how, problems, score in found]


def interval(score: Mapping[str, Any] | None) -> str:
    """A score or accuracy in a table, with its interval if it has one."""
    if score is None:
        return "–"
    value = score["score"] if "score" in score else score["accuracy"]
    if score["low"] is None:
        return f"{value:.4g}"
    return f"{value:.1%} [{score['low']:.1%}, {score['high']:.1%}]"


def _how(name: str, task: Mapping[str, Any]) -> str:
    settings = task["settings"]
    said = f"{name}: lm-eval {settings['lm_eval_version']}, task `{settings['lm_eval_task']}`, backend "
    said += f"{settings['backend']}, at most {settings['max_completion_length']:,} tokens per completion"
    if settings["chat_template_kwargs"]:
        said += f", chat template with {json.dumps(settings['chat_template_kwargs'])}"
    for field, whose in (("prompts_cut", "lm-eval's"), ("our_prompts_cut", "our")):
        if settings.get(field):
            said += f", {settings[field]} of {whose} prompts cut on the left to fit into the context"
    if "opo_trl" not in task:
        return f"{said}. Not measured with our reward: {settings['not_ours']}."
    for field, what in (("system_prompt", "system prompt"), ("instruction", "instruction")):
        if settings["prompt_style"] == "chat" and settings.get(field):
            said += f", our {what} “{settings[field]}”"
    return f"{said}, our samples at temperature {settings['sampling']['temperature']:g}."


def _metric(score: Mapping[str, Any]) -> str:
    return score["metric"] + (f", {score['filter']}" if score["filter"] != "none" else "")
