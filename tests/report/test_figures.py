"""Figures are drawn from the log alone: the same log gives the same files."""

import json

import pytest

from opo_trl.checks.files import append_lines, read_lines, write_json
from opo_trl.launch.cli import main
from opo_trl.metrics.log import PHASES
from opo_trl.report.figures import draw_run, fits_by_pass


@pytest.fixture
def run(tmp_path):
    rows = []
    for step in range(1, 41):
        row = {"step": step, "grad_norm": 1 + step % 3, "entropy": 1 / step, "opo/off_policy_steps": (step - 1) % 2}
        row |= {"opo/chi2": 0.1 * ((step - 1) % 2), "opo/gradient_response_efficiency": 0.5}
        row |= {f"opo/time/{phase}": 0.25 * (phase != "sync") for phase in PHASES} | {"opo/tokens_per_second": 1234.0}
        rows.append(row | ({"reward": step / 40} if step % 2 else {}))
        if step % 10 == 0:
            rows.append(
                {"step": step, "validation/accuracy": step / 50, "validation/low": 0.1, "validation/high": 0.9}
            )
    append_lines(tmp_path / "log.jsonl", rows)
    cell = {"accuracy": 0.5, "low": 0.4, "high": 0.6}
    levels = {"Level 3": {"greedy": cell, "sampled": cell}}
    write_json(tmp_path / "summary.json", {"before": levels, "after": levels})
    for name in ("recipe.yaml", "settings.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_figures_are_drawn_as_png_and_svg_and_labelled(run):
    files = {path.name: path for path in draw_run(run)}
    assert files.keys() == {
        f"{name}.{suffix}" for name in ("training", "time", "accuracy") for suffix in ("png", "svg")
    }
    assert all(path.read_bytes()[:4] == b"\x89PNG" for name, path in files.items() if name.endswith("png"))
    svg = files["training.svg"].read_text()
    for title in ("training reward", "validation accuracy", "entropy", "gradient norm", "χ²", "response efficiency"):
        assert title in svg, title
    assert "not logged" not in svg
    assert "Level 3, greedy" in files["accuracy.svg"].read_text()
    for label in ("generate, 0.25 s", "update, 0.25 s", "1,234 tokens per second"):
        assert label in files["time.svg"].read_text()
    assert "sync" not in files["time.svg"].read_text()


def test_target_fit_is_drawn_by_pass_if_there_are_several(run):
    log = run / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    for index, row in enumerate(steps):  # two steps in each of three passes
        row |= {"opo/pass": index // 2 % 3 + 1.0, "opo/target_fit": 0.1 * (index % 6) + index // 6}
    steps[7]["opo/pass"] = 1.5
    steps[17]["opo/target_fit"] = float("nan")
    log.unlink()
    append_lines(log, rows)
    fits = fits_by_pass(read_lines(log))
    assert fits[1] == pytest.approx([0.1, 1.0, *(0.1 + k for k in range(2, 7))])  # step 8 is in two passes
    assert fits[3] == pytest.approx([0.5, 1.5, 3.5, 4.5, 5.5])
    assert [path.name for path in draw_run(run)][2:4] == ["passes.png", "passes.svg"]
    assert "target fit" in (run / "figures" / "passes.svg").read_text()
    log.unlink()
    append_lines(log, [row | {"opo/pass": 1.0} for row in steps])
    assert not any(path.stem == "passes" for path in draw_run(run))


def test_same_log_gives_the_same_files(run):
    first = {path: path.read_bytes() for path in draw_run(run)}
    assert {path: path.read_bytes() for path in draw_run(run)} == first


def test_missing_metric_is_reported_instead_of_drawn(run):
    log = run / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    append_lines(log, [{"step": row["step"], "reward": row["reward"]} for row in rows if "reward" in row])
    (run / "summary.json").unlink()
    files = [*draw_run(run)]
    assert {path.name for path in files} == {"training.png", "training.svg"}
    assert "not logged" in files[1].read_text()


def test_command_lists_the_files_and_rejects_a_folder_without_a_log(run, tmp_path_factory, capsys):
    assert main(["figures", str(run)]) == 0
    assert "training.png" in capsys.readouterr().out
    empty = tmp_path_factory.mktemp("empty")
    assert main(["figures", str(empty)]) == 2
    assert "Pass the folder of a run" in capsys.readouterr().err
    assert not any(empty.iterdir())
