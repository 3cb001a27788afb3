"""The context cache against a plain set of prefixes, and what it may and may not evict."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.emulated.radix import RadixCache


def tokens(*ids: int) -> "array[int]":
    return array("I", ids)


def test_nothing_matches_in_an_empty_cache() -> None:
    cache = RadixCache()
    assert cache.match(tokens(1, 2, 3)).length == 0
    assert cache.match(tokens()).length == 0
    cache.check()


def test_a_match_ends_where_the_tokens_part_also_within_an_edge() -> None:
    cache = RadixCache()
    assert cache.insert(tokens(1, 2, 3, 4, 5)).added_tokens == 5
    assert cache.match(tokens(1, 2, 3, 9)).length == 3
    assert cache.match(tokens(1, 2, 3, 4, 5, 6)).length == 5
    assert cache.match(tokens(1, 2)).length == 2
    assert cache.match(tokens(2)).length == 0
    assert cache.size_tokens == 5
    cache.check()


def test_tokens_that_share_only_bytes_do_not_match() -> None:
    cache = RadixCache()
    cache.insert(tokens(0x01020304, 0x05060708))
    assert cache.match(tokens(0x01020304, 0x05060799)).length == 1
    assert cache.match(tokens(0x99020304)).length == 0


def test_only_what_lies_before_end_is_matched_and_inserted() -> None:
    cache = RadixCache()
    assert cache.insert(tokens(1, 2, 3, 4), 3).added_tokens == 3
    assert cache.match(tokens(1, 2, 3, 4)).length == 3
    assert cache.match(tokens(1, 2, 3, 4), 2).length == 2


def test_inserting_again_adds_only_what_is_new() -> None:
    cache = RadixCache()
    cache.insert(tokens(1, 2, 3))
    assert cache.insert(tokens(1, 2, 3)).added_tokens == 0
    assert cache.insert(tokens(1, 2, 7, 8)).added_tokens == 2
    assert cache.size_tokens == 5


def test_a_peek_leaves_the_order_of_eviction_as_it_was() -> None:
    cache = RadixCache()
    cache.insert(tokens(1, 1))
    cache.insert(tokens(2, 2))
    assert cache.peek(tokens(1, 1, 5)) == 2
    cache.evict(1)
    assert (cache.peek(tokens(1, 1)), cache.peek(tokens(2, 2))) == (0, 2)


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache()
    for first in (1, 2, 3):
        cache.insert(tokens(first, 10, 11))
    cache.match(tokens(1, 10, 11))
    assert cache.evict(1) == 3
    assert [cache.peek(tokens(first, 10, 11)) for first in (1, 2, 3)] == [3, 0, 3]
    cache.check()


def test_eviction_works_its_way_up_from_the_leaves() -> None:
    cache = RadixCache()
    cache.insert(tokens(1, 2, 3, 4))
    cache.insert(tokens(1, 2, 5))
    assert cache.evict(5) == 5
    assert (cache.size_tokens, cache.peek(tokens(1, 2))) == (0, 0)
    cache.check()


def test_a_pinned_prefix_stays_and_what_hangs_on_it_goes() -> None:
    cache = RadixCache()
    cache.insert(tokens(1, 2, 3, 4))
    match = cache.match(tokens(1, 2, 9))
    cache.lock(match.node)
    assert (match.length, cache.pinned_tokens, cache.evictable_tokens) == (2, 2, 2)
    assert cache.evict(100) == 2
    assert cache.peek(tokens(1, 2, 3, 4)) == 2
    cache.unlock(match.node)
    assert (cache.pinned_tokens, cache.evict(100)) == (0, 2)
    cache.check()


def test_a_pin_survives_that_its_edge_is_split() -> None:
    cache = RadixCache()
    node = cache.insert(tokens(1, 2, 3, 4)).node
    cache.lock(node)
    cache.insert(tokens(1, 2, 8))
    assert cache.pinned_tokens == 4
    cache.check()
    assert cache.evict(100) == 1
    cache.unlock(node)
    assert cache.pinned_tokens == 0
    cache.check()


def test_each_lock_wants_its_own_unlock() -> None:
    cache = RadixCache()
    node = cache.insert(tokens(1, 2)).node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert (cache.evict(1), cache.locks) == (0, 1)
    cache.unlock(node)
    assert (cache.evict(1), cache.locks) == (2, 0)


def test_a_check_tells_of_a_wrong_count() -> None:
    cache = RadixCache()
    cache.insert(tokens(1, 2))
    cache.size_tokens += 1
    with pytest.raises(RuntimeError, match="counted 3"):
        cache.check()


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=25)


@given(prompts)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_without_eviction_it_holds_exactly_the_prefixes_inserted(inserted: list[list[int]]) -> None:
    cache, prefixes = RadixCache(), set[tuple[int, ...]]()
    for prompt in inserted:
        known = max((n for n in range(len(prompt) + 1) if tuple(prompt[:n]) in prefixes), default=0)
        assert cache.match(array("I", prompt)).length == known
        assert cache.insert(array("I", prompt)).added_tokens == len(prompt) - known
        prefixes |= {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)}
        assert cache.size_tokens == len(prefixes)
        cache.check()


steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "pin", "unpin", "evict"]), st.lists(st.integers(0, 2), min_size=1, max_size=9)
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_whatever_happens_pinned_prefixes_stay_and_the_counts_hold(steps: list[tuple[str, list[int]]]) -> None:
    cache, pins = RadixCache(), []
    for verb, ids in steps:
        prompt = array("I", ids)
        if verb == "insert":
            cache.insert(prompt)
        elif verb == "pin":
            match = cache.match(prompt)
            cache.lock(match.node)
            pins.append((prompt[: match.length], match.node))
        elif verb == "unpin" and pins:
            cache.unlock(pins.pop(len(ids) % len(pins))[1])
        elif verb == "evict":
            before, evictable = cache.size_tokens, cache.evictable_tokens
            freed = cache.evict(len(ids))
            assert freed == before - cache.size_tokens
            assert freed >= min(len(ids), evictable)
        cache.check()
        assert all(cache.peek(prefix) == len(prefix) for prefix, _ in pins)
    for _, node in pins:
        cache.unlock(node)
    cache.evict(cache.size_tokens)
    assert (cache.size_tokens, cache.pinned_tokens, cache.locks) == (0, 0, 0)
