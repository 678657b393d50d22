"""The verdict of benchmarks/soak.py: flat curves pass, leaks and slowdowns fail."""

import pytest

from benchmarks.record import origin
from benchmarks.soak import judge, page


def series(**growth: float) -> list[dict[str, float]]:
    """Noisy samples of 1,000 steps with a warm-up; a quantity grows by its fraction in `growth` over all of them."""
    rows = []
    for step in range(1, 1001, 4):
        level = {"uss": 900.0, "rss": 1200.0, "handles": 50.0, "threads": 15.0, "processes": 6.0}
        row = {name: value * (1 + growth.get(name, 0) * step / 1000) for name, value in level.items()}
        warm = min(step / 100, 1)
        row |= {"uss": row["uss"] * (0.5 + 0.5 * warm) + step % 3, "rss": row["rss"] * (0.5 + 0.5 * warm)}
        if step % 50 == 1:  # a worker is replaced
            row |= {"processes": 5.0, "handles": 40.0, "threads": 14.0}
        seconds = 0.1 * step * (1 + growth.get("seconds", 0) * step / 2000)
        rows.append({"step": step, "seconds": seconds, **row})
    return rows


def failing(samples) -> set[str]:
    return {name for name, verdict in judge(samples).items() if not verdict.holds}


def test_flat_series_with_warm_up_and_noise_holds():
    assert failing(series()) == set()


@pytest.mark.parametrize(
    ("growth", "fails"),
    [
        ({"uss": 0.1}, {"uss"}),  # 7 % from the second tenth to the last
        ({"rss": 0.1}, {"rss"}),
        ({"uss": 0.04}, set()),
        ({"handles": 0.1}, {"handles"}),
        ({"threads": 0.1}, {"threads"}),
        ({"processes": 0.2}, {"processes"}),
        ({"seconds": 0.1}, {"speed"}),
        ({"seconds": -0.1}, set()),
    ],
)
def test_growth_beyond_its_bound_fails(growth, fails):
    assert failing(series(**growth)) == fails


def test_verdict_says_early_late_and_slope():
    verdict = judge(series(handles=0.2))["handles"]
    assert verdict.early == pytest.approx(50 * 1.03, rel=0.005)
    assert verdict.late == pytest.approx(50 * 1.19, rel=0.005)
    assert verdict.slope == pytest.approx(50 * 0.2, rel=0.1)
    assert judge(series())["speed"].early == pytest.approx(10)


def test_page_names_what_fails():
    header = {"origin": origin(), "steps": 1000, "failed_scores": 7, "checkpoints": 2}
    failed = [line for line in page(header, series(handles=0.5)).splitlines() if "**no**" in line]
    assert [line.split("|")[1].strip() for line in failed] == ["open file descriptors"]
