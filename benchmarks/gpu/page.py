"""The lines of all parts, as one JSON file and one page."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from opo_trl.checks.files import read_lines, write, write_json

from ..intervals import estimate
from ..pages import table
from .settings import PARTS, PHASES


ABOUT = """Each trainer started from the same model, with the same LoRA, prompts in the same order, and budgets of
completions and seconds; generation by Transformers. Seconds are those of training, without loading and measuring
accuracy. OPO with replay makes four passes over a rollout, the others one. Learning rates are not tuned for this task.
Accuracies are greedy, on the same problems, with Wilson's 95 % intervals; differences are paired by problem. These
intervals say nothing of another seed: one run each cannot say which method is ahead."""


def read_parts(output: Path) -> dict[str, dict[str, Any]]:
    """What each part has written so far, by its name."""
    parts = {}
    for name in PARTS:
        lines = read_lines(output / f"{name}.jsonl")
        if lines:
            parts[name] = summary(lines)
    return parts


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The lines of a part, in order of kind, with sums."""
    part: dict[str, Any] = {"end": "cut off"}
    for name in ("settings", "origin", "planned_memory", "end"):
        for line in lines:
            if name in line:
                part[name] = line[name]
    steps = [line for line in lines if "seconds" in line]
    seconds = {phase: sum(step["seconds"][phase] for step in steps) for phase in PHASES}
    if steps:
        latest = steps[-1]
        part["completions"] = latest["completions"]
        part["tokens"] = latest["tokens"]
        part["peak_memory"] = latest["peak_memory"]
        part["seconds"] = seconds
        part["tokens_per_second_of_generation"] = latest["tokens"] / seconds["generate"]
        part["tokens_per_second"] = latest["tokens"] / sum(seconds.values())
        part["update_of_a_step"] = of_later_steps([step["seconds"]["update"] for step in steps])
    part["accuracies"] = [line for line in lines if "accuracy" in line]
    part["steps"] = steps
    return part


def of_later_steps(seconds: list[float]) -> dict[str, float]:
    """Median and range of an optimizer step's seconds, without the first one, which compiles and allocates."""
    later = seconds[1:] or seconds
    return {"median": median(later), "low": min(later), "high": max(later)}


def write_report(output: Path, statuses: Mapping[str, str]) -> None:
    """Write `report.json` and `report.md`; `statuses` says of a part what is not in its lines."""
    parts = read_parts(output)
    for name, status in statuses.items():
        if name not in parts:
            parts[name] = {"end": status}
        elif parts[name]["end"] == "cut off":
            parts[name]["end"] = status
    write_json(output / "report.json", {"parts": parts})
    write(output / "report.md", page(parts))


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The page."""
    sections = ["# GRPO and OPO on one GPU", described(parts), ABOUT]
    measured = {name: part for name, part in parts.items() if "seconds" in part}
    if measured:
        sections += ["## Seconds and memory", costs(measured), *ratios(measured)]
    sections += ["## Accuracy over time", accuracies(parts), *differences(parts)]
    ends = [f"- {PARTS[name].title}: {part['end']}" for name, part in parts.items()]
    sections += ["## How each part ended", "\n".join(ends)]
    return "\n\n".join(sections) + "\n"


def described(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Device, versions and settings; of each part, where they differ."""
    titles: dict[str, list[str]] = {}
    for name, part in parts.items():
        if "origin" in part:
            text = f"{place(part['origin'])}\n\n{sizes(part['settings'])}"
            titles.setdefault(text, []).append(PARTS[name].title)
    if len(titles) == 1:
        return "".join(titles)
    return "\n\n".join(f"{', '.join(of_text)}: {text}" for text, of_text in titles.items())


def place(origin: Mapping[str, Any]) -> str:
    """Device, versions, commit and day."""
    device = origin["device"]
    if origin["device_memory"]:
        device += f" ({origin['device_memory'] / 1e9:.1f} GB)"
    versions = [f"CUDA {origin['cuda']}", f"Python {origin['python']}"]
    versions += [f"{package} {version}" for package, version in origin["versions"].items()]
    return f"{device}, {', '.join(versions)}; commit {origin['git_commit']}, {origin['date'][:10]}."


def sizes(settings: Mapping[str, Any]) -> str:
    """Model, data and how much of them."""
    text = (
        "{model} on {data}: {completions} completions of at most {max_completion_length} tokens, {rollout} in a "
        "rollout, {group} of each prompt, {steps_per_rollout} optimizer steps for each pass over it, {problems} "
        "problems for an accuracy."
    )
    return text.format_map(settings)


def costs(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each part."""
    rows = []
    for name, part in measured.items():
        seconds = [f"{part['seconds'][phase]:.1f}" for phase in PHASES]
        step = part["update_of_a_step"]
        memory = part["peak_memory"]
        row = [
            PARTS[name].title,
            f"{part['completions']}",
            f"{len(part['steps'])}",
            *seconds,
            f"{step['median']:.2f} ({step['low']:.2f}–{step['high']:.2f})",
            f"{part['tokens_per_second_of_generation']:.0f}",
            f"{part['tokens_per_second']:.0f}",
            f"{memory / 1e9:.2f}" if memory else "–",
        ]
        rows.append(row)
    header = ["", "completions", "optimizer steps", "generate, s", "score, s", "update, s", "update of a step, s"]
    header += ["tokens/s, generating", "tokens/s, of all", "peak memory, GB"]
    return table(header, rows)


def ratios(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What can be said of two parts in a sentence, and of the plan's memory."""
    sentences = []
    if {"grpotrainer", "grpo"} <= measured.keys():
        own = measured["grpo"]["update_of_a_step"]["median"]
        theirs = measured["grpotrainer"]["update_of_a_step"]["median"]
        sentences.append(f"An update with `objective: grpo` takes {own / theirs:.2f} of GRPOTrainer's time (medians).")
    for name, part in measured.items():
        if "planned_memory" in part:
            planned = part["planned_memory"]
            moment = max(planned, key=planned.get)
            sentences.append(
                f"The plan's peak for {PARTS[name].title} is {planned[moment] / 1e9:.2f} GB, at {moment}."
            )
    return [" ".join(sentences)]


def accuracies(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each accuracy."""
    rows = []
    for name, part in parts.items():
        measured = part.get("accuracies", [])
        for line in measured:
            found = line["accuracy"]
            row = [
                PARTS[name].title,
                f"{line['training_seconds']:.0f}",
                f"{line['completions']}",
                f"{found['accuracy']:.1%} [{found['low']:.1%}, {found['high']:.1%}]",
                points(line, measured[0]) if line is not measured[0] else "",
            ]
            rows.append(row)
    return table(["", "seconds of training", "completions", "accuracy", "gain in points"], rows)


def differences(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How far each part is from TRL's at their ends."""
    ends = {name: part["accuracies"][-1] for name, part in parts.items() if len(part.get("accuracies", [])) > 1}
    theirs = ends.pop("grpotrainer", None)
    if theirs is None:
        return []
    sentences = []
    for name, own in ends.items():
        budgets = f"after {own['completions']} and {theirs['completions']} completions"
        title = PARTS[name].title
        sentences.append(f"{title} less GRPOTrainer at the end: {points(own, theirs)} points, {budgets}.")
    return [" ".join(sentences)]


def points(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Difference of two accuracies on the same problems in points, with its paired 95 % interval."""
    pairs = zip(later["rewards"], earlier["rewards"], strict=True)
    scored = [(own, other) for own, other in pairs if own is not None and other is not None]
    found = estimate([100.0 * ((own >= 1) - (other >= 1)) for own, other in scored])
    low, high = found.interval or (found.mean, found.mean)
    return f"{found.mean:+.1f} [{low:+.1f}, {high:+.1f}]"
