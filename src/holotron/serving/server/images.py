"""Images in messages: counted and measured before anything decodes them, and fetched where a host is allowed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import ipaddress
import socket
import warnings
from collections.abc import Iterator

import httpx
from PIL import Image

from holotron.serving.server.errors import ApiError
from holotron.serving.server.schemas import ChatMessage, ImagePart, ImageUrl
from holotron.serving.server.settings import Limits

FORMATS = ("PNG", "JPEG", "WEBP")


def image_parts(messages: list[ChatMessage]) -> Iterator[tuple[str, ImagePart]]:
    """Every image and the field it stands in, in order."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield f"messages[{i}].content[{j}].image_url", part


def url_of(part: ImagePart) -> str:
    return part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url


def check_images(messages: list[ChatMessage], limits: Limits) -> None:
    """Refuse what is no picture within the limits, by its header alone. Raises ApiError. For a worker thread."""
    for field, part in image_parts(messages):
        _check(_decoded(url_of(part), field), field, limits)


def count_images(messages: list[ChatMessage], limits: Limits) -> None:
    """Raises ApiError for more images than one request may have."""
    count = sum(1 for _ in image_parts(messages))
    if count > limits.images:
        raise ApiError(400, f"the messages hold {count} images; this server takes {limits.images}", param="messages")


def _decoded(url: str, field: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        what = "this kind of URL" if ":" in url[:64] else "a path"
        raise ApiError(400, f"{field}: {what} is not taken; give a data:image/...;base64 URI", param=field)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"{field}: the base64 is broken: {error}", param=field) from None


def _check(data: bytes, field: str, limits: Limits) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # measured below
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                (width, height), animated = image.size, bool(getattr(image, "is_animated", False))
    except Image.DecompressionBombError:
        raise ApiError(400, f"{field}: more than {limits.pixels} pixels", param=field) from None
    except Exception as error:  # decoders raise many kinds on hostile bytes
        known = ", ".join(FORMATS)
        raise ApiError(400, f"{field}: {len(data)} bytes are not a {known} image", param=field) from error
    if width * height > limits.pixels:
        message = f"{field}: {width} x {height} pixels; this server takes {limits.pixels} in all"
        raise ApiError(400, message, param=field)
    if animated:
        raise ApiError(400, f"{field}: the image is animated; send the one frame that counts", param=field)


class Fetcher:
    """Gets images from the hosts of a list, each HOST or HOST:PORT, and from nowhere else.

    The address is looked up once, must be a public one unless `private`, and is the one connected to, so that a name
    cannot change its meaning in between. Redirects are not followed. Environment proxies are not used.
    """

    def __init__(self, hosts: tuple[str, ...], private: bool, limits: Limits) -> None:
        self._hosts = {host.lower() for host in hosts}
        self._private = private
        self._limits = limits

    async def inline(self, messages: list[ChatMessage]) -> None:
        """Put what remote URLs show in their place, as data URIs. Raises ApiError naming the field."""
        for field, part in image_parts(messages):
            url = url_of(part)
            if url.lower().startswith(("http://", "https://")):
                part.image_url = await self._fetch(url, field)

    async def _fetch(self, url: str, field: str) -> str:
        host, port, target = self._check_host(url, field)
        try:
            async with asyncio.timeout(self._limits.fetch_seconds):
                data = await self._get(target, host, await self._address(host, port, field), field)
        except TimeoutError:
            message = f"{field}: {host} sent no image within {self._limits.fetch_seconds:g} s"
            raise ApiError(400, message, param=field) from None
        except httpx.HTTPError as error:
            raise ApiError(400, f"{field}: {host} cannot be reached: {type(error).__name__}", param=field) from None
        return "data:image/fetched;base64," + base64.b64encode(data).decode("ascii")

    def _check_host(self, url: str, field: str) -> tuple[str, int, httpx.URL]:
        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            raise ApiError(400, f"{field}: this is no URL", param=field) from None
        host = target.host.lower()
        usual = 443 if target.scheme == "https" else 80
        port = target.port or usual
        listed = f"{host}:{port}" in self._hosts or (port == usual and host in self._hosts)
        if not host or not listed or target.userinfo:
            raise ApiError(
                400, f"{field}: this server fetches no images from {host!r}; send a data URI "
                "(who runs the server can allow a host with --allow-image-host)", param=field,
            )  # fmt: skip
        return host, port, target

    async def _address(self, host: str, port: int, field: str) -> str:
        try:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise ApiError(400, f"{field}: {host} is not known", param=field) from None
        addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in found]
        open_ones = [address for address in addresses if self._private or _is_public(address)]
        if len(open_ones) < len(addresses) or not addresses:
            raise ApiError(400, f"{field}: {host} has a private address", param=field)
        return str(open_ones[0])

    async def _get(self, target: httpx.URL, host: str, address: str, field: str) -> bytes:
        # uncompressed, so that bytes received are bytes counted
        headers = {"Host": target.netloc.decode("ascii"), "Accept-Encoding": "identity"}
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._limits.fetch_seconds) as client,
            client.stream(
                "GET", target.copy_with(host=address), headers=headers, extensions={"sni_hostname": host}
            ) as response,
        ):
            if response.status_code != 200:
                raise ApiError(400, f"{field}: {host} answered {response.status_code}, not 200", param=field)
            data = bytearray()
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > self._limits.fetch_bytes:
                    message = f"{field}: more than {self._limits.fetch_bytes} bytes"
                    raise ApiError(400, message, param=field)
            return bytes(data)


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return address.is_global and not address.is_multicast and (mapped is None or mapped.is_global)
