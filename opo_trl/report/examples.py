"""A few completions for the report of a run: the best and the worst of its first and of its last validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checks.secrets import mask_text
from ..metrics.log import number


LONGEST = 600  # characters of a prompt or a completion


@dataclass(frozen=True)
class Example:
    """A completion of a validation, as text that fits into a report."""

    step: int  # optimizer steps before it
    reward: str
    prompt: str
    completion: str


def examples(entries: Sequence[Mapping[str, Any]]) -> list[Example]:
    """
    The best and the worst completion of the first and of the last validation, of the entries of a run's
    `completions.jsonl`. One without a score counts as the worst.
    """
    if not entries:
        return []
    steps = [entry["step"] for entry in entries]
    chosen = []
    for step in sorted({min(steps), max(steps)}):
        of_validation = [entry for entry in entries if entry["step"] == step]
        best = max(of_validation, key=_score_or_lowest)
        worst = min(of_validation, key=_score_or_lowest)
        chosen.append(best)
        if worst is not best:
            chosen.append(worst)
    return [_example(entry) for entry in chosen]


def _score_or_lowest(entry: Mapping[str, Any]) -> float:
    """The reward of a completion; −∞ without one, so that it sorts as the worst."""
    reward = number(entry, "reward")
    return -math.inf if math.isnan(reward) else reward


def _example(entry: Mapping[str, Any]) -> Example:
    """A completion of a run as the report shows it: step, reward, and the beginning of its texts."""
    score = _score_or_lowest(entry)
    reward = f"{score:g}" if math.isfinite(score) else "no score"
    return Example(entry["step"], reward, _beginning(entry["prompt"]), _beginning(entry["completion"]))


def _beginning(content: Any) -> str:
    """The first 600 characters of a prompt or completion, without secrets, and how many more it has."""
    text = _text(content)
    n_more = len(text) - LONGEST
    masked = mask_text(text[:LONGEST])
    return f"{masked} … ({n_more:,} characters more)" if n_more > 0 else masked


def _text(content: Any) -> str:
    """A prompt or completion as one text; each of its messages begins with who says it."""
    if not isinstance(content, list):
        return str(content)
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in content)
