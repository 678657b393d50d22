"""HTML and Markdown pages, from the templates in this folder."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..checks.text import printable


def render(template: str, content: Mapping[str, Any], folder: Path = Path(__file__).parent) -> str:
    """Fill a template of a folder, or of this one. Values are escaped; a missing one is an error."""
    is_html = ".html" in template
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=is_html,
        finalize=_shown_in_html if is_html else in_markdown,
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


def check_output(path: Path | None, ending: str) -> None:
    """A `ValueError` if a page is to be written into a file of another kind, such as the log that was read."""
    if path is not None and path.suffix != ending:
        raise ValueError(f"output={str(path)!r} is not the name of a page. Let it end with {ending}.")


def _shown_in_html(value: Any) -> Any:
    return printable(value) if type(value) is str else value  # what a macro has made is `Markup`


def in_markdown(value: Any) -> Any:
    """A text of others in Markdown: neither HTML nor a link or picture from elsewhere."""
    return printable(value).replace("<", "&lt;").replace("](", "]\\(") if isinstance(value, str) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> dict[str, Any]:
    """A table, as the templates show it."""
    return {"head": head, "rows": rows, "title": title}
