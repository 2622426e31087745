"""Which Chromium to drive: HOLOTRON_CHROMIUM, then the system's, then one that Playwright installed.

Imports nothing outside the standard library, so that set-up can ask before anything heavy is loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HOLOTRON_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC_APPS = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
PLAYWRIGHT_LAYOUTS = (
    "chromium-*/chrome-linux*/chrome",
    "chromium-*/chrome-mac*/*.app/Contents/MacOS/*",
    "chromium-*/chrome-win*/chrome.exe",
)


@dataclass(frozen=True, slots=True)
class Chromium:
    path: Path
    version: str  # as it says itself, e.g. "156.0.8078.114"
    source: str  # the variable's name, "system" or "playwright"


class ChromiumMissing(FileNotFoundError):
    """No Chromium that starts; the message carries the command to type."""


def find_chromium() -> Chromium:
    """The first Chromium that answers `--version`; raises ChromiumMissing.

    A browser named by the variable is taken or refused, never passed over in silence.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = shutil.which(named)
        version = path and _version(Path(path))
        if not path or not version:
            raise ChromiumMissing(f"{VARIABLE}={named} is not a Chromium that starts; correct it or unset it")
        return Chromium(Path(path), version, VARIABLE)
    for source, candidate in _candidates():
        version = _version(candidate)
        if version:
            return Chromium(candidate, version, source)
    raise ChromiumMissing(f"no Chromium that starts was found; type: {install_command()}")


def install_command() -> str:
    """What to type to get one: Debian's package (Ubuntu's is an empty stub), elsewhere Playwright's."""
    if _is_debian() and shutil.which("apt-get"):
        sudo = "" if os.geteuid() == 0 else "sudo "
        return f"{sudo}apt-get install -y chromium"
    return f"{sys.executable} -m playwright install chromium"


def _is_debian() -> bool:
    try:
        return re.search(r'^ID="?debian"?$', Path("/etc/os-release").read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def _candidates() -> Iterator[tuple[str, Path]]:
    for name in NAMES:
        found = shutil.which(name)
        if found:
            yield "system", Path(found)
    for app in MAC_APPS:
        if os.access(app, os.X_OK):
            yield "system", Path(app)
    root = _playwright_folder()
    for layout in PLAYWRIGHT_LAYOUTS:
        for path in sorted(root.glob(layout), key=_revision, reverse=True):
            if path.is_file() and os.access(path, os.X_OK):
                yield "playwright", path


def _revision(path: Path) -> int:
    found = re.search(r"chromium-(\d+)", str(path))
    return int(found[1]) if found else 0


def _playwright_folder() -> Path:
    named = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    if named and named != "0":
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/ms-playwright"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "ms-playwright"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ms-playwright"


def _version(path: Path) -> str | None:
    """None where it does not start: a package's stub, or a library of the system is missing."""
    try:
        said = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+(\.\d+)+", said.stdout)
    return found[0] if found else None


def chromium_flags() -> list[str]:
    """The switches that every Chromium of ours starts with, beside Playwright's own.

    The sandbox is given up only where Chromium refuses to start with it: as root.
    """
    flags = [
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-smooth-scrolling",
        "--disable-partial-raster",  # else a repainted edge is one shade off: same page, other bytes
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--force-color-profile=srgb",
        "--font-render-hinting=none",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--no-sandbox")
    return flags


if __name__ == "__main__":  # set-up asks for the path alone
    try:
        print(find_chromium().path)
    except ChromiumMissing as missing:
        sys.exit(str(missing))
