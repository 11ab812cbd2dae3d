"""Trace formats of other projects, each a callable that turns a line into a request.

Sources of the fields: Mooncake, https://github.com/kvcache-ai/Mooncake (FAST25-release);
Qwen-Bailian, https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon (README and
docs/qa-context-growth-pattern.md); LMCache, https://github.com/LMCache/LMCache
(lmcache/tools/cache_simulator/README.md, `lmcache server --lookup-hash-log-dir`).
"""

from __future__ import annotations

from struct import Struct

from xxhash import xxh3_64_intdigest

from tieredkv.sim.formats_row import Row
from tieredkv.sim.request import Request

MOONCAKE_BLOCK = 512
"""Tokens per block of every Mooncake trace."""
BAILIAN_BLOCK = 16
"""Tokens per block of every Qwen-Bailian trace."""
LMCACHE_JITTER = 1.0
"""Seconds by which an LMCache line may lie before the one above it: events of several threads
are written by one."""

_LINK = Struct("<QQ").pack


class Sessions:
    """Sessions of a trace that has none: a request continues the session whose last request
    its prefix contains. One shared block is no evidence (all prompts of a deployment may
    start alike), so a session is continued from its second block on."""

    def __init__(self) -> None:
        self._tips: dict[int, tuple[str, int]] = {}
        self._count = 0

    def assign(self, ids: list[int]) -> tuple[str, int]:
        for block in reversed(ids[1:]):
            found = self._tips.pop(block, None)
            if found is not None:
                session, turn = found[0], found[1] + 1
                break
        else:
            session, turn = f"s{self._count}", 1
            self._count += 1
        if len(ids) > 1:
            self._tips[ids[-1]] = (session, turn)
        return session, turn


class Mooncake:
    """`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512 tokens each."""

    def __init__(self) -> None:
        self._sessions = Sessions()

    def __call__(self, row: Row) -> Request:
        length = row.integer("input_length", 0)
        # The last id of a Mooncake line may cover a partial block.
        ids = row.chained("hash_ids", row.ids("hash_ids"))[: length // MOONCAKE_BLOCK]
        session, turn = self._sessions.assign(ids)
        return Request(
            ts=row.seconds("timestamp") / 1000,
            session=session,
            turn=turn,
            input_length=length,
            output_length=row.integer("output_length", 0),
            block_size=MOONCAKE_BLOCK,
            hash_ids=ids,
        )


class Bailian:
    """`chat_id`, `parent_chat_id` (-1: none), `timestamp` in s, `input_length`,
    `output_length`, `type`, `turn`, `hash_ids` of 16 tokens each.

    The session is the root of the chain of parents, the category is `type`. A parent that the
    trace does not hold counts as the root. Memory: one entry per chat.
    """

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}

    def __call__(self, row: Row) -> Request:
        chat, parent = row.integer("chat_id", 0), row.integer("parent_chat_id", -1)
        root = chat if parent < 0 else self._roots.get(parent, parent)
        self._roots[chat] = root
        length = row.integer("input_length", 0)
        # The last block may be padded, and changes with the first token of the output.
        ids = row.ids("hash_ids")[: length // BAILIAN_BLOCK]
        return Request(
            ts=row.seconds("timestamp"),
            session=str(root),
            turn=row.integer("turn", 1),
            input_length=length,
            output_length=row.integer("output_length", 0),
            block_size=BAILIAN_BLOCK,
            hash_ids=_chain(ids),
            category=row.optional_text("type") or "",
        )


def _chain(contents: list[int]) -> list[int]:
    """Prefix-chained ids of blocks whose ids may name their content alone (Bailian's are
    published as a hash of each block). Ids that are chained already stay as distinct."""
    chained: list[int] = []
    before = 0
    for content in contents:
        before = xxh3_64_intdigest(_LINK(before, content))
        chained.append(before)
    return chained


class LMCache:
    """`timestamp` in s since 1970, `model_name`, `chunk_size`, `seq_len`, `chunk_hashes`
    (opaque texts, full chunks only); one lookup per request.

    Nothing is logged of the output and of the session: the former is 0, the latter is
    reconstructed as for Mooncake.
    """

    def __init__(self) -> None:
        self._sessions = Sessions()
        self._start: float | None = None
        self._ts = 0.0

    def __call__(self, row: Row) -> Request:
        model = row.optional_text("model_name") or ""
        size, length = row.integer("chunk_size", 1), row.integer("seq_len", 0)
        texts = row.texts("chunk_hashes")
        row.full_blocks("chunk_hashes", len(texts), size, length)
        ids = [xxh3_64_intdigest(f"{model}\0{text}".encode()) for text in texts]
        session, turn = self._sessions.assign(row.chained("chunk_hashes", ids))
        return Request(
            ts=self._since_start(row.seconds("timestamp")),
            session=session,
            turn=turn,
            input_length=length,
            output_length=0,
            block_size=size,
            hash_ids=ids,
            model=model or None,
        )

    def _since_start(self, ts: float) -> float:
        if self._start is None:
            self._start = ts
        ts -= self._start
        if self._ts - LMCACHE_JITTER <= ts < self._ts:
            return self._ts
        self._ts = ts
        return ts
