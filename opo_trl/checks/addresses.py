"""Addresses of servers: what TRL's clients can reach, and how a message shows one without its password."""

import re
from urllib.parse import urlsplit

from .ranges import require


def check_url(name: str, url: str) -> str:
    """Check the address of a server; returns it without a slash at its end, so that `/health` can be appended."""
    require(_fits(url), name, without_secrets(url), "an address such as http://localhost:8000, without a query")
    return url.rstrip("/")


def check_host(name: str, host: str) -> None:
    """Check a name or an address that TRL puts between `http://` and a port."""
    fits = _fits(f"http://{host}:1") and not {*"@/"} & {*host}
    require(fits, name, without_secrets(host), "a host name or an address, with brackets if it has colons, as [::1]")


def without_secrets(url: str) -> str:
    """An address, or what should be one, for a message: without user, password and query, which may hold a key."""
    shown = re.sub(r"^([^/@]*/+)?.*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?***", shown, flags=re.DOTALL)


def _fits(url: str) -> bool:
    if re.search(r"[\s\\?#]", url) or not url.isprintable():
        return False
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # raises for an empty part between dots
        known = parts.scheme in ("http", "https")
        return known and bool(parts.hostname) and parts.port != 0 and parts.netloc.count("@") < 2
    except ValueError:  # also of a port, or of an IPv6 address
        return False
