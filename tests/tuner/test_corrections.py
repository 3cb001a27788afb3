import pytest

from tuner.corrections import Corrections


def taught(*lessons: tuple[str, float, float], times: int = 20) -> Corrections:
    corrections = Corrections()
    for _ in range(times):
        for lesson in lessons:
            corrections = corrections.learn(*lesson)
    return corrections


def test_without_measurements_predictions_are_taken_as_they_are():
    assert Corrections().factor("data_parallel/0/0") == 1.0


def test_a_region_that_keeps_falling_short_is_predicted_lower():
    corrections = taught(("balanced/1/1", 0.9, 0.45))
    assert corrections.factor("balanced/1/1") == pytest.approx(0.5, abs=0.06)


def test_an_untried_region_inherits_the_common_error_so_that_it_does_not_look_better_than_what_is_measured():
    corrections = taught(("balanced/1/1", 0.9, 0.72))
    assert corrections.factor("disaggregated/0/2") < 0.9
    assert corrections.factor("disaggregated/0/2") >= corrections.factor("balanced/1/1")


def test_regions_are_told_apart():
    corrections = taught(("data_parallel/0/0", 0.9, 0.9), ("balanced/1/1", 0.9, 0.6))
    assert corrections.factor("balanced/1/1") < 0.8 < corrections.factor("data_parallel/0/0")


def test_one_disaster_moves_a_prediction_by_no_more_than_a_factor_of_two():
    corrections = taught(("balanced/1/1", 1.0, 0.0), times=100)
    assert corrections.factor("balanced/1/1") == pytest.approx(0.5)


def test_old_errors_fade():
    corrections = taught(("balanced/1/1", 0.9, 0.5), times=10)
    for _ in range(60):
        corrections = corrections.learn("balanced/1/1", 0.9, 0.9)
    assert corrections.factor("balanced/1/1") > 0.95
