"""What a server allows: chosen once, before it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

MIB = 1 << 20
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


class SettingsError(ValueError):
    """A server that must not start like this. One sentence naming the option that mends it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond `requests`, `preprocessing` or `bodies` a request is refused with 429, beyond any other with 4xx.

    Bytes, seconds, pixels and counts. `requests` are replies under way or waiting in the engine (one for each of a
    request's n), `preprocessing` requests that wait for their images to be decoded, `bodies` bytes of all bodies
    that are being received, `tokens` the most that one reply may ask for (None: what the context leaves).
    """

    body: int = 32 * MIB
    bodies: int = 512 * MIB
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    images: int = 64
    pixels: int = 2**25
    tokens: int | None = None
    choices: int = 16
    requests: int = 512
    preprocessing: int = 128
    preprocessing_threads: int = 2
    fetch_bytes: int = 16 * MIB
    fetch_seconds: float = 10.0
    drain_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SettingsError(f"limit {name} is {value}; it must be above 0")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`names` are what requests may call the model, the first is reported. `image_hosts` are HOST or HOST:PORT.

    Raises SettingsError for an address that the world can reach, unless there is a key or `insecure` is set.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False
    image_hosts: tuple[str, ...] = ()
    private_images: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise SettingsError("a served model needs a name; give --served-name")
        if self.api_key is not None and not self.api_key.strip():
            raise SettingsError("the API key is empty; give one, or leave it out")
        if not self.local and self.api_key is None and not self.insecure:
            raise SettingsError(
                f"{self.host} can be reached from other machines: set HOLOTRON_API_KEY (or --api-key), bind to "
                "127.0.0.1, or say --insecure if anyone may use this server"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_local(self.host)


def is_local(host: str) -> bool:
    """Whether a host name or address means this machine alone."""
    if host.lower() in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
