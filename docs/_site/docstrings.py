"""
Griffe extension: renders TRL-style docstrings as Markdown.

Sections become headings, `name (`type`): …` becomes a list item, and [`Name`] a link to that object, or plain code if
the reference does not show it.
"""

import re
import textwrap
from collections import defaultdict

import griffe


_SECTION = re.compile(r"(Args|Parameters|Attributes|Raises|Returns|Example):")
_ITEM = re.compile(r"(?P<head>\S.*?\)|\[?`[^`]+`\]?|\w+(?:, [\w*]+)+):(?: +(?P<text>.*))?")
_LINK = re.compile(r"\[`~?(?P<name>[\w.]+)`\](?!\()")


class Docstrings(griffe.Extension):
    """Rewrites a package's docstrings once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        described = [thing for thing in _objects(pkg) if thing.docstring]
        paths: dict[str, set[str]] = defaultdict(set)
        for thing in described:
            for name in (thing.name, thing.path.removeprefix(f"{pkg.name}.")):
                paths[name].add(thing.path)
        for thing in described:
            thing.docstring.value = to_markdown(thing.docstring.value, paths, f"{thing.module.path}.")


def _objects(thing: griffe.Object):
    yield thing
    for member in thing.members.values():
        if not member.is_alias:
            yield from _objects(member)


def to_markdown(docstring: str, paths: dict[str, set[str]], module: str) -> str:
    """
    Convert a docstring to Markdown.

    Args:
        docstring (`str`):
            Dedented text.
        paths (`dict[str, set[str]]`):
            Name → paths of the objects it may refer to.
        module (`str`):
            Path prefix of the docstring's own module: a name means an object in it, or the only one of that name.
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
        name, code = match["name"], f"<code>{match['name']}</code>"
        found = [path for path in paths.get(name, ()) if path.startswith(module)] or list(paths.get(name, ()))
        return f'<autoref identifier="{found[0]}" optional>{code}</autoref>' if len(found) == 1 else code

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
