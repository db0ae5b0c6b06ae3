"""Clients that keep their connection and send the same request again as soon as it is answered.

It imports nothing else, so that it takes little from the server on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path


class Client(asyncio.Protocol):
    """One client.

    Args:
        request: Head and body.
        end: Time, by ``time.perf_counter``, after which no request is sent.
        latencies: Where the seconds of each request are added.
    """

    def __init__(self, request: bytes, end: float, latencies: list[float]) -> None:
        self.request, self.end, self.latencies = request, end, latencies
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Send the next request when the answer is complete."""
        self.answer += data
        head, complete, body = self.answer.partition(b"\r\n\r\n")
        if not complete or len(body) < int(head.lower().partition(b"content-length:")[2].split()[0]):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(self.answer.decode())
        self.latencies.append(time.perf_counter() - self.began)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """Finish, or report why the connection ended early."""
        if time.perf_counter() < self.end:
            self.closed.set_exception(error or RuntimeError(f"the server closed the connection after {self.answer!r}"))
        else:
            self.closed.set_result(None)

    def _send(self) -> None:
        self.answer, self.began = b"", time.perf_counter()
        if self.began < self.end:
            self.transport.write(self.request)
        else:
            self.transport.close()


async def load(port: int, request: bytes, count: int, seconds: float) -> dict[str, float]:
    """Requests per second, and median and 99th percentile of their latency."""
    latencies: list[float] = []
    end = (began := time.perf_counter()) + seconds
    loop = asyncio.get_running_loop()
    clients = [Client(request, end, latencies) for _ in range(count)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(client.closed for client in clients))
    served, latencies = len(latencies) / (time.perf_counter() - began), sorted(latencies)
    return {"served": served, "p50": statistics.median(latencies), "p99": latencies[int(0.99 * len(latencies))]}


if __name__ == "__main__":
    port, file, count, limit = sys.argv[1:]
    print(json.dumps(asyncio.run(load(int(port), Path(file).read_bytes(), int(count), float(limit)))))
