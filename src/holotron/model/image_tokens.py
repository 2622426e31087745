"""From one placeholder for each image to as many context tokens as the image has."""

from __future__ import annotations

from collections.abc import Sequence


def expand_images(
    ids: Sequence[int],
    tokens_per_image: Sequence[int],
    image: int | None,
    start: int | None = None,
    end: int | None = None,
) -> list[int]:
    """Each `image` token repeated as often as its image has tokens, between `start` and `end`.

    Delimiters that already stand around a placeholder are not written twice; without `start` and `end` none are. Ids
    that hold as many context tokens as all images together pass unchanged: they were expanded before. Raises
    ValueError where placeholders and images do not match, or a placeholder has only one of its delimiters.
    """
    return [token for token, _ in expansion(ids, tokens_per_image, image, start, end)]


def expansion(
    ids: Sequence[int],
    tokens_per_image: Sequence[int],
    image: int | None,
    start: int | None = None,
    end: int | None = None,
) -> list[tuple[int, int]]:
    """`expand_images` as pairs of a token and the place in `ids` that it comes from."""
    same = [(token, place) for place, token in enumerate(ids)]
    places = [place for token, place in same if token == image]
    if sum(tokens_per_image) == len(places) != len(tokens_per_image):
        return same
    if len(places) != len(tokens_per_image):
        raise ValueError(f"the prompt has {len(places)} image placeholders for {len(tokens_per_image)} images")
    pairs: list[tuple[int, int]] = []
    done = 0
    for number, (place, count) in enumerate(zip(places, tokens_per_image, strict=True)):
        if count < 1:
            raise ValueError(f"image {number} has {count} tokens; an image has at least one")
        before = start is not None and place > 0 and ids[place - 1] == start
        after = end is not None and place + 1 < len(ids) and ids[place + 1] == end
        if before != after:
            found, lacking = (start, end) if before else (end, start)
            raise ValueError(f"placeholder {number} has delimiter {found} at its side but not {lacking}")
        tokens: list[int | None] = [image] * count if before else [start, *[image] * count, end]
        pairs += same[done:place] + [(token, place) for token in tokens if token is not None]
        done = place + 1
    return pairs + same[done:]
