from tuner.prefix import BLOCK_BYTES, PrefixIndex, block_hashes, sketch

TEXT = bytes(range(256)) * 40


def test_equal_prefixes_have_equal_hashes_and_a_change_alters_all_later_ones():
    changed = TEXT[:1500] + b"!" + TEXT[1501:]
    ours, theirs = block_hashes(TEXT), block_hashes(changed)
    shared = 1500 // BLOCK_BYTES
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs[shared:])


def test_only_whole_blocks_count():
    assert block_hashes(TEXT[: BLOCK_BYTES - 1]) == []
    assert len(block_hashes(TEXT[: 2 * BLOCK_BYTES + 1])) == 2


def test_match_gives_the_depth_that_each_engine_holds():
    index = PrefixIndex()
    hashes = block_hashes(TEXT)
    index.add(hashes[:3], "a")
    index.add(hashes[:7], "b")
    assert index.match(hashes) == {"a": 3, "b": 7}
    assert index.match(hashes[:2]) == {"a": 2, "b": 2}
    assert index.match(block_hashes(TEXT[1:])) == {}
    assert index.match([]) == {}


def test_a_forgotten_engine_is_not_matched_and_may_come_back_empty():
    index = PrefixIndex()
    hashes = block_hashes(TEXT)
    index.add(hashes, "a")
    index.forget("a")
    assert index.match(hashes) == {}
    index.add(hashes[:1], "a")
    assert index.match(hashes) == {"a": 1}


def test_memory_is_bounded_and_what_is_still_used_survives():
    index = PrefixIndex(capacity=100)
    hot = block_hashes(TEXT)[:5]
    for round_ in range(1000):
        index.add(hot, "a")
        index.add([round_ * 10_000 + at for at in range(10)], "b")
    assert index.match(hot) == {"a": 5}
    assert len(index._young) + len(index._old) <= 130


def test_a_sketch_is_logarithmic_and_keeps_the_first_block():
    hashes = block_hashes(TEXT)
    assert sketch(hashes) == (hashes[0], hashes[1], hashes[3], hashes[7], hashes[15])
    assert sketch([]) == ()
