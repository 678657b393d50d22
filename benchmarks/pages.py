"""Markdown tables, and the parts of a page that scripts write."""

import re
from collections.abc import Iterable, Mapping


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in which all columns but the first are numbers."""
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """The text of a page, with the blocks between `<!-- name -->` and `<!-- end -->` replaced."""
    for name, text in blocks.items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, n = re.subn(place, lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)
        assert n == 1, f"The page has {n} blocks `{name}`."
    return page
