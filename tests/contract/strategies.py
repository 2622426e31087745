"""Random valid steps and real screenshots for the tests of contracts."""

from __future__ import annotations

import io

from hypothesis import strategies as st
from PIL import Image

from holotron.contract import step as s
from holotron.contract.conversation import Conversation, Screenshot, Turn

text = st.text(max_size=30)
some_text = st.text(min_size=1, max_size=30)
coordinate = st.integers(0, 1000)
key = st.text(min_size=1, max_size=32)
point = {"element": text, "x": coordinate, "y": coordinate}
goals = st.lists(
    st.builds(s.Goal, title=some_text, status=st.sampled_from(["todo", "done", "failed"])),
    min_size=1,
    max_size=20,
)
tool_calls: st.SearchStrategy[s.ToolCall] = st.one_of(
    st.builds(s.UpdatePlan, goals=goals),
    st.builds(s.Click, **point, button=st.sampled_from(["left", "right", "middle"])),
    st.builds(s.DoubleClick, **point),
    st.builds(s.MoveTo, **point),
    st.builds(s.DragTo, **point),
    st.builds(
        s.Scroll,
        **point,
        direction=st.sampled_from(["up", "down", "left", "right"]),
        scroll_size=st.integers(1, 100),
    ),
    st.builds(s.Write, content=text, press_enter=st.booleans(), overwrite=st.booleans()),
    st.builds(s.Hotkey, keys=st.lists(key, min_size=1, max_size=5), repeat_count=st.integers(1, 20)),
    st.builds(
        s.HoldAndTapKey,
        hold_keys=st.lists(key, min_size=1, max_size=3),
        tap_keys=st.lists(key, min_size=1, max_size=5),
    ),
    st.builds(s.KeyDown, key=key),
    st.builds(s.KeyUp, key=key),
    st.builds(s.Wait, seconds=st.floats(0, 10)),
    st.builds(s.Navigate, url=some_text),
    st.builds(s.GoBack),
    st.builds(s.TabNew, url=text),
    st.builds(s.TabFocus, index=st.integers(0, 10**6)),
    st.builds(s.Answer, content=text),
)
steps = st.builds(s.Step, note=st.none() | text, thought=text, tool_call=tool_calls)


def shot(width: int = 20, height: int = 10, shade: int = 0, scale: float = 1.0) -> Screenshot:
    """A real PNG of one grey; `scale` image pixels per CSS pixel."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (shade, shade, shade)).save(buffer, "PNG")
    return Screenshot(buffer.getvalue(), width, height, width / scale, height / scale)


def talk(turns: int, *, decided: bool = False) -> Conversation:
    """A conversation of `turns` screenshots, each of another grey; the last is undecided unless `decided`."""
    conversation = Conversation("Buy milk")
    for n in range(turns):
        done = decided or n < turns - 1
        call = s.Click(element=f"button {n}", x=n, y=n)
        conversation.turns.append(
            Turn(
                shot(shade=n),
                step=s.Step(thought=f"thought {n}", tool_call=call) if done else None,
                result=f"clicked {n}" if done else None,
            )
        )
    return conversation
