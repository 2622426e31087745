"""Notices when a policy does the same thing to the same pixels again and again."""

from __future__ import annotations

from collections import deque

from holotron.contract.step import ToolCall

WINDOW = 20  # decisions looked back on, so that A, B, A, B is caught as well as A, A
NUDGES = {
    3: "This is the third time that you take this action on exactly this screen, and the screen has not "
    "changed since. Find out why it has no effect before you act again.",
    5: "You have now taken this action five times on exactly this screen. It does not work. Try a different "
    "element, a different tool or another route to the goal.",
    8: "Eight times the same action on exactly this screen. Once more and the episode is stopped. "
    "Do something else now.",
}
LAST_NUDGE = max(NUDGES)


class Repetition:
    """Counts how often a tool call was decided on the same screenshot within the last `WINDOW` decisions."""

    def __init__(self) -> None:
        self._seen: deque[tuple[str, str]] = deque(maxlen=WINDOW)
        self.count = 0

    def note(self, tool_call: ToolCall, sha256: str) -> None:
        # How an element is put into words says nothing about what is done to it.
        key = (tool_call.model_dump_json(exclude={"element"}), sha256)
        self._seen.append(key)
        self.count = self._seen.count(key)

    @property
    def nudge(self) -> str:
        """The text for the next observation; empty while there is nothing to say."""
        return NUDGES.get(self.count, "")

    @property
    def stuck(self) -> bool:
        return self.count > LAST_NUDGE
