"""
How far vLLM's log-probabilities are from the trainer's for the same weights, and what that makes of Δ.

    python -m benchmarks.server_noise run       # → results/server_noise.json; needs vLLM; 5 minutes on 2 cores
    python -m benchmarks.server_noise report    # results/server_noise.json → server_noise.md

In asynchronous training Δ = log π − log π_vLLM, which should be 0 for a completion of the current policy. vLLM
completes prompts, and Transformers computes the log-probabilities of the same tokens, at the same temperature. Weights
are in float32, as in training; a server in bfloat16 rounds them. Two policies:

- "arithmetic": the embedded base model, every weight moved by 1 % so that rounding matters; Level 3, up to the end of
  the answer;
- "random": a random Qwen3 of two layers and 1,024 tokens, whose completions end nowhere, so that Δ of the beginning of
  a completion is Δ of a completion of that length.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from opo_trl.checks.files import write_json
from opo_trl.data.arithmetic import base_model_path, make_problems

from .many_runs import read_command_line
from .pages import table
from .record import origin
from .shapes import small_qwen3


RESULTS = Path(__file__).resolve().parent / "results" / "server_noise.json"
LENGTHS = (16, 32, 64, 128, 256)
COMPLETIONS = {"arithmetic": 256, "random": 64}
SCALE, HEAD_SCALE = 6.0, 18.0  # of the random model's matrices, so that it is as sure of a token as a language model
SERVERS = {  # dtype and --logprobs-mode → temperatures
    ("float32", "processed_logprobs"): (1.0, 0.7),
    ("bfloat16", "processed_logprobs"): (1.0, 0.7),
    ("float32", "raw_logprobs"): (0.7,),
}
TRAINERS = ("float32", "bfloat16")  # without and with `bf16`, TRL's default: autocast
TARGET = 1.0  # |v*| is 1 to 6 with μ = 0.3


# Measurement


def make_policies(folder: Path) -> None:
    """Save the two policies, in float32."""
    torch.manual_seed(0)
    arithmetic = AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in arithmetic.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    arithmetic.save_pretrained(folder / "arithmetic")
    shape = small_qwen3(128) | {"max_position_embeddings": 512, "tie_word_embeddings": False}
    random = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in random.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(HEAD_SCALE if name.startswith("lm_head") else SCALE)
    random.save_pretrained(folder / "random")


def prompts(policy: str) -> list[list[int]]:
    """Token ids of one prompt for each completion."""
    count = COMPLETIONS[policy]
    if policy == "arithmetic":
        tokenizer = AutoTokenizer.from_pretrained(base_model_path())
        return [tokenizer(row["problem"])["input_ids"] for row in make_problems("train", ["Level 3"])[:count]]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1024, (count, 8), generator=generator).tolist()


def serve(policy: str, model: str, dtype: str, mode: str, output: Path) -> None:
    """Complete the prompts at each temperature; in a process of its own, which vLLM needs."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]  # crashes on some virtual machines
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    longest = max(LENGTHS) if policy == "random" else 40
    engine = LLM(
        model,
        dtype=dtype,
        logprobs_mode=mode,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest + 64,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=False,
        seed=0,
    )
    found = {}
    for temperature in SERVERS[dtype, mode]:
        stop = {"ignore_eos": True} if policy == "random" else {"stop_token_ids": [1]}
        sampling = SamplingParams(temperature=temperature, max_tokens=longest, logprobs=0, detokenize=False, **stop)
        rows = [{"prompt_token_ids": ids} for ids in prompts(policy)]
        outputs = [each.outputs[0] for each in engine.generate(rows, sampling, use_tqdm=False)]
        found[f"{temperature:g}"] = [
            (
                list(each.token_ids),
                [step[i].logprob for step, i in zip(each.logprobs, each.token_ids, strict=True)],
            )
            for each in outputs
        ]
    output.write_text(json.dumps(found))


@torch.no_grad()
def differences(policy: str, model: Any, completions: list, temperature: float, trainer: str) -> list[Tensor]:
    """log π − log π_vLLM of each token of each completion."""
    found = []
    for prompt, (ids, logps) in zip(prompts(policy), completions, strict=True):
        tokens = torch.tensor([prompt + ids])
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer == "bfloat16"):
            logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        own = (logits.float() / temperature).log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        found.append(own.double() - torch.tensor(logps, dtype=torch.float64))
    return found


def summary(deltas: Tensor) -> dict[str, float]:
    """Of Δ of many completions of one length."""
    size = deltas.abs()
    return {
        "mean": deltas.mean().item(),
        "std": deltas.std().item(),
        "median": size.median().item(),
        "max": size.max().item(),
    }


def measure() -> dict[str, Any]:
    """All cases."""
    cases = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_policies(folder)
        for policy in COMPLETIONS:
            model = AutoModelForCausalLM.from_pretrained(folder / policy, dtype=torch.float32).eval()
            for (dtype, mode), temperatures in SERVERS.items():
                served = folder / "served.json"
                arguments = ["serve", policy, str(folder / policy), dtype, mode, str(served)]
                subprocess.run([sys.executable, "-m", "benchmarks.server_noise", *arguments], check=True)
                completions = json.loads(served.read_text())
                for temperature in temperatures:
                    for trainer in TRAINERS:
                        tokens = differences(policy, model, completions[f"{temperature:g}"], temperature, trainer)
                        if policy == "arithmetic":
                            length = statistics.fmean(map(len, tokens))
                            deltas = {f"{length:.1f}": summary(torch.stack([each.sum() for each in tokens]))}
                        else:
                            sums = torch.stack(tokens).cumsum(dim=1)
                            deltas = {str(length): summary(sums[:, length - 1]) for length in LENGTHS}
                        case = {"policy": policy, "server": dtype, "mode": mode, "temperature": temperature}
                        case |= {"trainer": trainer, "deltas": deltas}
                        flat = torch.cat(tokens)
                        case |= {"token": {"mean": flat.mean().item(), "std": flat.std().item()}}
                        case["surprise"] = -statistics.fmean(
                            value for _, logps in completions[f"{temperature:g}"] for value in logps
                        )
                        cases.append(case)
                        print(case, flush=True)
    return {**origin(), "vllm": vllm_version(), "cases": cases}


def vllm_version() -> str:
    """Of either distribution."""
    from vllm import __version__  # type: ignore[import-not-found]

    return __version__


# Report


def size(each: dict[str, float]) -> float:
    """Root mean square of Δ."""
    return math.hypot(each["mean"], each["std"])


def exponent(deltas: dict[str, dict[str, float]]) -> float:
    """p of the least-squares fit size ∝ length^p."""
    points = [(math.log(float(length)), math.log(size(each))) for length, each in deltas.items()]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def overwhelmed(deltas: dict[str, dict[str, float]]) -> float:
    """Length at which Δ is as large as a small target, if it grows with √length from the longest measured."""
    length, each = max(((float(length), each) for length, each in deltas.items()), key=lambda item: item[0])
    return length * (TARGET / size(each)) ** 2


def report(results: dict[str, Any]) -> str:
    """The page."""
    short, long = ([c for c in results["cases"] if c["policy"] == policy] for policy in COMPLETIONS)

    def name(case: dict[str, Any]) -> list[str]:
        mode = case["mode"].removesuffix("_logprobs")
        return [f"{case['server']}, {mode}", f"{case['temperature']:g}", case["trainer"]]

    first = []
    for case in short:
        (length, each), *_ = case["deltas"].items()
        first.append([*name(case), length, *(f"{value:.1e}" for value in (size(each), each["median"], each["max"]))])
    second = []
    for case in long:
        sizes = [f"{size(each):.1e}" for each in case["deltas"].values()]
        enough = f"{overwhelmed(case['deltas']):.0e}"
        second.append([*name(case), *sizes, f"{exponent(case['deltas']):.2f}", enough])
    versions = ", ".join(f"{key} {number}" for key, number in results["versions"].items())
    header = ("server", "temperature", "trainer")
    surprise = statistics.fmean(case["surprise"] for case in long if case["temperature"] == 1.0)
    return (
        "# Noise of a server's log-probabilities\n\n"
        "`python -m benchmarks.server_noise report` makes this page; the script's docstring says what is measured. Δ "
        "of\ncompletions of the current policy, which should be 0.\n\n"
        f'"arithmetic", {COMPLETIONS["arithmetic"]} completions:\n\n'
        f"{table([*header, 'mean length', 'root mean square', 'median', 'largest'], first)}\n\n"
        f'"random", {COMPLETIONS["random"]} completions, {surprise:.1f} nats per token. Root mean square by length; '
        "the exponent of its growth, which is 0.5\nfor independent errors and 1 for errors in one direction; and the "
        f"length at which it is {TARGET:g}, the size of small targets with\nμ = 0.3, if it grows with the root of the "
        "length from the longest on:\n\n"
        f"{table([*header, *map(str, LENGTHS), 'exponent', f'{TARGET:g} at length'], second)}\n\n"
        f"Measured {results['date'][:10]} with vLLM {results['vllm']}, {versions}.\n"
    )


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        policy, model, dtype, mode, output = sys.argv[2:]
        serve(policy, model, dtype, mode, Path(output))
        return 0
    arguments = read_command_line(__doc__, "run", "report")
    if arguments.command == "run":
        write_json(RESULTS, measure())
    RESULTS.with_suffix(".md").write_text(report(json.loads(RESULTS.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
