r"""
Why lm-eval and our reward judge problems differently, of an evaluation that `opo-trl evaluate` has written.

    python -m benchmarks.lm_eval_agreement FOLDER

The two ask differently, so their completions differ, and so do their rules. To tell which it is, each rule judges the
other's completion, too. For every task of `FOLDER/evaluation.json`, this prints how many problems have different
verdicts for each reason, and the problems themselves.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opo_trl.launch import harness
from opo_trl.launch.evaluation import find_model, load_tasks
from opo_trl.launch.scores import judged, problem_of, reward_of
from opo_trl.report.evaluation import read_evaluation
from opo_trl.rewards.boxes import final_answer, without_reasoning


REASONS = {
    "prompt": "the completions differ; lm-eval's rule judges ours as our reward does",
    "no box": r"lm-eval takes an answer from our completion, in which our reward finds none in `\boxed{}`",
    "no match": "our reward finds an answer in our completion, and lm-eval's pattern finds none",
    "notation": "both find an answer in our completion, and only one takes it for the gold answer",
    "rule": "only one takes our completion for right; this task of lm-eval extracts and compares in one step",
    "unscored": "our reward cannot score our completion",
}


def rescore(task: Any, completions: Sequence[str], **how: Any) -> dict[tuple[str, str], list[harness.Verdict]]:
    """lm-eval's verdicts on given completions, one per problem: of a model that answers with them."""
    from lm_eval.api.model import LM

    class Replay(LM):
        def generate_until(self, requests, disable_tqdm=False):
            return [completions[request.doc_id] for request in requests]

        def loglikelihood(self, requests, disable_tqdm=False):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError

    return harness.score(Replay(), task, **how)[1]


def explain(entry: Mapping[str, Any], task: Any, reward: Callable[..., list]) -> list[dict[str, Any]]:
    """
    The verdict of each rule on the other's completion, and a key of [`REASONS`] or `None`, for each problem of a task.

    `entry` is its entry in `evaluation.json`, `task` lm-eval's.
    """
    settings, rows = entry["settings"], entry["samples"]
    how = {"limit": settings.get("limit"), "num_fewshot": settings["num_fewshot"], "batch_size": 1}
    chosen = (entry["agreement"]["metric"], entry["agreement"]["filter"])
    completions = [row["opo_trl"]["completion"] for row in rows]
    rescored = rescore(task, completions, length=settings["max_completion_length"], **how)[chosen]
    solutions = [(problem_of(verdict.doc) or ("", ""))[1] for verdict in rescored]
    again = reward(completions=[row["lm_eval"]["completion"] for row in rows], solution=solutions)
    found = []
    for row, verdict, theirs in zip(rows, rescored, again, strict=True):
        right, mine = row["lm_eval"]["right"], row["opo_trl"]["right"]
        found.append(
            {
                "problem": row["problem"],
                "theirs_by_our_reward": judged(theirs),
                "ours_by_lm_eval": bool(verdict.right),
                "reason": None if right is mine else _reason(mine, verdict, reward.__name__ == "accuracy_reward"),
            }
        )
    return found


def _reason(mine: bool | None, rescored: harness.Verdict, needs_box: bool) -> str:
    if mine is None:
        return "unscored"
    if bool(rescored.right) is mine:
        return "prompt"
    if needs_box and final_answer(without_reasoning(rescored.completion)) is None:
        return "no box"
    if rescored.answer == "[invalid]":
        return "no match"
    return "rule" if rescored.answer == rescored.completion else "notation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("folder", type=Path, help="folder with evaluation.json")
    content = read_evaluation(parser.parse_args().folder)
    settings = find_model(content["model"]).settings
    for label, entry in content["tasks"].items():
        if "agreement" not in entry:
            continue
        asked = entry["settings"]
        name = harness.EMBEDDED if asked["lm_eval_task"] == "arithmetic_embedded" else asked["lm_eval_task"]
        data = {name: Path(asked["data"])} if asked["data"] else {}
        task = load_tasks([name], data, settings, asked["num_fewshot"])[name][asked["lm_eval_task"]]
        rows = explain(entry, task, reward_of(name))
        counts = Counter(row["reason"] for row in rows)
        print(f"{label}: {counts[None]} of {len(rows)} problems have the same verdict")
        for reason, says in REASONS.items():
            if counts[reason]:
                which = ", ".join(str(row["problem"]) for row in rows if row["reason"] == reason)
                print(f"  {counts[reason]} × {reason}: {says} (problems {which})")


if __name__ == "__main__":
    main()
