"""Metrics of an evaluation by Transformers: means of the rewards, and `compute_metrics`, a function of the user's."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from transformers.trainer_utils import EvalPrediction


_TIMES = ("runtime", "samples_per_second", "steps_per_second")  # which Transformers adds

Sample = tuple[str, list[float], Mapping[str, Any]]  # completion, its rewards, and the row of the dataset


def check(compute_metrics: Any, args: Any, dataset: Any) -> None:
    """Check what is needed for the first time after an evaluation, on this dataset or on several by name."""
    if compute_metrics is not None and not callable(compute_metrics):
        raise TypeError(f"compute_metrics={compute_metrics!r:.60} is not a function. Pass one that takes predictions.")
    for name in ("include_for_metrics", "batch_eval_metrics") if compute_metrics is not None else ():
        if value := getattr(args, name):
            why = "`compute_metrics` is called once, with completions, rewards and `inputs`"
            raise ValueError(f"{name}={value!r} has no effect: {why}. Remove it.")
    names = [*dataset] if isinstance(dataset, dict) else []
    metric = args.metric_for_best_model
    follows = args.load_best_model_at_end or args.save_strategy == "best"
    known = tuple(f"{name}_" for name in names)
    if follows and names and metric and not metric.removeprefix("eval_").startswith(known):
        said = f"metric_for_best_model={metric!r} names no metric of the evaluation datasets {', '.join(names)}"
        raise ValueError(f"{said}. Set it to a metric of one of them, such as 'eval_{names[0]}_reward'.")


def means(trainer: Any, rewards: torch.Tensor) -> dict[str, list[float]]:
    """
    TRL's means of rewards `[N, number of reward functions]`, over all completions of an evaluation. TRL's own are
    means of its batches, which may differ in size and, on several processes, repeat rows.
    """
    total = (rewards * trainer.reward_weights.to(rewards.device)).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = torch.nan
    of_functions = zip(trainer.reward_func_names, rewards.nanmean(dim=0).tolist(), strict=False)
    return {f"rewards/{name}/mean": [mean] for name, mean in of_functions} | {"reward": [total.nanmean().item()]}


def metrics(
    compute_metrics: Callable[[EvalPrediction], Any], samples: Sequence[Sample], taken: Collection[str]
) -> dict[str, float]:
    """
    What the function returns for these samples; names without `eval_`, none of which is `taken`.

    Raises:
        `TypeError`: it is not a dictionary of numbers.
        `ValueError`: it has a name that is taken.
        `RuntimeError`: there is no sample.
    """
    if not samples:
        raise RuntimeError(
            "compute_metrics has nothing to measure: an override of `_generate_and_score_completions` does not call "
            "the parent's. Call it, or remove `compute_metrics`."
        )
    completions, rewards, rows = zip(*samples, strict=True)
    seen: Any = EvalPrediction(cast(Any, [*completions]), cast(Any, torch.tensor(rewards)))
    seen.inputs = [*rows]  # not in the constructor: `predictions, label_ids = seen` would have three values
    found = compute_metrics(seen)
    try:
        measured = {name.removeprefix("eval_"): float(value) for name, value in found.items()}
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        said = f"compute_metrics returned {found!r:.60}, not a dictionary of names and numbers"
        raise TypeError(f"{said}: {error}. Return such as {{'solved': 0.5}}.") from error
    if clash := measured.keys() & {*taken, *_TIMES}:
        name = min(clash)
        raise ValueError(f"compute_metrics returned {name!r}, which the evaluation itself logs. Call it 'my_{name}'.")
    if len(measured) < len(found):
        raise ValueError(f"compute_metrics returned {[*found]}, one of them with and without 'eval_'. Remove one.")
    return measured
