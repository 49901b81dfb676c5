"""Consul."""

import json
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import workspace
from .certificates import Authority
from .finding import Found
from .process import Process, free_port, run_as_server_user
from .server import Server, ServerNotOurs, start_together

_CONFIGURATION = {
    "bind_addr": "127.0.0.1",
    "client_addr": "127.0.0.1",
    "server": True,
    "raft_protocol": 3,
    # Elections as fast as in production. The default is for slow machines.
    "performance": {"raft_multiplier": 1},
    "disable_update_check": True,
    # It would write into the home directory.
    "disable_host_node_id": True,
    "leave_on_terminate": False,
}


class Consul(Server):
    """One node of Consul. Sessions of 1 s are allowed, which by default last for at least 10 s."""

    name = "consul"

    def __init__(self, url: str, process: Process | None = None) -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 8500, process)
        self.url = url
        self.directory: Path | None = None
        #: The nodes of its cluster, this one included.
        self.nodes: list[Consul] = [self]
        self.tls: Authority | None = None
        #: What clients have to show, if set.
        self.token: str | None = None
        self._ports = {"http": self.port}

    @classmethod
    def launch(cls, found: Found, **options: Any) -> "Consul":
        """Start one node; the options are those of `launch_cluster`."""
        return cls.launch_cluster(found, 1, **options)[0]

    @classmethod
    def launch_cluster(
        cls,
        found: Found,
        size: int = 3,
        *,
        session_ttl_min: str = "1s",
        tls: Authority | None = None,
        token: str | None = None,
        **settings: Any,
    ) -> "list[Consul]":
        """Start nodes. With *token*, clients need that or one made with it."""
        scheme = "https" if tls else "http"
        nodes = [cls(f"{scheme}://127.0.0.1:{free_port()}") for _ in range(size)]
        for node in nodes:
            node.directory = workspace.new_directory("consul")
            node.nodes, node.tls, node.token = nodes, tls, token
            node._ports = {name: free_port() for name in ("server", "serf_lan", "serf_wan")}
            node._ports |= {"http": -1, "https": node.port} if tls else {"http": node.port}
        for node in nodes:
            terms = node._terms() | {"session_ttl_min": session_ttl_min} | settings
            configuration = node._data.with_name("consul.json")
            configuration.write_text(json.dumps(terms))
            command = [found.path, "agent", "-config-file", configuration]
            node._process = node.as_process(command, node._data.parent)
            run_as_server_user("mkdir", node._data)
        start_together(nodes)
        return nodes

    def _terms(self) -> dict[str, Any]:
        number, size = self.nodes.index(self), len(self.nodes)
        others = [f"127.0.0.1:{node._ports['serf_lan']}" for node in self.nodes if node is not self]
        terms = _CONFIGURATION | {
            "node_name": f"n{number}",
            "data_dir": str(self._data),
            "ports": {"dns": -1, "grpc": -1, **self._ports},
            "bootstrap_expect": size,
            "retry_join": others,
        }
        if self.tls:
            server = self.tls.issue("consul")
            terms |= {"ca_file": str(self.tls.certificate), "verify_incoming_https": True}
            terms |= {"cert_file": str(server.certificate), "key_file": str(server.key)}
        if self.token:
            tokens = {"master": self.token, "agent": self.token}
            terms["acl"] = {"enabled": True, "default_policy": "deny", "tokens": tokens}
            terms["primary_datacenter"] = "dc1"
        return terms

    @property
    def _data(self) -> Path:
        if self.directory is None:
            raise ServerNotOurs(f"{self!r} was named in the environment.")
        return self.directory / "data"

    def start(self, *, empty: bool = False) -> None:
        """Start the node; with *empty*, as one that has lost all its data."""
        if empty:
            shutil.rmtree(self._data)
            run_as_server_user("mkdir", self._data)
        super().start()

    def request(self, path: str, body: Any = None, *, method: str = "", timeout: float = 5) -> Any:
        """Send a request, such as ``request("/v1/kv/x?raw", "text", method="PUT")``."""
        data = body.encode() if isinstance(body, str) else body and json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data=data,
            headers={"X-Consul-Token": self.token} if self.token else {},
            method=method or ("GET" if body is None else "PUT"),
        )
        context: ssl.SSLContext | None = self.tls.client_context() if self.tls else None
        with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
            content = answer.read()
            is_json = answer.headers.get_content_type() == "application/json"
            return json.loads(content or b"null") if is_json else content.decode()

    def answers(self) -> bool:
        """Return whether there is a leader that this node reaches."""
        try:
            self.request("/v1/kv/?keys&consistent", timeout=2)
        except urllib.error.HTTPError as exc:
            # There are no keys.
            return exc.code == 404
        except OSError:
            return False
        return True

    def is_leader(self) -> bool:
        leader = self.request("/v1/status/leader")
        return bool(leader == f"127.0.0.1:{self._ports['server']}")

    def empty(self) -> None:
        """Delete all keys and sessions."""
        self.request("/v1/kv/?recurse", method="DELETE")
        for session in self.request("/v1/session/list"):
            self.request(f"/v1/session/destroy/{session['ID']}", method="PUT")
