"""The prefix tree passes the public suite; an index with any one defect does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tieredkv.index.prefix_tree import PrefixTree, Run
from tieredkv.testing.index_suite import IndexSuite, PrefixIndex


class TestPrefixTree(IndexSuite):
    def make(self, tiers: int) -> PrefixIndex:
        return PrefixTree(tiers)


class ForgetsToUnmap(PrefixTree):
    def cut(self, run: Run, offset: int) -> None:
        keys = run.keys[offset:]
        super().cut(run, offset)
        for key in keys[-1:]:
            self._shards[key[0]][key] = run.id


class SplitKeepsTheOldMap(PrefixTree):
    def split(self, run: Run, offset: int) -> Run:
        head = super().split(run, offset)
        key = head.keys[0]
        self._shards[key[0]][key] = run.id
        return head


class SplitLosesPins(PrefixTree):
    def split(self, run: Run, offset: int) -> Run:
        head = super().split(run, offset)
        head.pins = None
        return head


class SplitMovesPinsUp(PrefixTree):
    def split(self, run: Run, offset: int) -> Run:
        pins = run.pins
        head = super().split(run, offset)
        head.pins, run.pins = pins, None
        return head


class SplitHidesTheHead(PrefixTree):
    def split(self, run: Run, offset: int) -> Run:
        head = super().split(run, offset)
        head.visible = False
        return head


class SplitShiftsSlots(PrefixTree):
    def split(self, run: Run, offset: int) -> Run:
        head = super().split(run, offset)
        for slots in head.slots:
            if slots is not None and len(slots) > 1:
                slots.append(slots.pop(0))
        return head


class ShowsEverything(PrefixTree):
    def match(self, keys: Sequence[bytes], *, visible: bool) -> tuple[int, Run | None]:
        return super().match(keys, visible=False)


class OneShort(PrefixTree):
    def match(self, keys: Sequence[bytes], *, visible: bool) -> tuple[int, Run | None]:
        found, run = super().match(keys, visible=visible)
        return (found - 1, run) if found > 7 else (found, run)


class Linear(PrefixTree):
    def match(self, keys: Sequence[bytes], *, visible: bool) -> tuple[int, Run | None]:
        return super().match([*keys], visible=visible)


class TrustsTheCaller(PrefixTree):
    def match(self, keys: Sequence[bytes], *, visible: bool) -> tuple[int, Run | None]:
        found, run = 0, None
        for key in keys:
            here = self.find(key)
            if here is None or (visible and not here.visible):
                break
            found, run = found + 1, here
        return found, run


class ForgetsGrandchildren(PrefixTree):
    def descendants(self, run: Run) -> list[Run]:
        return list((run.children or {}).values())


class ChildrenFirst(PrefixTree):
    def descendants(self, run: Run) -> list[Run]:
        return super().descendants(run)[::-1]


class Miscounts(PrefixTree):
    def cut(self, run: Run, offset: int) -> None:
        super().cut(run, offset)
        self.blocks += 1


def failure(kind: type[PrefixTree]) -> str | None:
    """The first test that fails."""

    class Suite(IndexSuite):
        def make(self, tiers: int) -> PrefixIndex:
            return kind(tiers)

    for name in [name for name in dir(Suite) if name.startswith("test_")]:
        try:
            getattr(Suite(), name)()
        except Exception:  # whatever a broken index runs into
            return name
    return None


DEFECTS = [
    ForgetsToUnmap, SplitKeepsTheOldMap, SplitLosesPins, SplitMovesPinsUp, SplitHidesTheHead,
    SplitShiftsSlots, ShowsEverything, OneShort, Linear, TrustsTheCaller, ForgetsGrandchildren,
    ChildrenFirst, Miscounts,
]  # fmt: skip


@pytest.mark.parametrize("kind", DEFECTS, ids=lambda kind: kind.__name__)
def test_a_defect_is_noticed(kind: type[PrefixTree]) -> None:
    assert failure(kind)


def test_the_suite_itself_is_content_with_the_tree() -> None:
    assert failure(PrefixTree) is None
