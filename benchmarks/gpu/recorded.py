"""
Recorded completions of a pretrained model: seven forms of the force on their log-ratios, each at its own rate.

    python -m benchmarks.gpu.recorded --output runs/gpu/recorded --model runs/smollm2      a GPU, 6 minutes
    python -m benchmarks.gpu.recorded … --size quarter --jobs 2                            two cores
    python -m benchmarks.gpu.recorded --output runs/gpu/tiny --size tiny                   a minute, without weights

SmolLM2-135M-Instruct (`benchmarks.smollm2`) on `addition` of `few_shot`. Once per seed it writes 8 completions of each
of 192 training problems, up to the first newline; all forms train on the same. The loss of a completion is `−f·Δ`: Δ =
log π/π_k of the whole completion, t = exp Δ, and without gradient f = w·(g − μ(w − 1)), where w is t, clipped to two
bounds where g > 0 and to two others elsewhere ([`FORMS`]), and g OPO's centred escort weight, α = 0.4: the push of all
forms. μ is 0.3 for OPO and else 0. The hinge adds (1 − t)₊ in groups with right completions only. *many*: four epochs
over 1,536 completions; *few*: four passes over each 96 of 384 before the next 96. Steps of 96, AdamW at a constant
rate without weight decay, no clipping of gradients (as in `benchmarks.offline`), products of matrices in bfloat16.

Plan, written before the first run. Each form is tried at four rates in *many*, with both tuning seeds, on 1,000
problems for tuning; the best mean sampled accuracy decides. All trials are reported: at which rate a form falls apart
is a result. Then both regimes and all forms, on 1,000 other problems, seed by seed: wherever the time ends, the forms
have the same seeds, save the last. Primary: sampled accuracy, less that of TR and of TOPR. Each finished run is a line
of `runs.jsonl`; the same command goes on, and writes `page.md`.
"""

import argparse
import multiprocessing
import random
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from operator import sub
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from opo_trl.checks.files import append_lines, read_lines, write_json, write_lines
from opo_trl.data.arithmetic import base_model_path
from opo_trl.data.few_shot import first_line_reward, make_problems
from opo_trl.objective import escort_weights, project

from ..objectives.report import shown
from ..pages import table
from ..real_model import multiply_as_bfloat16
from ..record import begin
from ..shared_beginning import sample
from ..staged import read


GROUP, MAX_TOKENS, PASSES, ALPHA = 8, 6, 4, 0.4
SPLITS = {"train": 2000, "validation": 1000, "test": 1000}
TUNING_SEEDS, SEEDS = (801, 802), tuple(range(811, 819))
Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Form:
    """A force: bounds of the ratio where g > 0 and elsewhere, the pull-back, and whether there is a hinge."""

    right: tuple[float, float] = (0, 2)
    wrong: tuple[float, float] = (0, 2)
    mu: float = 0.0
    hinge: bool = False

    def force(self, log_ratio: Tensor, g: Tensor, solved: Tensor) -> Tensor:
        """The force on each log-ratio; `solved` says whose group has right completions only."""
        t = log_ratio.exp()
        w = torch.where(g > 0, t.clamp(*self.right), t.clamp(*self.wrong))
        return w * (g - self.mu * (w - 1)) + (solved & self.hinge) * (1 - t).clamp(min=0)


FORMS = {
    "OPO": Form(mu=0.3),
    "TOPR": Form((1, 1), (0, 1)),
    "TR": Form(),
    "floor": Form((1, 2)),
    "(1, 2, 0, 1)": Form((1, 2), (0, 1)),
    "floor, hinge": Form((1, 2), hinge=True),
    "TR, hinge": Form(hinge=True),
}


@dataclass(frozen=True)
class Size:
    """Prompts of each regime and of an optimizer step, problems of an accuracy, and what is run."""

    prompts: dict[str, int]
    step: int
    problems: int
    seeds: tuple[int, ...] = SEEDS
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    rates: tuple[float, ...] = (5e-6, 1e-5, 2e-5, 4e-5)


SIZES = {
    "full": Size({"many": 192, "few": 48}, 12, 1000),
    "quarter": Size({"many": 48}, 3, 250, SEEDS[:4]),
    "tiny": Size({"many": 4, "few": 2}, 2, 8, SEEDS[:2], TUNING_SEEDS[:1], (1e-4, 1e-3)),
}


@dataclass(frozen=True)
class Run:
    """A form in a regime; one that tunes is measured on other problems."""

    regime: str
    form: str
    rate: float
    seed: int
    tuning: bool


def turns(completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward for tiny models, which are never right: ten completions of 1.0, ten of 0.0, and so on."""
    return [float(i % 20 < 10) for i in range(len(completions))]


class Bench:
    """The model of a process, its task and its runs."""

    def __init__(self, model: str | Path, output: Path, size: str):
        self.output, self.size = output, SIZES[size]
        self.reward: Any = turns if size == "tiny" else first_line_reward
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_num_threads(1)
        if self.device.type == "cpu" and size != "tiny":
            multiply_as_bfloat16()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.device).eval()
        self.base = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        self.ends = [self.tokenizer.eos_token_id, *(token for token, text in enumerate(texts) if "\n" in text)]

    def precision(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def complete(self, problems: Sequence[Mapping[str, str]], seed: int, temperature: float = 1.0) -> Any:
        """Prompts of problems, a completion of each, up to the first newline, and rewards."""
        prompts = [self.tokenizer(row["problem"])["input_ids"] for row in problems]
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": temperature}
        options["generator"] = torch.Generator(self.device).manual_seed(seed)
        with self.precision(), self.device:
            rows = sample(self.model, prompts, eos=torch.tensor(self.ends), **options)[0].tolist()
        cut = [ids[: next((i + 1 for i, x in enumerate(ids) if x in self.ends), len(ids))] for ids in rows]
        texts = self.tokenizer.batch_decode(cut, skip_special_tokens=True)
        return prompts, cut, self.reward(texts, solution=[row["solution"] for row in problems])

    @torch.no_grad()
    def record(self, seed: int) -> None:
        """Write the base model's groups for a seed, with log-probabilities of the passes of training."""
        file, step = self.output / f"recorded-{seed}.jsonl", self.size.step
        if file.exists():
            return
        self.model.load_state_dict(self.base)
        problems = random.Random(seed).sample(make_problems("train", ["addition"], SPLITS), self.size.prompts["many"])
        columns = self.complete([problem for problem in problems for _ in range(GROUP)], seed)
        groups: list[dict[str, Any]] = []
        for first in range(0, len(problems) * GROUP, GROUP):
            prompts, completions, rewards = (column[first : first + GROUP] for column in columns)
            groups.append({"prompt": prompts[0], "completions": completions, "rewards": rewards})
        parts = [self.logps(groups[first : first + step]).tolist() for first in range(0, len(groups), step)]
        logps = [row for part in parts for row in part]
        write_lines(file, [{**group, "logps": own} for group, own in zip(groups, logps, strict=True)])

    def logps(self, groups: Groups) -> Tensor:
        """Log-probability of each completion, `[N, GROUP]`; a row of the batch is a prompt with its completions."""
        rows, scored = [], []
        for group in groups:
            length = len(group["prompt"])
            row = [(token, 0, position) for position, token in enumerate(group["prompt"])]
            for number, completion in enumerate(group["completions"], 1):
                for position, token in enumerate(completion, length):
                    before = length - 1 if position == length else len(row) - 1
                    scored.append((len(rows), before, len(rows) * GROUP + number - 1, token))
                    row.append((token, number, position))
            rows.append(torch.tensor(row))
        ids, parts, positions = pad_sequence(rows, batch_first=True, padding_value=-1).to(self.device).unbind(dim=2)
        # A token sees those before it of its own completion and of the prompt.
        seen = ((parts[:, :, None] == parts[:, None, :]) | (parts[:, None, :] == 0)).tril()[:, None]
        line, column, owner, target = torch.tensor(scored, device=self.device).unbind(dim=1)
        with self.precision():
            inputs = {"input_ids": ids.clamp(min=0), "position_ids": positions.clamp(min=0), "attention_mask": seen}
            hidden = self.model.model(**inputs, use_cache=False).last_hidden_state[line, column]
            logits = self.model.lm_head(hidden).float()
        logps = logits.log_softmax(dim=1).gather(1, target[:, None])[:, 0]
        return logps.new_zeros(len(groups) * GROUP).index_add(0, owner, logps).view(-1, GROUP)

    def steps(self, run: Run, groups: Groups) -> Iterator[None]:
        """Train on recorded groups; pauses before each optimizer step, when the gradients are there."""
        form, step = FORMS[run.form], self.size.step
        rewards, at_first = (torch.tensor([group[name] for group in groups]) for name in ("rewards", "logps"))
        advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)  # as in TRL
        omega = escort_weights(advantages.flatten(), alpha=ALPHA, num_generations=GROUP)
        g = project(omega, num_generations=GROUP)[0].view(-1, GROUP)
        solved = (rewards == 1).all(1, True).expand(-1, GROUP)
        length = fmean(len(completion) for group in groups for completion in group["completions"])  # as in OPOTrainer
        moves = ((g != 0) | solved & form.hinge).any(1) | (form.mu > 0)  # the others have no force wherever they are
        g, solved, at_first = (tensor.to(self.device) for tensor in (g, solved, at_first))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.rate, weight_decay=0.0, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for batch in schedule(run.regime, len(groups), step, run.seed):
            if kept := [index for index in batch if moves[index]]:
                log_ratio = self.logps([groups[index] for index in kept]) - at_first[kept]
                force = form.force(log_ratio.detach(), g[kept], solved[kept])
                (-(force * log_ratio).sum() / (len(batch) * GROUP * length)).backward()
            yield
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def run(self, run: Run) -> dict[str, Any]:
        """Train from the base model, and measure; the line of a run."""
        self.record(run.seed)
        began = time.perf_counter()
        groups = read_lines(self.output / f"recorded-{run.seed}.jsonl", bounded=False)
        groups = groups[: self.size.prompts[run.regime]]
        self.model.load_state_dict(self.base)
        steps = sum(1 for _ in self.steps(run, groups))
        trained = time.perf_counter()
        problems = make_problems("validation" if run.tuning else "test", ["addition"], SPLITS)[: self.size.problems]
        decodings = {"sampled": 1.0} if run.tuning else {"sampled": 1.0, "greedy": 1e-4}
        reached = {name: fmean(self.complete(problems, run.seed, value)[2]) for name, value in decodings.items()}
        seconds = {"seconds": round(trained - began, 2), "measuring": round(time.perf_counter() - trained, 2)}
        return {**asdict(run), **reached, "steps": steps, **seconds}


def schedule(regime: str, groups: int, step: int, seed: int) -> list[list[int]]:
    """The groups of each optimizer step: passes over all, or, for few, passes over those of a step in a row."""
    order = random.Random(seed)
    many = regime == "many"
    passes = [order.sample(range(groups), groups) for _ in range(PASSES if many else 1)]
    batches = [one[first : first + step] for one in passes for first in range(0, groups, step)]
    return [batch for batch in batches for _ in range(1 if many else PASSES)]


_process: dict[str, Any] = {}  # of a worker


def _start(deadline: float, *arguments: Any) -> None:
    _process.update(bench=Bench(*arguments), deadline=deadline, longest=0.0)


def _make(name: str, what: Any) -> dict[str, Any] | None:
    """What a method of the bench returns; nothing if it fails, and `None` if there is no time for it."""
    began = time.time()
    if began + _process["longest"] > _process["deadline"]:
        return None
    try:
        return getattr(_process["bench"], name)(what)
    except Exception:
        traceback.print_exc()
        return {}
    finally:
        _process["longest"] = max(_process["longest"], time.time() - began)


def missing(size: Size, found: Mapping[Run, Mapping[str, Any]]) -> list[Run]:
    """What is not finished: of the trials, and then of the reports, at the best rate of each form."""
    seeds = size.tuning_seeds
    runs = [Run("many", form, rate, seed, True) for seed, rate, form in product(seeds, size.rates, FORMS)]
    if found.keys() >= {*runs}:

        def score(form: str, rate: float) -> float:
            return fmean(found[Run("many", form, rate, seed, True)]["sampled"] for seed in seeds)

        rates = {form: max(size.rates, key=partial(score, form)) for form in FORMS}
        runs = [Run(r, form, rates[form], seed, False) for seed, r, form in product(size.seeds, size.prompts, FORMS)]
    return [run for run in runs if run not in found]


def page(size: Size, found: Mapping[Run, Mapping[str, Any]]) -> str:
    """Sampled accuracies in %, as Markdown: all trials, and the reports of the seeds that all forms have."""
    reached: dict[Any, dict[int, float]] = defaultdict(dict)
    for run, line in found.items():
        reached[run.form, run.rate if run.tuning else run.regime][run.seed] = 100 * line["sampled"]
    trials = [[form, *(" ".join(f"{x:.1f}" for x in reached[form, r].values()) for r in size.rates)] for form in FORMS]
    parts = ["# Recorded completions", table(["trials", *map("{:.0e}".format, size.rates)], trials)]
    for regime in size.prompts:
        seeds = sorted(set.intersection(*(set(reached[form, regime]) for form in FORMS)))
        own = {form: [reached[form, regime][seed] for seed in seeds] for form in FORMS}
        rows = [
            [form, shown(own[form]), *(shown([*map(sub, own[form], own[x])], signed=True) for x in ("TR", "TOPR"))]
            for form in FORMS
            if len(seeds) > 1
        ]
        parts.append(table([f"{regime}, {len(seeds)} seeds", "sampled", "less TR", "less TOPR"], rows))
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write or resume")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, or for tiny of any model")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time, each in a process")
    parser.add_argument("--limit_seconds", type=float, default=float("inf"), help="time limit")
    args = parser.parse_args(argv)
    if args.model is None and args.size != "tiny":
        parser.error("--model is needed, but for --size tiny")
    size, file, runs = SIZES[args.size], args.output / "runs.jsonl", []
    write_json(args.output / "origin.json", begin(args.output / "origin.json", {"size": args.size}))
    write_lines(file, read_lines(file))  # without a line that was cut short
    start = (time.time() + args.limit_seconds, args.model or base_model_path(), args.output, args.size)
    with ExitStack() as stack:
        each: Any = map
        if args.jobs == 1:
            _start(*start)
        else:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(args.jobs, _start, start))
            each = partial(pool.imap_unordered, chunksize=1)
        failed = {} in [*each(partial(_make, "record"), (*size.tuning_seeds, *size.seeds))]
        while (left := missing(size, read(Run, file))) and left != runs:
            runs = left
            for line in each(partial(_make, "run"), runs):
                failed |= line == {}
                append_lines(file, [line] if line else [])
    (args.output / "page.md").write_text(page(size, read(Run, file)), encoding="utf-8")
    if left:
        print(f"{len(left)} runs of this stage are missing: the same command resumes.", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
