"""What a browser may reach.

Addresses of the machine itself (`file:`, `chrome:` and the like) are always refused. With an allow-list of
hosts every connection of the browser goes through a proxy of its own that opens none to another host. So
redirects, popups, frames, workers and sockets are covered alike: the refusal does not depend on who asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from urllib.parse import urlsplit

_WEB = frozenset({"http", "https", "ws", "wss"})
_INLINE = frozenset({"data", "blob", "javascript"})
_HEAD_BYTES = 64 * 1024
_HEAD_S = 30.0
_CONNECT_S = 20.0


class Guard:
    """Decides by host. `allowed_hosts` None allows every host.

    An entry is a host (`example.org`), a host with a port (`localhost:8000`), or `*.example.org`, which means
    all hosts below it and itself.
    """

    def __init__(self, allowed_hosts: Iterable[str] | None = None) -> None:
        self.allowed_hosts = None if allowed_hosts is None else tuple(h.strip().lower() for h in allowed_hosts)

    def allows_host(self, host: str, port: int | None) -> bool:
        if self.allowed_hosts is None:
            return True
        host = host.lower().strip("[]").rstrip(".")
        for entry in self.allowed_hosts:
            name, _, wanted_port = entry.rpartition(":") if entry.count(":") == 1 else (entry, "", "")
            if wanted_port and str(port) != wanted_port:
                continue
            name = name.strip("[]")
            if host == name or (name.startswith("*.") and (host == name[2:] or host.endswith(name[1:]))):
                return True
        return False

    def refusal(self, url: str) -> str | None:
        """Why this address may not be opened, in words for the model; None if it may."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return f"refused: {url[:200]} is not an address"
        scheme = parts.scheme.lower()
        if url in ("", "about:blank", "about:srcdoc") or scheme == "chrome-error":
            return None
        if scheme in _INLINE:
            # What such an address holds came from no host, so an allow-list cannot vouch for it.
            return None if self.allowed_hosts is None else f"refused: {scheme}: addresses are not allowed"
        if scheme not in _WEB:
            return f"refused: {scheme or 'such'}: addresses are not allowed"
        default = 443 if scheme in ("https", "wss") else 80
        if not self.allows_host(parts.hostname or "", port or default):
            return f"refused: host {parts.hostname} is not allowed"
        return None


class GuardProxy:
    """An HTTP proxy on a local port that connects to allowed hosts only. One per computer."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.refused: list[str] = []  # hosts since the last look, for the report to the model
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; returns the address to give to the browser."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_BYTES)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the browser went away or spoke no HTTP: nothing to answer to
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
        request_line, _, headers = head.partition(b"\r\n")
        method, target, version = request_line.decode("latin-1").split(" ", 2)
        tunnel = method == "CONNECT"
        parts = urlsplit(f"//{target}" if tunnel else target)
        host, port = parts.hostname or "", parts.port or (443 if tunnel else 80)
        if not self.guard.allows_host(host, port):
            self.refused.append(host)
            await _answer(writer, "403 Forbidden", f"The host {host} is not allowed here.")
            return
        try:
            upstream = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_S)
        except (OSError, TimeoutError):
            await _answer(writer, "502 Bad Gateway", f"The host {host} could not be reached.")
            return
        if tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = parts.path or "/"
            path += f"?{parts.query}" if parts.query else ""
            upstream[1].write(f"{method} {path} {version}\r\n".encode("latin-1") + _once(headers))
        await asyncio.gather(_pump(reader, upstream[1]), _pump(upstream[0], writer))


def _once(headers: bytes) -> bytes:
    """Headers that ask to close after this answer: another request may go to another host, unseen."""
    hop = (b"connection:", b"proxy-connection:", b"keep-alive:")
    kept = [line for line in headers.split(b"\r\n") if line and not line.lower().startswith(hop)]
    return b"\r\n".join([*kept, b"Connection: close", b"", b""])


async def _answer(writer: asyncio.StreamWriter, status: str, text: str) -> None:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    await writer.drain()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(64 * 1024):
            sink.write(data)
            await sink.drain()
    with contextlib.suppress(OSError, RuntimeError):
        sink.close()
