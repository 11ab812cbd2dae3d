"""What other processes are to see: copies for a shared tier, and blocks that they put there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from operator import itemgetter

from tieredkv.index.prefix_tree import ABSENT, Run
from tieredkv.planner.residency import Residency
from tieredkv.planner.room import Room, leaf_on_path
from tieredkv.types import Move, Outcome

SCAN = 16  # runs that one call looks at: bounds the time under the lock


def publish(res: Residency, room: Room, now: float, blocks: int) -> None:
    """Want the runs that the shared tier lacks copied there, oldest first, each with the
    ancestors that it lacks, until about `blocks` are on their way. What finds no room there
    waits until it leaves memory."""
    tier = res.shared
    if not tier or not res.levels[tier].accepts:
        return  # none, or all puts go there first, or it does not answer
    for run_id in list(islice(res.unshared, SCAN)):
        if blocks <= 0:
            return
        del res.unshared[run_id]
        run = res.tree.runs.get(run_id)
        if run is None or not run.visible or not _in_memory(res, run):
            continue  # what only a disk has is not worth its reads
        lacking = _lacking(res, run, tier)
        got = room.make(tier, len(lacking), now, leaf_on_path(run, tier))
        for _, part in groupby(lacking[:got], itemgetter(2)):
            room.issue(part, tier)
        blocks -= got


def _in_memory(res: Residency, run: Run) -> bool:
    return any(count and t not in (res.durable, res.shared) for t, count in enumerate(run.count))


def _lacking(res: Residency, run: Run, tier: int) -> list[tuple[Run, int, int]]:
    """(run, offset, fastest source) of the blocks up to the end of `run` that are neither in
    the tier nor on their way, root first."""
    path: list[Run] = []
    node: Run | None = run
    while node is not None and not node.full(tier):
        path.append(node)
        node = node.parent
    writing = res.levels[tier].writing
    return [
        (node, offset, next(t for t, slots in enumerate(node.slots) if _held(slots, offset)))
        for node in reversed(path)
        for offset, key in enumerate(node.keys)
        if not _held(node.slots[tier], offset) and key not in writing
    ]


def strays(res: Residency, move: Move, write: Sequence[Outcome]) -> list[bytes]:
    """What a move has put into the shared tier though it was deleted or cleared meanwhile: nobody
    here counts on it, nor removes it later. To be asked before the move is finished."""
    tier = move.dst
    assert tier is not None
    found = []
    for key, generation, outcome in zip(move.keys, move.generations, write, strict=True):
        if outcome is not Outcome.OK or res.written(key, generation, tier) is not None:
            continue
        run = res.tree.find(key)  # stored anew?
        again = run is not None and _held(run.slots[tier], run.keys.index(key))
        if not again:
            found.append(key)
    return found


def _held(slots: Sequence[int] | None, offset: int) -> bool:
    return slots is not None and slots[offset] != ABSENT


def adopt(res: Residency, room: Room, run: Run | None, keys: Sequence[bytes], now: float,
          generation: int) -> int:  # fmt: skip
    """Blocks that others have stored in the shared tier, `keys` behind the end of `run`, are
    visible at once; where there is no room for all, the first of them. How many."""
    tier = res.shared
    assert tier is not None
    res.tree.check_new(keys)
    got = room.make(tier, len(keys), now, leaf_on_path(run, tier))
    if not got or (run is not None and run.id not in res.tree.runs):
        return 0
    child = res.tree.append(run, keys[:got], generation, now, None)
    res.install(child, 0, tier, res.levels[tier].pool.take(got), reserved=False)
    child.visible = True
    if res.lacks(child):
        res.declined.add(child.id)  # its writer writes it; here it has to be used first
    return got
