"""ZooKeeper."""

import importlib
import shutil
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import finding, workspace
from .certificates import Authority
from .finding import Found
from .process import Process, free_port, run_as_server_user
from .server import Server, ServerNotOurs, start_together

_CONFIGURATION = """\
tickTime={tick}
initLimit=10
syncLimit=5
dataDir={data}
clientPortAddress=127.0.0.1
clientPort={port}
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=*
"""
_TLS = """\
secureClientPortAddress=127.0.0.1
secureClientPort={port}
serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory
ssl.clientAuth=need
ssl.hostnameVerification=false
ssl.keyStore.location={store}
ssl.keyStore.type=PEM
ssl.trustStore.location={authority}
ssl.trustStore.type=PEM
"""
_LOGIN = """\
authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider
enforce.auth.enabled=true
enforce.auth.schemes=sasl
"""
_USERS = """\
Server {{ org.apache.zookeeper.server.auth.DigestLoginModule required user_{}="{}"; }};
"""
# Without UsePerfData it writes nothing outside of its directory.
_JAVA = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


class ZooKeeper(Server):
    """One node of ZooKeeper. With ticks of 500 ms, sessions live for 1 to 10 s as asked for."""

    name = "zookeeper"

    def __init__(self, url: str, process: Process | None = None) -> None:
        parts = urlsplit(f"//{url.partition(',')[0]}")
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 2181, process)
        #: Where clients connect to this node.
        self.url = url
        #: It speaks no TLS: another port than that of clients if these have to.
        self.plain_port = self.port
        self.directory: Path | None = None
        #: The nodes of its cluster, this one included.
        self.nodes: list[ZooKeeper] = [self]
        self.tls: Authority | None = None
        #: User and password that clients have to give by SASL's DIGEST-MD5.
        self.login: tuple[str, str] | None = None

    @classmethod
    def launch(cls, found: Found, *lines: str, **options: Any) -> "ZooKeeper":
        """Start one node; the options are those of `launch_cluster`."""
        return cls.launch_cluster(found, 1, *lines, **options)[0]

    @classmethod
    def launch_cluster(
        cls,
        found: Found,
        size: int = 3,
        *lines: str,
        tick: int = 500,
        tls: Authority | None = None,
        login: tuple[str, str] | None = None,
    ) -> "list[ZooKeeper]":
        """Start nodes with these *lines* in their configuration, such as "maxClientCnxns=60"."""
        nodes = [cls(f"127.0.0.1:{free_port()}") for _ in range(size)]
        peers = [f"127.0.0.1:{free_port()}:{free_port()}" for _ in nodes]
        members = [f"server.{number}={peer}" for number, peer in enumerate(peers, 1)]
        for number, node in enumerate(nodes, 1):
            node.directory = workspace.new_directory("zookeeper")
            node.nodes, node.tls, node.login = nodes, tls, login
            if tls:
                node.plain_port = free_port()
            node._make_data(number)
            node._configure(tick, [*(members if size > 1 else []), *lines])
            node._process = node.as_process(node._command(found), node.directory)
        start_together(nodes)
        return nodes

    @property
    def hosts(self) -> str:
        """All nodes of the cluster, as clients take them."""
        return ",".join(node.url for node in self.nodes)

    @property
    def _data(self) -> Path:
        if self.directory is None:
            raise ServerNotOurs(f"{self!r} was named in the environment.")
        return self.directory / "data"

    def _make_data(self, number: int) -> None:
        run_as_server_user("mkdir", self._data)
        (self._data / "myid").write_text(str(number))

    def _configure(self, tick: int, lines: list[str]) -> None:
        directory = self._data.parent
        text = _CONFIGURATION.format(tick=tick, data=self._data, port=self.plain_port)
        if self.tls:
            server = self.tls.issue("zookeeper")
            store = directory / "server.pem"
            store.write_text(server.key.read_text() + server.certificate.read_text())
            text += _TLS.format(port=self.port, store=store, authority=self.tls.certificate)
        if self.login:
            text += _LOGIN
            (directory / "users.conf").write_text(_USERS.format(*self.login))
        (directory / "zoo.cfg").write_text(text + "\n".join(lines) + "\n")

    def _command(self, found: Found) -> list[object]:
        directory = self._data.parent
        jars = ":".join(map(str, finding.zookeeper_jars(found.path)))
        command = [finding.java().path, *_JAVA, f"-Djava.io.tmpdir={directory}"]
        if self.login:
            command.append(f"-Djava.security.auth.login.config={directory}/users.conf")
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return [*command, "-cp", jars, main, directory / "zoo.cfg"]

    def start(self, *, empty: bool = False) -> None:
        """Start the node; with *empty*, as one that has lost all its data."""
        if empty:
            number = self.nodes.index(self) + 1
            shutil.rmtree(self._data)
            self._make_data(number)
        super().start()

    def ask(self, word: str, timeout: float = 2) -> str:
        """Send one of the words of four letters, such as "srvr", and return the answer."""
        with socket.create_connection((self.host, self.plain_port), timeout) as connection:
            connection.sendall(word.encode())
            with connection.makefile("rb") as answer:
                return answer.read().decode()

    def answers(self) -> bool:
        try:
            # While it starts, it accepts connections that it never answers.
            return "Mode:" in self.ask("srvr", timeout=0.5)
        except OSError:
            return False

    def is_leader(self) -> bool:
        """Return whether the node leads; one that runs alone does."""
        answer = self.ask("srvr")
        return "Mode: leader" in answer or "Mode: standalone" in answer

    def client(self, **options: Any) -> Any:
        """Return a client that isn't started yet. It needs kazoo, and pure-sasl for a login."""
        options = {"hosts": self.hosts, "timeout": 5} | options
        if self.tls:
            identity = self.tls.client
            options |= {"use_ssl": True, "ca": str(self.tls.certificate), "check_hostname": False}
            options |= {"certfile": str(identity.certificate), "keyfile": str(identity.key)}
        if self.login:
            user, password = self.login
            options["sasl_options"] = {
                "mechanism": "DIGEST-MD5",
                "username": user,
                "password": password,
            }
        return importlib.import_module("kazoo.client").KazooClient(**options)

    def empty(self) -> None:
        """Delete all nodes of the tree. It needs kazoo."""
        client = self.client()
        client.start(timeout=5)
        try:
            for name in client.get_children("/"):
                if name != "zookeeper":
                    client.delete(f"/{name}", recursive=True)
        finally:
            client.stop()
            client.close()
