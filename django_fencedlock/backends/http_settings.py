"""The addresses of the nodes of a service over HTTP, its credentials, and TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ..conf import AliasConfig, Problem, shown
from ..storage.text import without_secrets

#: The options of TLS: the files of the authorities, and of the client's certificate and key.
TLS_OPTIONS = frozenset({"CA", "CERT", "KEY"})


class Node(NamedTuple):
    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def read_nodes(locations: list[str], port: int) -> list[Node]:
    """Read the URLs of nodes. ValueError says what is wrong with one, without its password."""
    nodes = []
    for url in locations:
        parts = urlsplit(url)
        where = without_secrets(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{where!r} doesn't begin with http:// or https://")
        try:
            node = Node(parts.hostname or "", parts.port or port, parts.scheme == "https")
        except ValueError as exc:
            raise ValueError(f"{where!r}: {without_secrets(str(exc))}") from None
        if not node.host or parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError(f"{where!r} isn't a scheme, a host and a port alone")
        nodes.append(node)
    if len({node.tls for node in nodes}) > 1:
        raise ValueError("it has both http:// and https:// URLs")
    return nodes


def credentials(locations: list[str]) -> tuple[str, str] | None:
    """Return the user and password of the first URL that has them."""
    for parts in map(urlsplit, locations):
        if parts.username:
            return unquote(parts.username), unquote(parts.password or "")
    return None


def tls_context(config: AliasConfig) -> ssl.SSLContext:
    """Make the TLS context of the options CA, CERT and KEY."""
    context = ssl.create_default_context(cafile=config.options.get("CA"))
    certificate, key = config.options.get("CERT"), config.options.get("KEY")
    if key and not certificate:
        raise ValueError("KEY needs CERT, the client's certificate")
    if certificate:
        context.load_cert_chain(certificate, key)
    return context


def location_problems(config: AliasConfig, port: int, form: str) -> Iterator[Problem]:
    """Yield the problems of LOCATION and of the options of TLS."""
    try:
        nodes = read_nodes(config.locations, port)
    except ValueError as exc:
        yield Problem("E007", f"{config.where('LOCATION')}: {exc}.", form)
        return
    if not nodes:
        yield Problem("E007", f"{config.where()} names no server: LOCATION is empty.", form)
        return
    given = {key: config.options[key] for key in TLS_OPTIONS & set(config.options)}
    where = config.where("OPTIONS")
    if given and not nodes[0].tls:
        what = f"{where} has {' and '.join(sorted(given))}, but LOCATION begins with http://."
        yield Problem("E008", what, "Use https:// URLs, or leave these options out.")
        return
    try:
        tls_context(config)
    except (OSError, TypeError, ValueError) as exc:
        what = f"{where}: the TLS files {shown(given)} can't be used: {exc}."
        yield Problem("E008", what, "Name PEM files that this process can read.")
