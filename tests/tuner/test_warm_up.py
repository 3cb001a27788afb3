import numpy as np

from tuner.warm_up import FORGET_S, WarmUp


def warming(warm_up: WarmUp, engine_id: str | None, at_s: float) -> bool:
    return bool(warm_up.warming([engine_id], np.array([at_s]))[0])


def test_an_engine_warms_up_after_it_was_first_seen():
    warm_up = WarmUp(warm_up_s=10)
    warm_up.seen({"a": "1"}, 100.0)
    warm_up.seen({"a": "1"}, 105.0)
    assert [warming(warm_up, "a", at_s) for at_s in (99.0, 100.0, 109.9, 110.0)] == [False, True, True, False]


def test_an_engine_that_joined_between_two_looks_warms_up_from_the_first_of_them():
    warm_up = WarmUp(warm_up_s=10)
    warm_up.seen({"a": "1"}, 95.0)
    warm_up.seen({"a": "1", "b": "1"}, 100.0)
    moments = (94.0, 95.0, 99.0, 109.9, 110.0)
    assert [warming(warm_up, "b", at_s) for at_s in moments] == [False, True, True, True, False]


def test_a_new_epoch_is_a_new_engine():
    warm_up = WarmUp(warm_up_s=10)
    warm_up.seen({"a": "1"}, 0.0)
    warm_up.seen({"a": "2"}, 100.0)
    assert warming(warm_up, "a", 105.0)
    assert not warming(warm_up, "a", 50.0)


def test_engines_never_seen_are_warm():
    warm_up = WarmUp(warm_up_s=10)
    assert not warming(warm_up, "a", 5.0)
    warm_up.seen({"b": "1"}, 0.0)
    assert not warming(warm_up, "a", 5.0)
    assert not warming(warm_up, None, 5.0)


def test_engines_that_are_long_gone_are_forgotten():
    warm_up = WarmUp(warm_up_s=10)
    for number in range(1000):
        warm_up.seen({f"e{number}": "1"}, 60.0 * number)
    assert len(warm_up._epochs) <= FORGET_S / 60 + 1
