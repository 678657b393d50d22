"""What is compared, and at which size; imported without PyTorch."""

import argparse
from dataclasses import asdict, dataclass, field
from typing import Any


MODEL, DATA = "Qwen/Qwen3-0.6B", "openai/gsm8k"
TINY_MODEL, TINY_DATA = "opo_trl/data/arithmetic/base", "arithmetic"
MAX_PROMPT_LENGTH = 256
PHASES = ("generate", "score", "update")
TEMPLATE = {"enable_thinking": False}  # thinking would not fit into the completions


@dataclass(frozen=True)
class Part:
    """A trainer: whose it is, its title, passes over a rollout, its share of the learning rate, and its fields."""

    title: str
    library: str
    passes: int = 1
    rate: float = 1.0
    fields: dict[str, Any] = field(default_factory=dict)


# OPO's learning rate is half of GRPO's, as where both were tuned: it makes four times as many steps.
PARTS = {
    "grpotrainer": Part("TRL's GRPOTrainer", "trl", fields={"loss_type": "grpo"}),
    "grpo": Part("`objective: grpo`", "opo_trl", fields={"objective": "grpo"}),
    "opo": Part("OPO with replay", "opo_trl", 4, 0.5, {"num_iterations": 4, "max_staleness": 8}),
}


@dataclass(frozen=True)
class Size:
    """How much is generated, trained and measured; completions of a group, a micro-batch, a rollout and a part."""

    completions: int = 2048
    rollout: int = 64
    group: int = 8
    rows: int = 8
    steps_per_rollout: int = 2  # optimizer steps of a pass
    max_completion_length: int = 384
    problems: int = 128  # of an accuracy
    learning_rate: float = 5e-5

    @property
    def micro_batches(self) -> int:
        """Of an optimizer step."""
        return self.rollout // (self.rows * self.steps_per_rollout)


FULL = Size()
TINY = Size(48, 24, 6, 6, 2, 32, 24, 1e-3)


@dataclass(frozen=True)
class Settings:
    """What the parts of a page have in common."""

    model: str
    data: str
    tiny: bool
    seed: int = 42

    @property
    def size(self) -> Size:
        return TINY if self.tiny else FULL

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | asdict(self.size)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options that [`of`] reads."""
        parser.add_argument("--model", help=f"name on the Hub, or a folder; by default {MODEL}")
        parser.add_argument(
            "--data", help=f"name on the Hub, or a folder with train and test files; by default {DATA}"
        )
        parser.add_argument(
            "--tiny", action="store_true", help="a few steps, also on a CPU, by default of the embedded model"
        )

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Settings":
        """Those of a command line."""
        model, data = (TINY_MODEL, TINY_DATA) if arguments.tiny else (MODEL, DATA)
        return cls(arguments.model or model, arguments.data or data, arguments.tiny)
