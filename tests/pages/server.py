"""Serves this folder on a local port; also answers late, redirects, and remembers what was asked for."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

FOLDER = Path(__file__).parent


class Pages(SimpleHTTPRequestHandler):
    """`/slow?SECONDS` and `/slow.html?SECONDS` answer late, `/go?URL` redirects, `/page?HTML` says HTML."""

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        query = unquote(parts.query)
        if parts.path in ("/slow", "/slow.html"):
            time.sleep(float(query))
            self._say("<title>Slow</title>late but here")
        elif parts.path == "/go":
            self.send_response(302)
            self.send_header("Location", query)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif parts.path == "/page":
            self._say(query)
        else:
            super().do_GET()

    def _say(self, html: str) -> None:
        body = html.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


class Site:
    """`asked` is every (host, path) that arrived, `url(path)` the address of a page."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.port = server.server_address[1]
        self.asked: list[tuple[str, str]] = server.asked  # type: ignore[attr-defined]

    def url(self, path: str = "", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"


@contextmanager
def serve_pages() -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, directory=str(FOLDER)))
    server.asked = []  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Site(server)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
