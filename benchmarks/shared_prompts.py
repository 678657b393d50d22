"""
What it saves to compute a prompt once for its completions: forward and backward pass over the samples of a step; and
what an update of OPOTrainer takes, beside one of TRL's GRPOTrainer on the same rollout.

    python -m benchmarks.shared_prompts    # → results/shared_prompts.md

The model has the shape of SmolLM2-135M (vocabulary 49,152) and random weights, on one thread of a CPU in float32. Both
ways alternate; processor time, so other work counts little.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from opo_trl.rollout.planning import Limits, Prompts, Rows, parts_of_rows
from opo_trl.rollout.shared_prompts import balance, model_for

from .pages import table
from .record import origin
from .replay import Rollout, make_trainer, ratio, take_turns


RESULTS = Path(__file__).with_name("results")
# Prompts, completions of each, tokens of a prompt and of its longest completion.
CASES = {
    "half as long as completions": (1, 8, 64, 128),
    "as long": (1, 8, 96, 96),
    "four times as long": (1, 8, 256, 64),
    "three worked lines, an answer": (4, 6, 41, 6),
    "a system prompt with tools": (1, 6, 600, 40),
}
UPDATES = ("as long", "three worked lines, an answer")  # with whole trainers, of 48 completions in micro-batches of 16
ROUNDS = 2
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}


def samples(prompts: int, completions: int, prompt: int, longest: int) -> tuple[Rows, np.ndarray]:
    """Samples of random tokens, with completions of half to all of the longest, and their prompts."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 49_000, (prompts, prompt), generator=random).repeat_interleave(completions, dim=0)
    tokens = torch.randint(3, 49_000, (len(ids), longest), generator=random)
    length = torch.randint((longest + 1) // 2, longest + 1, (len(ids), 1), generator=random)
    rows = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": tokens}
    rows["completion_mask"] = (torch.arange(longest) < length).long()
    return rows, np.repeat(np.arange(prompts), completions)


def update(model: LlamaForCausalLM, rows: Rows, prompts: Prompts | None) -> tuple[float, int, torch.Tensor]:
    """Processor seconds, tokens passed and gradient of a step whose loss is the sum of all log-probabilities."""
    lengths = torch.stack([rows["prompt_mask"].sum(1), rows["completion_mask"].sum(1)], dim=1).numpy()
    model.zero_grad()
    began, passed = time.process_time(), 0
    for part in parts_of_rows(rows, lengths, np.arange(len(lengths)), 1, Limits(16), prompts=prompts):
        ids, mask = (
            torch.cat([part[f"{text}_{name}"] for text in ("prompt", "completion")], dim=1) for name in ("ids", "mask")
        )
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : part["prompt_ids"].size(1)] = -100
        passed += part.get("opo_source", ids).numel()
        called = model_for(model, part)
        called(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)["log_probs"].sum().backward()
    seconds = time.process_time() - began
    return seconds, passed, torch.cat([p.grad.flatten() for p in model.parameters()])


def measure() -> dict:
    """Both ways, by case."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    add_fused_lm_head(model)
    found = {}
    for name, case in CASES.items():
        rows, of_sample = samples(*case)
        times: dict[bool, list[float]] = {False: [], True: []}
        tokens, gradients = {}, {}
        for _ in range(ROUNDS):
            for shared in times:
                prompts = Prompts(of_sample, balance(model)) if shared else None
                seconds, tokens[shared], gradients[shared] = update(model, rows, prompts)
                times[shared].append(seconds)
        distance = (gradients[True] - gradients[False]).norm() / gradients[False].norm()
        ratios = [own / other for own, other in zip(times[True], times[False], strict=True)]
        found[name] = {"ratios": ratios, "tokens": [tokens[True], tokens[False]], "distance": distance.item()}
    return found


def measure_updates() -> dict:
    """Processor time of an optimizer step of each trainer, by case. No group has zero variance."""
    found = {}
    for name in UPDATES:
        _, completions, prompt, longest = CASES[name]
        rows, _ = samples(48 // completions, completions, prompt, longest)
        lengths = rows["completion_mask"].sum(1).tolist()
        tokens = [ids[:length] for ids, length in zip(rows["completion_ids"].tolist(), lengths, strict=True)]
        rewarded = [[2 * (ids[0] // 2) + place % 2, *ids[1:]] for place, ids in enumerate(tokens)]
        rollout = Rollout(rows["prompt_ids"].tolist(), rewarded, completions)
        trainers = {
            method: make_trainer(method, {"model_type": "llama", **SHAPE}, rollout, rows=16, steps=1)
            for method in ("GRPO", "OPO")
        }
        seconds = take_turns(trainers, ROUNDS)
        found[name] = {"seconds": seconds, "ratio": ratio(seconds["OPO"], seconds["GRPO"])}
    return found


def write_page(file: Path) -> None:
    """Write the page of a file of results."""
    found = json.loads(file.read_text())
    rows = []
    for name, case in found["cases"].items():
        low, middle, high = min(case["ratios"]), statistics.median(case["ratios"]), max(case["ratios"])
        tokens = case["tokens"][0] / case["tokens"][1]
        rows.append([name, f"{tokens:.2f}", f"{middle:.2f} ({low:.2f}–{high:.2f})", f"{case['distance']:.0e}"])
    header = ("prompts", "tokens", "processor time", "difference of the gradients")
    origin_line = f"`{found['origin']['command']}`, {found['origin']['date']}, {found['origin']['device']}."
    updates = [[name, *_seconds(case)] for name, case in found["updates"].items()]
    header_of_updates = ("prompts", "GRPOTrainer, seconds", "OPOTrainer, seconds", "ratio")
    text = f"# A prompt computed once: fractions of what rows take\n\n{origin_line}\n\n{table(header, rows)}\n"
    text += "\n## An update of 48 completions, beside GRPOTrainer's\n\nNo group has zero variance; one thread.\n\n"
    text += table(header_of_updates, updates) + "\n"
    file.with_suffix(".md").write_text(text)


def _seconds(case: dict) -> list[str]:
    times = [f"{statistics.median(case['seconds'][name]):.1f}" for name in ("GRPO", "OPO")]
    return [*times, f"{case['ratio']['median']:.2f} ({case['ratio']['low']:.2f}–{case['ratio']['high']:.2f})"]


def main() -> None:
    """Measure, and write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    file = RESULTS / "shared_prompts.json"
    file.write_text(
        json.dumps({"origin": origin(), "cases": measure(), "updates": measure_updates()}, indent=1) + "\n"
    )
    write_page(file)


if __name__ == "__main__":
    main()
