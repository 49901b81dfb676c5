"""A TCP proxy between one client and the lock service, which can stop forwarding."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


class Proxy:
    """
    Forwards connections to a server. While it is cut, it forwards and closes nothing.

    Data sent in that time arrives after `mend()`, as with TCP.
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._run(self._open())

    @property
    def dead(self) -> bool:
        return not self._alive.is_set()

    def cut(self) -> None:
        """Stop forwarding."""
        self._run(self._switch(alive=False))

    def mend(self) -> None:
        """Forward again, delayed data first."""
        self._run(self._switch(alive=True))

    def close(self) -> None:
        """Close all connections, and stop listening."""
        self._run(self._shut())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, _running_loop()).result(10)

    async def _open(self) -> None:
        self._alive = asyncio.Event()
        self._alive.set()
        self._server = await asyncio.start_server(self._serve, self.host, 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _switch(self, alive: bool) -> None:
        if alive:
            self._alive.set()
        else:
            self._alive.clear()

    async def _shut(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._alive.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._alive.wait()
                writer.write(data)
                await writer.drain()
            # The end of a connection is delayed as well.
            await self._alive.wait()
        writer.close()


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="simulator-net", daemon=True).start()
    return _loop
