"""The pages: their code runs, their metrics are logged, and their figures match the committed runs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from device_fields import USE_CPU


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BENCHMARKS = ROOT / "benchmarks"  # other tests compare its pages with the runs


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def code(page: str, language: str) -> str:
    return "\n".join(blocks(page, language))


@pytest.mark.parametrize("page", ["paper.md", "theory.md"])
def test_assertions_of_a_page_hold(page):
    exec(compile(code(page, "python"), page, "exec"), {})


def script(side: str) -> str:
    """The script on one side of the second diff; tests/device/test_quickstart.py trains those of the first."""
    _, with_configuration = blocks("migrating.md", "diff")
    lines = []
    for line in with_configuration.splitlines():
        if line == "" or line.startswith((" ", side)):
            lines.append(line[1:])
    return "\n".join(lines)


def small_script(side: str, model: str, folder: Path) -> str:
    """The script with a small model and dataset, for two optimizer steps."""
    options = (
        f"output_dir={str(folder)!r}, max_steps=2, logging_steps=1, max_completion_length=8, use_cpu={USE_CPU},"
        "bf16=False, report_to='none', save_strategy='no',"
    )
    source = script(side)
    for published, small in {
        'load_dataset("trl-lib/DeepMath-103K", split="train")': "small_dataset",
        '"Qwen/Qwen3-0.6B"': repr(model),
        'output_dir="qwen3",': options,
    }.items():
        assert source.count(published) == 1
        source = source.replace(published, small)
    return source


@pytest.fixture(scope="module")
def logs(tiny_model, tmp_path_factory) -> dict[str, dict[str, float]]:
    """Each script's last log entry, after two optimizer steps with a small model and dataset."""
    prompt = [{"role": "user", "content": "1+1="}]
    last_entries = {}
    for side, trainer_class in {"-": "GRPOTrainer", "+": "OPOTrainer"}.items():
        source = small_script(side, tiny_model, tmp_path_factory.mktemp("run"))
        names = {"small_dataset": Dataset.from_dict({"prompt": [prompt] * 16})}
        exec(compile(source, f"migrating.md, {side}", "exec"), names)
        trainer = names["trainer"]
        assert type(trainer).__name__ == trainer_class
        last_entries[side] = trainer.state.log_history[-2]
    return last_entries


def test_both_scripts_of_the_diff_train(logs):
    for entry in logs.values():
        assert entry["step"] == 2
        assert "grad_norm" in entry
    assert logs["+"]["opo/off_policy_steps"] == 1


def metrics_of_page() -> set[str]:
    """The metrics in the first column of the page's table."""
    page = (DOCS / "methods" / "opo.md").read_text(encoding="utf-8")
    _, section = page.split("## Logged metrics")
    table, *_ = section.split("\n## ")
    metrics = set()
    for first_cell in re.findall(r"^\| (`.*?)\|", table, re.MULTILINE):
        for name in re.findall(r"`([a-z_2/]+)`", first_cell):
            metrics.add(f"opo/{name}")
    return metrics


def test_page_lists_exactly_the_logged_metrics(logs):
    described = metrics_of_page()
    # All completions have the same reward, so there is no target and no advantage; and none is asked for in advance.
    without_value = {"opo/target_fit", "opo/gradient_response_efficiency", "opo/age"}
    logged = {name for name in logs["+"] if name.startswith("opo/")}
    assert described - without_value == logged
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"\bopo/[a-z_2]+(?:/[a-z]+)?", text))
        assert named <= described | {"opo/time"}, page


def rows_of_tables(report: str) -> Iterator[list[str]]:
    for line in report.splitlines():
        if line.startswith("|"):
            cells = line.strip("|").split("|")
            yield [cell.strip() for cell in cells]


def cell(report: str, method: str, column: str) -> str:
    """A method's value in the first table with this column."""
    rows = rows_of_tables(report)
    place = next(row.index(column) for row in rows if column in row)
    return next(row[place] for row in rows if row[0] == method)


@pytest.mark.pages
@pytest.mark.parametrize(
    ("method", "in_regime"), [("opo", "OPO, mu = 0.3"), ("grpo", "GRPO"), ("gspo", "GSPO"), ("dapo", "DAPO")]
)
def test_page_of_a_method_has_its_parts_and_its_committed_results(method, in_regime):
    file = "opo.md" if method == "opo" else "baselines.md"
    page = (DOCS / "methods" / file).read_text(encoding="utf-8")
    headings = re.findall("^## (.*)", page, re.MULTILINE)
    assert headings == ["Usage", "Logged metrics", "Implementation details", "Results"]
    for name in ("experiment1", "experiment2"):
        report = (BENCHMARKS / "paper" / name / "report.md").read_text(encoding="utf-8")
        reward = cell(report, method, "final reward")
        accuracy = cell(report, method, "Level 4, sampled")
        completions = cell(report, method, "completions")
        assert f"paper/{name}/report.md) | {reward} | {accuracy} | {completions} |" in page
    regime = (BENCHMARKS / "losses" / "regime.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| 16 \| {in_regime} \| (.*?) \|", regime, re.MULTILINE)
    assert f"{row[1]} % " in in_one_line(page.replace(",", " "))


def in_one_line(text: str) -> str:
    return " ".join(text.split())


SIGNED = r"[+−][\d.]+(?: pp)?"
DECIMAL = r"\d+\.\d+"
FIGURE = rf"{DECIMAL}(?: %)? ± {DECIMAL}|{DECIMAL} \({DECIMAL}–{DECIMAL}\)|{SIGNED} \[{SIGNED}, {SIGNED}\]"


def figures(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    # In a report, a difference and its interval are two cells of a row.
    without_cells = text.replace(" | [", " [")
    return set(re.findall(FIGURE, in_one_line(without_cells)))


@pytest.mark.pages
def test_every_figure_with_an_interval_or_a_range_is_in_a_report():
    reported = set.union(*map(figures, BENCHMARKS.rglob("*.md")))
    assert set.union(*map(figures, PAGES))
    for page in PAGES:
        assert figures(page) <= reported, page
