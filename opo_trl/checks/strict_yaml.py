"""
YAML without the surprises of YAML 1.1.

PyYAML reads YAML 1.1, which changes what a recipe says: `no` becomes false, `010` becomes 8, `1:30` becomes 90, `1e-4`
stays text, a commit `1234e5` becomes a number, and of a duplicate key only the last value survives. Here text fields
keep their characters, numbers are those of JSON, and anything ambiguous is an error. What [`dump`] writes, [`read`]
reads back.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from .paths import readable


# How a field is read: text as written, a switch that may also be yes, no, on or off, or by the look of the value.
Kind = Literal["text", "switch", "plain"]

_TAG = "tag:yaml.org,2002:"
_AMBIGUOUS = "!ambiguous"
_UNQUOTED = {_AMBIGUOUS, *(f"{_TAG}{name}" for name in ("bool", "int", "float", "merge"))}

# Of a field, with its aliases written out: a few lines of aliases of aliases stand for gigabytes.
_MOST_VALUES = 100_000
_MOST_BYTES = 10_000_000


class _Rejected(yaml.YAMLError):
    """Valid YAML that a recipe may not contain."""


class _Loader(yaml.SafeLoader):
    kind: Kind = "plain"
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own)
    yaml_constructors: ClassVar[dict] = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *(f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")))
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise _Rejected(f"line {line}: a {key.id} cannot be a key. Write `name: value`.")
            if key.value in lines:
                raise _Rejected(f"lines {lines[key.value]} and {line}: duplicate key {key.value!r}. Remove one.")
            lines[key.value] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in _UNQUOTED and isinstance(node, yaml.ScalarNode):
            if self.kind == "text":
                return node.value
            if self.kind == "switch" and node.value.lower() in self.bool_values:
                return self.bool_values[node.value.lower()]
            if node.tag == _AMBIGUOUS:
                line = node.start_mark.get_snippet().splitlines()[0].strip()
                raise _Rejected(
                    f"line {node.start_mark.line + 1}: {node.value[:20]} in `{line}` is ambiguous in YAML. Write a "
                    "decimal number of at most 1000 digits, true or false, or text in quotes."
                )
        return super().construct_object(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        # Own keys come after merged ones, and replace them: merged again, PyYAML 6.0.4 takes the first of a name.
        node.value = [*{(key.tag, str(key.value)): (key, value) for key, value in node.value}.values()]


# The first match wins.
for _tag, _pattern in (
    (f"{_TAG}null", r"~|null|Null|NULL|"),
    (f"{_TAG}merge", r"<<"),
    (f"{_TAG}bool", r"true|True|TRUE|false|False|FALSE"),
    (_AMBIGUOUS, r"[-+]?[0-9_]{1001,}"),  # Python reads at most 4300 digits
    (f"{_TAG}int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)"),
    (_AMBIGUOUS, r"[-+]?0[0-9_]+|[-+]?0[xob][0-9a-fA-F_]+"),
    (f"{_TAG}float", r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    (_AMBIGUOUS, r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"),
    (_AMBIGUOUS, r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that [`_Loader`] or YAML 1.1 would take for something else."""

    yaml_implicit_resolvers: dict = {  # noqa: RUF012 (PyYAML's own)
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers[None]]
        for first in (None, *yaml.SafeDumper.yaml_implicit_resolvers)
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # In other styles PyYAML folds these line ends into spaces.
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def dump(fields: Mapping[str, Any]) -> str:
    """Write a mapping of fields, in its order, as YAML that [`read`] reads back."""
    return yaml.dump(dict(fields), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read(path: str | Path, kind_of: Callable[[str], Kind]) -> dict[str, Any]:
    """
    Read a YAML file of fields: one mapping of names to values.

    `kind_of` gives the [`Kind`] of a field's value and of everything nested in it. Messages name the line.
    """
    named = f"config={str(path)!r}"
    with readable("config", path):
        if Path(path).stat().st_size > _MOST_BYTES:
            raise ValueError(f"{named} has more than {_MOST_BYTES:,} bytes, so it is no recipe. Pass a recipe.")
        content = Path(path).read_bytes()
    return _read(named, content, kind_of, "no `field: value` lines. Write one field per line.")


def read_mapping(field: str, text: str) -> dict[str, Any]:
    """Read the value of a field that holds a mapping, from a command line: `{key: value}`, in YAML or JSON."""
    indented = re.sub(r"^[ \t]+", " ", text, flags=re.MULTILINE)  # JSON may have tabs
    return _read(f"{field}={text!r}", indented, lambda _: "plain", "not a mapping. Write it as `{key: value}`.")


def read_mappings(field: str, value: Any) -> Any:
    """The value of a field that can hold a mapping, with any `{…}` read by [`read_mapping`]."""
    if isinstance(value, list):
        return [read_mappings(field, part) for part in value]
    return read_mapping(field, value) if isinstance(value, str) and value.startswith("{") else value


def _read(named: str, content: str | bytes, kind_of: Callable[[str], Kind], otherwise: str) -> dict[str, Any]:
    fields = {}
    try:
        loader = _Loader(content if isinstance(content, str) else content.decode("utf-8-sig"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise _Rejected(otherwise)
        for key, value in node.value:
            if any(islice(_nodes(value), _MOST_VALUES, None)):
                line = key.start_mark.line + 1
                raise _Rejected(f"line {line}: {key.value!r} has more than {_MOST_VALUES:,} values. Shorten it.")
        loader.flatten_mapping(node)  # `<<: *other`
        for key, value in node.value:
            loader.kind = kind_of(key.value)
            loader.constructed_objects.clear()  # an alias may stand for values of two kinds
            fields[key.value] = loader.construct_object(value, deep=True)
    except _Rejected as error:
        raise ValueError(f"{named}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = "it is recursive, or nested too deeply" if isinstance(error, RecursionError) else str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            said = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ValueError(f"{named} is not valid YAML: {said}. Fix it there.") from error
    return fields


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """A node and all within it, its aliases written out."""
    yield node
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        for inner in part if isinstance(part, tuple) else (part,):
            yield from _nodes(inner)
