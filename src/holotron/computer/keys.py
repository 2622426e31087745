"""Names of keys: what people and models call them -> what the browser calls them."""

from __future__ import annotations

import sys

_MAC = sys.platform == "darwin"

# Lower case, without spaces, hyphens and underscores.
_NAMES = {
    "return": "Enter",
    "enter": "Enter",
    "numpadenter": "Enter",
    "kpenter": "Enter",
    "esc": "Escape",
    "escape": "Escape",
    "tab": "Tab",
    "space": "Space",
    "spacebar": "Space",
    "backspace": "Backspace",
    "bksp": "Backspace",
    "delete": "Delete",
    "del": "Delete",
    "insert": "Insert",
    "ins": "Insert",
    "home": "Home",
    "end": "End",
    "pageup": "PageUp",
    "pgup": "PageUp",
    "prior": "PageUp",
    "pagedown": "PageDown",
    "pgdn": "PageDown",
    "pgdown": "PageDown",
    "next": "PageDown",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "ctrl": "Control",
    "control": "Control",
    "ctl": "Control",
    # The shortcut key of a Mac means Control elsewhere.
    "command": "Meta" if _MAC else "Control",
    "cmd": "Meta" if _MAC else "Control",
    "controlormeta": "Meta" if _MAC else "Control",
    "commandorcontrol": "Meta" if _MAC else "Control",
    "meta": "Meta",
    "super": "Meta",
    "win": "Meta",
    "windows": "Meta",
    "alt": "Alt",
    "option": "Alt",
    "opt": "Alt",
    "altgr": "AltGraph",
    "altgraph": "AltGraph",
    "shift": "Shift",
    "capslock": "CapsLock",
    "contextmenu": "ContextMenu",
    "menu": "ContextMenu",
    "plus": "+",
    "minus": "-",
    "comma": ",",
    "period": ".",
    "dot": ".",
    "slash": "/",
    "backslash": "\\",
    "equal": "=",
    "equals": "=",
    "semicolon": ";",
} | {f"f{n}": f"F{n}" for n in range(1, 13)}

_SIDES = ("left", "right")
MODIFIERS = frozenset({"Control", "Meta", "Alt", "AltGraph", "Shift"})


class UnknownKey(ValueError):
    """No key of that name; the message is meant for the model."""


def browser_key(name: str) -> str:
    """The browser's name of a key, whatever its case; raises UnknownKey.

    Takes any printable ASCII character as itself, aliases (`esc`, `cmd`, `page_down`), DOM names (`ArrowUp`),
    and sided modifiers (`ctrl_left`, `shiftright`).
    """
    if len(name) == 1:
        if name == " ":
            return "Space"
        if name in "\n\r":
            return "Enter"
        if name == "\t":
            return "Tab"
        if name.isascii() and name.isprintable():
            return name
        raise UnknownKey(f"unknown key {name!r}; use write for such characters")
    plain = name.strip().lower().replace(" ", "").replace("_", "").replace("-", "")
    candidates = [plain, plain.removeprefix("arrow"), plain.removeprefix("key"), plain.removeprefix("digit")]
    candidates += [plain.removesuffix(side) for side in _SIDES] + [
        plain.removeprefix(side) for side in _SIDES
    ]
    for candidate in candidates:
        if candidate in _NAMES:
            return _NAMES[candidate]
        if candidate != plain and len(candidate) == 1 and candidate.isascii() and candidate.isalnum():
            return candidate
    raise UnknownKey(
        f"unknown key {name!r}; known are characters, enter, esc, tab, arrows, ctrl, alt, shift, f1"
    )


def chord(names: list[str]) -> list[str]:
    """Keys of one chord, also where they were written as one string (`ctrl+a`); raises UnknownKey.

    With a modifier held a letter means its key, so `Ctrl+A` is Ctrl and A without Shift.
    """
    parts: list[str] = []
    for name in names:
        split = name.split("+") if len(name) > 1 and "+" in name.strip("+") else [name]
        parts += [part for part in split if part]
    keys = [browser_key(part) for part in parts]
    if MODIFIERS.intersection(keys):
        keys = [key.lower() if len(key) == 1 else key for key in keys]
    return keys
