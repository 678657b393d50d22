r"""
Agreement of `accuracy_reward` with published verdicts on whether two answers are equal, beside that of TRL's.

    pip download --no-deps --no-binary :all: math-verify==0.9.0 && tar xzf math_verify-0.9.0.tar.gz
    python benchmarks/reward_agreement.py math_verify-0.9.0/tests [--list]

The verdicts are those of math-verify's own tests: gold answer, prediction, and 1 or 0. They are read from the test
files without running them. What both rewards are asked about is an answer in a box: a prediction that has boxes is
the completion as it is, and one that is a single formula or a bare expression is put into a box. Free text around an
answer without a box is left out, since finding the answer in it is another task, as are verdicts that depend on
options.
"""

import argparse
import ast
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from trl.rewards import accuracy_reward as trl_reward

from opo_trl.rewards import accuracy_reward


Case = tuple[str, str, int]  # gold answer, completion, verdict

_FORMULA = re.compile(r"\s*(?:\$\$?([^$]+)\$\$?|\\\[(.+)\\\]|\\\((.+)\\\))\s*\.?\s*", re.DOTALL)
_WORDS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}(?![A-Za-z]*\})|[€²]")


def published(folder: Path) -> Iterator[Case]:
    """Every parameter list `gold, pred, expected` of the test files."""
    for file in sorted(folder.glob("test_*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.parametrize"):
                continue
            try:
                names, rows = (ast.literal_eval(argument) for argument in call.args[:2])
            except ValueError:  # an expression of sympy's
                continue
            if re.fullmatch(r"gold, ?pred, ?(expected|result)", names):
                yield from ((gold, pred, int(verdict)) for gold, pred, verdict in rows)


def boxed(case: Case) -> Case | None:
    """The case with its prediction in a box; `None` if that has none and is free text."""
    gold, pred, verdict = case
    if "boxed" in pred:
        return case
    formula = _FORMULA.fullmatch(pred)
    if formula is None and ("$" in pred or _WORDS.search(pred)):
        return None
    answer = next(filter(None, formula.groups())) if formula else pred
    return gold, f"The answer is $\\boxed{{{answer}}}$.", verdict


def in_formula(gold: str) -> str:
    """TRL's reward reads a gold answer as LaTeX only if it is marked as such."""
    return gold if re.search(r"\$|\\\[|\\\(|boxed", gold) else f"${gold}$"


def main():
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="folder of math-verify's tests")
    parser.add_argument("--list", action="store_true", help="list the cases in which ours differs")
    arguments = parser.parse_args()
    all_cases = list(dict.fromkeys(published(arguments.tests)))
    cases = [case for case in map(boxed, all_cases) if case]
    print(f"{len(all_cases)} published verdicts, {len(cases)} of them on answers in a box or a formula")
    rewards: dict[str, Callable[[str, str], float | None]] = {
        "opo_trl": lambda completion, gold: accuracy_reward([completion], [plain(gold)])[0],
        "TRL": lambda completion, gold: trl_reward([[{"content": completion}]], [in_formula(gold)])[0],
    }
    for name, reward in rewards.items():
        scored = [(case, reward(case[1], case[0])) for case in cases]
        agreed = sum(score == verdict for (_, _, verdict), score in scored)
        of_wrong = [score for (_, _, verdict), score in scored if verdict == 0]
        print(
            f"{name}: agrees on {agreed} of {len(cases)}; accepts {of_wrong.count(1.0)} of {len(of_wrong)} wrong ones"
        )
        if arguments.list and name == "opo_trl":
            for (gold, completion, verdict), score in scored:
                if score != verdict:
                    print(f"  {verdict} {score} {gold!r} {completion!r}")


def plain(gold: str) -> str:
    """The gold answer as a data set's column holds it: without the signs of a formula."""
    return gold if "boxed" in gold else re.sub(r"(?<!\\)\$|\\[\[\]()]", "", gold)


if __name__ == "__main__":
    main()
