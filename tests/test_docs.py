"""The pages: their code runs, their metrics are logged, and their figures match the committed runs."""

import re
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import USE_CPU


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results"  # other tests compare these with the runs


def code(page: str, language: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("page", ["paper.md", "theory.md"])
def test_statements_hold(page):
    exec(compile(code(page, "python"), page, "exec"), {})


def script(side: str) -> str:
    """The script on one side of the diff."""
    lines = code("migrating.md", "diff").splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in (" ", side, ""))


@pytest.fixture(scope="module")
def logs(tiny_model, tmp_path_factory) -> dict[str, dict[str, float]]:
    """Each script's last log entry, after two optimizer steps with a small model and dataset."""
    last = {}
    for side in "-+":
        source = script(side)
        for ours, theirs in {
            'load_dataset("trl-lib/DeepMath-103K", split="train")': "small_dataset",
            '"Qwen/Qwen3-0.6B"': repr(tiny_model),
            'output_dir="qwen3",': f"output_dir={str(tmp_path_factory.mktemp('run'))!r}, max_steps=2, logging_steps=1,"
            f"max_completion_length=8, use_cpu={USE_CPU}, bf16=False, report_to='none', save_strategy='no',",
        }.items():
            assert source.count(ours) == 1
            source = source.replace(ours, theirs)
        prompt = [{"role": "user", "content": "1+1="}]
        names = {"small_dataset": Dataset.from_dict({"prompt": [prompt] * 16})}
        exec(compile(source, f"migrating.md, {side}", "exec"), names)
        assert type(names["trainer"]).__name__ == {"-": "GRPOTrainer", "+": "OPOTrainer"}[side]
        last[side] = names["trainer"].state.log_history[-2]
    return last


def test_both_scripts_of_the_diff_train(logs):
    assert all(entry["step"] == 2 and "grad_norm" in entry for entry in logs.values())
    assert logs["+"]["opo/off_policy_steps"] == 1


def test_page_lists_exactly_the_logged_metrics(logs):
    table = (DOCS / "methods" / "opo.md").read_text(encoding="utf-8").split("## Logged metrics")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    described = {f"opo/{name}" for cell in cells for name in re.findall(r"`([a-z_2/]+)`", cell)}
    # All completions have the same reward, so there is no target and no advantage; and none is asked for in advance.
    without_value = {"opo/target_fit", "opo/gradient_response_efficiency", "opo/age"}
    logged = {name for name in logs["+"] if name.startswith("opo/")}
    assert described - without_value == logged
    for page in PAGES:
        named = set(re.findall(r"\bopo/[a-z_2]+(?:/[a-z]+)?", page.read_text(encoding="utf-8")))
        assert named <= described | {"opo/time"}, page


def cell(report: str, method: str, column: str) -> str:
    """A method's value in the first table with this column."""
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if line[:1] == "|")
    place = next(row.index(column) for row in rows if column in row)
    return next(row[place] for row in rows if row[0] == method)


@pytest.mark.parametrize(
    ("method", "in_regime"), [("opo", "OPO, mu = 0.3"), ("grpo", "GRPO"), ("gspo", "GSPO"), ("dapo", "DAPO")]
)
def test_page_of_a_method_has_its_parts_and_its_committed_results(method, in_regime):
    page = (DOCS / "methods" / ("opo.md" if method == "opo" else "baselines.md")).read_text(encoding="utf-8")
    headings = re.findall("^## (.*)", page, re.MULTILINE)
    assert headings == ["Usage", "Logged metrics", "Implementation details", "Results"]
    for name in ("experiment1", "experiment2"):
        report = (RESULTS / name / "report.md").read_text(encoding="utf-8")
        figures = [cell(report, method, column) for column in ("final reward", "Level 4, sampled", "completions")]
        assert f"results/{name}/report.md) | {' | '.join(figures)} |" in page
    regime = (RESULTS / "regime.md").read_text(encoding="utf-8")
    accuracy = re.search(rf"^\| 16 \| {in_regime} \| (.*?) \|", regime, re.MULTILINE)[1]
    assert f"{accuracy} % " in " ".join(page.replace(",", " ").split())


def test_every_figure_with_an_interval_or_a_range_is_in_a_report():
    signed, part = r"[+−][\d.]+(?: pp)?", r"\d+\.\d+"
    figure = re.compile(rf"{part}(?: %)? ± {part}|{part} \({part}–{part}\)|{signed} \[{signed}, {signed}\]")

    def figures(path: Path) -> set[str]:
        # In a report, a difference and its interval are two cells of a row.
        return set(figure.findall(" ".join(path.read_text(encoding="utf-8").replace(" | [", " [").split())))

    reported = set.union(*map(figures, RESULTS.rglob("*.md")))
    assert set.union(*map(figures, PAGES))
    for page in PAGES:
        assert figures(page) <= reported, page
