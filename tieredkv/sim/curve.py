"""Hit rate against capacity, for all capacities in one pass, for a prefix-closed LRU cache.

LRU is a stack algorithm (Mattson et al., IBM Systems Journal 1970): order the blocks by last
use, and a cache of C blocks holds the first C of them. A request uses its whole chain, so
with equal times the deeper block is the older one, no block outlives its ancestors, and leaf-only
eviction chooses the same victims. A block is hit by every capacity that reaches its position.

The order consists of **stretches**: what is left of the chain of one earlier request. Later
requests take over prefixes of it, so a stretch only loses blocks at its head, and the next turn
of a session finds its context in a handful of them. Per stretch: one bisection to find where
it ends and O(log requests) in a Fenwick tree to find its position; the blocks in between
differ by one in position and are counted as a range.

Sampling, for traces whose unique blocks do not fit into memory, follows SHARDS (Waldspurger
et al., FAST'15): blocks are chosen by the hash of their id, and positions among them scaled
up. Blocks that very many requests share (system prompts) would make or break such a sample;
they are few, so their last uses are all kept. Several disjoint samples are taken: their mean is
the estimate, their scatter the stated error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from tieredkv.errors import UsageError
from tieredkv.sim.request import Request, TraceError
from tieredkv.sim.stack import Floats, Integers, Stack

SAMPLES = 8
"""Disjoint samples taken when sampling."""
HOT = 64
"""Uses after which a block is looked at whatever its hash."""
T99 = 3.499
"""Student's t for a two-sided 99 % interval of the mean of `SAMPLES`."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Token hits of an LRU cache at every capacity.

    The arrays have equal shapes, one entry per capacity, from 0 to what holds everything.
    """

    capacity: Integers
    """Blocks, ascending from 0."""
    hit_rate: Floats
    """Share of the input tokens that is hit; never falls."""
    error: Floats
    """Half width of a nominal 99 % interval around `hit_rate`; 0 when nothing was sampled.
    Wide below some multiples of 8 / `sample` blocks, the resolution of a sampled curve."""
    hit_pairs: Floats
    """Like `hit_rate` with every token weighted by its position in the prompt: the share of
    the attention work of prefill that hits save."""
    block_tokens: int
    requests: int
    input_tokens: int
    pairs: float
    """Sum over all input tokens of their position."""
    unique_blocks: int
    """Estimated when sampled."""
    sample: float
    """Share of the blocks that was looked at; 1 is exact."""

    @property
    def infinite(self) -> float:
        """Hit rate of a cache without limit."""
        return float(self.hit_rate[-1])

    def at(self, capacity: npt.ArrayLike) -> Floats:
        """Hit rate at capacities in blocks (any shape); flat beyond the last entry."""
        values: Floats = np.interp(np.asarray(capacity, float), self.capacity, self.hit_rate)
        return values

    def error_at(self, capacity: npt.ArrayLike) -> Floats:
        """Stated error at capacities in blocks."""
        values: Floats = np.interp(np.asarray(capacity, float), self.capacity, self.error)
        return values

    def pairs_at(self, capacity: npt.ArrayLike) -> Floats:
        """`hit_pairs` at capacities in blocks."""
        values: Floats = np.interp(np.asarray(capacity, float), self.capacity, self.hit_pairs)
        return values


def miss_ratio_curve(requests: Iterable[Request], sample: float = 1.0, seed: int = 0) -> Curve:
    """The curve of a trace, requests in order of arrival.

    All blocks of a request count as used when it arrives, hit or not, the root last. A block
    is hit if it was in the cache before the request came; tokens beyond the last full block
    count as missed.

    `sample` in (0, 1]: share of the blocks to look at, rounded to 1 / n. 1 is exact and takes
    some 100 bytes of memory per unique block; less takes that share of it, and not less time:
    it is for traces that do not fit. `seed` chooses the blocks.

    Raises UsageError for a bad argument or an empty trace, TraceError for blocks that are not
    prefix-chained or a block size that changes.
    """
    if not 0 < sample <= 1 or seed < 0:
        raise UsageError(f"sample={sample}, seed={seed}: pass a share in (0, 1] and a seed >= 0")
    stride = SAMPLES * max(1, round(1 / sample))
    survey = _Exact() if stride == SAMPLES else _Sampled(stride, seed)
    count = tokens = block_tokens = 0
    pairs = 0.0
    for request in requests:
        if count == 0:
            block_tokens = request.block_size
        elif request.block_size != block_tokens:
            raise TraceError(
                f"request {count + 1}: block size {request.block_size} after {block_tokens}; "
                "convert the trace to one block size"
            )
        count += 1
        tokens += request.input_length
        pairs += request.input_length**2 / 2
        survey.use(request.hash_ids)
    if not tokens:
        raise UsageError("the trace has no requests with input tokens; give one that has some")
    hits, error, hit_pairs = survey.hits()
    share = block_tokens / tokens
    return Curve(
        capacity=np.arange(len(hits), dtype=np.int64) * survey.step,
        hit_rate=np.clip(hits * share, 0, 1),
        error=error * share,
        hit_pairs=np.clip(hit_pairs * block_tokens**2 / pairs, 0, 1),
        block_tokens=block_tokens,
        requests=count,
        input_tokens=tokens,
        pairs=pairs,
        unique_blocks=survey.unique_blocks,
        sample=SAMPLES / stride,
    )


class _Exact:
    """Every block in one stack."""

    step = 1

    def __init__(self) -> None:
        self._stack = Stack()

    def use(self, ids: list[int]) -> None:
        self._stack.use(ids, None)

    @property
    def unique_blocks(self) -> int:
        return len(self._stack.used)

    def hits(self) -> tuple[Floats, Floats, Floats]:
        """Hits at multiples of `step`, their error, and hits weighted by depth + 1/2."""
        hits, weighted = self._stack.hits(self.unique_blocks + 1)
        return hits, np.zeros(len(hits)), weighted


class _Sampled:
    """A stack for each sample, and the last use of every hot block."""

    def __init__(self, step: int, seed: int) -> None:
        self.step = step
        self._seed = np.uint64(seed * 0x632BE59BD9B4E019 & _MASK)
        self._stacks = [Stack() for _ in range(SAMPLES)]
        self._now = 0
        self._uses: dict[int, int] = {}
        """Uses of hot blocks and of their children: a child is counted once its parent is hot."""
        self._hot: dict[int, int] = {}
        """Last use of the blocks with more than `HOT` uses. Along a chain they come first."""
        self._cold_accesses = 0

    def use(self, ids: list[int]) -> None:
        self._now += 1
        hot = self._hot
        depth = 0
        while depth < len(ids) and (last := hot.get(ids[depth])):
            first = depth
            while depth < len(ids) and hot.get(ids[depth]) == last:
                hot[ids[depth]] = self._now
                depth += 1
            for stack in self._stacks:
                stack.note(last, first, depth - first)
        if depth < len(ids):
            block = ids[depth]
            self._uses[block] = uses = self._uses.get(block, 0) + 1
            if uses > HOT:
                hot[block] = self._now
                del self._uses[block]
        self._cold_accesses += len(ids) - depth
        draw = _hash(ids, self._seed) % np.uint64(self.step)
        taken = np.flatnonzero(draw < SAMPLES)
        group = draw[taken]
        for index, stack in enumerate(self._stacks):
            depths = taken[group == index]
            stack.use([ids[i] for i in depths.tolist()], depths, int((depths < depth).sum()))

    @property
    def unique_blocks(self) -> int:
        return round(sum(len(stack.used) for stack in self._stacks) * self.step / SAMPLES)

    def hits(self) -> tuple[Floats, Floats, Floats]:
        """As for `_Exact`. Each sample is scaled by the cold blocks of the trace per cold block
        that it took, which cancels how often its blocks happen to be used (a ratio estimate).
        The error includes what one step of capacity changes."""
        size = 2 + max(len(stack.used) for stack in self._stacks)
        rows = []
        for stack in self._stacks:
            scale = self._cold_accesses / max(1, stack.accesses)
            cold, hot = stack.hits(size), stack.noted(size)
            rows.append([cold[0] * scale + hot[0], cold[1] * scale + hot[1]])
        table = np.array(rows)
        mean, scatter = table.mean(axis=0), table[:, 0].std(axis=0, ddof=1)
        rise = np.diff(mean[0], prepend=0.0, append=mean[0][-1])
        step = np.maximum(rise[:-1], rise[1:])
        return mean[0], T99 * scatter / sqrt(SAMPLES) + step, mean[1]


def _hash(ids: list[int], seed: np.uint64) -> npt.NDArray[np.uint64]:
    """64 well-mixed bits of each id (the finaliser of splitmix64, Steele et al., OOPSLA'14)."""
    try:
        value = np.array(ids, np.uint64)
    except OverflowError:
        value = np.array([block & _MASK for block in ids], np.uint64)
    value = (value + seed) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)
