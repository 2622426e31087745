"""Scripted experts for the twenty easy MiniWoB++ tasks: they read the page's DOM and decide one next action.

They are stateless with regard to the page, so they can label any state that another policy has led it to.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holotron.contract.conversation import Conversation
from holotron.contract.policy import Decision
from holotron.contract.step import Click, Scroll, Step, Write
from holotron.tasks.miniwob import MiniWobTask
from holotron.tasks.oracle_page import (
    DOWN,
    FIRST,
    FOCUS,
    OPEN,
    OPENED,
    RETYPE,
    SECOND,
    SELECT,
    SEND,
    SUBMIT,
    TARGET,
    THOUGHTS,
    TYPE,
    UNSELECT,
    UP,
    Element,
    Move,
    NoTarget,
    Page,
)

__all__ = ["ORACLES", "THOUGHTS", "NoTarget", "OraclePolicy"]

_ELEMENTS = (Path(__file__).with_name("oracle_elements.js")).read_text(encoding="utf-8")
SCROLL_SIZE = 2  # wheel clicks, of a view of 160 pixels

Oracle = Callable[[Page], Move]
ORACLES: dict[str, Oracle] = {}


def _oracle(*names: str) -> Callable[[Oracle], Oracle]:
    def keep(function: Oracle) -> Oracle:
        for name in names:
            ORACLES[name] = function
        return function

    return keep


def _word(pattern: str, page: Page) -> str:
    found = re.search(pattern, page.goal)
    if not found:
        raise NoTarget(f"the goal {page.goal!r} is not one of this task")
    return found[1]


@_oracle("click-test")
def _click_test(page: Page) -> Move:
    return Move(TARGET, page.find(lambda e: e.tag == "button"))


@_oracle("click-test-2", "click-test-transfer")
def _click_named(page: Page) -> Move:
    return Move(TARGET, page.button(_word(r"button (\w+)", page)))


@_oracle("click-button")
def _click_button(page: Page) -> Move:
    return Move(TARGET, page.button(_word(r'"(.*)"', page)))


@_oracle("click-button-sequence")
def _click_sequence(page: Page) -> Move:
    return Move(SECOND, page.button("TWO")) if page.pushed else Move(FIRST, page.button("ONE"))


@_oracle("click-link")
def _click_link(page: Page) -> Move:
    wanted = _word(r'"(.*)"', page)
    return Move(TARGET, page.find(lambda e: e.link and e.text == wanted))


@_oracle("click-tab")
def _click_tab(page: Page) -> Move:
    wanted = _word(r"(Tab #\d)", page)
    return Move(TARGET, page.find(lambda e: e.tag == "a" and e.text == wanted))


@_oracle("click-dialog", "click-dialog-2")
def _click_dialog(page: Page) -> Move:
    wanted = _word(r'"(.*)"', page)
    if wanted == "x":
        return Move(TARGET, page.find(lambda e: e.closes), "x")
    return Move(TARGET, page.button(wanted))


def _select(page: Page, items: list[Element], wanted: Callable[[Element], bool], name: str = "") -> Move:
    """Items in page order, wrong ones too; then the button."""
    for item in items:
        if wanted(item) != item.selected:
            return Move(SELECT if wanted(item) else UNSELECT, item, name and f"{name} {item.color}")
    return Move(SUBMIT, page.button("Submit"))


@_oracle("click-option")
def _click_option(page: Page) -> Move:
    wanted = _word(r"^Select (.*) and click Submit\.$", page)
    item = page.find(lambda e: e.kind == "radio" and e.text == wanted)
    return Move(SUBMIT, page.button("Submit")) if item.selected else Move(SELECT, item)


@_oracle("click-checkboxes")
def _click_checkboxes(page: Page) -> Move:
    """In the order of the goal, so that what comes next follows from goal and history alone."""
    wanted = _word(r"^Select (.*) and click Submit\.$", page).split(", ")
    boxes = [e for e in page.elements if e.kind == "checkbox"]
    boxes.sort(key=lambda e: wanted.index(e.text) if e.text in wanted else len(wanted))
    return _select(page, boxes, lambda e: e.text in wanted)


@_oracle("click-shades")
def _click_shades(page: Page) -> Move:
    wanted = _word(r"shades of (\w+)", page)
    return _select(page, [e for e in page.elements if e.color], lambda e: e.color == wanted, "shade of")


@_oracle("click-color")
def _click_color(page: Page) -> Move:
    wanted = _word(r"Click on the (\w+) colored box", page)
    return Move(TARGET, page.find(lambda e: e.color == wanted), wanted)


@_oracle("click-widget")
def _click_widget(page: Page) -> Move:
    wanted = _word(r'"(.*)"', page)
    if wanted in ("radio", "checkbox"):
        return Move(TARGET, page.find(lambda e: e.tag == "label" and e.kind == wanted), wanted)
    return Move(TARGET, page.find(lambda e: e.tag != "label" and e.type == wanted), wanted)


@_oracle("focus-text")
def _focus_text(page: Page) -> Move:
    return Move(FOCUS, page.find(lambda e: e.tag == "input"), "text field")


@_oracle("focus-text-2")
def _focus_text_2(page: Page) -> Move:
    nth = _word(r"the (\d\w\w) input", page)
    target = page.find(lambda e: e.id == f"tt{nth[0]}")
    return Move(FOCUS, target, f"{nth} text field")


def _fill(page: Page, fields: Sequence[tuple[str, str, str]], button: str) -> Move:
    """(id, name, text) of each field. The one in the focus comes first, so no click is spent twice."""
    wrong = []
    for identity, name, text in fields:
        element = page.find(lambda e, i=identity: e.id == i)  # type: ignore[misc]
        if element.value != text:
            wrong.append((element, name, text))
    for element, name, text in wrong:
        if element.focused:
            old = bool(element.value)
            return Move(RETYPE if old else TYPE, element, name, content=text, overwrite=old)
    if wrong:
        return Move(FOCUS, wrong[0][0], wrong[0][1])
    return Move(SEND, page.button(button))


@_oracle("enter-text")
def _enter_text(page: Page) -> Move:
    return _fill(page, [("tt", "text field", _word(r'"(.*)"', page))], "Submit")


@_oracle("enter-password")
def _enter_password(page: Page) -> Move:
    text = _word(r'"(.*)"', page)
    return _fill(page, [("password", "password field", text), ("verify", "verify field", text)], "Submit")


@_oracle("login-user")
def _login_user(page: Page) -> Move:
    user, password = (page.quoted() + ["", ""])[:2]
    fields = [("username", "username field", user), ("password", "password field", password)]
    return _fill(page, fields, "Login")


@_oracle("click-collapsible")
def _click_collapsible(page: Page) -> Move:
    header = page.find(lambda e: e.tag == "h3")
    return Move(OPENED, page.button("Submit")) if header.selected else Move(OPEN, header)


@dataclass(slots=True)
class OraclePolicy:
    """Implements Policy for one task. Decides from the page as it is now and `conversation.goal`.

    `Decision.extra` holds `box`, the clickable part of the target as [x0, y0, x1, y1] in CSS pixels of the
    viewport (None for typing and scrolling), and `target`, its visible text. Raises NoTarget where the page
    has no way on.
    """

    task: MiniWobTask
    name: str = field(default="oracle")

    def __post_init__(self) -> None:
        if self.task.name not in ORACLES:
            raise ValueError(f"no oracle solves {self.task.name}; there is one for {', '.join(ORACLES)}")

    async def decide(self, conversation: Conversation) -> Decision:
        began = time.perf_counter()
        computer = self.task.computer
        seen: dict[str, Any] = await computer.evaluate(
            f"() => ({{ elements: ({_ELEMENTS})(), pushed: (window.buttonsPushed || []).length }})"
        )
        elements = tuple(Element(**element) for element in seen["elements"])
        move = ORACLES[self.task.name](Page(conversation.goal, elements, seen["pushed"]))
        step = _step(move, computer.width, computer.height)
        typed = not isinstance(step.tool_call, Click)
        extra = {
            "box": None if typed or not move.target.box else list(move.target.box),
            "target": move.target.text,
        }
        return Decision(step, seconds=time.perf_counter() - began, extra=extra)

    async def close(self) -> None:
        return


def _step(move: Move, width: int, height: int) -> Step:
    target = move.target
    if move.content is not None:
        return Step(thought=move.thought, tool_call=Write(content=move.content, overwrite=move.overwrite))
    if target.point is None:
        below = target.full[3] > height / 2
        call = Scroll(element="page", x=500, y=500, direction="down" if below else "up", scroll_size=SCROLL_SIZE)
        return Step(thought=DOWN if below else UP, tool_call=call)
    x, y = target.point
    click = Click(element=move.element, x=round(1000 * x / width), y=round(1000 * y / height))
    return Step(thought=move.thought, tool_call=click)
