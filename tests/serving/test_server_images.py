"""Hostile and unusual images: a 4xx that names the part, or the answer that the picture itself would get."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import ipaddress
import random
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image, ImageOps

from holotron.engine import LLM
from holotron.serving.server import Limits
from holotron.serving.server.errors import ApiError
from holotron.serving.server.images import Fetcher, _is_public
from holotron.serving.server.schemas import ChatMessage
from tests.engine.tiny import picture
from tests.serving.running import Running, data_uri, image_part, serving

PLACE = "messages[0].content[0].image_url"


def ask(server: Running, url: str | dict[str, Any], **fields: Any) -> httpx.Response:
    part = url if isinstance(url, dict) else {"type": "image_url", "image_url": {"url": url}}
    return server.chat([part], **fields)


def refused(response: httpx.Response, word: str = "") -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] in (PLACE, "messages") and word in error["message"], error


def answer(response: httpx.Response) -> tuple[str, int]:
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens_details"]["image_tokens"]


def png(width: int, height: int, rows: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG with these bytes as its pixel stream, whatever its header says."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [(60_000, 60_000), (2**31 - 1, 1), (30_000, 30_000), (100_000, 400)])
def test_decompression_bombs(server: Running, side: tuple[int, int]) -> None:
    bomb = png(*side, bytes(5_000_000))
    assert len(bomb) < 100_000
    refused(ask(server, data_uri(bomb)), "")


def test_a_pixel_stream_larger_than_its_header(server: Running) -> None:
    response = ask(server, data_uri(png(4, 4, bytes(5_000_000))))
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated(server: Running, kind: str) -> None:
    whole = base64.b64decode(data_uri(picture(64, 64), kind).partition(",")[2])
    for keep in (0, 1, 8, 20, 30, len(whole) // 2, len(whole) - 30):
        refused(ask(server, data_uri(whole[:keep], kind)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_broken_bytes_are_refused_or_read(server: Running, kind: str) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    whole = base64.b64decode(data_uri(picture(40, 40), kind).partition(",")[2])
    for _ in range(8):
        broken = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        response = ask(server, data_uri(bytes(broken), kind), max_tokens=1)
        assert response.status_code in (200, 400), (seed, response.text)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "ICO", "PPM"])
def test_other_formats(server: Running, kind: str) -> None:
    refused(ask(server, image_part(picture(32, 32), kind)), "PNG, JPEG, WEBP")
    refused(ask(server, data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml")))
    refused(ask(server, data_uri(b"%PDF-1.4")))


def test_a_wrong_label_does_not_matter(server: Running) -> None:
    image = picture(48, 32)
    assert answer(ask(server, image_part(image))) == answer(ask(server, data_uri(image).replace("/png", "/webp")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated(server: Running, kind: str) -> None:
    frames = [picture(32, 32, i) for i in range(3)]
    part = image_part(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
    refused(ask(server, part), "PNG, JPEG, WEBP" if kind == "GIF" else "animated")


def test_cmyk_and_other_modes(server: Running) -> None:
    image = Image.fromarray(np.tile(np.arange(0, 256, 4, dtype=np.uint8)[:, None, None], (1, 64, 3)))  # grey, in RGB
    expected = answer(ask(server, image_part(image)))
    for mode in ("L", "RGBA", "LA"):
        assert answer(ask(server, image_part(image.convert(mode)))) == expected, mode
    cmyk = io.BytesIO()
    image.convert("CMYK").save(cmyk, "JPEG", quality=95)
    plain = Image.open(cmyk).convert("RGB")
    assert answer(ask(server, data_uri(cmyk.getvalue(), "JPEG"))) == answer(ask(server, image_part(plain)))
    for mode in ("1", "P"):
        reduced = image.convert(mode)
        assert answer(ask(server, image_part(reduced))) == answer(ask(server, image_part(reduced.convert("RGB")))), mode


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(server: Running, orientation: int) -> None:
    image = picture(64, 32, orientation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = io.BytesIO()
    image.save(turned, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(turned))
    assert upright is not None
    assert answer(ask(server, data_uri(turned.getvalue()))) == answer(ask(server, image_part(upright)))


def test_one_pixel(thinking_server: Running, server: Running) -> None:
    for running in (server, thinking_server):
        response = ask(running, image_part(picture(1, 1)))
        assert response.status_code == 400 or answer(response)[1] > 0


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000), (20_000, 20), (20_000, 300)])
def test_a_side_of_20000_pixels(thinking_server: Running, server: Running, size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, "red")
    for running in (server, thinking_server):
        response = ask(running, image_part(image), max_tokens=1)
        assert response.status_code == 400 or answer(response)[1] > 0
        if response.status_code == 400:
            refused(response)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "/etc/passwd", "etc/passwd", "", "data:", "data:image/png,x", "data:text/plain;base64,aGk=",
     "data:image/png;base64,", "data:image/png;base64,@@@", "data:image/png;base64,aGk", "ftp://example.org/a.png",
     "javascript:alert(1)", "http://", "https://[", "http://example.org:99999/x.png", "http://\x00/", "HTTP://127.0.0.1/x.png"],
)  # fmt: skip
def test_paths_and_strange_urls(server: Running, url: str) -> None:
    refused(ask(server, url))
    refused(ask(server, {"type": "image_url", "image_url": url}))


@contextmanager
def pictures_served(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> Iterator[tuple[int, list[str]]]:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.headers['Host']}{self.path}")
            self.send_response(status)
            for name, value in (headers or {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                pass

        def log_message(self, *args: object) -> None:
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=site.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield site.server_address[1], asked
    finally:
        site.shutdown()
        site.server_close()


def test_remote_images_only_from_listed_hosts(tiny_llm: LLM, server: Running) -> None:
    image = picture(48, 32, 9)
    body = base64.b64decode(data_uri(image).partition(",")[2])
    with pictures_served(body) as (port, asked):
        url = f"http://localhost:{port}/a.png?b=c"
        refused(ask(server, url), "--allow-image-host")
        with serving(tiny_llm, image_hosts=(f"localhost:{port}",)) as running:
            refused(ask(running, url), "private address")
        assert asked == []
        allowed = {"image_hosts": (f"localhost:{port}", "example.org"), "private_images": True}
        with serving(tiny_llm, **allowed) as running:
            assert answer(ask(running, url)) == answer(ask(server, image_part(image)))
            assert asked == [f"localhost:{port}/a.png?b=c"]
            for other in (
                f"http://127.0.0.1:{port}/a.png",
                "http://localhost/a.png",
                f"https://x@localhost:{port}/a.png",
            ):
                refused(ask(running, other), "--allow-image-host")
            assert len(asked) == 1


def test_what_a_listed_host_may_not_do(tiny_llm: LLM) -> None:
    def outcome(body: bytes, status: int = 200, headers: dict[str, str] | None = None, **limits: Any) -> str:
        with pictures_served(body, status, headers) as (port, _):
            chosen = Limits(**limits)
            with serving(tiny_llm, chosen, image_hosts=(f"localhost:{port}",), private_images=True) as running:
                response = ask(running, f"http://localhost:{port}/")
                refused(response)
                return str(response.json()["error"]["message"])

    assert "302" in outcome(b"", 302, {"Location": "http://169.254.169.254/", "Content-Length": "0"})
    assert "404" in outcome(b"", 404)
    assert "more than 1000 bytes" in outcome(bytes(5000), fetch_bytes=1000)
    assert "not a PNG" in outcome(b"<html>")


def test_a_silent_host_is_given_up(tiny_llm: LLM) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        limits = Limits(fetch_seconds=0.3)
        with serving(tiny_llm, limits, image_hosts=(f"localhost:{port}",), private_images=True) as running:
            response = ask(running, f"http://localhost:{port}/")
    refused(response, "within 0.3 s")


async def test_a_name_that_means_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher(("pictures.example",), private=False, limits=Limits())
    loop = asyncio.get_running_loop()
    for address in (
        "10.0.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
    ):

        async def resolve(host: str, port: int, **_: Any) -> list[Any]:
            public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port))
            return [public, (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]  # noqa: B023

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        message = ChatMessage.model_validate(
            {"role": "user", "content": [{"type": "image_url", "image_url": "https://pictures.example/a.png"}]}
        )
        with pytest.raises(ApiError, match="private address"):
            await fetcher.inline([message])


def test_public_addresses() -> None:
    for text in ("93.184.216.34", "2606:2800:220:1::1"):
        assert _is_public(ipaddress.ip_address(text))
    for text in ("100.64.0.1", "192.168.0.1", "2002:0a00:0001::1", "fc00::1"):
        assert not _is_public(ipaddress.ip_address(text))
