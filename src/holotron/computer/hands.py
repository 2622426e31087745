"""Each tool call, carried out with mouse and keyboard on one page."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from playwright.async_api import Error, Page

from holotron.computer.computer import Point
from holotron.computer.keys import browser_key, chord
from holotron.contract.step import (
    Click,
    DoubleClick,
    DragTo,
    HoldAndTapKey,
    Hotkey,
    KeyDown,
    KeyUp,
    MoveTo,
    Scroll,
    Tool,
    UpdatePlan,
    Wait,
    Write,
)

WHEEL_CLICK_PX = 50  # one click of a wheel; the default of 10 clicks moves 500 CSS pixels
DRAG_STEPS = 8  # moves between press and release: pages tell a drag from a click by them
TYPED_KEY_BY_KEY = 300  # characters; a longer text arrives as one input event

_NOT_TYPED = re.compile(r"([\n\t]+)")
# Into what kind of thing text would go: "none", a single "line", a "text" of several, or a "frame" that only
# its own document can tell more of.
_FOCUS = """() => {
  let e = document.activeElement;
  while (e && e.shadowRoot && e.shadowRoot.activeElement) e = e.shadowRoot.activeElement;
  if (!e || e === document.body && !e.isContentEditable || e === document.documentElement) return 'none';
  if (e.tagName === 'IFRAME' || e.tagName === 'FRAME') return 'frame';
  return e.tagName === 'INPUT' ? 'line' : 'text';
}"""


@dataclass(slots=True)
class Hands:
    """Where the cursor is and which keys are held; both outlive a page."""

    width: int
    height: int
    cursor: Point = (0.0, 0.0)
    held: list[str] = field(default_factory=list)

    def inside(self, point: Point | None) -> Point:
        """The point, kept on the last pixel row and column of the viewport."""
        if point is None:
            raise ValueError("this tool call needs a point")
        x, y = point
        return min(max(float(x), 0.0), self.width - 1.0), min(max(float(y), 0.0), self.height - 1.0)

    async def carry_out(self, page: Page, call: Tool, point: Point | None) -> str:
        """Returns what the model should know, "" if nothing; raises UnknownKey or Playwright's Error."""
        match call:
            case Click():
                self.cursor = self.inside(point)
                await page.mouse.click(*self.cursor, button=call.button)
            case DoubleClick():
                self.cursor = self.inside(point)
                await page.mouse.dblclick(*self.cursor)
            case MoveTo():
                self.cursor = self.inside(point)
                await page.mouse.move(*self.cursor)
            case DragTo():
                await self._drag(page, self.inside(point))
            case Scroll():
                await self._scroll(page, call, self.inside(point))
            case Write():
                return await self._write(page, call)
            case Hotkey():
                keys = chord(call.keys)
                for _ in range(call.repeat_count):
                    await _press_chord(page, keys[:-1], keys[-1:])
            case HoldAndTapKey():
                hold, tap = chord(call.hold_keys), chord([*call.hold_keys, *call.tap_keys])
                await _press_chord(page, hold, tap[len(hold) :])
            case KeyDown():
                key = browser_key(call.key)
                await page.keyboard.down(key)
                if key not in self.held:
                    self.held.append(key)
            case KeyUp():
                key = browser_key(call.key)
                await page.keyboard.up(key)
                if key in self.held:
                    self.held.remove(key)
            case Wait():
                await asyncio.sleep(call.seconds)
            case UpdatePlan():
                return "\n".join(f"{n}. {goal.title} [{goal.status}]" for n, goal in enumerate(call.goals, 1))
        return ""

    async def _drag(self, page: Page, target: Point) -> None:
        await page.mouse.move(*self.cursor)
        await page.mouse.down()
        self.cursor = target
        try:
            await page.mouse.move(*target, steps=DRAG_STEPS)
        finally:
            await page.mouse.up()

    async def _scroll(self, page: Page, call: Scroll, at: Point) -> None:
        self.cursor = at
        await page.mouse.move(*at)
        pixels = call.scroll_size * WHEEL_CLICK_PX
        dx, dy = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}[call.direction]
        await page.mouse.wheel(dx * pixels, dy * pixels)

    async def _write(self, page: Page, call: Write) -> str:
        """A newline or tab in the content is text, never a key: only `press_enter` submits."""
        focus = await _focus(page)
        if call.overwrite and focus != "none":
            await page.keyboard.press("ControlOrMeta+a")
            await page.keyboard.press("Delete")
        content = call.content.replace("\r\n", "\n").replace("\r", "\n")
        if focus == "line":  # a field of one line would take an inserted newline for Enter
            content = content.replace("\n", " ")
        if len(content) > TYPED_KEY_BY_KEY:
            await page.keyboard.insert_text(content)
        else:
            for part in _NOT_TYPED.split(content):
                if part and part[0] in "\n\t":
                    await page.keyboard.insert_text(part)
                elif part:
                    await page.keyboard.type(part)
        if call.press_enter:
            await page.keyboard.press("Enter")
        return "nothing has the focus" if focus == "none" else ""

    async def let_go(self, page: Page) -> None:
        """Release every key that is still held."""
        while self.held:
            try:
                await page.keyboard.up(self.held.pop())
            except Error:
                return  # a page that is gone holds no keys


async def _focus(page: Page) -> str:
    """The kind of what has the focus, looked up in the frame that has it."""
    kind = str(await page.evaluate(_FOCUS))
    if kind != "frame":
        return kind
    for frame in page.frames[1:]:
        try:
            inner = str(await frame.evaluate(f"() => document.hasFocus() ? ({_FOCUS})() : 'none'"))
        except Error:
            continue  # it was replaced or removed meanwhile
        if inner not in ("none", "frame"):
            return inner
    return "text"


async def _press_chord(page: Page, hold: list[str], tap: list[str]) -> None:
    """Holds in order, taps in order, releases in reverse, also when something fails half way."""
    down: list[str] = []
    try:
        for key in hold:
            await page.keyboard.down(key)
            down.append(key)
        for key in tap:
            await page.keyboard.press(key)
    finally:
        for key in reversed(down):
            await page.keyboard.up(key)
