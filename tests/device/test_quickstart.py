"""The first diff of docs/migrating.md turns a script of TRL's defaults into one that trains OPO, on a device."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from trl import GRPOTrainer

from opo_trl import OPOTrainer


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "public_scripts" / "quickstart.py"


def sides_of_the_diff() -> tuple[str, str]:
    """The code before and after, as the page has it."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    diff = re.search(r"^```diff\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE).group(1)
    before, after = [], []
    for line in diff.splitlines():
        if not line.startswith("+"):
            before.append(line[1:])
        if not line.startswith("-"):
            after.append(line[1:])
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


@pytest.mark.device(processes=1)
def test_script_with_two_lines_changed_trains_opo(tiny_model, tmp_path):
    before, after = sides_of_the_diff()
    docstring, _, code = SCRIPT.read_text(encoding="utf-8").partition("\n\n")
    assert docstring.startswith('"""')
    assert before == code
    changed = [line for line in before.splitlines() if line not in after.splitlines()]
    assert len(changed) == 2
    # The names on the Hub are those of folders here.
    model = shutil.copytree(tiny_model, tmp_path / "Qwen" / "Qwen3-0.6B")
    # Of TRL's default, 256 tokens, few are needed: half of the vocabulary ends a completion.
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(2, 130))}), encoding="utf-8")
    data = tmp_path / "trl-lib" / "tldr"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n", encoding="utf-8")
    os.chdir(tmp_path)
    trainers = []
    for side in (before, after):
        names = {}
        exec(compile(side, "script", "exec"), names)
        trainers.append(names["trainer"])
    theirs, ours = trainers
    assert type(theirs) is GRPOTrainer
    assert type(ours) is OPOTrainer
    assert ours.args.objective == "opo"
    assert ours.args.plan_micro_batches
    assert ours.args.skip_inert_rows
    assert theirs.state.global_step == ours.state.global_step == 3
    assert ours.accelerator.device.type == "cuda"
