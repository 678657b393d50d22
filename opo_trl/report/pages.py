"""HTML and Markdown pages, from the templates in this folder."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..checks.text import printable


def render(template: str, content: Mapping[str, Any]) -> str:
    """Fill a template of this folder. Values are escaped; a missing one is an error."""
    is_html = ".html" in template
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=is_html,
        finalize=_shown_in_html if is_html else _shown_in_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "embedded": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
        "cell": lambda text: text.replace("|", r"\|").replace("\n", " "),  # of a table in Markdown
    }
    return environment.get_template(template).render(content)


def _shown_in_html(value: Any) -> Any:
    return printable(value) if type(value) is str else value  # what a macro has made is `Markup`


def _shown_in_markdown(value: Any) -> Any:
    """A text of others in Markdown: neither HTML nor a link or picture from elsewhere."""
    return printable(value).replace("<", "&lt;").replace("](", "]\\(") if isinstance(value, str) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> dict[str, Any]:
    """A table, as the templates show it."""
    return {"head": head, "rows": rows, "title": title}


def versions(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of the versions in the runs' `environment.json`, listing every value if runs differ."""
    rows = []
    for environment in environments:
        own = {key: environment.get(key) for key in ("git_commit", "python", "platform")}
        devices = ", ".join(environment.get("devices") or [])
        rows.append({**own, "devices": devices, **(environment.get("packages") or {})})
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: sorted({str(row.get(name)) for row in rows if row.get(name)}) for name in names}
    found = [(name.replace("git_commit", "commit"), "; ".join(values[name])) for name in names if values[name]]
    return table(["made with", "version"], found)
