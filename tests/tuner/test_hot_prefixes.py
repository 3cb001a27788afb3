"""Hot contexts: found in sketches, and carried from plan to plan."""

import numpy as np
import pytest

from engines.types import Role
from tests.support.traffic import engine_states
from tuner.hot_prefixes import carried, holders, hot_contexts, is_covered
from tuner.plan import BOOTSTRAP_PLAN, HotPrefix
from tuner.prefix import BLOCK_BYTES, block_hashes, sketch
from tuner.sharing import LEVELS, Prompts

FLEET = engine_states(4)
IDS = ("e0", "e1", "e2", "e3")


def text(blocks, salt):
    return (f"{salt} " * (blocks * BLOCK_BYTES))[: blocks * BLOCK_BYTES].encode()


def prompts(*texts):
    sketches = [sketch(block_hashes(each)) for each in texts]
    columns = np.zeros((len(texts), LEVELS), dtype=np.uint64)
    for row, hashes in enumerate(sketches):
        columns[row, : len(hashes)] = hashes
    nbytes = np.array([float(len(each)) for each in texts])
    unknown = np.full(len(texts), np.nan)
    return Prompts(columns, np.array([len(each) for each in sketches]), nbytes, nbytes / 4, nbytes / 4, unknown)


def alike(count, blocks, salt, own=1):
    """Prompts that share `blocks` blocks and go on differently for `own` more."""
    return [text(blocks, salt) + text(own, f"{salt} {number}") for number in range(count)]


def other(count):
    return [text(8, f"other {number}") for number in range(count)]


def test_what_most_prompts_begin_with_is_found_by_the_hash_that_routers_see():
    (found,) = hot_contexts(prompts(*alike(60, 16, "document"), *other(40)), 4)
    assert (found.blocks, found.requests, found.share, found.tokens) == (16, 60, 0.6, 2048)
    (request,) = alike(1, 16, "document")
    assert int(found.prefix, 16) == block_hashes(request)[found.blocks - 1]


def test_the_length_is_what_is_certainly_shared():
    (found,) = hot_contexts(prompts(*alike(60, 25, "document", own=20)), 4)
    assert found.blocks == 16


@pytest.mark.parametrize(
    "texts",
    [
        [],
        alike(15, 16, "document"),  # too few to tell
        alike(30, 16, "document") + other(70),  # one engine of four serves that well
        alike(60, 2, "document") + other(40),  # quicker computed than copied
        other(100),
    ],
)
def test_nothing_is_hot_for_less(texts):
    assert hot_contexts(prompts(*texts), 4) == []


def test_what_is_too_much_depends_on_the_fleet():
    texts = prompts(*alike(30, 16, "document"), *other(70))
    assert [len(hot_contexts(texts, engines)) for engines in (1, 2, 4, 8)] == [0, 0, 0, 1]


def test_a_beginning_that_forks_is_hot_beside_its_branches():
    system = text(8, "system")
    one = [system + each for each in alike(50, 24, "one")]
    two = [system + each for each in alike(45, 24, "two")]
    found = hot_contexts(prompts(*one, *two), 8)
    assert [(each.blocks, each.requests) for each in found] == [(32, 50), (32, 45), (8, 95)]


def test_the_most_work_comes_first_and_eight_are_enough():
    texts = [each for number in range(12) for each in alike(20 + number, 16, f"document {number}")]
    found = hot_contexts(prompts(*texts), 100)
    assert [each.requests for each in found] == [31, 30, 29, 28, 27, 26, 25, 24]


def replica(salt, *engines):
    return HotPrefix(prefix=f"{salt:016x}", blocks=16, engines=engines)


def context(salt):
    (found,) = hot_contexts(prompts(*alike(60, 16, f"document {salt}")), 4)
    return found


def test_engines_that_only_prefill_hold_no_copies():
    assert holders(FLEET, {"e0": Role.PREFILL, "e1": Role.DECODE}) == ("e1", "e2", "e3")


def test_a_plan_covers_a_context_if_all_engines_are_to_hold_it():
    hot = context(1)
    plan = BOOTSTRAP_PLAN.model_copy(update={"replicas": (HotPrefix(prefix=hot.prefix, blocks=16, engines=IDS[:2]),)})
    assert is_covered(hot, plan, IDS[:2])
    assert not is_covered(hot, plan, IDS)
    assert not is_covered(context(2), plan, IDS[:2])


def test_what_is_hot_still_is_kept_through_other_changes_and_goes_to_the_engines_of_the_new_plan():
    hot = context(1)
    kept, cold = HotPrefix(prefix=hot.prefix, blocks=16, engines=IDS[:2]), replica(7, *IDS[:2])
    plan = BOOTSTRAP_PLAN.model_copy(update={"replicas": (kept, cold)})
    assert carried([], plan, [hot], IDS[1:]) == (kept.model_copy(update={"engines": IDS[1:]}),)


def test_new_contexts_join_the_old_ones_once_each():
    hot = context(1)
    old = HotPrefix(prefix=hot.prefix, blocks=16, engines=IDS[:2])
    plan = BOOTSTRAP_PLAN.model_copy(update={"replicas": (old,)})
    new = HotPrefix(prefix=hot.prefix, blocks=16, engines=IDS), replica(8, *IDS)
    assert [each.prefix for each in carried(new, plan, [hot], IDS)] == [hot.prefix, replica(8, "e0").prefix]


def test_a_single_engine_is_given_no_copies():
    assert carried([replica(8, *IDS)], BOOTSTRAP_PLAN, [], ("e0",)) == ()
