"""What an oracle reads of a page and what it can say about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from holotron.contract.policy import PolicyError

TARGET = "I click the target."
FIRST = "I click the first button."
SECOND = "I click the second button."
SELECT = "I select the next item."
UNSELECT = "I unselect a wrong item."
SUBMIT = "All is selected, I submit."
FOCUS = "I focus the field."
TYPE = "The field has focus, I type."
RETYPE = "The text is wrong, I replace it."
SEND = "The text is in, I submit."
OPEN = "I open the section."
OPENED = "The section is open, I submit."
DOWN = "The target is below, I scroll."
UP = "The target is above, I scroll."

# Every thought an oracle can have.
THOUGHTS: tuple[str, ...] = (
    TARGET, FIRST, SECOND, SELECT, UNSELECT, SUBMIT, FOCUS, TYPE, RETYPE, SEND, OPEN, OPENED, DOWN, UP,
)  # fmt: skip


class NoTarget(PolicyError):
    """The page does not hold what the goal asks for: it is not, or no longer, the oracle's task."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element of the page. Boxes are [x0, y0, x1, y1] in CSS pixels of the viewport.

    `full` is its whole box; `box` what of it can be clicked now, None if nothing; `point` where to click.
    """

    tag: str
    type: str
    id: str
    text: str
    closes: bool
    link: bool
    color: str
    selected: bool
    kind: str  # of a label: the type of its control
    value: str
    focused: bool
    full: tuple[float, float, float, float]
    box: tuple[float, float, float, float] | None
    point: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Page:
    """What an oracle decides from."""

    goal: str
    elements: tuple[Element, ...]
    pushed: int = 0  # click-button-sequence shows nowhere how many buttons were clicked

    def find(self, holds: Callable[[Element], bool]) -> Element:
        """The first such element that can be clicked now, else the first one; raises NoTarget."""
        found = [element for element in self.elements if holds(element)]
        if not found:
            raise NoTarget(f"nothing on the page answers to the goal {self.goal!r}")
        return next((element for element in found if element.point), found[0])

    def button(self, text: str) -> Element:
        return self.find(lambda e: e.tag == "button" and not e.closes and e.text == text)

    def quoted(self) -> list[str]:
        return re.findall(r'"([^"]*)"', self.goal)


@dataclass(frozen=True, slots=True)
class Move:
    """A click on `target`, or, if `content` is set, typing into the focus."""

    thought: str
    target: Element
    name: str = ""  # how the element is called; its visible text where empty
    content: str | None = None
    overwrite: bool = False

    @property
    def element(self) -> str:
        return self.name or self.target.text
