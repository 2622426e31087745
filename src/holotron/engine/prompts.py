"""From what a caller hands in (text, token ids, chat messages) to token ids and pictures."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from holotron.engine.vocabulary import Vocabulary
from holotron.model.pictures import Picture

Prompt = str | Sequence[int] | dict[str, Any]
Message = dict[str, Any]


def read_prompt(prompt: Prompt, vocabulary: Vocabulary) -> tuple[list[int], list[Picture]]:
    """`prompt` is text, token ids, or {"prompt" | "prompt_token_ids", "multi_modal_data": {"image": [...]}}.

    Raises ValueError.
    """
    pictures: list[Picture] = []
    if isinstance(prompt, dict):
        data = dict(prompt.get("multi_modal_data") or {})
        images = data.pop("image", [])
        if data:
            raise ValueError(f"multi_modal_data can hold image only, not {', '.join(sorted(data))}")
        pictures = list(images) if isinstance(images, list | tuple) else [images]
        given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"}
        if len(given) != 1 or unknown:
            raise ValueError(
                f"a prompt dict holds prompt or prompt_token_ids, and multi_modal_data; got {sorted(prompt)}"
            )
        prompt = prompt[given[0]]
    ids: list[int] = []
    if isinstance(prompt, str):
        ids = vocabulary.encode(prompt)
    elif not isinstance(prompt, dict):
        ids = list(prompt)
        if not all(isinstance(i, int) and 0 <= i < vocabulary.size for i in ids):
            raise ValueError(f"prompt_token_ids must be integers from 0 to {vocabulary.size - 1}")
    if not ids:
        raise ValueError("the prompt is empty")
    return ids, pictures


def read_messages(
    messages: Sequence[Message], vocabulary: Vocabulary, template_kwargs: dict[str, Any] | None
) -> tuple[list[int], list[Picture]]:
    """OpenAI chat messages: text, and images as base64 data URIs. Raises ValueError."""
    if not messages:
        raise ValueError("messages is empty")
    pictures: list[Picture] = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where} must be an object with a role")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise ValueError(f"{where}.content must be text or a list of parts")
        for i, part in enumerate(content):
            picture = _read_part(part, f"{where}.content[{i}]")
            if picture is not None:
                pictures.append(picture)
    return vocabulary.encode_chat(list(messages), template_kwargs or {}), pictures


def _read_part(part: Any, where: str) -> Picture | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return None
    if kind == "image_url":
        target = part.get("image_url")
        url = target.get("url") if isinstance(target, dict) else target
        if isinstance(url, str):
            return _read_data_uri(url, where)
    raise ValueError(f"{where} must be a text part or an image_url part with a data URI")


def _read_data_uri(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise ValueError(f"{where}: images come as data:image/...;base64 URIs; nothing is fetched")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where}: the image's base64 is broken: {error}") from None
