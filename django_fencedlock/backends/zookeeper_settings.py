"""The settings of the ZooKeeper backend, and the problems of settings and servers."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kazoo.client import KazooClient
from kazoo.security import CREATOR_ALL_ACL

from ..conf import AliasConfig, Problem, shown
from ..problems import ok
from .http_settings import TLS_OPTIONS, tls_context

FORM = "Write it as 'zk1:2181,zk2:2181/path', or as a list of hosts, the last one with the path."
USER_OPTIONS = "USERNAME", "PASSWORD", "SASL"
MECHANISMS = "DIGEST-MD5", "GSSAPI"
#: The part of maxClientCnxns that the connections of one address may use.
MANY = 0.8


def read_location(config: AliasConfig) -> tuple[list[tuple[str, int]], str]:
    """Return hosts and path of LOCATION. ValueError says what is wrong with it."""
    if not config.locations:
        raise ValueError("it is empty")
    if "://" in config.location or "@" in config.location:
        raise ValueError("it is a URL, or has a user; OPTIONS has USERNAME and PASSWORD")
    client = KazooClient(config.location)
    if "," in client.chroot:
        raise ValueError("a path comes last, after all hosts")
    return client.hosts, client.chroot


def client_options(config: AliasConfig) -> dict[str, Any]:
    """Return what kazoo's client needs for TLS and for the user."""
    options, found = config.options, dict[str, Any]()
    if TLS_OPTIONS & set(options):
        found |= {"use_ssl": True, "check_hostname": True, "ca": options.get("CA")}
        found |= {
            "certfile": options.get("CERT"),
            "keyfile": options.get("KEY", options.get("CERT")),
        }
    user = {key.lower(): options[key] for key in USER_OPTIONS[:2] if key in options}
    if mechanism := options.get("SASL"):
        found["sasl_options"] = {"mechanism": mechanism, **user}
    elif user:
        found["auth_data"] = [("digest", ":".join(user.values()))]
    if mechanism or user:
        # Other users neither read nor change the nodes.
        found["default_acl"] = CREATOR_ALL_ACL
    return found


def settings_problems(config: AliasConfig) -> Iterator[Problem]:
    """Yield the problems of LOCATION and OPTIONS."""
    options, where = config.options, config.where("OPTIONS")
    try:
        read_location(config)
    except ValueError as exc:
        yield Problem("E007", f"{config.where('LOCATION')}: {exc}.", FORM)
    try:
        tls_context(config)
    except (OSError, TypeError, ValueError) as exc:
        given = {key: options[key] for key in TLS_OPTIONS & set(options)}
        what = f"{where}: the TLS files {shown(given)} can't be used: {exc}."
        yield Problem("E008", what, "Name PEM files that this process can read.")
    if ("USERNAME" in options) != ("PASSWORD" in options):
        yield Problem("E008", f"{where} has USERNAME or PASSWORD alone.", "Set both, or none.")
    for key in (key for key in USER_OPTIONS if not isinstance(options.get(key, ""), str)):
        # The value may be a password.
        yield Problem("E008", f"{where}[{key!r}] isn't a str.", "Write it in quotes.")
    if options.get("SASL", MECHANISMS[0]) not in MECHANISMS:
        what = f"{where}['SASL'] is {shown(options['SASL'])}."
        yield Problem("E008", what, f"Use {MECHANISMS[0]!r} or {MECHANISMS[1]!r}.")
    if "SASL" in options and not importlib.util.find_spec("puresasl"):
        yield Problem("E005", f"{where}['SASL'] needs pure-sasl.", "Run: pip install pure-sasl")


def server_problems(config: AliasConfig, host: str, port: int) -> Iterator[Problem]:
    """Ask one server for its state and limits."""
    where = f"ZooKeeper's server {host}:{port}"
    try:
        words = ("srvr", "conf", "cons")
        status, limits, clients = (_command(config, host, port, each) for each in words)
    except OSError as exc:
        yield Problem("W052", f"{where} doesn't answer: {exc}.", "Start it, or leave it out.")
        return
    version, mode = re.search(r"version: ([\d.]+)", status), re.search(r"Mode: (\S+)", status)
    if "not in the whitelist" not in status and (mode is None or mode[1] == "read-only"):
        what = f"{where} can't serve: {status.strip()[:100] or 'it closed the connection'}."
        yield Problem("W052", what, "Start the other servers: it has no quorum.")
        return
    if version and mode:
        yield ok(f"{where} is ZooKeeper {version[1]}, {mode[1]}.")
    most = re.search(r"maxClientCnxns=(\d+)", limits)
    if most is None:
        what = f"{where} doesn't tell its limits: 'conf' and 'cons' aren't allowed."
        yield Problem("I052", what, "Set 4lw.commands.whitelist=srvr,conf,cons in zoo.cfg.")
        return
    addresses = Counter(re.findall(r"^ /(.*):\d+\[", clients, re.MULTILINE))
    for address, count in addresses.most_common(1):
        if 0 < int(most[1]) * MANY <= count:
            what = f"{where} has {count} connections from {address}, and allows {most[1]}."
            remedy = "Raise maxClientCnxns: a process needs one for each ttl."
            yield Problem("W052", what, remedy)


def _command(config: AliasConfig, host: str, port: int, word: str) -> str:
    """Send a four-letter word of ZooKeeper, and return the answer."""
    with socket.create_connection((host, port), min(1.0, config.timeout)) as sock:
        if TLS_OPTIONS & set(config.options):
            sock = tls_context(config).wrap_socket(sock, server_hostname=host)
        sock.sendall(word.encode())
        with sock, sock.makefile("rb") as answer:
            return answer.read().decode(errors="replace")
