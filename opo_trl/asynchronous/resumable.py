"""
Which prompts asynchronous training has trained, in a checkpoint.

A group's id is the place of its prompt in the stream of the dataset's epochs. TRL saves the first place that has not
been collated. A resumed run then skips prompts, because a micro-batch is collated before it is trained. It also trains
prompts again, because groups are finished out of order, or never.
"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path


TRAINED = "trained_prompts.json"


def write_trained(folder: Path, groups: Iterable[int]) -> None:
    """Write groups to a checkpoint, as half-open ranges: 0, 1, 2, 5 are `[[0, 3], [5, 6]]`."""
    runs = itertools.groupby(enumerate(sorted(groups)), key=lambda pair: pair[1] - pair[0])
    found = [[place for _, place in run] for _, run in runs]
    (folder / TRAINED).write_text(json.dumps([[run[0], run[-1] + 1] for run in found]))


def read_trained(folder: Path) -> list[int]:
    """Groups that a checkpoint has trained; of a checkpoint by `AsyncGRPOTrainer`, those before the place it saved."""
    if (folder / TRAINED).exists():
        return [place for run in json.loads((folder / TRAINED).read_text()) for place in range(*run)]
    try:
        return list(range(json.loads((folder / "rollout_state.json").read_text())["prompt_index"]))
    except FileNotFoundError:
        return []
