"""Tool calls and quantities in words a person reads at a glance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

QUOTE_LIMIT = 400
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def quoted(text: str, limit: int = QUOTE_LIMIT) -> str:
    """The text in double quotes, line breaks visible, cut with an ellipsis after `limit` characters."""
    flat = text.replace("\n", "⏎")
    return f"“{flat[:limit]}…”" if len(flat) > limit else f"“{flat}”"


def _keys(keys: Any) -> str:
    return "+".join(str(key) for key in keys) if isinstance(keys, list | tuple) else str(keys)


def _pointing(verb: str, call: Mapping[str, Any]) -> str:
    button = call.get("button", "left")
    target = call.get("element") or ""
    aim = f" {quoted(str(target))}" if target else ""
    which = f" with the {button} button" if button != "left" else ""
    place = f" at ({call['x']}, {call['y']})" if "x" in call and "y" in call else ""
    return f"{verb}{aim}{place}{which}"


def _write(call: Mapping[str, Any]) -> str:
    how = [
        phrase
        for flag, phrase in (("overwrite", "over what is there"), ("press_enter", "then Enter"))
        if call.get(flag)
    ]
    return " ".join(["write", quoted(str(call.get("content", ""))), *how])


def _hotkey(call: Mapping[str, Any]) -> str:
    count = call.get("repeat_count", 1)
    return f"press {_keys(call.get('keys', []))}" + (f" {count} times" if count != 1 else "")


def _scroll(call: Mapping[str, Any]) -> str:
    amount = f"{call.get('direction', '?')} by {call.get('scroll_size', 10)}"
    return _pointing(f"scroll {amount} on", call)


def _plan(call: Mapping[str, Any]) -> str:
    goals = call.get("goals", [])
    parts = [f"{goal.get('title', '?')} [{goal.get('status', '?')}]" for goal in goals]
    return "plan: " + "; ".join(parts)


def _hold(call: Mapping[str, Any]) -> str:
    return f"hold {_keys(call.get('hold_keys', []))} and tap {_keys(call.get('tap_keys', []))}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "click": lambda call: _pointing("click", call),
    "double_click": lambda call: _pointing("double-click", call),
    "move_to": lambda call: _pointing("move to", call),
    "drag_to": lambda call: _pointing("drag to", call),
    "scroll": _scroll,
    "write": _write,
    "hotkey": _hotkey,
    "hold_and_tap_key": _hold,
    "key_down": lambda call: f"hold down {call.get('key', '?')}",
    "key_up": lambda call: f"let go of {call.get('key', '?')}",
    "wait": lambda call: f"wait {call.get('seconds', '?')} s",
    "navigate": lambda call: f"go to {call.get('url', '?')}",
    "go_back": lambda call: "go back",
    "tab_new": lambda call: f"open a tab at {call.get('url', 'about:blank')}",
    "tab_focus": lambda call: f"focus tab {call.get('index', '?')}",
    "update_plan": _plan,
    "answer": lambda call: f"answer {quoted(str(call.get('content', '')))}",
}


def tool_call_text(call: Mapping[str, Any], places: bool = True) -> str:
    """One line for a tool call dumped as a dict, without coordinates unless `places`.

    Coordinates are the contract's. An unknown tool is shown as name and JSON.
    """
    if not places:
        call = {key: value for key, value in call.items() if key not in ("x", "y")}
    name = str(call.get("tool_name", "?"))
    if name in _WORDS:
        return _WORDS[name](call)
    arguments = {key: value for key, value in call.items() if key != "tool_name"}
    return f"{name} {json.dumps(arguments, ensure_ascii=False, default=str)}"


def binary_unit(size: float) -> tuple[int, str]:
    """The largest binary unit not above `size`: its bytes and its name."""
    power = 0
    while power < len(UNITS) - 1 and abs(size) >= 1024 ** (power + 1):
        power += 1
    return 1024**power, UNITS[power]


def bytes_text(count: float | None) -> str:
    """Bytes with a binary unit: 0 B, 912 B, 1.5 KiB, 24.0 MiB. None is a dash."""
    if count is None:
        return "–"
    unit, name = binary_unit(count)
    return f"{count:.0f} B" if unit == 1 else f"{count / unit:.1f} {name}"


def seconds_text(seconds: float | None) -> str:
    """Seconds, in ms below one: 12 ms, 1.25 s, 3 min 05 s. None is a dash."""
    if seconds is None:
        return "–"
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def number_text(value: float | None, digits: int = 1) -> str:
    """A number with thousands separated; whole ones without decimals. None is a dash."""
    if value is None:
        return "–"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}f}"


def percent_text(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.0f} %"
