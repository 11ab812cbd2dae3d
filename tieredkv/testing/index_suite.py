"""What every prefix index has to satisfy: inherit `IndexSuite` and implement `make`.

    class TestMyIndex(IndexSuite):
        def make(self, tiers):
            return MyIndex(tiers)

Random chains are appended, split and cut, and after every step the index is compared with a
dict that knows each block by itself. Copies and pins are kept by the suite, as the planner's
residency keeps them.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsIndex, overload

from tieredkv.errors import UsageError
from tieredkv.index.prefix_tree import Run
from tieredkv.types import Turn


class PrefixIndex(Protocol):
    """The part of `tieredkv.index.prefix_tree.PrefixTree` that its users rely on."""

    runs: dict[int, Run]
    blocks: int

    def find(self, key: bytes) -> Run | None: ...

    def match(self, keys: Sequence[bytes], *, visible: bool) -> tuple[int, Run | None]: ...

    def append(
        self,
        parent: Run | None,
        keys: Sequence[bytes],
        generation: int,
        now: float,
        turn: Turn | None,
    ) -> Run: ...

    def split(self, run: Run, offset: int) -> Run: ...

    def cut(self, run: Run, offset: int) -> None: ...

    def descendants(self, run: Run) -> list[Run]: ...

    def check(self) -> list[str]: ...


@dataclass(slots=True)
class Block:
    """What the dict knows about a block."""

    parent: bytes | None
    depth: int
    slot: int
    generation: int
    visible: bool


class IndexWorld:
    """An index and the naive model beside it. Chains are over two symbols, so they meet often."""

    def __init__(self, index: PrefixIndex, seed: int) -> None:
        self.index = index
        self.rng = random.Random(seed)
        self.blocks: dict[bytes, Block] = {}
        self.pins: dict[int, bytes] = {}
        self.next = 1

    def path(self) -> list[bytes]:
        return chain([self.rng.randrange(2) for _ in range(self.rng.randint(1, 12))])

    def step(self) -> None:
        keys = self.path()
        known, run = self.index.match(keys, visible=False)
        action = self.rng.random()
        if action < 0.6 and known < len(keys):
            self.append(keys, known, run)
        elif action < 0.75 and run is not None:
            self.reveal(run)
        elif action < 0.85 and run is not None and run.visible:
            self.pin(run, self.rng.randint(run.start + 1, run.end))
        elif run is not None and action > 0.9:
            self.drop(run, self.rng.randrange(len(run.keys)))

    def append(self, keys: Sequence[bytes], known: int, run: Run | None) -> Run:
        if run is not None and known < run.end:
            tail, run = run, self.index.split(run, known - run.start)
            assert tail.parent is run
            run.kids[0] = 1
        number, self.next = self.next, self.next + len(keys)
        turn = Turn(session=str(number))
        added = self.index.append(run, keys[known:], number, float(number), turn)
        slots = list(range(number, number + len(keys) - known))
        added.slots[0], added.count[0] = array("i", slots), len(slots)
        added.recount()
        added.visible = (run is None or run.visible) and self.rng.random() < 0.5
        if run is not None:
            run.kids[0] += 1
        parent = keys[known - 1] if known else None
        for i, slot in enumerate(slots):
            key = keys[known + i]
            self.blocks[key] = Block(parent, known + i, slot, number, added.visible)
            parent = key
        return added

    def reveal(self, run: Run) -> None:
        if run.parent is None or run.parent.visible:
            run.visible = True
            for key in run.keys:
                self.blocks[key].visible = True

    def pin(self, run: Run, depth: int) -> None:
        number, self.next = self.next, self.next + 1
        run.pins = {**(run.pins or {}), number: depth}
        self.pins[number] = run.keys[depth - run.start - 1]

    def drop(self, run: Run, offset: int) -> None:
        """Cut as the residency does it: children first, copies before blocks."""
        for node in reversed(self.index.descendants(run)):
            self._cut(node, 0)
        self._cut(run, offset)

    def _cut(self, run: Run, offset: int) -> None:
        for key in run.keys[offset:]:
            del self.blocks[key]
        self.pins = {pin: key for pin, key in self.pins.items() if key in self.blocks}
        kept = {pin: end for pin, end in (run.pins or {}).items() if end <= run.start + offset}
        run.pins = kept or None
        run.count[0] = offset
        if not offset:
            run.slots[0] = None
            if run.parent is not None:
                run.parent.kids[0] -= 1
        self.index.cut(run, offset)

    # -- comparison -----------------------------------------------------------------------

    def compare(self) -> None:
        """Everything that the index says about every block, against the dict."""
        index = self.index
        problems = index.check()
        assert not problems, problems
        assert index.blocks == len(self.blocks)
        assert sum(len(run.keys) for run in index.runs.values()) == len(self.blocks)
        for key, block in self.blocks.items():
            run = index.find(key)
            assert run is not None, "a block is unknown"
            offset = block.depth - run.start
            assert run.keys[offset] == key
            slots = run.slots[0]
            assert slots is not None
            assert slots[offset] == block.slot
            assert (run.generation, run.visible) == (block.generation, block.visible)
            assert run.turn is not None
            assert run.turn.session == str(block.generation)
            self._compare_link(run, block, offset)
        for pin, key in self.pins.items():
            run = index.find(key)
            assert run is not None
            assert (run.pins or {}).get(pin) == self.blocks[key].depth + 1, "a pin has moved"
        self._compare_matches()

    def _compare_link(self, run: Run, block: Block, offset: int) -> None:
        if offset:
            assert run.keys[offset - 1] == block.parent
        elif block.parent is None:
            assert run.parent is None
        else:
            assert run.parent is not None
            assert run.parent.keys[-1] == block.parent

    def _compare_matches(self) -> None:
        for _ in range(10):
            keys = self.path()
            for visible in (False, True):
                expected = 0
                for key in keys:
                    block = self.blocks.get(key)
                    if block is None or (visible and not block.visible):
                        break
                    expected += 1
                found, run = self.index.match(keys, visible=visible)
                assert found == expected
                assert run is (self.index.find(keys[found - 1]) if found else None)
            if run is not None:
                self._compare_descendants(run)

    def _compare_descendants(self, run: Run) -> None:
        below, known = self.index.descendants(run), {run.id}
        for node in below:
            assert node.parent is not None
            assert node.parent.id in known, "a child before its parent"
            known.add(node.id)
        ends, expected = {run.keys[-1]}, set()
        for key, block in sorted(self.blocks.items(), key=lambda item: item[1].depth):
            if block.parent in ends:
                ends.add(key)
                expected.add(key)
        found = [key for node in below for key in node.keys]
        assert len(found) == len(set(found))
        assert set(found) == expected


class IndexSuite:
    """Inherit, name the class `Test...`, implement `make`. Needs pytest only."""

    def make(self, tiers: int) -> PrefixIndex:
        """A new, empty index over this many tiers."""
        raise NotImplementedError

    def test_random_chains_against_a_dict(self) -> None:
        for seed in range(20):
            world = IndexWorld(self.make(1), seed)
            for _ in range(120):
                world.step()
                world.compare()
            assert len(world.index.runs) > 3, "the walk never branched: it proves nothing"

    def test_everything_can_be_cut_again(self) -> None:
        for seed in range(10):
            world = IndexWorld(self.make(1), seed)
            for _ in range(60):
                world.step()
            for root in [run for run in world.index.runs.values() if run.parent is None]:
                world.drop(root, 0)
            world.compare()
            assert not world.index.runs
            assert world.index.blocks == 0

    def test_split_keeps_what_the_run_was(self) -> None:
        index = self.make(3)
        keys = chain([0] * 6)
        run = index.append(None, keys, 7, 2.0, Turn(session="s"))
        run.slots[1], run.count[1] = array("i", [10, 11, 12, 13, 14, 15]), 6
        run.slots[2], run.count[2] = array("i", [20, 21, -1, -1, -1, -1]), 2
        run.visible, run.last, run.hits, run.pins = True, 9.0, 3, {1: 2, 2: 4, 3: 6}
        head = index.split(run, 4)
        assert (list(head.keys), list(run.keys)) == (keys[:4], keys[4:])
        assert (head.start, head.end, run.start, run.end) == (0, 4, 4, 6)
        assert (head.count, run.count) == ([0, 4, 2], [0, 2, 0])
        assert head.slots[1] is not None
        assert list(head.slots[1]) == [10, 11, 12, 13]
        assert (head.generation, head.visible, head.last, head.hits) == (7, True, 9.0, 3)
        assert head.turn == run.turn == Turn(session="s")
        assert (head.born, run.born) == (2.0, 2.0)
        assert (head.pins, run.pins) == ({1: 2, 2: 4}, {3: 6})

    def test_keys_that_do_not_begin_at_the_root_are_refused(self) -> None:
        index = self.make(1)
        keys = chain([0] * 8)
        run = index.append(None, keys, 1, 0.0, None)
        run.visible = True
        refused = 0
        for wrong in (keys[3:], [keys[0], keys[2]], keys[::-1]):
            try:
                index.match(wrong, visible=False)
            except UsageError:
                refused += 1
        assert refused == 3, "a shifted chain was taken for a prefix"

    def test_matching_looks_at_few_keys(self) -> None:
        index = self.make(1)
        run = None
        keys = chain([0] * 4096)
        for lo in range(0, 4096, 64):
            run = index.append(run, keys[lo : lo + 64], 1, 0.0, None)
            run.visible = True
        for known in (0, 1, 2048, 4096):
            asked = Counted(keys[:known] + chain([1] * 4096)[known:])
            assert index.match(asked, visible=True)[0] == known
            assert asked.reads <= 32, f"{asked.reads} of 4096 keys read"


def chain(symbols: Sequence[int]) -> list[bytes]:
    """Keys of 32 bytes that each stand for all symbols up to theirs."""
    keys, last = [], b""
    for symbol in symbols:
        last = hashlib.sha256(last + bytes([symbol])).digest()
        keys.append(last)
    return keys


class Counted(Sequence[bytes]):
    """A sequence that counts how often it is asked for an item."""

    def __init__(self, items: list[bytes]) -> None:
        self.items = items
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, at: SupportsIndex) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...

    def __getitem__(self, at: SupportsIndex | slice) -> bytes | Sequence[bytes]:
        found = self.items[at]
        self.reads += len(found) if isinstance(at, slice) else 1
        return found
