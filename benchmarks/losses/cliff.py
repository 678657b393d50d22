"""
How much of a learning rate that is too high each form forgives: the cliff.

    python -m benchmarks.models.smollm2 --output runs/smollm2
    python -m benchmarks.losses.cliff run --jobs 1       # what is missing of cliff.jsonl
    python -m benchmarks.losses.cliff report             # → cliff.md

Plan, committed before the first run. Trials of `bounds` and `gpu.recorded`, one or two seeds each, suggested that at
two to eight times the best rate, forms in which a right completion keeps a weight of at least 1 reach 28 to 54 %, the
others 0 to 28 %. Who can't tune may want a form that forgives the rate more than one that is two points ahead.

**Forms**: (1, 2, 0, 1), TOPR, truncated REINFORCE, OPO with μ = 0.3 and GSPO as in `bounds`; GRPO with the truncated
importance sampling of TRL, per token and per completion. Of these two, each step of 48 completions is a rollout, as
with TRL's defaults: the policy is recomputed for it, so the clipped ratio is 1 there and no clip range acts; the ratio
to the policy that wrote the completions, at most 2, is the weight. Per token, this is AReaL's loss. A test holds both
against TRL's trainer.

**Tasks**: `many` and `largest` of `bounds`, and `addition` of `few_shot`, also with 384 completions of SmolLM2, cut
after the first line, and four epochs. The conditions are those of `bounds`, so that its recorded rates hold.

**Rates**: 1, 2 and 4 times the best. The best is that of the trials in `bounds` for its four forms in `many` and
`largest`. All others are tuned by its rule, with its rates and its seeds, 601 to 603: GSPO and the two of TRL in both,
and all forms in `addition`. GSPO has the clip range 0.2, the better of two with recorded completions; its recorded
rates are those of other numbers of completions.

**Reports**: seeds 651 to 658, which nothing was tried on, for all forms, rates and tasks; on 500 problems in `many`
and 300 else. Primary: sampled accuracy. Greedy beside it.

**Rule**. A form forgives the rate if its accuracy at 4 times the rate, less that at its own best, has a 95 % t
interval over seeds whose lower bound is above −10 points, on both tasks of SmolLM2. Its own best is the multiple with
the best mean of the same runs, which favours no form that is said to forgive. Verdicts are of one form each, and are
not corrected for their number; which form is best at its best is not asked. `many` decides nothing. If a form is
recommended for this, greedy accuracy at both rates stands beside it.

**Order and cost**: `addition`, `largest`, `many`, so that what decides comes first; forms in the order above, each
finished with its eight seeds before the next. In `many`, 168 reports and 33 trials of about 20 processor seconds: 1.2
hours. On SmolLM2, 336 reports and 70 trials of 32 steps and 300 or 150 problems, sampled and greedy. By parts that
were timed on a busy machine and the records of `bounds`, a report takes about 75 processor seconds and a trial 65:
eight to nine hours, not the five that were meant for all. It was not cut further: with fewer completions or epochs,
the recorded rates would not hold, and all forms would have to be tuned anew. What is computed less than in `bounds`: a
step has one pass instead of two; 300 completions instead of 48 are measured together; and each prompt is computed once
for its completions.

**Shortened** when the first three forms had finished `addition`, and before any run of `largest`: a form that does not
forgive the rate on one task of SmolLM2 has failed by the rule, whatever the other task says, and is not run there. No
seed, rate, form or margin is changed, so no verdict can differ from that of the whole plan.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from ..intervals import estimate
from ..many_runs import read_command_line
from ..pages import table
from ..staged import read, run_missing
from . import bounds
from .bounds import Found, Run
from .objectives.report import shown


RECORD = Path(__file__).resolve().with_name("cliff.jsonl")
TASKS = ("addition", "largest", "many")
FORMS = ("(1, 2, 0, 1)", "TOPR", "truncated REINFORCE", "OPO", *bounds.LATER)
SEEDS, MULTIPLES, MARGIN = range(651, 659), (1, 2, 4), 10.0
AT_A_TIME = 300  # completions, in measuring
Cell = tuple[str, str]  # form and task


def cells() -> list[Cell]:
    """In the order in which they run."""
    return [(form, task) for task in TASKS for form in FORMS]


def read_runs() -> Found:
    """All finished runs, those of `bounds` among them, whose trials chose rates."""
    return read(Run, bounds.RECORD, RECORD)


def reports(form: str, task: str, found: Found) -> list[Run]:
    """The runs that report, seed by seed, once the trials are finished."""
    missing, chosen, _ = bounds.explored(form, task, found)
    if missing or chosen is None:
        return []
    rate, own = chosen
    return [Run(form, task, rate * multiple, own, seed, False) for seed in SEEDS for multiple in MULTIPLES]


def next_runs(form: str, task: str) -> list[Run]:
    found = read_runs()
    if is_decided_elsewhere(form, task, found):
        return []
    missing, _, _ = bounds.explored(form, task, found)
    return missing or [run for run in reports(form, task, found) if run not in found]


# The rule and the page


def accuracies(form: str, task: str, found: Found, measure: str = "sampled") -> np.ndarray | None:
    """Accuracies of a cell in %, by seed and multiple of the rate; `None` if it is not finished."""
    runs = reports(form, task, found)
    if not runs or any(run not in found for run in runs):
        return None
    reached = [100 * found[run][measure] for run in runs]
    return np.array(reached).reshape(len(SEEDS), len(MULTIPLES))


def loss_at_highest(reached: np.ndarray) -> np.ndarray:
    """By seed, the accuracy at the highest multiple less that at the multiple with the best mean."""
    best = reached.mean(axis=0).argmax()
    return reached[:, -1] - reached[:, best]


def forgives(reached: np.ndarray) -> bool:
    """Whether the lower bound of that difference is above the margin."""
    loss = estimate(loss_at_highest(reached).tolist())
    assert loss.interval
    return loss.interval[0] > -MARGIN


def page(found: Found) -> str:
    """The finished cells as a page, and the verdicts on the forms that are decided."""
    text = [_INTRODUCTION]
    for task in TASKS:
        rows = [row for form in FORMS if (row := _row(form, task, found))]
        if rows:
            text.append(f"## `{task}`\n\n{table(_HEADER, rows)}\n")
    missing = [part for task in TASKS if (part := _missing(task, found))]
    if missing:
        text.append(f"**Not finished**: {'; '.join(missing)}.\n")
    decided = [form for form in FORMS if verdict(form, found) is not None]
    if decided:
        rows = [[form, "yes" if verdict(form, found) else "no"] for form in decided]
        text.append(f"## The decision\n\n{table(['', 'forgives the rate'], rows)}\n")
    return "\n".join(text)


def verdict(form: str, found: Found) -> bool | None:
    """Whether a form forgives the rate on both tasks of SmolLM2; `None` as long as that is open."""
    reached = [accuracies(form, task, found) for task in bounds.PRETRAINED]
    finished = [own for own in reached if own is not None]
    if not all(map(forgives, finished)):
        return False
    return True if len(finished) == len(reached) else None


def is_decided_elsewhere(form: str, task: str, found: Found) -> bool:
    """Whether the form has failed on the other task of SmolLM2, so that this one could not change its verdict."""
    return task in bounds.PRETRAINED and accuracies(form, task, found) is None and verdict(form, found) is False


def _missing(task: str, found: Found) -> str:
    """The task if none of its forms is finished, else those that are not and are still run; empty if all are."""
    forms = [form for form in FORMS if accuracies(form, task, found) is None]
    left = [form for form in forms if not is_decided_elsewhere(form, task, found)]
    if len(left) == len(FORMS):
        return f"`{task}`"
    return f"{' / '.join(left)} in `{task}`" if left else ""


_HEADER = ["", "best rate", *(f"{multiple}×" for multiple in MULTIPLES), "4× less its best", "within 10 points"]


def _row(form: str, task: str, found: Found) -> list[str]:
    """A cell's rate, sampled and in brackets greedy accuracies, and the loss at the highest rate; empty if missing."""
    sampled, greedy = (accuracies(form, task, found, measure) for measure in ("sampled", "greedy"))
    if sampled is None or greedy is None:
        return []
    rate, at_edge = reports(form, task, found)[0].learning_rate, bounds.explored(form, task, found)[2]
    reached = [f"{shown([*own])} [{shown([*its])}]" for own, its in zip(sampled.T, greedy.T, strict=True)]
    loss = shown([*loss_at_highest(sampled)], signed=True)
    tuned = f"{rate:.2g}{' (edge)' if at_edge else ''}"
    return [form, tuned, *reached, loss, "yes" if forgives(sampled) else "no"]


_INTRODUCTION = """# The cliff: what each form forgives of a learning rate

Accuracies in %, sampled and in brackets greedy, at the best rate of each form's own trials and at two and four times
it, ± half of the 95 % t interval over eight seeds. A form forgives the rate if its sampled accuracy at four times the
rate is surely within 10 points of that at its own best of the three, on both `addition` and `largest`; one that fails
on the first is not run on the second. Rates differ between forms, so columns compare a form with itself. [Plan, rule
and code](cliff.py); every run: [cliff.jsonl](cliff.jsonl), and for rates that were known [bounds.jsonl](bounds.jsonl).
"""


def main() -> int:
    arguments = read_command_line(__doc__, "run", "report")
    if arguments.command == "report":
        RECORD.with_suffix(".md").write_text(page(read_runs()))
        return 0
    make = partial(bounds.train, at_a_time=AT_A_TIME)
    return run_missing([partial(next_runs, *cell) for cell in cells()], make, RECORD, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
