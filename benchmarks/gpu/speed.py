"""
Speed and memory of an update at the shape of Qwen3-1.7B, with random weights: OPOTrainer beside TRL's GRPOTrainer.

    python -m benchmarks.gpu.speed --output runs/gpu/speed.json            a few minutes on a GPU of 80 GB or more
    python -m benchmarks.gpu.speed --output runs/gpu/tiny.json --tiny      on a CPU, in a minute

Both trainers get one fixed rollout in place of generation: random tokens, as many as solutions of MATH problems have.
An update phase is all that follows: log-probabilities of the anchor, rewards and advantages, and two optimizer steps
of forward and backward passes. Memory is that of a trainer alone on the device; then both are there, and their phases
alternate, so that a device that slows down slows both. With gradient checkpointing and without.
"""

import argparse
import contextlib
import gc
import io
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.arithmetic import base_model_path
from opo_trl.run_folder import write_json

from .record import origin, peak_memory, reset_peak_memory


QWEN3_1_7B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
TINY_QWEN3 = QWEN3_1_7B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
SHAPES = {"qwen3-1.7b": QWEN3_1_7B, "tiny": TINY_QWEN3}
GENERATIONS = 6
OPTIMIZER_STEPS = 2
DEFAULTS = {
    "shape": "qwen3-1.7b",
    "groups": 16,
    "rows": 8,
    "repeats": 5,
    "lengths": {"prompt": 120, "median": 300, "longest": 1280},  # as of MATH problems and their solutions
}
TINY = {"shape": "tiny", "groups": 2, "rows": 3, "lengths": {"prompt": 8, "median": 12, "longest": 32}}


@dataclass(frozen=True)
class Rollout:
    """
    A fixed rollout.

    Args:
        prompts: token ids of each completion's prompt; those of a group are the same.
        completions: token ids of each completion.
    """

    prompts: list[list[int]]
    completions: list[list[int]]


def draw_rollout(*, groups: int, prompt: int, median: int, longest: int, vocab_size: int, eos: int) -> Rollout:
    """
    Draw a rollout of random tokens.

    Args:
        groups (`int`):
            Prompts, each with `GENERATIONS` completions.
        prompt (`int`):
            Typical length of a prompt; lengths lie within a quarter of it.
        median (`int`), longest (`int`):
            Lengths of completions are log-normal with this median, and cut off there.
        vocab_size (`int`), eos (`int`):
            Size of the vocabulary, and the token that ends a completion unless it was cut off.

    Returns:
        [`Rollout`]: The same one on every call.
    """
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(eos + 1, vocab_size) for _ in range(n)]

    prompts = [tokens(rng.randint(prompt * 3 // 4, prompt * 5 // 4)) for _ in range(groups)]
    completions = []
    for _ in range(groups * GENERATIONS):
        length = round(median * rng.lognormvariate(0, 0.6))
        completions.append(tokens(longest) if length > longest else [*tokens(length - 1), eos])
    return Rollout([ids for ids in prompts for _ in range(GENERATIONS)], completions)


class Replay:
    """Put before a trainer among the bases: its rollouts are the one in `rollout`, instead of generated ones."""

    rollout: Rollout

    def _generate(self, prompts: list):
        texts = [""] * len(prompts)
        return self.rollout.prompts, self.rollout.completions, None, texts, None, {}, None, []


class ReplayingGRPOTrainer(Replay, GRPOTrainer):
    """TRL's trainer on a fixed rollout."""


class ReplayingOPOTrainer(Replay, OPOTrainer):
    """OPO's trainer on a fixed rollout."""


TRAINERS: dict[str, tuple[type, type]] = {
    "grpo": (ReplayingGRPOTrainer, GRPOConfig),
    "opo": (ReplayingOPOTrainer, OPOConfig),
}


class Stopwatch(TrainerCallback):
    """Seconds from the first optimizer step's beginning to the last one's end, of the latest call of `train`."""

    seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self._started = _now()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = _now() - self._started


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def parity(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """A reward with spread in a group: whether a completion begins with an even token."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def make_trainer(method: str, config: PreTrainedConfig, rollout: Rollout, *, rows: int, checkpointing: bool) -> Any:
    """A trainer of a new random model that is trained on the rollout by each call of `train`."""
    on_gpu = torch.cuda.is_available()
    trainer_class, config_class = TRAINERS[method]
    micro_batches = len(rollout.completions) // rows
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=micro_batches // OPTIMIZER_STEPS,
            steps_per_generation=micro_batches,
            max_steps=OPTIMIZER_STEPS,
            num_generations=GENERATIONS,
            max_completion_length=max(map(len, rollout.completions)),
            learning_rate=2e-6,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            beta=0.0,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
    trainer = trainer_class(
        model=model,
        reward_funcs=parity,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(rollout.completions))]}),
        processing_class=AutoTokenizer.from_pretrained(base_model_path()),
    )
    trainer.rollout = rollout
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Stopwatch())
    return trainer


def update_phase(trainer: Any) -> float:
    """Train on the rollout once; returns the seconds it took."""
    with contextlib.redirect_stdout(io.StringIO()):  # the training plan, each time again
        trainer.train()
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Stopwatch)).seconds


def measure_memory(method: str, config: PreTrainedConfig, rollout: Rollout, **options) -> int | None:
    """Peak of allocated bytes in the second phase of a trainer that is alone; the first makes the moments."""
    trainer = make_trainer(method, config, rollout, **options)
    update_phase(trainer)
    reset_peak_memory()
    update_phase(trainer)
    return peak_memory()


def measure_speed(config: PreTrainedConfig, rollout: Rollout, *, repeats: int, **options) -> dict[str, list[float]]:
    """Seconds of each method's phases, which alternate; a first one of each is not counted."""
    trainers = {method: make_trainer(method, config, rollout, **options) for method in TRAINERS}
    seconds: dict[str, list[float]] = {method: [] for method in TRAINERS}
    for repeat in range(repeats + 1):
        # Whoever comes first may find the device cooler: take turns.
        for method in sorted(TRAINERS, reverse=repeat % 2 == 1):
            took = update_phase(trainers[method])
            if repeat:
                seconds[method].append(round(took, 4))
    return seconds


def measure(config: PreTrainedConfig, rollout: Rollout, *, repeats: int, **options) -> dict[str, Any]:
    """Memory and speed of both, and OPO's time relative to GRPO's: pair by pair, its median and range."""
    result: dict[str, Any] = {}
    for method in TRAINERS:
        result[method] = {"peak_memory": measure_memory(method, config, rollout, **options)}
        _free()
    tokens = sum(map(len, rollout.prompts)) + sum(map(len, rollout.completions))
    speed = measure_speed(config, rollout, repeats=repeats, **options)
    _free()
    for method, seconds in speed.items():
        middle = statistics.median(seconds)
        result[method] |= {"seconds": seconds, "median": middle, "tokens_per_second": round(tokens / middle)}
    ratios = sorted(opo / grpo for opo, grpo in zip(speed["opo"], speed["grpo"], strict=True))
    result["ratio"] = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
    return result


def _free():
    gc.collect()
    torch.cuda.empty_cache()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--shape", choices=SHAPES, help="shape of the model (qwen3-1.7b)")
    parser.add_argument("--model", help="folder or Hub id whose configuration to take instead; no weights are read")
    parser.add_argument("--groups", type=int, help="prompts of the rollout, 6 completions each (16)")
    parser.add_argument("--rows", type=int, help="completions per micro-batch (8)")
    parser.add_argument("--repeats", type=int, help="measured phases of each trainer (5)")
    parser.add_argument("--tiny", action="store_true", help="everything as small as it gets, on a CPU")
    tiny = parser.parse_args(argv).tiny
    parser.set_defaults(**DEFAULTS | (TINY if tiny else {}))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")  # names that TRL still uses
    arguments = parse(argv)
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit("No GPU. `--tiny` tries the same code on a CPU.")
    model, groups, rows = arguments.model, arguments.groups, arguments.rows
    config = AutoConfig.from_pretrained(model) if model else AutoConfig.for_model(**SHAPES[arguments.shape])
    if groups * GENERATIONS % (OPTIMIZER_STEPS * rows):
        raise ValueError(
            f"rows={rows} does not cut {groups} groups of {GENERATIONS} completions into {OPTIMIZER_STEPS} equal "
            "optimizer steps. Set `--rows` to a divisor of half of the completions."
        )
    eos = AutoTokenizer.from_pretrained(base_model_path()).eos_token_id
    rollout = draw_rollout(groups=groups, vocab_size=config.vocab_size, eos=eos, **arguments.lengths)
    results: dict[str, Any] = {
        **origin(),
        "model": config.to_diff_dict(),
        "rollout": {
            "completions": len(rollout.completions),
            "rows": rows,
            "prompt_tokens": sum(map(len, rollout.prompts)),
            "completion_tokens": sum(map(len, rollout.completions)),
            "longest": max(map(len, rollout.completions)),
        },
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for name, checkpointing in (("checkpointing", True), ("no checkpointing", False)):
        try:
            results[name] = measure(config, rollout, rows=rows, checkpointing=checkpointing, repeats=arguments.repeats)
        except torch.OutOfMemoryError:
            results[name] = "out of memory"
        _free()
        write_json(arguments.output, results)
        print(name, results[name], flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
