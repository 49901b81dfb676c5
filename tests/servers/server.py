"""What all servers have in common."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .clock import Clock
from .process import Process


class ServerNotOurs(Exception):
    """A test wants to stop a server that was named in the environment."""


class Server:
    """A server on loopback, or one named in the environment."""

    name = "server"

    def __init__(self, host: str, port: int, process: Process | None = None) -> None:
        self.host = host
        self.port = port
        self._process = process

    def __repr__(self) -> str:
        return f"<{self.name} at {self.host}:{self.port}>"

    @property
    def can_kill(self) -> bool:
        return self._process is not None

    @property
    def process(self) -> Process:
        if self._process is None:
            raise ServerNotOurs(
                f"{self!r} was named in the environment, so tests may not stop it. "
                f"Use a private one, from the fixture make_{self.name}."
            )
        return self._process

    def answers(self) -> bool:
        raise NotImplementedError

    def as_process(self, command: Sequence[object], directory: Path) -> Process:
        """Return the process that runs this server, which is ready when it answers."""
        # A cluster elects a leader first, and Java starts slowly on a busy machine.
        return Process(command, directory, lambda process: self.answers(), patience=60)

    def start(self) -> None:
        self.process.start()

    def stop(self) -> None:
        self.process.terminate()

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        self.process.kill()

    def pause(self) -> None:
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    def go_by(self, clock: Clock) -> None:
        """Restart the server, with a wall clock that can be set."""
        self.stop()
        self.process.add_environment(clock.environment)
        self.start()

    def close(self) -> None:
        if self.can_kill:
            self.process.quit()


def start_together(servers: Sequence[Server]) -> None:
    """Start the nodes of a cluster: none of them answers before most of them run."""
    with ThreadPoolExecutor(len(servers)) as pool:
        starting = [pool.submit(server.start) for server in servers]
    try:
        for each in starting:
            each.result()
    except BaseException:
        for server in servers:
            server.close()
        raise
