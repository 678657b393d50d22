"""
Six short runs, their log entries and a hash of their weights, to compare two versions of the package on one machine.

    python tests/six_runs.py FOLDER > before.json      # two minutes; not a test: other machines round differently
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
SHORT = {"validation_steps": 1000, "validation_size": 50, "report_levels": "Level 3", "report_size": 50}
SHORT |= {"overwrite": "false", "disable_tqdm": "true", "save_strategy": "no"}


def train(recipe: str, output: Path, launch: tuple[str, ...] = (), **fields) -> Path:
    """Train with a recipe and other fields, in a process of its own, or in what `launch` starts."""
    given = {"config": ROOT / "recipes" / recipe, "output_dir": output, **SHORT, **fields}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *launch, "-m", "opo_trl.train", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    return output


def result(folder: Path) -> dict:
    """Entries of the log without times, in order, and the hash of the weights."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    untimed = ("time", "per_second", "runtime", "seconds", "memory")
    kept = [{k: v for k, v in line.items() if not any(word in k for word in untimed)} for line in lines]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {"weights": weights, "log": kept}


def main() -> None:
    folder = Path(sys.argv[1])
    reuse = {"max_completions": 240}
    runs = {
        "demo": train("arithmetic/opo.yaml", folder / "demo", max_steps=12),
        "reuse": train("arithmetic/reuse.yaml", folder / "reuse", save_rollouts="true", **reuse),
        "recorded": train(
            "arithmetic/reuse.yaml",
            folder / "recorded",
            rollouts=folder / "reuse" / "rollouts",
            num_iterations=2,
            max_staleness=0,
            **reuse,
        ),
        "asynchronous": train("arithmetic/async/opo.yaml", folder / "asynchronous", max_steps=8),
    }
    two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    gloo = {"ddp_backend": "gloo", "per_device_train_batch_size": 24}
    runs["two processes"] = train("arithmetic/reuse.yaml", folder / "two", two, **reuse, **gloo)
    steps = {"save_strategy": "steps", "save_steps": 6}  # between the passes over a rollout
    train("arithmetic/reuse.yaml", folder / "resumed", max_steps=6, **steps)
    checkpoint = folder / "resumed" / "checkpoint-6"
    runs["resumed"] = train("arithmetic/reuse.yaml", folder / "resumed", resume_from_checkpoint=checkpoint, **reuse)
    print(json.dumps({name: result(made) for name, made in runs.items()}, indent=1))


if __name__ == "__main__":
    main()
