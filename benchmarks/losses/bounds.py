"""
Which bounds on the importance weight, which push, and whether solved groups hold the policy: the confirmation.

    python -m benchmarks.losses.bounds simulate           # how often the rule finds what is there
    python -m benchmarks.losses.bounds run --jobs 1       # what is missing of bounds.jsonl
    python -m benchmarks.losses.bounds report             # → bounds.md
    python -m benchmarks.losses.bounds again              # two runs of each finished cell once more → runs/again.jsonl

The last regime needs `python -m benchmarks.models.smollm2 --output runs/smollm2`.

Plan, committed before the first run. All arms but OPO, GSPO and GRPO are `objective: topr` with the bounds (right low,
right high, wrong low, wrong high) on the weight π/π_k of the whole completion. Earlier trials on the seeds 211 to 213
of `arithmetic` suggested the candidates; nothing of them is confirmed.

**Candidates**: (1, 2, 0, 1), (1, 2, 0, 2), and the latter and (0, 2, 0, 2) with a hinge, all with the escort push. The
hinge is the force (1 − t)₊ on right answers of solved groups, t = π/π_k, where all rewards are above 1/2.
**References**: TOPR, (1, 1, 0, 1) with advantages; truncated REINFORCE, (0, 2, 0, 2) with r − r̄; OPO, μ = 0.3.
**Ablation**, which decides nothing: (1, 1, 0, 1), (0, 2, 0, 2) and (1, 1, 0, 2) with the escort push; (1, 2, 0, 1)
with r − r̄ and with advantages; (0, 2, 0, 2) with advantages; GSPO and GRPO with three clip ranges; TOPR's ±1 for right
and wrong answers of all groups, on `many` only.

| regime | |
|---|---|
| many | `arithmetic`, 2,880 completions of the base model, four epochs |
| few | 480 of them, four passes over each 48 before the next 48 |
| lag | 60 rollouts of 48 completions by the policy 64 versions ago |
| replay | 24 rollouts, four passes, all but the first from up to 32 earlier rollouts |
| fresh | 60 rollouts by the current policy, trained on once |
| spelling | `spell_backward`, 2,880 completions of its base model, four epochs |
| largest | SmolLM2-135M-Instruct, `largest` of `few_shot`: 384 completions, cut after the first line, four epochs |

No form was tried on the last before. The ablation leaves out `fresh` and `largest`.

**Tuning**, alike for all: the rates 2.5e-5 to 4e-4 in steps of 2 (spelling: 5e-5 to 8e-4; largest: 2.5e-6 to 4e-5)
with seed 601, the best three also with 602 and 603 (largest: the best two with 602), on problems of their own. A rate
at an edge of the region extends it by a factor of 2, at most twice; one that is still at an edge is reported as such.
GSPO and GRPO also choose their clip range. **Reports**: seeds from 611 on, 24 of each form that the rule reads (ten on
`largest`) and ten of the others, at the form's own rate, on other problems; the draws of an evaluation differ by seed.
Primary measure: sampled accuracy.

**Rule.** A candidate passes if (1) the lower 95 % bounds (one-sided) of its differences to TOPR and to truncated
REINFORCE are above −5 points in every regime, and (2) for each of TOPR, truncated REINFORCE and OPO there is a regime
in which it is ahead, after Bonferroni's correction for the seven regimes and four candidates at 5 %, one-sided. Of
those that pass, the one with the smallest largest shortfall to the best form of a regime wins; within 0.5 points, the
one with fewer rules. If none passes, the search has failed, and the pages say so.

`simulate` gives the powers, from the spread of earlier runs: a form that is level everywhere and 4 points ahead of all
three in one regime passes in 72 % of the cases, one that is level everywhere, or also 6 points behind in one regime,
in less than 1 %. A first draft, with ten seeds, six of SmolLM2, a margin of 3 points and superiority of the mean over
regimes, found the former in 2 %: 4 points in one of seven regimes are half a point of the mean, and six seeds of
SmolLM2 spread by more than the margin.

Secondary, decides nothing: greedy accuracy, entropy, share of runs below half of the best, and forms at twice and four
times their rate, as far as the tuning has them. The negative control of the hinge (random right answers of groups that
are not solved) is run if a form with the hinge passes. Left out for time: 1 and 16 epochs, completions that are 16
versions old, MCPO.

**Budget**: 17 hours of one core, 20 with extended rates: runs of the regimes above took 25, 5, 8, 13, 15, 9 and 170
seconds. One process of one thread. If time is short, the ablation is dropped, from its end; never seeds, never
references.

Notes after the first runs, which change nothing of the rule. All runs but those of `largest` use the code of commit
e0781cc. "No form was tried" holds for the candidates: OPO, truncated REINFORCE, GSPO and GRPO were trained online on
`largest`, with other problems (`real_model`). The "best form of a regime" is the best of those that the rule reads.
Test problems of `arithmetic` and `spelling` are those of earlier experiments; the seeds are new. Two forms that agree
in all runs of a regime count as not ahead.

Before any run that counts on `largest`: the beginning of its prompts, 73 of 85 to 91 tokens, is computed once for all
in a batch, in training and in measuring (`shared_beginning`). In float32 the gradient of a step is that of before
within 1e-5 of its norm. Three trials of TOPR had been made before, to find where the time goes; they are repeated.
Trials of all arms but TOPR and truncated REINFORCE there measure no greedy accuracy, which decides nothing.

Runs of `lag` and `fresh` were made with `AsyncOPOTrainer`, which commit 6495d6c5ac08 has.

After `many`, `few` and `lag`: (1, 2, 0, 2) with the hinge can't pass any more, since in `many` its lower bound against
truncated REINFORCE is −6.8. It is not run in the other regimes, unless two candidates pass: then their shortfalls need
it. On `largest`, (0, 2, 0, 2) with the hinge has failed, too, against TOPR. Last, (1, 2, 0, 1) and (1, 2, 0, 2) have
passed, so (1, 2, 0, 2) with the hinge was run in the other regimes. For time, the ablation was not run, so no gain is
credited to a part; forms at multiples of their rate and shares of low runs are not reported. Of the 98 runs that
`again` repeats, with later code and Transformers 5.24, 96 have the same accuracies; two of TOPR on `largest`, the
first runs there, differ by at most 1.7 points.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.data import few_shot
from opo_trl.data.arithmetic import draw_split
from opo_trl.objective import OPO, Objective
from opo_trl.objectives import TOPR

from ..many_runs import read_command_line
from ..pages import table
from ..staged import read, run_missing
from . import offline, real_model, shared_beginning
from .objectives import published, training
from .objectives.grid import CELLS
from .objectives.report import shown
from .stale import BATCH, GROUP, common_fields


RECORD = Path(__file__).resolve().with_name("bounds.jsonl")
FIRST_SEED, EXTENSIONS, MARGIN = 611, 2, 5.0
_SOLVED = 1e-30  # target of completions of solved groups: positive, and without effect as a push


class Held(TOPR):
    """TOPR's weights, and the hinge (1 − t)₊ on completions of solved groups."""

    def targets(self, groups):
        found = super().targets(groups)
        right = (groups.rewards > 0.5) | ~groups.valid
        solved = right.view(-1, groups.num_generations).all(dim=1).repeat_interleave(groups.num_generations)
        return replace(found, target=torch.where(solved & groups.valid, _SOLVED, found.target))

    def terms(self, log_ratio, weights, samples):
        solved = samples.target == _SOLVED
        push, _ = super().terms(log_ratio, torch.where(solved, 0.0, weights), samples)
        fallen = (1 - self.reduce(samples.moved, samples).exp()).clamp(min=0)
        return push, torch.where(solved, -samples.weights * fallen * log_ratio, 0.0)


class Signed(TOPR):
    """TOPR with ±1 for right and wrong answers, also of groups of equal rewards."""

    def targets(self, groups):
        found = super().targets(groups)
        signs = (groups.rewards > 0.5).to(found.target.dtype) * 2 - 1
        return replace(found, target=signs * groups.valid)


GSPO = CELLS["advantage-clipped-none"]


@dataclass(frozen=True)
class Arm:
    """
    A form.

    Args:
        kind (`type[Objective]`), options (`Mapping[str, Any]`): its objective and fields of the configuration.
        own (`str`), values (`tuple[float, ...]`): attributes of the objective that are tuned besides the rate.
    """

    kind: type[Objective]
    options: Mapping[str, Any] = field(default_factory=dict)
    own: str = ""
    values: tuple[float, ...] = (0.0,)


def _topr(*bounds: float, push: str = "escort", kind: type[Objective] = TOPR) -> Arm:
    own = {"positive_bounds": list(map(float, bounds[:2])), "negative_bounds": list(map(float, bounds[2:]))}
    return Arm(kind, {"objective": "topr", "push": push, **own})


CANDIDATES = {
    "(1, 2, 0, 1)": _topr(1, 2, 0, 1),
    "(1, 2, 0, 2)": _topr(1, 2, 0, 2),
    "(1, 2, 0, 2), hinge": _topr(1, 2, 0, 2, kind=Held),
    "(0, 2, 0, 2), hinge": _topr(0, 2, 0, 2, kind=Held),
}
RULES = dict(zip(CANDIDATES, (1, 1, 2, 2), strict=True))  # of the tie: bounds, hinge
REFERENCES = {
    "TOPR": _topr(1, 1, 0, 1, push="advantage"),
    "truncated REINFORCE": _topr(0, 2, 0, 2, push="reward"),
    "OPO": Arm(OPO, {"mu": 0.3}),
}
_CLIPS = (0.05, 0.2, 0.8)
ABLATION = {
    "(1, 1, 0, 1)": _topr(1, 1, 0, 1),
    "(0, 2, 0, 2)": _topr(0, 2, 0, 2),
    "(1, 2, 0, 1), r − r̄": _topr(1, 2, 0, 1, push="reward"),
    "GSPO": Arm(GSPO, own="clip", values=_CLIPS),
    "(1, 2, 0, 1), advantage": _topr(1, 2, 0, 1, push="advantage"),
    "(0, 2, 0, 2), advantage": _topr(0, 2, 0, 2, push="advantage"),
    "GRPO": Arm(published.GRPO, {"log_ratio_reduction": "mean"}, "low high", _CLIPS),
    "±1, TOPR": _topr(1, 1, 0, 1, kind=Signed),
    "(1, 1, 0, 2)": _topr(1, 1, 0, 2),
}
DECIDING = {**REFERENCES, **CANDIDATES}
ARMS = {**DECIDING, **ABLATION}


# Regimes


_SPLITS = {"train": 2000, "validation": 150, "test": 300}


def problems_of(level: str, seed: int = 61) -> tuple[offline.Rows, offline.Rows, offline.Rows]:
    """For training, for reports and for tuning."""
    task = few_shot.LEVELS[level]
    worked = "".join(f"{task.ask(numbers)} {task.answer(numbers)}\n" for numbers in task.worked)
    shown_ = {few_shot._key(numbers) for numbers in task.worked}

    def problems(split: str) -> offline.Rows:
        drawn = draw_split(split, level, task.draw, few_shot._key, sizes=_SPLITS, seed=seed, besides=shown_)
        return [{"problem": worked + task.ask(numbers), "solution": str(task.answer(numbers))} for numbers in drawn]

    return problems("train"), problems("test"), problems("validation")


PRETRAINED = "largest"  # of SmolLM2
_MANY = offline.TASKS["arithmetic"]
RECORDED = {
    "many": _MANY,
    "few": replace(_MANY, prompts=offline.FEW_PROMPTS, in_a_row=True),
    "spelling": offline.TASKS["spell_backward"],
    PRETRAINED: replace(offline.TASKS[offline.PRETRAINED], problems=partial(problems_of, PRETRAINED), prompts=64),
}
ONLINE = {"lag": "lag64", "replay": "replay", "fresh": "fresh"}
REGIMES = ("many", "few", "lag", "replay", "fresh", "spelling", "largest")
LOWEST_RATE = {**dict.fromkeys(REGIMES, 2.5e-5), "spelling": 5e-5, PRETRAINED: 2.5e-6}
EPOCHS = 4


@dataclass(frozen=True)
class Run:
    """An arm in a regime, with a learning rate and its own value; one that tunes has other test problems."""

    arm: str
    regime: str
    learning_rate: float
    own: float
    seed: int
    tuning: bool


def cells() -> list[tuple[str, str]]:
    """Arms and regimes, in the order in which they run: what decides first, the pretrained model last of that."""
    found = [(arm, regime) for regime in REGIMES for arm in DECIDING]
    found += [(arm, regime) for arm in ABLATION for regime in REGIMES if regime not in ("fresh", "largest")]
    return [(arm, regime) for arm, regime in found if not arm.startswith("±") or regime == "many"]


def tuning_seeds(regime: str) -> tuple[int, ...]:
    """All settings are tried with the first, as many of the best as there are seeds with the others, too."""
    return (601, 602) if regime == PRETRAINED else (601, 602, 603)


def seeds(arm: str, regime: str) -> range:
    """Of reports."""
    return range(FIRST_SEED, FIRST_SEED + (24 if arm in DECIDING and regime != "largest" else 10))


Found = Mapping[Run, Mapping[str, Any]]


def explored(arm: str, regime: str, found: Found) -> tuple[list[Run], tuple[float, float] | None, bool]:
    """The trials that are missing now; the setting that is chosen if none is; whether its rate is at an edge."""
    rates = [LOWEST_RATE[regime] * 2**i for i in range(5)]
    for extension in range(EXTENSIONS + 1):
        settings = [(rate, own) for rate in rates for own in ARMS[arm].values]

        def trials(chosen: list[tuple[float, float]], seeds: tuple[int, ...] = tuning_seeds(regime)) -> list[Run]:
            return [Run(arm, regime, *setting, seed, True) for setting in chosen for seed in seeds]

        first = trials(settings, tuning_seeds(regime)[:1])
        if missing := [run for run in first if run not in found]:
            return missing, None, False
        ranked = sorted(first, key=lambda run: found[run]["sampled"], reverse=True)
        few = [(run.learning_rate, run.own) for run in ranked[: len(tuning_seeds(regime))]]
        if missing := [run for run in trials(few) if run not in found]:
            return missing, None, False
        chosen = max(few, key=lambda setting: fmean(found[run]["sampled"] for run in trials([setting])))
        if chosen[0] not in (min(rates), max(rates)):
            return [], chosen, False
        if extension < EXTENSIONS:
            beyond = chosen[0] / 2 if chosen[0] == min(rates) else chosen[0] * 2
            rates = sorted([*rates, beyond])
    return [], chosen, True


def reports(arm: str, regime: str, found: Found) -> list[Run]:
    """The runs that report, once the trials are finished."""
    missing, chosen, _ = explored(arm, regime, found)
    return [] if missing or chosen is None else [Run(arm, regime, *chosen, s, False) for s in seeds(arm, regime)]


def next_runs(arm: str, regime: str) -> list[Run]:
    found = read(Run, RECORD)
    missing, _, _ = explored(arm, regime, found)
    return missing or [run for run in reports(arm, regime, found) if run not in found]


# A run


def first_line(row: dict[str, Any], text_of: Any) -> dict[str, Any]:
    """A recorded completion up to the end of its first line."""
    ids = row["completion_ids"]
    ends = [n for n in range(1, len(ids) + 1) if "\n" in text_of(ids[:n])]
    n = ends[0] if ends else len(ids)
    return {**row, "completion": text_of(ids[:n]), "completion_ids": ids[:n], "logprobs": row["logprobs"][:n]}


def recorded(task: offline.Task, regime: str, seed: int) -> offline.Rows:
    """What a run trains on, from a file after the first time."""
    file = Path("runs/bounds", f"{regime}, {seed}.json")
    if not file.exists():
        rows = task.record(seed)
        if regime == PRETRAINED:
            decode = AutoTokenizer.from_pretrained(task.base).decode
            rows = [first_line(row, decode) for row in rows]
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(rows))
        own.replace(file)
    return json.loads(file.read_text())


def train(run: Run) -> dict[str, Any]:
    """Train and measure in this process, which must be a new one."""
    torch.set_num_threads(1)
    arm, began = ARMS[run.arm], time.process_time()
    if run.regime in ONLINE:
        own = training.Run(run.arm, ONLINE[run.regime], run.learning_rate, run.own, run.seed, run.tuning)
        line = training.train(own, arm.kind, arm.own, dict(arm.options), draws=run.seed)
        return {**asdict(run), **{name: line[name] for name in ("sampled", "greedy", "entropy", "seconds")}}
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        trainer = make_trainer(run, folder)
        trainer.train()
    task, weights = RECORDED[run.regime], trainer.model.state_dict()
    reached = task.accuracies(weights, for_tuning=run.tuning, draws=run.seed)
    entropies = [entry["entropy"] for entry in trainer.state.log_history if "entropy" in entry][-5:]
    return {
        **asdict(run),
        **reached,
        "entropy": round(fmean(entropies), 4),
        "seconds": round(time.process_time() - began, 1),
    }


def make_trainer(run: Run, folder: str) -> Any:
    """The trainer of a run on recorded completions."""
    task, arm = RECORDED[run.regime], ARMS[run.arm]
    if run.regime == PRETRAINED:
        real_model.multiply_as_bfloat16()
        shared_beginning.apply()
        offline.trl.trainer.utils._use_triton = lambda device: True  # the head computes completions only, as on GPUs
    file = Path(folder) / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in recorded(task, run.regime, run.seed)))
    steps = EPOCHS * task.prompts * GROUP // BATCH
    fields = common_fields(folder, run.learning_rate, run.seed, max_steps=steps)
    fields |= {"max_completion_length": task.max_tokens, "rollouts": str(file)} | arm.options
    fields["num_iterations"] = EPOCHS if task.in_a_row else 1
    kind = type("OPOTrainer", (OPOTrainer,), {"objective_class": arm.kind})
    tokenizer = AutoTokenizer.from_pretrained(task.base)
    trainer = kind(task.base, args=OPOConfig(**fields), processing_class=tokenizer)
    for name in arm.own.split():
        setattr(trainer.policy_objective, name, run.own)
    trainer.remove_callback(PrinterCallback)
    return trainer


# The rule


def passes(reached: Mapping[tuple[str, str], np.ndarray], name: str) -> tuple[bool, bool]:
    """
    Whether a candidate is nowhere behind, and somewhere ahead, from the sampled accuracies in % of each arm and
    regime, by seed.
    """
    regimes = [regime for arm, regime in reached if arm == name]
    gains = {(arm, r): reached[name, r] - reached[arm, r] for arm in REFERENCES for r in regimes}
    level = all(_bound(gain) > -MARGIN for (arm, _), gain in gains.items() if arm != "OPO")
    return level, all(any(_is_ahead(gains[arm, r], len(regimes)) for r in regimes) for arm in REFERENCES)


def _is_ahead(gain: np.ndarray, regimes: int) -> bool:
    """After Bonferroni's correction; two forms that agree in all runs are level."""
    p = stats.ttest_1samp(gain, 0, alternative="greater").pvalue if gain.any() else 1
    return p < 0.05 / len(CANDIDATES) / regimes


def _bound(gain: np.ndarray) -> float:
    test = stats.ttest_1samp(gain, 0, alternative="greater")
    return float(test.confidence_interval(0.95).low)


# Standard deviations of sampled accuracy in points over seeds, of ten or six runs of earlier experiments each
# (`offline.jsonl`, `objectives.jsonl`): the mean over forms that did not collapse.
SPREAD = {"many": 1.9, "few": 2.5, "lag": 2.6, "replay": 2.3, "fresh": 1.8, "spelling": 1.6, "largest": 3.5}


def simulate(ahead: float, behind: float, trials: int = 2000) -> float:
    """Share of cases in which a form passes that is so far ahead in one regime and behind in another."""
    random, arms, passed = np.random.default_rng(0), ("form", *REFERENCES), 0
    for _ in range(trials):
        true = dict(zip(random.permutation(REGIMES), (ahead, -behind), strict=False))
        reached = {
            (arm, regime): random.normal(
                true.get(regime, 0) * (arm == "form"), SPREAD[regime], len(seeds("OPO", regime))
            )
            for regime in REGIMES
            for arm in arms
        }
        passed += all(passes(reached, "form"))
    return passed / trials


# The page


def _is_done(cell: tuple[str, str], found: Found) -> bool:
    """Whether all runs that report on a form in a regime are finished."""
    runs = reports(*cell, found)
    return bool(runs) and all(run in found for run in runs)


def page(found: Found) -> str:
    """The finished cells as a page, and the decision once all that it needs is finished."""
    done = {each: reports(*each, found) for each in cells() if _is_done(each, found)}
    reached = {each: 100 * np.array([found[run]["sampled"] for run in runs]) for each, runs in done.items()}
    text, arms = [_INTRODUCTION], [arm for arm in ARMS if any((arm, regime) in done for regime in REGIMES)]
    cells_of = {
        "Sampled accuracy": partial(_accuracy, done, found, "sampled"),
        "Greedy accuracy": partial(_accuracy, done, found, "greedy"),
        "Chosen rates": partial(_rate, done, found),
    }
    for title, cell in cells_of.items():
        rows = [[arm, *(cell(arm, regime) if (arm, regime) in done else "" for regime in REGIMES)] for arm in arms]
        text.append(f"## {title}\n\n{table(['', *REGIMES], rows)}\n")
    pairs = [*product(CANDIDATES, REFERENCES), *combinations(reversed(REFERENCES), 2)]
    rows = [[f"{a} less {b}", *(_difference(reached, a, b, regime) for regime in REGIMES)] for a, b in pairs]
    text.append(f"## Differences of sampled accuracy\n\n{_DIFFERENCES}\n\n{table(['', *REGIMES], rows)}\n")
    missing = [f"{arm} in `{regime}`" for arm, regime in cells() if arm in DECIDING and (arm, regime) not in done]
    text.append(f"**Not finished**, so nothing is decided: {'; '.join(missing)}.\n" if missing else _decision(reached))
    return "\n".join(text)


Done = Mapping[tuple[str, str], list[Run]]


def _accuracy(done: Done, found: Found, measure: str, arm: str, regime: str) -> str:
    return shown([100 * found[run][measure] for run in done[arm, regime]])


def _rate(done: Done, found: Found, arm: str, regime: str) -> str:
    run, at_edge = done[arm, regime][0], explored(arm, regime, found)[2]
    return f"{run.learning_rate:.2g}{f', {run.own:g}' if ARMS[arm].own else ''}{' (edge)' if at_edge else ''}"


def _difference(reached: Mapping[tuple[str, str], np.ndarray], arm: str, other: str, regime: str) -> str:
    if not {(arm, regime), (other, regime)} <= reached.keys():
        return ""
    gain = reached[arm, regime] - reached[other, regime]
    ahead, behind = _is_ahead(gain, len(REGIMES)), other != "OPO" and _bound(gain) <= -MARGIN
    mark = " \\*" if ahead else " ▼" if behind else ""
    return shown([*gain], signed=True) + (mark if arm in CANDIDATES else "")


def _decision(reached: Mapping[tuple[str, str], np.ndarray]) -> str:
    means = {each: own.mean() for each, own in reached.items() if each[0] in DECIDING}
    best = {regime: max(mean for (_, r), mean in means.items() if r == regime) for regime in REGIMES}
    shortfall = {arm: max(best[r] - means[arm, r] for r in REGIMES) for arm in DECIDING}
    verdicts = {name: passes(reached, name) for name in CANDIDATES}
    rows = [
        [arm, f"{shortfall[arm]:.1f}", *(("yes" if ok else "no") for ok in verdicts.get(arm, ()))] for arm in DECIDING
    ]
    passed = [name for name, own in verdicts.items() if all(own)]
    close = [name for name in passed if shortfall[name] <= min(shortfall[other] for other in passed) + 0.5]
    winner = min(close, key=lambda name: (RULES[name], shortfall[name])) if close else ""
    said = f"**{winner}** wins." if winner else "No candidate passes: the search has failed."
    header = ["", "largest shortfall", "(1) nowhere behind", "(2) somewhere ahead"]
    return f"## The decision\n\n{said}\n\n{table(header, [row + [''] * (4 - len(row)) for row in rows])}\n"


_INTRODUCTION = """# Bounds on the importance weight

Accuracies in %, ± half of the 95 % t interval over 24 seeds, ten in `largest`; every form at its own rate. The
ablation was not run, so no gain is credited to a part. [Plan, rule and code](bounds.py); [every run](bounds.jsonl);
[what it carries](bounds_checked.md).
"""
_DIFFERENCES = """Paired by seed. By the rule, \\* marks where a candidate is ahead, after its correction, and ▼ where
it may be 5 points behind. The last rows are directions."""


def again(jobs: int) -> int:
    """Make the first two reporting runs of each finished cell again, and print those that differ from the record."""
    found, file = read(Run, RECORD), Path("runs/again.jsonl")
    wanted: list[Run] = []
    for each in cells():
        if _is_done(each, found):
            wanted += reports(*each, found)[:2]
    status = run_missing([lambda: [run for run in wanted if run not in read(Run, file)]], train, file, jobs)
    made = read(Run, file)
    measured = ("sampled", "greedy")

    def differs(run: Run) -> bool:
        return any(made[run][measure] != found[run][measure] for measure in measured)

    differing = [run for run in wanted if run in made and differs(run)]
    for run in differing:
        print(run, *(f"{m} {found[run][m]} → {made[run][m]}" for m in measured))
    print(f"{len(wanted)} runs, of which {len(differing)} differ.")
    return status


def main() -> int:
    arguments = read_command_line(__doc__, "simulate", "run", "report", "again")
    if arguments.command == "simulate":
        for name, true in (("power", (4, 0)), ("null", (0, 0)), ("behind", (4, 6))):
            print(f"{name}: {simulate(*true):.0%}")
        return 0
    if arguments.command == "report":
        RECORD.with_suffix(".md").write_text(page(read(Run, RECORD)))
        return 0
    if arguments.command == "again":
        return again(arguments.jobs)
    return run_missing([partial(next_runs, *each) for each in cells()], train, RECORD, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
