"""What TRL has collected for the log and not logged yet: metrics, and the table of completions without its images."""

from collections.abc import Mapping
from typing import Any


def state_of(metrics: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """What is in TRL's `_metrics` and `_logs`, for [`load`]."""
    return {"metrics": metrics, "completions": {name: values for name, values in tables.items() if name != "images"}}


def load(state: Mapping[str, Any], metrics: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """
    Go on from a state of [`state_of`]: put it into TRL's `metrics` (mode → metric → values) and `tables` (column of
    the table of completions → values).
    """
    for mode, values_of_mode in state["metrics"].items():
        metrics[mode].update(values_of_mode)
    for name, values in state["completions"].items():
        if isinstance(values, dict):  # column → values, as rewards and extra columns have it
            for column, values_of_column in values.items():
                tables[name][column].extend(values_of_column)
        else:
            tables[name].extend(values)
