"""
Extension of Griffe: docstrings in the style of TRL's as Markdown.

Sections become headings, `name (`type`): …` an item of a list, and [`Name`] a link to the object of that name, or
plain code where the reference does not show it.
"""

import re
import textwrap

import griffe


_SECTION = re.compile(r"(Args|Parameters|Attributes|Raises|Returns|Example):")
_ITEM = re.compile(r"(?P<head>\S.*?\)|`[^`]+`):(?: +(?P<text>.*))?")
_LINK = re.compile(r"\[`~?(?P<name>[\w.]+)`\](?!\()")


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        described = [thing for thing in _objects(pkg) if thing.docstring]
        public = [thing for thing in described if "._" not in thing.path]
        shown = {thing.name: thing.path for thing in public if not thing.is_module}
        shown |= {thing.path.removeprefix(f"{pkg.name}."): thing.path for thing in public}
        for thing in described:
            thing.docstring.value = to_markdown(thing.docstring.value, shown)


def _objects(thing: griffe.Object):
    yield thing
    for member in thing.members.values():
        if not member.is_alias:
            yield from _objects(member)


def to_markdown(docstring: str, shown: dict[str, str]) -> str:
    """
    A docstring as Markdown.

    Args:
        docstring (`str`):
            Text, without indentation.
        shown (`dict[str, str]`):
            Name → path of what can be linked to.
    """
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in docstring.splitlines():
        section = _SECTION.fullmatch(line)
        if section:
            blocks.append((section[1], []))
        elif line.strip() and not line[0].isspace() and blocks[-1][0]:
            blocks.append(("", [line]))
        else:
            blocks[-1][1].append(line)
    text = "\n\n".join(_section(title, textwrap.dedent("\n".join(lines))) for title, lines in blocks)

    def link(match: re.Match) -> str:
        name = match["name"]
        path = shown.get(name)
        return f"[`{name}`][{path}]" if path else f"`{name}`"

    return _LINK.sub(link, text)


def _section(title: str, text: str) -> str:
    if not title:
        return text.strip("\n")
    if title in ("Returns", "Example"):
        return f"**{title}**\n\n{text.strip()}"
    lines: list[str] = []
    for line in text.strip("\n").splitlines():
        item = _ITEM.fullmatch(line)
        if item:
            head = re.sub(r"(^|, )(\w+)(?= \()", r"\1**`\2`**", item["head"])
            lines.append(f"- {head}: {item['text'] or ''}")
        elif line.startswith("> "):
            lines += ["", f"**{line[2:]}**", ""]
        else:
            lines.append(f"    {line}" if line[:1].strip() else line)
    return f"**{title}**\n\n" + "\n".join(lines)
