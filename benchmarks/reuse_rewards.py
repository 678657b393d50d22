"""A reward of the benchmark of reuse that is not 0 or 1."""

from typing import Any


def share_of_digits(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
    """Reward the share of the answer's digits that are right, place by place from the right; 1.0 if all are."""

    def share(completion: str, worked: str) -> float:
        found, right = (text.rpartition("=")[2] for text in (completion, worked))
        places = max(len(found), len(right))
        return sum(a == b for a, b in zip(reversed(found), reversed(right), strict=False)) / places

    return [share(completion, worked) for completion, worked in zip(completions, solution, strict=True)]
