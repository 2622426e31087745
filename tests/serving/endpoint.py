"""A real HTTP server on 127.0.0.1 that says what a test tells it to and keeps what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEP = {"note": None, "thought": "The button is in view.", "tool_call": {
    "tool_name": "click", "element": "Ok", "x": 500, "y": 250, "button": "left"}}  # fmt: skip
STEP_TEXT = json.dumps(STEP)


@dataclass
class Answer:
    """`body` as bytes is sent as it is; anything else as JSON. `drip` seconds pass after each byte.

    With a `meeting` nobody is answered before all parties have asked.
    """

    body: Any
    status: int = 200
    wait: float = 0.0
    drip: float = 0.0
    meeting: threading.Barrier | None = None
    headers: dict[str, str] = field(default_factory=dict)


def completion(content: str | None = STEP_TEXT, finish: str = "stop", **message: Any) -> Answer:
    usage = {"prompt_tokens": 321, "completion_tokens": 45, "prompt_tokens_details": {"cached_tokens": 300}}
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": content} | message,
    }
    return Answer({"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})


@dataclass
class Endpoint:
    """Gives `answers` one after another, then the last one again."""

    url: str
    answers: list[Answer]
    raw: list[bytes] = field(default_factory=list)  # bodies of the POST requests
    headers: list[dict[str, str]] = field(default_factory=list)
    models: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": "pilot"}]})

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.raw]


@contextmanager
def serve(*answers: Answer) -> Iterator[Endpoint]:
    endpoint = Endpoint("", list(answers))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                endpoint.raw.append(body)
                endpoint.headers.append(dict(self.headers))
                answer = endpoint.answers.pop(0) if len(endpoint.answers) > 1 else endpoint.answers[0]
            time.sleep(answer.wait)
            if answer.meeting:
                try:
                    answer.meeting.wait(20)
                except threading.BrokenBarrierError:
                    answer = Answer({"error": "the others never came"}, 500)
            if self.path != "/v1/chat/completions":
                answer = Answer({"error": {"message": f"no such path {self.path}"}}, 404)
            self._send(answer)

        def do_GET(self) -> None:
            self._send(Answer(endpoint.models) if self.path == "/v1/models" else Answer({"error": "no"}, 404))

        def _send(self, answer: Answer) -> None:
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            try:
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(body), 1 if answer.drip else len(body) or 1):
                    self.wfile.write(body[start : start + (1 if answer.drip else len(body))])
                    self.wfile.flush()
                    time.sleep(answer.drip)
            except OSError:
                pass  # the client gave up, as some tests want

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
