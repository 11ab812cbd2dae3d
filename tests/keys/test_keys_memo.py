"""The memo changes the cost of a chain, never its keys."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv import chain_hash, keys
from tieredkv.chain_hash import Memo
from tieredkv.keys import chain_keys


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 tokens, so that short chains have several."""
    monkeypatch.setattr(chain_hash, "_CHUNK_BYTES", 32)
    monkeypatch.setattr(keys, "_MEMO", Memo(1 << 20))


def unmemoised(tokens: list[int], block: int, **extra: Any) -> list[bytes]:
    used = keys._MEMO
    keys._MEMO = Memo(0)
    try:
        return chain_keys(tokens, block, **extra)
    finally:
        keys._MEMO = used


turns = st.lists(
    st.tuples(
        st.integers(0, 40),  # where the turn branches off the previous one
        st.lists(st.integers(0, 1), max_size=30),
        st.sampled_from([1, 3, 8, 16]),
        st.sampled_from([None, "a"]),
        st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["x", "y"])), max_size=2),
    ),
    max_size=8,
)


@given(turns)
@settings(max_examples=200)
def test_equal_to_unmemoised(turns: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_hash, "_CHUNK_BYTES", 32)
        patch.setattr(keys, "_MEMO", Memo(20_000))
        tokens: list[int] = []
        for branch, new, block, lora, media in turns:
            tokens = tokens[:branch] + new
            expected = unmemoised(tokens, block, lora=lora, media=media)
            assert chain_keys(tokens, block, lora=lora, media=media) == expected
            assert chain_keys(tokens, block, lora=lora, media=media) == expected


def test_a_longer_chain_hashes_its_new_tokens_only(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    original = chain_hash.hash_blocks

    def counting(hasher: Any, data: bytes, width: int, marks: Any) -> Any:
        hashed.append(len(data) // 4)
        return original(hasher, data, width, marks)

    monkeypatch.setattr(chain_hash, "hash_blocks", counting)
    tokens = list(range(800))
    chain_keys(tokens, 4)
    assert sum(hashed) == 800
    hashed.clear()
    chain_keys([*tokens, *range(20)], 4)
    assert sum(hashed) == 20
    hashed.clear()
    chain_keys([*tokens[:400], 9999, *tokens[401:]], 4)  # another branch
    chain_keys([*tokens, *range(20)], 4)  # did not push out this one
    assert sum(hashed) == 400 + 4


def test_a_checksum_collision_is_a_miss(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_hash, "xxh3_64_intdigest", lambda data: 1)
    first, second = list(range(64)), list(range(100, 164))
    for tokens in (first, second, first, second):
        assert chain_keys(tokens, 4) == unmemoised(tokens, 4)


def test_the_list_belongs_to_the_caller(small_chunks: None) -> None:
    tokens = list(range(64))
    got = chain_keys(tokens, 4)
    expected = list(got)
    got.clear()
    again = chain_keys(tokens, 4)
    assert again == expected
    again[0] = b""
    assert chain_keys(tokens, 4) == expected


def test_a_changed_array_is_hashed_again(small_chunks: None) -> None:
    import numpy as np

    tokens = np.arange(64, dtype=np.uint32)
    before = chain_keys(tokens, 4)
    tokens[0] = 5
    assert chain_keys(tokens, 4) == unmemoised(list(map(int, tokens)), 4)
    assert chain_keys(tokens, 4)[0] != before[0]


@pytest.mark.parametrize("block", [1, 16, 256])
def test_memory_stays_below_the_limit(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 3 << 20
    rng = random.Random(1)
    monkeypatch.setattr(keys, "_MEMO", memo := Memo(limit))
    chains = [[rng.randrange(2**32) for _ in range(9000)] for _ in range(40)]
    tracemalloc.start()
    try:
        for number, chain in enumerate(chains):
            chain_keys(chain, block, media=[(number, "m" * 1000)])
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0 < memo.nbytes <= limit
    assert used <= limit * 1.05


def test_a_chunk_larger_than_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MEMO", memo := Memo(10_000))
    assert len(chain_keys(range(1 << 16), 1 << 15)) == 2
    assert memo.nbytes == 0


def test_threads_see_the_same_keys(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MEMO", Memo(20_000))  # small enough to evict all the time
    rng = random.Random(2)
    chains = [[rng.randrange(2) for _ in range(rng.randrange(200))] for _ in range(50)]
    expected = [unmemoised(chain, 4) for chain in chains]
    wrong: list[int] = []

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(300):
            number = order.randrange(len(chains))
            if chain_keys(chains[number], 4) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_fork_while_the_lock_is_held_does_not_deadlock() -> None:
    with keys._MEMO._lock:
        pid = os.fork()
        if pid == 0:
            acquired = keys._MEMO._lock.acquire(timeout=5)
            os._exit(0 if acquired else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
