"""
YAML as it is written.

YAML 1.1, which PyYAML reads, makes other values of what a recipe says: `no` becomes false, `010` becomes 8, `1:30`
becomes 90, `1e-4` stays text, a commit `1234e5` becomes a number, and of a key that stands twice one value vanishes.
Here a field of text keeps the characters, numbers are those of JSON, and what can be read in two ways is an error.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml


# How a field's value is read: as the characters that are written, as a switch, or as what it looks like.
Kind = Literal["text", "switch", "plain"]

_LONGEST_NUMBER = 1000  # in characters; Python reads 4300 digits
_PREFIX = "tag:yaml.org,2002:"
_TWO_WAYS = "!two-ways"
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own)


# The first that matches holds.
for _tag, _pattern in (
    (f"{_PREFIX}null", r"~|null|Null|NULL|"),
    (f"{_PREFIX}merge", r"<<"),
    (f"{_PREFIX}bool", r"true|True|TRUE|false|False|FALSE"),
    (f"{_PREFIX}int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)"),
    (_TWO_WAYS, r"[-+]?0[0-9_]+|[-+]?0[xob][0-9a-fA-F_]+"),
    (f"{_PREFIX}float", r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    (_TWO_WAYS, r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"),
    (_TWO_WAYS, r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


def read(path: str | Path, kind_of: Callable[[str], Kind]) -> dict[str, Any]:
    """
    Read a YAML file of fields.

    Args:
        path (`str` or `Path`):
            The file: one mapping of names to values.
        kind_of (`Callable`):
            Field → [`Kind`] of its value, and of the entries of a list. What stands in a mapping is read as what it
            looks like, but in `"text"`.

    Returns:
        `dict[str, Any]`: field → value.

    Raises:
        `ValueError`: the file cannot be read, is no single mapping, has a key twice or one that is no name, or a value
            that can be read in two ways. The message names the line.
    """
    named = f"config={str(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{named} holds no `field: value` lines. Write one field per line.")
        return _Reader(loader, named).fields(node, kind_of)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{named} is not valid YAML: {error}. Mend it there.") from error
    except OSError as error:
        raise ValueError(f"{named} cannot be read: {error}. Pass the path of a recipe.") from error


class _Reader:
    def __init__(self, loader: _Loader, named: str):
        self.loader, self.named = loader, named
        self.read: dict[tuple[int, Kind], Any] = {}  # a node that aliases share is read once
        self.open: set[int] = set()  # nodes that are being read

    def fields(self, node: yaml.MappingNode, kind_of: Callable[[str], Kind]) -> dict[str, Any]:
        return {key.value: self._value(value, kind_of(key.value), key.value) for key, value in self._pairs(node)}

    def _pairs(self, node: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{self.named}, line {line}: a key is no name, but {key.id}. Write `name: value`.")
            if key.value in lines:
                raise ValueError(
                    f"{self.named} sets {key.value!r} twice, in lines {lines[key.value]} and {line}. Remove one of "
                    "them."
                )
            lines[key.value] = line
        self.loader.flatten_mapping(node)  # `<<: *other`
        return list({key.value: (key, value) for key, value in node.value}.values())

    def _value(self, node: yaml.Node, kind: Kind, where: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, kind, where)
        if (id(node), kind) not in self.read:
            if id(node) in self.open:
                raise yaml.constructor.ConstructorError(None, None, f"{where} holds itself", node.start_mark)
            self.open.add(id(node))
            self.read[id(node), kind] = self._collection(node, kind, where)
            self.open.remove(id(node))
        return self.read[id(node), kind]

    def _collection(self, node: yaml.Node, kind: Kind, where: str) -> Any:
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_PREFIX}seq":
            return [self._value(item, kind, where) for item in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_PREFIX}map":
            return {
                self._key(key, where): self._value(value, kind, f"{where}: {key.value}")
                for key, value in self._pairs(node)
            }
        raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag!r} is not known", node.start_mark)

    def _key(self, node: yaml.ScalarNode, where: str) -> Any:
        return self._scalar(node, "plain", f"{where}, key {node.value}")

    def _scalar(self, node: yaml.ScalarNode, kind: Kind, where: str) -> Any:
        written, tag = node.value, node.tag
        if tag == f"{_PREFIX}null" and not written.strip("~nulNUL"):
            return None
        implicit = tag == _TWO_WAYS or tag in (f"{_PREFIX}{name}" for name in ("bool", "int", "float", "merge", "str"))
        if tag == f"{_PREFIX}str" or (kind == "text" and implicit):
            return written
        if tag == _TWO_WAYS:
            if kind == "switch" and written.lower() in _SWITCHES:
                return _SWITCHES[written.lower()]
            line = node.start_mark.line + 1
            raise ValueError(
                f"{self.named}, line {line}: {where}={written} is not what YAML reads there. Write a number in "
                "decimals, true or false, or text in quotes."
            )
        if tag == f"{_PREFIX}bool":
            return written.lower() == "true"
        if tag == f"{_PREFIX}int":
            if len(written) > _LONGEST_NUMBER:
                line = node.start_mark.line + 1
                raise ValueError(
                    f"{self.named}, line {line}: {where}={written[:20]}… has {len(written)} digits. Write a number "
                    f"with at most {_LONGEST_NUMBER}."
                )
            return int(written)
        if tag == f"{_PREFIX}float":
            return float(re.sub(r"\.(?=[in])", "", written.lower()))  # `.inf` and `.nan`
        raise yaml.constructor.ConstructorError(None, None, f"the tag {tag!r} is not known", node.start_mark)
