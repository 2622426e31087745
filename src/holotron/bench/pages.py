"""Records traces on real pages of a folder: a seeded walk that clicks, types, scrolls and follows links."""

from __future__ import annotations

import hashlib
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from playwright.async_api import Route

from holotron.bench.drawn import WORDS
from holotron.bench.traces import TraceError, TraceFolder, TraceTurn, TraceWriter, think_time
from holotron.computer.browser import Browser, BrowserComputer
from holotron.contract.contract import get_contract
from holotron.contract.step import Click, Direction, Navigate, Scroll, Step, ToolCall, Write

KIT = "gentelella@4.2.0"  # an MIT admin template of 58 pages on npm; fetched to record, never shipped
KIT_ROOT = "dist"
GOAL = "Go through the pages of this site: open sections, try the controls and fill in the fields."
VIEWPORT = (1920, 1080)
ADDRESS = "http://site.example"  # answered from the folder, never looked up
_ELEMENTS = Path(__file__).with_name("page_elements.js").read_text(encoding="utf-8")
# Shares of what a walk does next, where the page allows it; a field that was clicked is always typed into.
_MIX = (("button", 0.40), ("field", 0.25), ("scroll", 0.15), ("link", 0.20))


def fetch_kit(folder: Path, name: str = KIT) -> Path:
    """The root to serve of an npm package of pages, fetched once into `folder`. Raises TraceError without npm."""
    root = folder / name.replace("@", "-") / "package" / KIT_ROOT
    if not root.is_dir():
        target = root.parents[1]
        target.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", "--pack-destination", str(target.resolve()), name]
        try:
            packed = subprocess.run(command, cwd=target, check=True, capture_output=True, text=True).stdout.split()[-1]
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            raise TraceError(f"npm could not fetch {name} ({error}); name a folder of pages instead") from error
        with tarfile.open(target / packed) as archive:
            archive.extractall(target, filter="data")
    return root


async def serve_folder(computer: BrowserComputer, root: Path) -> None:
    """Answers ADDRESS from files below `root` and cuts off every other host, so that no run depends on the network."""

    async def answer(route: Route) -> None:
        parts = urlsplit(route.request.url)
        path = (root / unquote(parts.path).lstrip("/")).resolve()
        if parts.netloc != urlsplit(ADDRESS).netloc:
            await route.abort()
        elif path.is_file() and path.is_relative_to(root.resolve()):
            await route.fulfill(path=path)
        else:
            await route.fulfill(status=404, body="no such file")

    await computer.context.route("**/*", answer)


async def record_pages(
    folder: Path,
    root: Path,
    *,
    traces: int = 8,
    turns: int = 20,
    viewport: tuple[int, int] = VIEWPORT,
    seed: int = 0,
    on_trace: Callable[[str], None] | None = None,
) -> TraceFolder:
    """`traces` walks of `turns` steps over the HTML pages below `root`, each from a page of its own.

    Nothing outside the folder is reached. Raises TraceError for a folder without pages, ComputerError.
    """
    pages = sorted(str(path.relative_to(root)) for path in root.rglob("*.html"))
    if not pages:
        raise TraceError(f"{root} holds no .html page to record on")
    writer = TraceWriter(folder, "pages", seed, viewport)
    async with await Browser.launch() as browser:
        for number in range(traces):
            rng = random.Random(f"{seed}-{number}")
            computer = await browser.new_computer(*viewport)
            try:
                await serve_folder(computer, root)
                await computer.goto(f"{ADDRESS}/{rng.choice(pages)}")
                name = f"pages-{number:04d}"
                made: list[TraceTurn] = []
                for _ in range(turns):
                    made.append(await _turn(computer, writer, rng, pages, made))
                writer.add(name, GOAL, made)
            finally:
                await computer.close()
            if on_trace is not None:
                on_trace(name)
    return writer.close()


async def _turn(
    computer: BrowserComputer, writer: TraceWriter, rng: random.Random, pages: list[str], past: list[TraceTurn]
) -> TraceTurn:
    seen: dict[str, Any] = await computer.evaluate(_ELEMENTS)
    shot = await computer.screenshot()
    name = hashlib.sha256(shot.png).hexdigest()
    if len(past) > 1 and all(turn.image == name for turn in past[-2:]):  # nothing works here any more
        seen = {"elements": [], "typing": False}
    call, thought = _choose(seen, rng, pages, computer)
    outcome = await computer.do(call, get_contract("holotron3").point(call, shot))
    step = Step(thought=thought, tool_call=call)
    return writer.turn(shot.png, step, result=outcome.text, is_error=not outcome.ok, think_s=think_time(rng))


def _choose(
    seen: dict[str, Any], rng: random.Random, pages: list[str], computer: BrowserComputer
) -> tuple[ToolCall, str]:
    if seen["typing"] and rng.random() < 0.9:
        return Write(content=" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))), "The field has focus."
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for element in seen["elements"]:
        by_kind.setdefault(element["kind"], []).append(element)
    kinds = [(kind, share) for kind, share in _MIX if kind in by_kind or kind == "scroll"]
    kind = rng.choices([k for k, _ in kinds], [share for _, share in kinds])[0]
    if not seen["elements"]:
        return Navigate(url=f"{ADDRESS}/{rng.choice(pages)}"), "There is nothing here, I open another page."
    if kind == "scroll":
        direction: Direction = "down" if rng.random() < 0.75 else "up"
        return Scroll(element="page", x=500, y=500, direction=direction, scroll_size=5), "I look further."
    element = rng.choice(by_kind[kind])
    x, y = round(1000 * element["x"] / computer.width), round(1000 * element["y"] / computer.height)
    return Click(element=element["text"] or kind, x=x, y=y), f"I try this {kind}."
