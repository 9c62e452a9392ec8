import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.inference.embedded.blocks import KEPT_VERSIONS, BlockPool, chain_hashes


def ids(*values):
    return np.array(values, np.int64)


def test_a_hash_names_salt_tokens_and_everything_before():
    tokens = np.arange(12, dtype=np.int32)
    base = chain_hashes(b"salt", tokens, 4)
    assert len(base) == 3
    assert chain_hashes(b"salt", tokens[:11], 4) == base[:2]
    assert not set(chain_hashes(b"other", tokens, 4)) & set(base)
    changed = tokens.copy()
    changed[0] = 99
    assert not set(chain_hashes(b"salt", changed, 4)) & set(base)
    assert chain_hashes(base[0], tokens[4:], 4) == base[1:]


def test_a_cached_block_is_found_until_it_is_evicted_least_recently_used_first():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.register(int(first[0]), b"a")
    pool.register(int(second[0]), b"b")
    pool.release(first)
    pool.release(second)
    assert pool.lookup([b"a"]).tolist() == [first[0]]
    pool.allocate(2)  # the two blocks without cached content are allocated first
    assert len(pool.lookup([b"a"])) == len(pool.lookup([b"b"])) == 1
    pool.allocate(1)
    assert len(pool.lookup([b"a"])) == 0
    assert len(pool.lookup([b"b"])) == 1


def test_a_shared_block_is_free_only_after_its_last_owner():
    pool = BlockPool(3)
    block = pool.allocate(1)
    pool.share(block, 2)
    pool.release(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2


def test_releasing_too_often_is_a_broken_invariant():
    pool = BlockPool(3)
    block = pool.allocate(1)
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_forgetting_keeps_owned_blocks_and_finds_nothing():
    pool = BlockPool(4)
    kept, gone = pool.allocate(1), pool.allocate(1)
    pool.register(int(kept[0]), b"kept")
    pool.register(int(gone[0]), b"gone")
    pool.release(gone)
    pool.clear_prefix_cache()
    assert len(pool._block_of) == 0 and pool.num_free == 2
    assert len(pool.lookup([b"kept"])) == 0
    pool.release(kept)
    assert pool.num_free == 3


def test_a_cached_block_is_kept_while_sequences_of_recent_versions_use_it():
    pool = BlockPool(4)
    used, unused = pool.allocate(1), pool.allocate(1)
    pool.register(int(used[0]), b"used")
    pool.register(int(unused[0]), b"unused")
    pool.release(used)
    pool.release(unused)
    for version in range(KEPT_VERSIONS):
        assert len(pool.lookup([b"unused"])) == 1
        if version == 1:  # the next turn of a rollout
            pool.share(pool.lookup([b"used"]))
            pool.release(used)
        pool.begin_version()
    assert len(pool.lookup([b"unused"])) == 0 and len(pool.lookup([b"used"])) == 1
    assert pool.num_free == 3


def test_a_run_of_short_versions_uses_few_of_many_blocks():
    pool, touched = BlockPool(1000), set()
    for version in range(100):
        blocks = pool.allocate(10)
        touched |= set(blocks.tolist())
        for block in blocks.tolist():
            pool.register(block, f"{version} {block}".encode())
        pool.release(blocks)
        pool.begin_version()
    assert len(touched) == 10 * KEPT_VERSIONS


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "share", "register", "version"]), st.integers(0, 50)),
        max_size=80,
    )
)
def test_every_block_is_owned_or_free_exactly_once(operations):
    pool, owners, keys = BlockPool(9), [], 0
    for action, pick in operations:
        if action == "allocate" and pool.num_free:
            owners.append(pool.allocate(pick % pool.num_free + 1))
        elif action == "release" and owners:
            pool.release(owners.pop(pick % len(owners)))
        elif action == "share" and owners:
            owners.append(owners[pick % len(owners)].copy())
            pool.share(owners[-1])
        elif action == "register" and owners:
            keys += 1
            pool.register(int(owners[pick % len(owners)][0]), str(keys).encode())
        elif action == "version":
            pool.begin_version()
        counted = np.zeros(9, np.int64)
        for held in owners:
            np.add.at(counted, held, 1)
        counted[0] = 1
        assert (counted == pool.refs).all()
        free = [*pool._free, *pool._free_cached]
        assert len(free) == len(set(free)) == pool.num_free
        assert sorted(free) == np.flatnonzero(counted == 0).tolist()
        found = [pool.lookup([str(k).encode()]) for k in range(1, keys + 1)]
        assert sum(map(len, found)) == len(pool._block_of)
