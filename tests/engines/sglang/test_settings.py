"""Settings of the plugin."""

import pytest

from engines.sglang.settings import BadSettings, load_settings


def test_the_environment_sets_them(monkeypatch):
    monkeypatch.setenv("TRIMTAB_SGLANG_ENGINE_ID", "e1")
    monkeypatch.setenv("TRIMTAB_SGLANG_CHECKSUM", "1")
    settings = load_settings()
    assert (settings.engine_id, settings.checksum, settings.redis_url) == ("e1", True, None)


def test_a_bad_one_is_named_as_it_was_set(monkeypatch):
    monkeypatch.setenv("TRIMTAB_SGLANG_HEARTBEAT_S", "-1")
    with pytest.raises(BadSettings, match="TRIMTAB_SGLANG_HEARTBEAT_S"):
        load_settings()
