r"""
Agreement of `accuracy_reward`, and of TRL's, with published verdicts on whether two answers are equal.

    python -m benchmarks.rewards.reward_agreement            print the table
    python -m benchmarks.rewards.reward_agreement --write    … and write it to reward_agreement.md
    python -m benchmarks.rewards.reward_agreement --list     … and list the verdicts with which opo_trl disagrees

`published_verdicts.jsonl` holds the verdicts: source, gold answer, answer, equal or not. They are the assertions of
graders' tests (`SOURCES`), each file in full. A verdict of several sources counts once. Verdicts with the reason
`left_out` are in the file but not used:

- free text: an answer in a sentence without a box, since finding it there is another task;
- several boxes, of which the source takes the last and this project all (`benchmarks/rewards/reward_agreement.md`);
- tolerance, and an option on percentages: a number and its rounded form, or 75 and 0.75, called equal;
- not an answer, or impossible in a box: empty on both sides, `None`, a bare backslash at the end, an open brace;
- a complete solution of more than 300 characters as gold answer; another reward of TRL's; and one verdict that its
  source itself calls incorrect.

A completion of more than 300 characters is cut to the text from its box on. KAS writes `sin(pi x)` and `x^(1/5)`,
which was translated to LaTeX (backslashes of functions and of `\pi`, braces of exponents, `\cdot`, `\le` and
`\neq`). The file does not contain 22 files of math-validation, mostly on solving equations, and math-verify's lists
with options.

Both rewards are called as in training: the answer in a box, and the gold answer as a dataset's column. TRL reads the
gold answer as LaTeX between dollar signs or, if there is no other choice, without; both forms are tried on all
verdicts, and the table has the one with which TRL agrees more often.
"""

import argparse
import functools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from trl.rewards import accuracy_reward as trl_reward

from opo_trl.rewards import accuracy_reward

from ..pages import fill, table


VERDICTS = Path(__file__).with_name("published_verdicts.jsonl")
PAGE = Path(__file__).resolve().with_name("reward_agreement.md")
SOURCES = {
    "math-verify": ("huggingface/Math-Verify 0.9.0, `tests/`: its lists of gold, pred, expected", "Apache-2.0"),
    "MARIO_EVAL": ("MARIO-Math-Reasoning/MARIO_EVAL, `math_evaluation/tests/test_is_equiv.py`", "MIT"),
    "NeMo-Skills": ("NVIDIA/NeMo-Skills, `tests/test_math_equal.py`, two versions", "Apache-2.0"),
    "SkyThought": ("NovaSky-AI/SkyThought, tests of `math_equal` in `math_parsing_util`", "Apache-2.0"),
    "inspect_ai": ("UKGovernmentBEIS/inspect_ai, `tests/scorer/test_math.py`, `math_cases.json`", "MIT"),
    "TRL and open-r1": (
        "huggingface/trl and open-r1, `tests/test_rewards.py`: accuracy rewards",
        "Apache-2.0",
    ),
    "ms-swift": ("modelscope/ms-swift, tests of `MathAccuracy`", "Apache-2.0"),
    "Eval360": ("ifm-ai/Eval360, `tests/test_math_verify.py`", "Apache-2.0"),
    "math-validation": ("pie-framework/math-validation, 14 files of `src/fixtures/latex-equal/symbolic`", "ISC"),
    "KAS": ("Khan/perseus, `packages/kas/src/__tests__/comparing.test.ts`, without the option `form`", "MIT"),
}


class Verdict(TypedDict):
    """A line of the file that is used."""

    source: str
    gold: str
    answer: str
    equal: bool


def published() -> list[Verdict]:
    """The verdicts that are used, in the order of the file."""
    lines = map(json.loads, VERDICTS.read_text().splitlines())
    return [verdict for verdict in lines if "left_out" not in verdict]


def bare(latex: str) -> str:
    """A formula without its delimiters."""
    return latex if "boxed" in latex else re.sub(r"(?<!\\)\$|\\[\[\]()]", "", latex)


def completion(answer: str) -> str:
    """The answer in a box, unless it has one already."""
    return answer if "boxed" in answer else f"The answer is $\\boxed{{{bare(answer)}}}$."


def ours(verdict: Verdict) -> float | None:
    return accuracy_reward([completion(verdict["answer"])], [bare(verdict["gold"])])[0]


def trl(verdict: Verdict, sign: str) -> float | None:
    gold = verdict["gold"] if "boxed" in verdict["gold"] else f"{sign}{bare(verdict['gold'])}{sign}"
    return trl_reward([[{"content": completion(verdict["answer"])}]], [gold])[0]


def agreed(verdicts: list[Verdict], scores: list[float | None]) -> int:
    return sum(score == verdict["equal"] for verdict, score in zip(verdicts, scores, strict=True))


def accepted(verdicts: list[Verdict], scores: list[float | None]) -> int:
    return sum(score == 1 and not verdict["equal"] for verdict, score in zip(verdicts, scores, strict=True))


def score(verdicts: list[Verdict]) -> dict[str, list[float | None]]:
    """Scores of both rewards, TRL's with the gold answers in the form with which it agrees more often."""
    rewards: list[Callable[[Verdict], float | None]] = [functools.partial(trl, sign=sign) for sign in ("$", "")]
    forms = [[reward(verdict) for verdict in verdicts] for reward in rewards]
    return {
        "opo_trl": [ours(verdict) for verdict in verdicts],
        "TRL": max(forms, key=functools.partial(agreed, verdicts)),
    }


def agreement(verdicts: list[Verdict], scores: dict[str, list[float | None]]) -> str:
    """The table."""
    lines = []
    for source in [*SOURCES, "all"]:
        rows = [index for index, verdict in enumerate(verdicts) if source in (verdict["source"], "all")]
        part = [verdicts[index] for index in rows]
        ours, trl = ([scores[name][index] for index in rows] for name in ("opo_trl", "TRL"))
        wrong = sum(not verdict["equal"] for verdict in part)
        numbers = [len(part), agreed(part, ours), agreed(part, trl), wrong, accepted(part, ours), accepted(part, trl)]
        lines.append([source, *map(str, numbers)])
    head = ["source", "verdicts", "opo_trl agrees", "TRL agrees", "wrong ones", "opo_trl accepts", "TRL accepts"]
    return table(head, lines)


def main():
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.name}")
    parser.add_argument("--list", action="store_true", help="list the verdicts with which opo_trl disagrees")
    arguments = parser.parse_args()
    verdicts = published()
    scores = score(verdicts)
    print(agreement(verdicts, scores))
    if arguments.write:
        PAGE.write_text(fill(PAGE.read_text(), {"agreement": agreement(verdicts, scores)}))
    if arguments.list:
        for verdict, of_ours, of_trl in zip(verdicts, scores["opo_trl"], scores["TRL"], strict=True):
            if of_ours != verdict["equal"]:
                print(verdict["source"], verdict["equal"], of_ours, of_trl, verdict["gold"], "|", verdict["answer"])


if __name__ == "__main__":
    main()
