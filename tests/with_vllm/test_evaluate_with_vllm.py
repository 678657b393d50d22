"""`opo-trl evaluate --backend vllm`: the same verdicts from both, and the accuracy that Transformers measures."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval: pip install 'opo_trl[evaluate]'")
def test_vllm_gives_the_verdicts_of_transformers(environment, tmp_path):
    rows = {}
    for backend in ("hf", "vllm"):
        options = ("--tasks", "arithmetic", "--limit", "40", "--samples", "1", "--backend", backend)
        command = [sys.executable, "-m", "opo_trl.launch.cli", "evaluate", "arithmetic", *options]
        command += ["--output", str(tmp_path / backend)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        task = json.loads((tmp_path / backend / "evaluation.json").read_text())["tasks"]["arithmetic"]
        assert task["agreement"]["same"] == 40
        assert all(row["lm_eval"]["completion"] == row["opo_trl"]["completion"] for row in task["samples"])
        rows[backend] = [row["opo_trl"]["right"] for row in task["samples"]]
    # In bfloat16 the engines round differently, which may change a completion.
    assert sum(one is other for one, other in zip(*rows.values(), strict=True)) >= 36
    assert any(rows["vllm"])
