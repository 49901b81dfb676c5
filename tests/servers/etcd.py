"""etcd."""

import base64
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import workspace
from .certificates import Authority
from .finding import Found
from .process import Process, free_port
from .server import Server, ServerNotOurs, start_together


class Etcd(Server):
    """One node of etcd. It syncs each write to the disk, as in production."""

    name = "etcd"

    def __init__(self, url: str, process: Process | None = None) -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 2379, process)
        self.url = url
        self.member = "n0"
        self.peer_url: str | None = None
        self.directory: Path | None = None
        #: The nodes of its cluster, this one included.
        self.nodes: list[Etcd] = [self]
        self.tls: Authority | None = None
        #: What requests carry, after enable_login().
        self.login: tuple[str, str] | None = None

    @classmethod
    def launch(cls, found: Found, *arguments: str, tls: Authority | None = None) -> "Etcd":
        """Start one node. With *tls*, clients need a certificate of that authority."""
        return cls.launch_cluster(found, 1, *arguments, tls=tls)[0]

    @classmethod
    def launch_cluster(
        cls, found: Found, size: int = 3, *arguments: str, tls: Authority | None = None
    ) -> "list[Etcd]":
        nodes = [cls._prepare(number, tls) for number in range(size)]
        for node in nodes:
            node.nodes = nodes
            command = [found.path, *node._options(), *arguments]
            node._process = node.as_process(command, node._data.parent)
        start_together(nodes)
        return nodes

    @classmethod
    def _prepare(cls, number: int, tls: Authority | None) -> "Etcd":
        scheme = "https" if tls else "http"
        node = cls(f"{scheme}://127.0.0.1:{free_port()}")
        node.member = f"n{number}"
        node.peer_url = f"http://127.0.0.1:{free_port()}"
        node.directory = workspace.new_directory("etcd")
        node.tls = tls
        return node

    def _options(self) -> list[object]:
        members = ",".join(f"{node.member}={node.peer_url}" for node in self.nodes)
        options: list[object] = ["--name", self.member, "--data-dir", self._data]
        options += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        options += ["--listen-peer-urls", self.peer_url]
        options += ["--initial-advertise-peer-urls", self.peer_url]
        options += ["--initial-cluster", members, "--initial-cluster-state", "new"]
        # It would refuse to replace a member while the others know each other for less than 5 s.
        options += ["--strict-reconfig-check=false"]
        if self.tls:
            server = self.tls.issue("etcd")
            options += ["--cert-file", server.certificate, "--key-file", server.key]
            options += ["--client-cert-auth", "--trusted-ca-file", self.tls.certificate]
        return options

    @property
    def _data(self) -> Path:
        if self.directory is None:
            raise ServerNotOurs(f"{self!r} was named in the environment.")
        return self.directory / "data"

    def start(self, *, empty: bool = False) -> None:
        """Start the node; with *empty*, as one that has lost all its data."""
        if empty:
            shutil.rmtree(self._data)
            if len(self.nodes) > 1:
                self._join_again()
        super().start()

    def _join_again(self) -> None:
        # etcd panics at a member that has forgotten what it had confirmed.
        other = next(node for node in self.nodes if node is not self and node.answers())
        for member in other.request("/v3/cluster/member/list")["members"]:
            if member["peerURLs"] == [self.peer_url]:
                other.request("/v3/cluster/member/remove", {"ID": member["ID"]})
        other.request("/v3/cluster/member/add", {"peerURLs": [self.peer_url]})
        self.process.set_option("--initial-cluster-state", "existing")

    def request(self, path: str, body: Any = None, *, timeout: float = 5, token: str = "") -> Any:
        """Send JSON to the gateway, such as ``request("/v3/kv/range", {"key": encode("x")})``."""
        if self.login and not token and path != "/v3/auth/authenticate":
            user, password = self.login
            answer = self.request("/v3/auth/authenticate", {"name": user, "password": password})
            token = answer["token"]
        request = urllib.request.Request(
            self.url + path,
            data=None if path == "/health" else json.dumps(body or {}).encode(),
            headers={"Authorization": token} if token else {},
        )
        context = self.tls.client_context() if self.tls else None
        with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
            return json.load(answer)

    def answers(self) -> bool:
        try:
            return self.request("/health", timeout=2)["health"] in ("true", True)
        except OSError:
            return False

    def is_leader(self) -> bool:
        status = self.request("/v3/maintenance/status")
        return bool(status["header"]["member_id"] == status.get("leader"))

    def enable_login(self, user: str = "root", password: str = "secret") -> None:
        """Let in only those who log in; *user* may do everything."""
        self.request("/v3/auth/role/add", {"name": "root"})
        # Without a user called root, it refuses.
        for name in {"root", user}:
            self.request("/v3/auth/user/add", {"name": name, "password": password})
            self.request("/v3/auth/user/grant", {"user": name, "role": "root"})
        self.request("/v3/auth/enable")
        for node in self.nodes:
            node.login = user, password

    def empty(self) -> None:
        """Delete all keys and leases."""
        everything = {"key": encode("\0"), "range_end": encode("\0")}
        self.request("/v3/kv/deleterange", everything)
        for lease in self.request("/v3/lease/leases").get("leases", []):
            self.request("/v3/lease/revoke", {"ID": lease["ID"]})


def encode(text: str) -> str:
    """Return a key or value as etcd's JSON has it."""
    return base64.b64encode(text.encode()).decode()
