from __future__ import annotations

import itertools
import random
import secrets
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from holotron.engine.errors import EngineError
from holotron.engine.prefix_tree import Key, PrefixTree, Snapshot, prompt_key
from tests.oracles.prefix_snapshots import Prefix, SnapshotDict

keys = st.lists(st.integers(-2, 1), min_size=1, max_size=12).map(tuple)
coefficients = st.tuples(
    st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.3, 2.0])
)


def as_key(prefix: Prefix) -> Key:
    return np.array(prefix, dtype=np.int64)


class AgainstADict(RuleBasedStateMachine):
    """Each operation on the tree and on the oracle; whatever is evicted must have had the lowest score."""

    prompts: Bundle[Prefix] = Bundle("prompts")

    @initialize(budget=st.integers(10, 60), coefficients=coefficients)
    def begin(self, budget: int, coefficients: tuple[float, float, float]) -> None:
        per_token, per_pair, weight = coefficients
        self.oracle = SnapshotDict(*coefficients)
        self.tree: PrefixTree[int] = PrefixTree(
            budget, self.evicted, flops_per_token=per_token, flops_per_pair=per_pair, flops_weight=weight
        )
        self.names = itertools.count()
        self.handles: dict[int, Snapshot[int]] = {}

    def evicted(self, name: int) -> None:
        scores = self.oracle.scores()
        assert scores[name] <= min(scores.values()) + 1e-9
        self.oracle.evict(name)

    @rule(target=prompts, prompt=keys)
    def fresh(self, prompt: Prefix) -> Prefix:
        return prompt

    @rule(target=prompts, prompt=prompts, cut=st.integers(0, 12), tail=keys)
    def branch(self, prompt: Prefix, cut: int, tail: Prefix) -> Prefix:
        return prompt[:cut] + tail

    @rule(prompt=prompts, share=st.floats(0, 1), nbytes=st.integers(1, 20))
    def insert(self, prompt: Prefix, share: float, nbytes: int) -> None:
        prefix = prompt[: max(1, round(share * len(prompt)))]
        name = next(self.names)
        new = prefix not in self.oracle.kept
        fits = self.oracle.nbytes(pinned_only=True) + nbytes <= self.tree.budget_bytes
        room = self.oracle.nbytes() + nbytes <= self.tree.budget_bytes
        before = self.tree.stats.evictions
        assert self.tree.insert(as_key(prefix), name, nbytes) == (new and fits)
        assert (self.tree.stats.evictions > before) == (new and fits and not room)
        if not new:
            self.oracle.use(prefix)
        elif fits:
            self.oracle.insert(prefix, name, nbytes)

    @rule(prompt=prompts, short=st.integers(-1, 4), pin=st.booleans())
    def find(self, prompt: Prefix, short: int, pin: bool) -> None:
        below = len(prompt) - short
        expected = self.oracle.deepest(prompt, below)
        found = self.tree.find(as_key(prompt), below)
        if expected is None:
            assert found is None
            return
        assert found is not None
        kept = self.oracle.kept[expected]
        assert (found.payload, found.position, found.nbytes) == (kept.name, len(expected), kept.nbytes)
        self.oracle.use(expected)
        if pin:
            self.tree.pin(found)
            kept.pins += 1
            self.handles[kept.name] = found

    @rule(prompt=prompts)
    def touch(self, prompt: Prefix) -> None:
        assert self.tree.touch(as_key(prompt)) == (prompt in self.oracle.kept)
        if prompt in self.oracle.kept:
            self.oracle.use(prompt)

    @precondition(lambda self: any(k.pins for k in self.oracle.kept.values()))
    @rule(choice=st.randoms(use_true_random=False))
    def unpin(self, choice: random.Random) -> None:
        kept = choice.choice([k for k in self.oracle.kept.values() if k.pins])
        self.tree.unpin(self.handles[kept.name])
        kept.pins -= 1

    @rule()
    def evict_one(self) -> None:
        possible = bool(self.oracle.scores())
        assert self.tree.evict_one() == possible

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check(pins=sum(k.pins for k in self.oracle.kept.values()))
            stats = self.tree.stats
            assert (stats.snapshots, stats.bytes) == (len(self.oracle.kept), self.oracle.nbytes())
            worth = {snapshot.payload: snapshot.worth for snapshot in self.tree._nodes}
            for prefix, kept in self.oracle.kept.items():
                assert worth[kept.name] == pytest.approx(self.oracle.flops(prefix) / kept.nbytes)

    def teardown(self) -> None:
        """Everything comes out, and nothing stays behind."""
        for kept in self.oracle.kept.values():
            while kept.pins:
                self.tree.unpin(self.handles[kept.name])
                kept.pins -= 1
        while self.tree.evict_one():
            self.tree.check(pins=0)
        assert not self.oracle.kept and not self.tree._root.children


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("budget", [30, 150, 600])
def test_a_long_random_walk(budget: int) -> None:
    """The same rules, in a tree that grows larger than hypothesis makes it."""
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    chance = random.Random(seed)
    machine = AgainstADict()
    machine.begin(budget, (1.0, chance.choice([0.0, 0.3]), chance.choice([0.0, 0.5, 2.0])))
    prompts: list[Prefix] = [(0,)]
    for _ in range(600):
        prompt = chance.choice(prompts[-20:])
        prompt = prompt[: chance.randint(0, len(prompt))] + tuple(chance.choices([-1, 0, 1], k=chance.randint(1, 6)))
        prompts.append(prompt)
        machine.insert(prompt, chance.choice([0.5, 1.0]), chance.randint(1, 10))
        machine.find(chance.choice(prompts[-20:]), chance.randint(-1, 3), chance.random() < 0.1)
        machine.touch(chance.choice(prompts[-20:]))
        if any(kept.pins for kept in machine.oracle.kept.values()):
            machine.unpin(chance)
        if chance.random() < 0.1:
            machine.evict_one()
        machine.sound()
    assert machine.tree.stats.evictions > 50 and machine.tree.stats.hits > 50
    machine.teardown()


def test_an_inner_snapshot_goes_and_deeper_ones_stay() -> None:
    gone: list[str] = []
    tree: PrefixTree[str] = PrefixTree(100, gone.append, flops_weight=0.0)
    prompt = np.arange(10)
    for name, position in [("system", 2), ("image", 5), ("turn", 9)]:
        assert tree.insert(prompt[:position], name, 10)
    tree.evict_one()
    tree.evict_one()
    assert gone == ["system", "image"]
    found = tree.find(prompt, 9)
    assert found is not None and (found.payload, found.position) == ("turn", 9)
    assert tree.find(prompt, 8) is None
    assert (tree.stats.lookups, tree.stats.hits, tree.stats.tokens_asked, tree.stats.tokens_hit) == (2, 1, 20, 9)


def test_what_saves_most_per_byte_outlives_what_was_used_later() -> None:
    gone: list[str] = []
    tree: PrefixTree[str] = PrefixTree(10_000, gone.append, flops_weight=2.0)
    tree.insert(np.full(1000, 1), "long", 10)
    tree.insert(np.full(20, 2), "short", 10)
    tree.insert(np.full(1000, 3), "large", 1000)
    tree.insert(np.full(1010, 1), "ten tokens further", 10)
    while tree.evict_one():
        pass
    assert gone == ["short", "large", "ten tokens further", "long"]


def test_misuse_is_refused() -> None:
    tree: PrefixTree[str] = PrefixTree(10, lambda name: None)
    with pytest.raises(ValueError, match="position 0"):
        tree.insert(np.arange(0), "empty", 1)
    with pytest.raises(ValueError, match="0 bytes"):
        tree.insert(np.arange(3), "free", 0)
    assert not tree.insert(np.arange(3), "large", 11)
    assert tree.insert(np.arange(3), "a", 10)
    found = tree.find(np.arange(3), 3)
    assert found is not None
    with pytest.raises(EngineError, match="not pinned"):
        tree.unpin(found)
    tree.pin(found)
    with pytest.raises(EngineError, match="1 pins; 0 are known"):
        tree.check(pins=0)
    assert not tree.evict_one() and not tree.insert(np.arange(2), "b", 1)
    tree.unpin(found)
    assert tree.evict_one()
    with pytest.raises(EngineError, match="was evicted"):
        tree.pin(found)


@pytest.mark.parametrize("damage", ["bytes", "position", "parent", "first", "listed"])
def test_the_check_finds_damage(damage: str) -> None:
    tree: PrefixTree[str] = PrefixTree(100, lambda name: None)
    for prompt in ([1, 2, 3], [1, 2, 4], [5]):
        tree.insert(np.array(prompt), "s", 10)
    tree.check(pins=0)
    branch = tree._root.children[1]
    leaf = branch.children[3]
    assert leaf.snapshot is not None
    if damage == "bytes":
        leaf.snapshot.nbytes += 1
    elif damage == "position":
        leaf.run = np.array([3, 3])
    elif damage == "parent":
        leaf.parent = tree._root
    elif damage == "first":
        branch.children[9] = branch.children.pop(3)
    else:
        del tree._nodes[leaf.snapshot]
    with pytest.raises(EngineError):
        tree.check()


@settings(deadline=None)
@given(data=st.data())
def test_prompt_keys_tell_images_apart_and_keep_text(data: st.DataObject) -> None:
    image_token = data.draw(st.integers(0, 5))
    hashes = data.draw(st.lists(st.binary(min_size=32, max_size=32), max_size=4))
    counts = [data.draw(st.integers(1, 9)) for _ in hashes]
    text = st.lists(st.integers(0, 9).filter(lambda t: t != image_token), max_size=4)
    tokens: list[int] = data.draw(text)
    owner: list[tuple[bytes, int] | int] = list(tokens)
    for digest, count in zip(hashes, counts, strict=True):
        after = data.draw(text)
        tokens += [image_token] * count + after
        owner += [(digest, place) for place in range(count)]
        owner += after
    key = prompt_key(tokens, image_token, hashes, counts)
    assert key.dtype == np.int64 and len(key) == len(tokens)
    assert [int(k) for k, o in zip(key, owner, strict=True) if isinstance(o, int)] == [
        o for o in owner if o.__class__ is int
    ]
    assert all(k < 0 for k, o in zip(key, owner, strict=True) if not isinstance(o, int))
    again = prompt_key([7, *tokens], image_token, hashes, counts) if image_token != 7 else None
    assert again is None or (again[1:] == key).all()


@pytest.mark.parametrize("byte", range(32))
def test_four_image_tokens_carry_the_whole_hash(byte: int) -> None:
    digest = bytes(range(32))
    other = bytearray(digest)
    other[byte] ^= 0x10
    ours, theirs = (prompt_key([3] * 4, 3, [bytes(d)], [4]) for d in (digest, other))
    assert (ours != theirs).sum() == 1
    assert len(set(prompt_key([3] * 5000, 3, [digest], [5000]).tolist())) == 5000


def test_prompt_key_refuses_what_does_not_match() -> None:
    digest = bytes(32)
    for tokens, image_token, hashes, counts in [
        ([1, 3], 3, [], []),
        ([1], 3, [digest], [1]),
        ([1], None, [digest], [1]),
        ([3, 3], 3, [digest], [2, 0]),
        ([3], 3, [b""], [1]),
    ]:
        with pytest.raises(ValueError):
            prompt_key(tokens, image_token, hashes, counts)
    assert prompt_key([1, 2], None, [], []).tolist() == [1, 2]


def test_long_prompts_are_no_loop_over_tokens() -> None:
    """10,000 tokens one way and the other: a loop in Python over all of them would take milliseconds."""
    tree: PrefixTree[int] = PrefixTree(1 << 20, lambda name: None)
    prompt = np.random.default_rng().integers(0, 1000, 10_000)
    for position in range(500, 10_000, 500):
        tree.insert(prompt[:position], position, 1)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        found = tree.find(prompt, len(prompt) - 1)
        times.append(time.perf_counter() - start)
        assert found is not None and found.position == 9500
    assert min(times) < 0.001
