"""S3-FIFO: queues and counters worked out by hand; `test_libcachesim.py` has the long streams."""

from __future__ import annotations

import random

from tests.eviction.leaves import BLOCK, Leaves
from tieredkv.eviction import S3FifoPolicy
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.testing.policy_suite import PolicySuite
from tieredkv.testing.policy_world import World


class TestS3Fifo(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return S3FifoPolicy(capacity, block_bytes, seed)


def ten() -> Leaves:
    """Ten blocks: 1 is the small queue, 2 to 10 found it full and are the main one."""
    leaves = Leaves(S3FifoPolicy(10 * BLOCK, BLOCK))
    for run in range(1, 11):
        leaves.insert(run, float(run))
    return leaves


def test_without_uses_it_is_first_in_first_out() -> None:
    assert ten().order() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_ghost_starts_in_the_main_queue() -> None:
    leaves = ten()
    assert leaves.evict() == 1
    leaves.insert(11, 11.0)  # new: small queue
    assert leaves.evict() == 11
    leaves.insert(12, 12.0, key=b"1")  # the first one again: main queue, which is too long now
    assert leaves.order() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 12]


def test_one_use_in_the_small_queue_is_not_enough_two_are() -> None:
    once, twice = ten(), ten()
    for leaves, uses in ((once, 1), (twice, 2)):
        for use in range(uses):
            leaves.hit(1, 20.0 + use)
    assert once.order()[0] == 1
    assert twice.order() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 1]


def test_each_lap_of_the_main_queue_costs_one_use_and_three_count() -> None:
    leaves = ten()
    for run, uses in ((2, 5), (3, 1), (4, 2), (5, 3)):
        for use in range(uses):
            leaves.hit(run, 20.0 + run + use / 10)
    assert leaves.order() == [1, 6, 7, 8, 9, 10, 3, 4, 2, 5]
    for run in (1, 6):  # the hand has passed 2 to 5: their counters are 2, 0, 1, 2
        assert leaves.evict() == run
    leaves.insert(11, 30.0)
    assert leaves.evict() == 11
    leaves.insert(12, 31.0, key=b"11")  # behind 3 in the main queue
    assert leaves.order() == [7, 8, 9, 10, 3, 12, 4, 2, 5]
    leaves.hit(3, 32.0)  # at 1 now, and behind 2 but before 4
    assert leaves.order() == [7, 8, 9, 10, 12, 3, 4, 2, 5]
    leaves.hit(4, 33.0)
    assert leaves.order() == [7, 8, 9, 10, 12, 3, 2, 4, 5]


def test_what_is_pinned_still_fills_its_queue() -> None:
    leaves = ten()
    assert leaves.evict() == 1
    leaves.insert(11, 11.0, key=b"1")  # the main queue has 10 blocks of 9
    leaves.insert(12, 12.0)
    (victim,) = leaves.policy.victims(BLOCK, 12.0, lambda run: BLOCK if run == 2 else 0)
    assert victim.run == 3


def test_a_leaf_again_has_its_old_uses_and_the_time_of_its_last_one() -> None:
    leaves = Leaves(S3FifoPolicy(100 * BLOCK, BLOCK))
    for run in (1, 2, 3):
        leaves.insert(run, float(run))
    leaves.child(1)
    leaves.leaf(1, 2.5, hits=1)
    assert leaves.order() == [2, 1, 3]
    leaves.child(1)
    leaves.leaf(1, 2.5, hits=2)
    assert leaves.order() == [2, 3, 1]


def test_an_ended_run_leaves_no_ghost() -> None:
    leaves = ten()
    leaves.end(1, 11.0)
    assert leaves.evict() == 1
    leaves.insert(11, 12.0, key=b"1")  # unknown: small queue
    assert leaves.order()[0] == 11


def test_a_ghost_weighs_what_the_run_had_at_most() -> None:
    leaves = Leaves(S3FifoPolicy(10 * BLOCK, BLOCK))
    for run, blocks in ((1, 5), (2, 4)):
        leaves.insert(run, float(run), blocks=blocks)
    leaves.resize(1, 1)
    assert leaves.evict() == 1
    leaves.insert(3, 3.0, blocks=5)
    assert leaves.evict() == 3  # 5 + 5 > 9 blocks: the ghost of 1 is gone
    leaves.insert(4, 4.0, key=b"3")
    assert leaves.order() == [2, 4]  # 4 is in the main queue behind 2
    leaves.insert(5, 5.0, key=b"1")
    assert leaves.order()[0] == 5


def test_one_question_for_all_is_as_many_questions_for_one() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        capacity = rng.choice([5, 20, 60])
        leaves = Leaves(S3FifoPolicy(capacity * BLOCK, BLOCK))
        held: dict[int, int] = {}
        for run in range(400):
            blocks = rng.randint(1, 3)
            while sum(held.values()) + blocks > capacity:
                del held[leaves.evict()]
            leaves.insert(run, float(run), blocks=blocks, key=b"%d" % rng.randrange(80))
            held[run] = blocks
            for _ in range(rng.randrange(4)):
                leaves.hit(rng.choice(list(held)), run + rng.random())
            if rng.random() < 0.1:
                leaves.end(rng.choice(list(held)), run + 1.0)
        order = leaves.order()
        assert order == [leaves.evict() for _ in order], seed
        assert not leaves.order()


def test_sizes_are_the_sums_of_their_queues() -> None:
    policy = S3FifoPolicy(100 * BLOCK, BLOCK)
    world = World(policy, 100 * BLOCK, BLOCK, seed=3)
    for _ in range(2000):
        world.step()
        for part, queue in enumerate(policy._queues):
            members = [policy._members[int(rank[3])] for rank in queue]
            assert policy._size[part] == sum(member.nbytes for member in members)
            assert all(member.part == part for member in members)
        assert policy._ghost_size == sum(policy._ghosts.values()) <= 90 * BLOCK
