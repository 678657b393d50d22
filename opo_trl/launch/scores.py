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
from .harness import Verdicts


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


def reward_of(task: str) -> Callable[..., list[float | None]]:
    """Our reward for the problems of a task: for the embedded one its own, otherwise `accuracy_reward`, isolated."""
    return arithmetic_reward if task == harness.EMBEDDED else IsolatedReward(accuracy_reward)


def problem_of(doc: Mapping[str, Any]) -> tuple[str, str] | None:
    r"""
    Problem and solution in a row of a task's dataset; `None` if its columns are not those of MATH or GSM8K.

    Fewer names than training recognizes: an `answer` of another task may be the number of a choice.
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
    lm: Any, task: Any, asking: Asking, reward: Any, *, samples: int, ks: Sequence[int], **options: Any
) -> dict[str, Any]:
    """lm-eval's scores of a task and ours on the same problems: an entry of the JSON. `options`: [`harness.score`]."""
    chat, length = asking.style == "chat", asking.length
    about, verdicts = harness.score(lm, task, length=length, apply_chat_template=chat, **options)
    first = next(iter(verdicts.values()))
    settings = {
        "prompt_style": asking.style,
        "instruction": asking.instruction,
        "system_prompt": asking.system,
        "chat_template_kwargs": dict(asking.template) if chat else {},
        "max_completion_length": length,
        **about,
        "problems": len(first),
        "prompts_cut": harness.count_cut(lm, [verdict.prompt for verdict in first], length),
        "samples": samples,
        "sampling": dict(asking.sampling),
    }
    scores = [
        {"metric": metric, "filter": name, **harness.summarize([verdict.right for verdict in found])}
        for (metric, name), found in verdicts.items()
    ]
    entry: dict[str, Any] = {"settings": settings, "lm_eval": scores}
    problems = [problem_of(verdict.doc) for verdict in first]
    generates = about["lm_eval_decoding"] != "likelihood"
    if not generates or None in problems:
        what = "has no columns problem and solution" if generates else "compares likelihoods"
        return entry | {"settings": settings | {"not_ours": f"the task {what}"}}

    asked, solutions = zip(*(problem for problem in problems if problem is not None), strict=True)
    prompts = [prompt_of(lm, problem, asking) for problem in asked]
    settings["our_prompts_cut"] = harness.count_cut(lm, prompts, length)

    def solve(times: int = 1, **options: Any) -> Evaluation:
        repeated, solved = ([each for each in values for _ in range(times)] for values in (prompts, solutions))
        completions = harness.generate(lm, repeated, {"max_gen_toks": length, **options})
        scored = zip(repeated, completions, reward(completions=completions, solution=solved), strict=True)
        rows = [{"prompt": prompt, "completion": said, "reward": score} for prompt, said, score in scored]
        return Evaluation(rows, times)

    greedy = solve(do_sample=False, temperature=0.0)
    torch.manual_seed(_SEED)
    several = solve(samples, do_sample=True, **asking.sampling)
    pass_at = {
        str(k): dict(zip(("low", "high"), several.pass_at_interval(k), strict=True), score=several.pass_at(k))
        for k in ks
    }
    summaries = {"greedy": greedy.summary(), "sampled": several.summary()}
    entry["opo_trl"] = {"reward": reward.__name__, **summaries, "pass_at": pass_at}
    return entry | _agreement(verdicts, asked, greedy, several)


def _agreement(verdicts: Verdicts, asked: Sequence[str], greedy: Evaluation, several: Evaluation) -> dict[str, Any]:
    """Both verdicts on each problem, and how many are the same; empty if lm-eval's metric is no verdict."""
    name = list(verdicts)[-1][1]  # the last filter is the most lenient
    metrics = [metric for metric, of_filter in verdicts if of_filter == name]
    metric = "math_verify" if "math_verify" in metrics else metrics[0]
    found = verdicts[metric, name]
    if not {float(verdict.right) for verdict in found} <= {0.0, 1.0}:
        return {}
    rewards, n = [sample["reward"] for sample in several.samples], several.per_problem
    rows: list[dict[str, Any]] = [
        {
            "problem": index,
            "text": asked[index],
            "target": theirs.target,
            "lm_eval": {"right": bool(theirs.right), "answer": theirs.answer, "completion": theirs.completion},
            "opo_trl": {
                "right": judged(ours["reward"]),
                "completion": ours["completion"],
                "sampled_right": sum(bool(judged(reward)) for reward in rewards[index * n : (index + 1) * n]),
            },
        }
        for index, (theirs, ours) in enumerate(zip(found, greedy.samples, strict=True))
    ]
    same = sum(row["lm_eval"]["right"] is row["opo_trl"]["right"] for row in rows)
    return {"agreement": {"metric": metric, "filter": name, "problems": len(rows), "same": same}, "samples": rows}


def prompt_of(lm: Any, problem: str, asking: Asking) -> str:
    """What training asked, as text, with the chat template applied."""
    prompt = as_prompt(problem, asking.style, asking.instruction, asking.system)
    return prompt if isinstance(prompt, str) else lm.apply_chat_template(prompt)


def judged(reward: float | None) -> bool | None:
    """Our verdict on a completion; `None` if it is unscored."""
    return None if reward is None else reward >= 1.0
