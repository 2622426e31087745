"""Names of keys: what people and models call them -> what the browser calls them."""

from __future__ import annotations

import re
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

# The keys that a character is on, of the US layout: a key, unlike a character, heeds Shift.
_CODES = {
    **{letter: f"Key{letter.upper()}" for letter in "abcdefghijklmnopqrstuvwxyz"},
    **{digit: f"Digit{digit}" for digit in "0123456789"},
    "`": "Backquote",
    "-": "Minus",
    "=": "Equal",
    "[": "BracketLeft",
    "]": "BracketRight",
    "\\": "Backslash",
    ";": "Semicolon",
    "'": "Quote",
    ",": "Comma",
    ".": "Period",
    "/": "Slash",
}

_SIDED = re.compile(r"^(left|right)[ _-]?(.+)$|^(.+?)([ _-]?(left|right)|[ _-][lr])$")
MODIFIERS = frozenset({"Control", "Meta", "Alt", "AltGraph", "Shift"})


class UnknownKey(ValueError):
    """No key of that name; the message is meant for the model."""


def browser_key(name: str) -> str:
    """The browser's name of a key, whatever its case; raises UnknownKey.

    Takes any printable ASCII character as itself, aliases (`esc`, `cmd`, `page_down`), DOM names (`ArrowUp`,
    `KeyA`) and sided modifiers (`ctrl_left`, `Control_L`).
    """
    if len(name) == 1:
        return _character_key(name)
    plain = _plain(name)
    for candidate in (plain, plain.removeprefix("arrow")):
        if candidate in _NAMES:
            return _character_key(key) if len(key := _NAMES[candidate]) == 1 else key
    for prefix in ("key", "digit", "numpad"):
        rest = plain.removeprefix(prefix)
        if rest != plain and rest in _CODES:
            return _CODES[rest]
    sided = _SIDED.match(name.strip().lower())
    if sided and (key := _NAMES.get(_plain(sided[2] or sided[3]), "")) in MODIFIERS:
        return key
    raise UnknownKey(f"unknown key {name!r}; known are characters, enter, esc, tab, up, ctrl, alt, shift, f1")


def _plain(name: str) -> str:
    return re.sub(r"[ _-]", "", name.strip().lower())


def _character_key(character: str) -> str:
    named = {" ": "Space", "\n": "Enter", "\r": "Enter", "\t": "Tab"}.get(character)
    if named:
        return named
    if character.isascii() and character.isprintable():
        return _CODES.get(character, character)
    raise UnknownKey(f"unknown key {character!r}; use write for such characters")


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
        keys = [_CODES.get(key.lower(), key) if len(key) == 1 else key for key in keys]
    return keys
