"""The MiniWoB++ pages of the installed wheel, served on a local port: one quiet server per process."""

from __future__ import annotations

import functools
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import miniwob

ROOT = Path(miniwob.__file__).parent / "html"


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections: a task loads about ten files

    def log_message(self, format: str, *args: object) -> None:
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # many workers open their pages at once

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a browser that went away is no news
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@functools.cache
def miniwob_address() -> str:
    """Starts the server on the first call; it ends with the process. E.g. "http://127.0.0.1:40123"."""
    server = _Server(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(ROOT)))
    threading.Thread(target=server.serve_forever, name="miniwob-pages", daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"
