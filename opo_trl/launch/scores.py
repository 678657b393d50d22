"""One task, measured by lm-eval and by us: both scores, and how many verdicts are the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data.arithmetic import arithmetic_reward
from ..data.problems import boxed
from ..data.prompts import Style, as_prompt
from ..evaluate import Evaluation
from ..rewards.accuracy import accuracy_reward
from ..rewards.boxes import final_answer
from ..rewards.scoring import IsolatedReward
from . import harness
from .harness import Verdict


_SEED = 0  # of our samples


@dataclass(frozen=True)
class Asking:
    """How our side asks: as the run did, unless the command line says otherwise."""

    style: Style
    instruction: str
    template: Mapping[str, Any]
    length: int
    sampling: Mapping[str, Any]
    system: str = ""


class Reward:
    """Our reward for the problems of a task: for the embedded one its own, otherwise `accuracy_reward`, isolated."""

    def __init__(self, embedded: bool):
        self.name = "arithmetic_reward" if embedded else "accuracy_reward"
        self._isolated = None if embedded else IsolatedReward(accuracy_reward)
        self.function: Callable[..., list[float | None]] = self._isolated or arithmetic_reward

    def __call__(self, completions: Sequence[str], solutions: Sequence[str]) -> list[float | None]:
        return self.function(completions=list(completions), solution=list(solutions))

    def close(self) -> None:
        if self._isolated is not None:
            self._isolated.close()


def problem_of(doc: Mapping[str, Any]) -> tuple[str, str] | None:
    r"""
    Problem and solution in a row of a task's dataset; `None` if its columns are not those of MATH or GSM8K.

    The solution is in the column `solution`, or is the column `answer`: all of it, or what follows `####`. Fewer names
    than training recognizes: an `answer` of another task may be the number of a choice.
    """
    if isinstance(doc.get("problem"), str) and isinstance(doc.get("solution"), str):
        return doc["problem"], doc["solution"]
    answer = doc.get("answer")
    if isinstance(doc.get("problem"), str) and isinstance(answer, str | int):
        return doc["problem"], str(answer)
    if isinstance(doc.get("question"), str) and isinstance(answer, str) and "####" in answer:
        return doc["question"], final_answer(boxed(answer)) or ""
    return None


def measure(
    lm: Any,
    task: Any,
    asking: Asking,
    reward: Reward,
    *,
    samples: int,
    ks: Sequence[int],
    limit: int | None,
    num_fewshot: int | None,
    length: int,
    batch_size: int,
) -> dict[str, Any]:
    """lm-eval's scores of a task and ours on the same problems: an entry of the JSON."""
    how = {"limit": limit, "num_fewshot": num_fewshot, "length": length, "batch_size": batch_size}
    about, verdicts = harness.score(lm, task, chat=asking.style == "chat", **how)
    first = next(iter(verdicts.values()))
    entry: dict[str, Any] = {
        "settings": {
            "prompt_style": asking.style,
            "instruction": asking.instruction,
            "system_prompt": asking.system,
            "chat_template_kwargs": dict(asking.template) if asking.style == "chat" else {},
            "max_completion_length": length,
            "num_fewshot": about["num_fewshot"],
            "lm_eval_task_version": about["version"],
            "lm_eval_decoding": "sampled" if about["sampled"] else "greedy" if about["generates"] else "likelihood",
            "problems": len(first),
            "prompts_cut": harness.count_cut(lm, [verdict.prompt for verdict in first], length),
            "samples": samples,
            "sampling": dict(asking.sampling),
        },
        "lm_eval": [
            {"metric": metric, "filter": name, **harness.summarize([verdict.right for verdict in found])}
            for (metric, name), found in verdicts.items()
        ],
    }
    problems = [problem_of(verdict.doc) for verdict in first]
    if not about["generates"] or None in problems:
        what = "compares likelihoods" if not about["generates"] else "has no columns problem and solution"
        entry["settings"]["not_ours"] = f"the task {what}"
        return entry

    asked, solutions = zip(*(problem for problem in problems if problem is not None), strict=True)
    prompts = [prompt_of(lm, problem, asking) for problem in asked]
    entry["settings"]["our_prompts_cut"] = harness.count_cut(lm, prompts, length)
    greedy, several = _ask(lm, prompts, solutions, asking, reward, samples, length)
    entry["opo_trl"] = {
        "reward": reward.name,
        "greedy": greedy.summary(),
        "sampled": several.summary(),
        "pass_at": {
            str(k): dict(zip(("low", "high"), several.pass_at_interval(k), strict=True), score=several.pass_at(k))
            for k in ks
        },
    }
    chosen = _to_compare(verdicts)
    if chosen is not None:
        rows = [
            {
                "problem": index,
                "text": asked[index],
                "target": theirs.target,
                "lm_eval": {"right": bool(theirs.right), "answer": theirs.answer, "completion": theirs.completion},
                "opo_trl": {
                    "right": judged(ours["reward"]),
                    "completion": ours["completion"],
                    "sampled_right": sum(
                        bool(judged(each["reward"]))
                        for each in several.samples[index * samples : (index + 1) * samples]
                    ),
                },
            }
            for index, (theirs, ours) in enumerate(zip(verdicts[chosen], greedy.samples, strict=True))
        ]
        same = sum(row["lm_eval"]["right"] is row["opo_trl"]["right"] for row in rows)
        entry["agreement"] = {"metric": chosen[0], "filter": chosen[1], "problems": len(rows), "same": same}
        entry["samples"] = rows
    return entry


def prompt_of(lm: Any, problem: str, asking: Asking) -> str:
    """What training asked, as text, with the chat template applied."""
    prompt = as_prompt(problem, asking.style, asking.instruction, asking.system)
    return prompt if isinstance(prompt, str) else lm.apply_chat_template(prompt)


def judged(reward: float | None) -> bool | None:
    """Our verdict on a completion; `None` if it is unscored."""
    return None if reward is None else reward >= 1.0


def _ask(
    lm: Any,
    prompts: Sequence[str],
    solutions: Sequence[str],
    asking: Asking,
    reward: Reward,
    samples: int,
    length: int,
) -> tuple[Evaluation, Evaluation]:
    """Our scores: greedy, and of several samples."""
    greedy = harness.generate(lm, prompts, {"do_sample": False, "temperature": 0.0, "max_gen_toks": length})
    torch.manual_seed(_SEED)
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    drawn = harness.generate(lm, repeated, {"do_sample": True, "max_gen_toks": length, **asking.sampling})
    rewards = reward(drawn, [solution for solution in solutions for _ in range(samples)])
    return _result(prompts, greedy, reward(greedy, solutions)), _result(repeated, drawn, rewards, samples)


def _result(
    prompts: Sequence[str], completions: Sequence[str], rewards: Sequence[float | None], per_problem: int = 1
) -> Evaluation:
    samples = [
        {"prompt": prompt, "completion": completion, "reward": reward}
        for prompt, completion, reward in zip(prompts, completions, rewards, strict=True)
    ]
    return Evaluation(samples, per_problem)


def _to_compare(verdicts: Mapping[tuple[str, str], Sequence[Verdict]]) -> tuple[str, str] | None:
    """Metric and filter to compare with our reward: the last and most lenient; `None` if it is no verdict."""
    last = list(verdicts)[-1][1]
    metrics = [metric for metric, name in verdicts if name == last]
    metric = "math_verify" if "math_verify" in metrics else metrics[0]
    chosen = (metric, last)
    return chosen if {float(verdict.right) for verdict in verdicts[chosen]} <= {0.0, 1.0} else None
