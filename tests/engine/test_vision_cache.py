from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holotron.engine.vision_cache import Entry, VisionCache, config_fingerprint, image_hash, tile_hashes


@settings(deadline=None)
@given(
    budget=st.integers(0, 60),
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 5), max_size=3), st.integers(1, 3)), max_size=60),
)
def test_the_least_recently_used_goes_first(budget: int, steps: list[tuple[bool, list[int], int]]) -> None:
    """Against a list of (key, bytes, value) in order of use."""
    cache = VisionCache(budget)
    order: list[tuple[bytes, int, float]] = []
    requested, values = 0, itertools.count()
    for asks, names, size in steps:
        keys = [bytes([name]) for name in names]
        if asks:
            requested += len(keys)
            found = cache.get_many(keys)
            here = {key: value for key, _, value in order}
            assert [None if e is None else e.tokens[0].item() for e in found] == [here.get(key) for key in keys]
            for key in keys:
                order.sort(key=lambda item, key=key: item[0] == key)  # stable: the one asked for moves to the end
            continue
        for key in keys:
            value = float(next(values))
            cache.put(key, torch.full((size,), value), torch.zeros(size))
            order = [item for item in order if item[0] != key]
            if 8 * size <= budget:
                order.append((key, 8 * size, value))
            while sum(nbytes for _, nbytes, _ in order) > budget:
                order.pop(0)
        assert (len(cache), cache.nbytes) == (len(order), sum(nbytes for _, nbytes, _ in order))
    assert (cache.requested, cache.encoded) == (requested, next(values))
    assert [e is not None for e in cache.get_many([key for key, _, _ in order])] == [True] * len(order)


def test_being_asked_for_is_a_use() -> None:
    cache = VisionCache(3 * 4)
    for key in (b"a", b"b", b"c"):
        cache.put(key, torch.zeros(1))
    cache.get_many([b"b", b"a"])
    cache.put(b"d", torch.zeros(2))
    assert [entry is not None for entry in cache.get_many([b"a", b"b", b"c", b"d"])] == [True, False, False, True]


def test_entries_are_copies_of_their_own() -> None:
    batch = torch.randn(4, 3, 8, requires_grad=True)
    features = torch.randn(4, 8, 3).transpose(1, 2)
    cache = VisionCache(10_000)
    put = cache.put(b"a", batch[1], features[1])
    (found,) = cache.get_many([b"a"])
    assert isinstance(found, Entry) and found is put and found.features is not None
    assert torch.equal(found.tokens, batch[1]) and torch.equal(found.features, features[1])
    for kept in (found.tokens, found.features):
        assert kept.is_contiguous() and not kept.requires_grad
        assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
    assert cache.nbytes == found.nbytes == 4 * (24 + 24)
    cache.put(b"a", batch[2].detach())
    (again,) = cache.get_many([b"a"])
    assert again is not None and again.features is None and cache.nbytes == 4 * 24


def test_what_exceeds_the_budget_is_not_kept_and_drops_nothing() -> None:
    cache = VisionCache(100)
    cache.put(b"small", torch.zeros(10))
    large = cache.put(b"large", torch.ones(26))
    assert cache.get_many([b"large"]) == [None] and cache.get_many([b"small"]) != [None]
    assert torch.equal(large.tokens, torch.ones(26))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_hashes_are_of_content(dtype: torch.dtype) -> None:
    tiles = torch.randint(0, 200, (3, 3, 6, 4)).to(dtype)
    tiles[2] = tiles[0]
    first, second, third = tile_hashes(tiles)
    assert first == third != second
    assert tile_hashes(tiles[1:2].clone()) == [second]  # whatever stands beside it
    strided = tiles.transpose(2, 3).contiguous().transpose(2, 3)
    assert not strided.is_contiguous() and tile_hashes(strided) == [first, second, third]
    place = tuple(int(torch.randint(size, ())) for size in tiles.shape[1:])
    tiles[2][place] += 1
    assert tile_hashes(tiles)[2] != first


def test_shape_dtype_and_settings_belong_to_the_hash() -> None:
    tile = torch.zeros(1, 3, 4, 4)
    one, two = config_fingerprint({"patch": 16, "eps": 1e-6}, {}), config_fingerprint({"patch": 14, "eps": 1e-6}, {})
    assert (
        one == config_fingerprint({"eps": 1e-6, "patch": 16}, {}) != config_fingerprint({}, {"patch": 16, "eps": 1e-6})
    )
    keys = [
        tile_hashes(tile),
        tile_hashes(tile.view(1, 3, 2, 8)),
        tile_hashes(tile.half()),
        tile_hashes(tile.bfloat16()),
        tile_hashes(torch.zeros(1, 6, 4, 4, dtype=torch.float16)),  # as many zero bytes
        tile_hashes(tile, one),
        tile_hashes(tile, two),
    ]
    assert len({key for (key,) in keys}) == len(keys)
    assert tile_hashes(torch.zeros(0, 3, 4, 4)) == []


def test_a_picture_is_its_tiles_and_its_geometry() -> None:
    first, second = tile_hashes(torch.arange(24.0).view(2, 3, 2, 2))
    pictures = [
        image_hash([first, second], (2, 1), (100, 50)),
        image_hash([second, first], (2, 1), (100, 50)),
        image_hash([first, second], (1, 2), (100, 50)),
        image_hash([first, second], (2, 1), (101, 50)),
        image_hash([first], (2, 1), (100, 50)),
    ]
    assert len(set(pictures)) == len(pictures) and {len(digest) for digest in pictures} == {32}
    assert image_hash((first, second), (2, 1), (100, 50)) == pictures[0]
