"""
Passwords, tokens and keys in settings: no file of a run, tracker or message shows them.

A secret is recognized by its name (`hub_token`, `WANDB_API_KEY`, `?token=…`), by its place in an address
(`https://user:password@host`), or by its form (`hf_…`). Its name stands in its place, as in `<HUB_TOKEN>`, which is
what Transformers writes, or `***` in an address.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml


_NAME = re.compile(
    r"(?i:(.*[_-])?(token|passw(or)?d|passphrase|pass|pat|secret|credentials?|signature|sig|auth(orization)?|bearer"
    r"|connection[_-]string|webhook([_-]url)?|(api|access|secret|private|auth|account|license)[_-]?key))"
    r"|[A-Z0-9_]+(_KEY|PASSW(OR)?D)|(MYSQL_PWD|DB_?PASS)"
)
_USER = re.compile(r"(\w://)[^\s/'\"]*@")
_QUERY = re.compile(r"([?&]([\w-]+))=[^\s&#'\"]+")
# No name of words: `hf-internal-testing` is an organization, and `sk-…` may be a folder.
_FORM = re.compile(
    r"\b((?:hf|hf_oauth|gh[pousr]|sk)(?=[_-][A-Za-z0-9]{16})"
    r"|(?:github_pat|glpat|xox[abp]|sk-(?:proj|svcacct|ant|or))(?=[_-][\w-]{16}))[_-][\w-]+"
)
_LOST = re.compile(r"://\*\*\*@|[?&][\w-]+=\*\*\*|\b[a-z_]+_\*\*\*")


def mask(content: Any, name: str = "") -> Any:
    """The same settings without secrets: a mapping, list or text, of which `name` is the field, if it has one."""
    if isinstance(content, Mapping):
        return {key: mask(value, str(key)) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(mask(value, name) for value in content)
    if type(content) in (str, int) and content != "" and _is_secret(name, str(content)):
        return _marker(name)
    if type(content) is not str:  # such as an `Enum`
        return content
    if content.startswith("{"):  # a mapping as text
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            parsed = yaml.safe_load(content)
            return content if (plain := mask(parsed)) == parsed else str(plain)
    return mask_text(content)


def mask_words(words: Sequence[str]) -> list[str]:
    """A command line without secrets."""
    return [_mask_word(before, word) for before, word in zip(["", *words], words, strict=False)]


def _mask_word(before: str, word: str) -> str:
    is_value = before.startswith("--") and not word.startswith("--")
    option, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    shown = mask(value, (before if is_value else option).lstrip("-").replace("-", "_"))
    return f"{option}{sign}{shown}"


def mask_text(text: str) -> str:
    """A message without tokens, and without passwords in addresses."""
    text = _QUERY.sub(lambda found: f"{found[1]}=***" if _NAME.fullmatch(found[2]) else found[0], text)
    return _FORM.sub(r"\1_***", _USER.sub(r"\1***@", text))


def masked(content: Any, name: str = "") -> bool:
    """Whether a field has lost a secret, so that its value is of no use."""
    if isinstance(content, Mapping):
        return any(masked(value, str(key)) for key, value in content.items())
    if isinstance(content, list):
        return any(masked(value, name) for value in content)
    return isinstance(content, str) and (content == _marker(name) or bool(_LOST.search(content)))


class Masked:
    """A configuration whose `to_dict`, which trackers get, and pickle, `training_args.bin`, hold no secrets."""

    def to_dict(self) -> dict[str, Any]:
        """The settings, without secrets."""
        return mask(super().to_dict())  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        plain = {name: mask(value, name) for name, value in vars(self).items() if isinstance(value, str | dict)}
        return {**vars(self), **plain}

    # Copies, which Python would make of the same state, keep all.

    def __copy__(self):
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo):
        memo[id(self)] = other = copy.copy(self)
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other


def _is_secret(name: str, value: str) -> bool:
    # What begins like this is a marker, or a token of the vocabulary.
    return bool(_NAME.fullmatch(name)) and not value.strip("'\"").startswith(("<", "[", "***"))


def _marker(name: str) -> str:
    return f"<{name.upper()}>"
