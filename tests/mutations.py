"""
What the package notices of changed releases: twenty changes of TRL 1.16 and more, by somebody who had not read the
checks (`mutations.yaml`), half of which break.

    python tests/mutations.py [NAME …]    # the table of docs/compatibility.md, a minute for each; all without a name

Each change makes a simulated release. It is imported, trains two runs, and has the self-test. Exits with status 1 if
one that breaks is not named by any of these, or if one that does not is refused by one.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from simulated_releases import simulate


ROOT = Path(__file__).resolve().parents[1]
MUTATIONS = ROOT / "tests" / "mutations.yaml"
LATER = {"trl": "1.17.0", "transformers": "5.25.0"}

# Rewards and entropies of the first rollout differ, and its prompts have two lengths.
RUNS = """
import sys
from datasets import Dataset
from opo_trl import OPOConfig, OPOTrainer
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems

short = make_problems("train", ["Level 1"])[:16]
long = make_problems("train", ["Level 3"])[:16]
prompts = Dataset.from_list(
    [{"prompt": row["problem"], "solution": row["solution"]} for pair in zip(short, long) for row in pair]
)
options = {
    "opo": {"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2},
    "grpo": {"per_device_train_batch_size": 4, "steps_per_generation": 4, "beta": 0.1, "scale_rewards": "group"},
}
for objective, fields in options.items():
    args = OPOConfig(
        f"{sys.argv[1]}/{objective}",
        objective=objective,
        num_generations=4,
        max_completion_length=16,
        temperature=2.0,
        max_steps=3,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        **fields,
    )
    OPOTrainer(base_model_path(), arithmetic_reward, args, prompts).train()
"""
COMMANDS = {
    "import": ("-c", "import opo_trl.trainer"),
    "first step": ("-c", RUNS, "."),
    "self-test": ("-m", "opo_trl.selftest"),
}


def release(mutation: dict[str, Any], folder: Path) -> Path:
    """The simulated release of a mutation, all of whose edits are of one library."""
    edits = defaultdict(list)
    for edit in mutation["edits"]:
        library, _, file = edit["file"].partition("/")
        edits[file].append((edit["old"], edit["new"]))
    return simulate(folder / "release", number=LATER[library], edits=edits, library=library)


def complaints(mutation: dict[str, Any]) -> dict[str, str]:
    """Where a mutation is refused → the last line that says so."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(release(mutation, Path(folder))), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        for name, command in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode != 0:
                errors = re.findall(r"^WRONG +(.*)$|^\w*Error: (.*)$", done.stdout + done.stderr, re.MULTILINE)
                found[name] = "".join(errors[0]) if errors else "ended without a message"
    return found


def main(names: list[str]) -> int:
    """Returns the exit status."""
    mutations = yaml.safe_load(MUTATIONS.read_text(encoding="utf-8"))
    are_right = []
    print("| change | breaks | refused by | it says |", "| --- | --- | --- | --- |", sep="\n", flush=True)
    for name in names or mutations:
        mutation = mutations[name]
        found = complaints(mutation)
        breaks = mutation["kind"] == "breaking"
        are_right.append(bool(found) == breaks)
        message = next(iter(found.values()), "–").replace("|", "\\|")
        answer = "yes" if breaks else "no"
        print(f"| {mutation['what']} | {answer} | {', '.join(found) or '–'} | {message[:160]} |", flush=True)
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
