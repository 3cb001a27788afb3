"""Profiles: files that load whole or not at all, and a latency model that adds up."""

from pathlib import Path

import msgspec
import pytest

from engines.emulated.profile import PROFILES, Profile, ProfileError, load_profile, profile_names


def alone(n: int, cached: int = 0) -> float:
    """The context product of one sequence."""
    return n * (cached + n / 2)


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_loads_under_its_name_and_says_where_its_numbers_are_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.kind == profile.name == name
    assert set(profile.source) == {"prefill", "step", "transfer", "kv", "scheduler"}
    assert all(profile.source.values())


def test_the_promised_profiles_ship() -> None:
    assert {"h100-tp4-llama-3.1-70b", "a100-tp4-llama-2-70b", "a100-llama-2-13b", "laptop"} <= set(profile_names())


@pytest.mark.parametrize(
    ("name", "fitted_s"),
    [("h100-tp4-llama-3.1-70b", 0.138988), ("a100-tp4-llama-2-70b", 0.489446), ("a100-llama-2-13b", 0.333473)],
)
def test_three_thousand_tokens_take_what_the_fit_says(name: str, fitted_s: float) -> None:
    assert load_profile(name).prefill_s(3000, alone(3000)) == pytest.approx(fitted_s, rel=1e-4)


def test_the_laptop_profile_moves_smollm_sized_kv_and_steps_in_15_to_20_ms() -> None:
    laptop = load_profile("laptop")
    assert laptop.kv_layout.bytes_per_token == 23_040
    assert all(0.015 <= laptop.step_s(batch, 1000 * batch) <= 0.020 for batch in range(1, 5))


def test_prefill_in_two_chunks_costs_one_more_fixed_part_and_nothing_else() -> None:
    profile = load_profile("h100-tp4-llama-3.1-70b")
    whole = profile.prefill_s(3000, alone(3000))
    chunks = profile.prefill_s(2000, alone(2000)) + profile.prefill_s(1000, alone(1000, cached=2000))
    assert chunks == pytest.approx(whole + profile.a_s)


def test_a_mixed_pass_costs_its_prefill_and_what_the_decodes_add() -> None:
    profile = load_profile("laptop")
    mixed = profile.pass_s(100, alone(100), 4, 800)
    assert mixed == pytest.approx(profile.prefill_s(100, alone(100)) + profile.step_s(4, 800) - profile.d_s)
    assert profile.pass_s(0, 0, 4, 800) == profile.step_s(4, 800)
    assert profile.pass_s(100, alone(100), 0, 0) == profile.prefill_s(100, alone(100))


def test_transfers_that_share_the_link_take_longer_in_proportion() -> None:
    profile = load_profile("laptop")
    assert profile.transfer_s(1_000_000) == pytest.approx(profile.g_s + 0.001)
    assert profile.transfer_s(1_000_000, 3) == pytest.approx(profile.g_s + 0.003)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"'h200'.*laptop"):
        load_profile("h200")


def test_a_file_is_loaded_by_path_and_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((PROFILES / "laptop.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert msgspec.structs.replace(load_profile(str(path)), name="laptop") == load_profile("laptop")
    assert load_profile(str(path)).kind == "mine"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("d_s = 1.5e-2", "d_s = -1.5e-2", "d_s"),
        ("bandwidth_bytes_per_s = 1.0e9", "bandwidth_bytes_per_s = 0.0", "bandwidth_bytes_per_s"),
        ("max_running = 64", "max_runing = 64", "max_runing"),
        ("a_s = 5.0e-3", "", "a_s"),
        ("a_s = 5.0e-3", "a_s = ", "line"),
    ],
)
def test_a_bad_profile_is_refused_with_the_reason(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    text = (PROFILES / "laptop.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ProfileError, match=complaint):
        load_profile(str(path))


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere\.toml"):
        load_profile(str(tmp_path / "nowhere.toml"))


def test_one_number_of_a_profile_can_be_varied() -> None:
    laptop = load_profile("laptop")
    varied: Profile = msgspec.structs.replace(laptop, kv_capacity_tokens=1000)
    assert (varied.kv_capacity_tokens, varied.d_s, laptop.kv_capacity_tokens) == (1000, laptop.d_s, 40_960)
