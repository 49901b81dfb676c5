"""A network that can fail: a TCP proxy between a client and a server."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any


class _Way:
    """What happens to bytes on their way in one direction."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.heal()

    def heal(self) -> None:
        self.delay = 0.0
        self.drop = False
        self.budget: int | None = None
        self.open.set()


class Proxy:
    """Forward connections to a server, and misbehave on request, for open connections too."""

    host = "127.0.0.1"

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._connections: set[asyncio.StreamWriter] = set()
        self._maimed: set[asyncio.StreamWriter] = set()
        self._to_server, self._to_client = _Way(), _Way()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, self.host, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def pass_through(self) -> None:
        """Deliver what a black hole held back, and cut the connections that lost bytes."""
        self._run(self._heal())

    def delay(self, to_server: float = 0, to_client: float = 0) -> None:
        self._to_server.delay, self._to_client.delay = to_server, to_client

    def black_hole(self) -> None:
        self._run(self._hold())

    def drop_replies(self) -> None:
        self._to_client.drop = True

    def cut(self) -> None:
        self._run(self._cut(self._connections))

    def cut_after(self, *, to_server: int | None = None, to_client: int | None = None) -> None:
        """Close all open connections once that many more bytes went one way. This happens once."""
        self._to_server.budget, self._to_client.budget = to_server, to_client

    def retarget(self, host: str, port: int) -> None:
        self._target = (host, port)

    def close(self) -> None:
        self._run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _hold(self) -> None:
        self._to_server.open.clear()
        self._to_client.open.clear()

    async def _heal(self) -> None:
        await self._cut(self._maimed)
        self._to_server.heal()
        self._to_client.heal()

    async def _cut(self, connections: set[asyncio.StreamWriter]) -> None:
        for writer in connections:
            writer.transport.abort()
        # They close on the next turn of the loop.
        await asyncio.sleep(0)

    async def _shut_down(self) -> None:
        self._server.close()
        await self._cut(self._connections)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._connections |= ends
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, self._to_server),
                self._pump(far_reader, writer, self._to_client),
            )
        finally:
            self._connections -= ends
            self._maimed -= ends
            for end in ends:
                end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Way
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(way.delay)
                await way.open.wait()
                if way.drop:
                    self._maimed.add(writer)
                else:
                    await self._forward(data, writer, way)
            await way.open.wait()
        # Nothing that we proxy talks on over half a connection.
        writer.close()

    async def _forward(self, data: bytes, writer: asyncio.StreamWriter, way: _Way) -> None:
        if way.budget is None:
            writer.write(data)
            await writer.drain()
            return
        writer.write(data[: way.budget])
        await writer.drain()
        way.budget -= len(data)
        if way.budget <= 0:
            way.budget = None
            await self._cut(self._connections)
