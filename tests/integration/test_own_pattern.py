"""The example in docs/patterns.md is installed as a user would install it, and serves."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.fleet import MODEL, text_of

DOCS = Path(__file__).parents[2] / "docs" / "patterns.md"


@pytest.fixture
def installed_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    entry = re.search(r"```toml\n\[project\.entry-points\.\"(.+?)\"\]\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    assert entry is not None
    info = tmp_path / "my_patterns-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-patterns\nVersion: 1.0\n")
    points = entry[2].replace('"', "")
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{points}")
    (tmp_path / "my_patterns.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)


async def test_the_documented_pattern_splits_long_prompts_in_the_middle_and_leaves_short_ones(
    installed_example, start_fleet
):
    fleet = await start_fleet(2)
    await fleet.plan("halves", {"e0": "prefill", "e1": "decode"})
    for prompt in ("short", text_of(1500)):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 5}
        answer = await fleet.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    short, long = await fleet.records(2)
    assert (short.pattern, short.split_end, short.prefill_engine) == ("halves", None, None)
    assert (long.split_end, long.prefill_engine) == (long.prompt_tokens // 2, "e0")
    assert long.cached_tokens == long.split_end
    await fleet.settled()


async def test_a_plan_with_a_pattern_that_is_not_installed_is_refused_and_the_old_one_stays(start_fleet):
    fleet = await start_fleet(1)
    await fleet.plan("data_parallel")
    with pytest.raises(AssertionError, match="plan 2 applied"):
        await fleet.plan("nowhere_installed", within_s=0.5)
    assert fleet.running.service._board.plan.pattern == "data_parallel"
    answer = await fleet.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 2})
    assert answer.status_code == 200
    assert 'trimtab_documents_refused_total{kind="plan"} 1.0' in (await fleet.http.get("/metrics")).text


@pytest.mark.parametrize("body", ["return\n    yield", "yield call.generate('nobody')", "1 / 0\n    yield"])
async def test_a_broken_pattern_is_an_error_to_its_client_and_harms_no_one_else(
    body, tmp_path, monkeypatch, start_fleet
):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trimtab.patterns]\nbroken = broken_pattern:broken\n")
    (tmp_path / "broken_pattern.py").write_text(f"async def broken(call):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_pattern", raising=False)
    fleet = await start_fleet(1)
    await fleet.plan("broken")
    ask = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    assert (await fleet.http.post("/v1/completions", json=ask)).status_code >= 500
    await fleet.plan("data_parallel")
    assert (await fleet.http.post("/v1/completions", json=ask)).status_code == 200
    await fleet.settled()
