"""The MiniWoB++ pages of the installed wheel, served on a local port: one quiet server per process."""

from __future__ import annotations

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import miniwob

ROOT = Path(miniwob.__file__).parent / "html"


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections: a task loads about ten files

    def log_message(self, format: str, *args: object) -> None:
        return


@functools.cache
def miniwob_address() -> str:
    """Starts the server on the first call; it ends with the process. E.g. "http://127.0.0.1:40123"."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(ROOT)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="miniwob-pages", daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"
