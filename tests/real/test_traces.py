"""One trace, and one set of logs, over a router and real engines."""

import json

from tests.support.otlp import BALANCED
from tests.support.sglang import BYTES_PER_TOKEN

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
ROLES = {"e0": "prefill", "e1": "decode"}
MARKER = "xyzzy-what-a-client-has-said"


async def test_a_balanced_request_is_one_tree_over_router_and_both_engines(fleet, collector, prompts):
    plan = await fleet.plan("balanced", ROLES, offload_ratio=0.25, min_remote_tokens=1, bypass_cached_fraction=1.0)
    ids = [prompts.randrange(1000, 40000) for _ in range(200)]
    asked = {"model": fleet.keys.model, "prompt": ids, "max_tokens": 4, "ignore_eos": True, "stream": True}
    answer = await fleet.http.post("/v1/completions", json=asked, headers=HEADERS)
    assert answer.status_code == 200, answer.text

    tree = await collector.tree(TRACE_ID, len(BALANCED.splitlines()))

    assert tree.drawn() == BALANCED
    assert not any(span.failed for span in tree.spans)
    (root,) = tree.roots
    expected = {
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 150,
        "trimtab.pattern": "balanced",
        "trimtab.plan.version": plan.version,
        "trimtab.split.begin": 0,
        "trimtab.split.end": 150,
        "trimtab.engine.prefill": "e0",
        "trimtab.engine.decode": "e1",
        "trimtab.transfer.bytes": 150 * BYTES_PER_TOKEN,
    }
    assert root.attributes | expected == root.attributes
    sent = tree.named("POST /microserving/remote_send", "server")
    assert [child.name for child in tree.children(sent)] == ["queue", "prefill", "transfer"]
    assert sent.attributes["trimtab.transfer.bytes"] == 150 * BYTES_PER_TOKEN


async def test_engines_log_nothing_that_a_client_has_said(fleet, pair):
    await fleet.plan("disaggregated", ROLES, min_remote_tokens=1)
    said = [{"role": "user", "content": MARKER}]
    statuses = []
    for more in ({}, {"temperature": MARKER}, {"messages": [{"role": MARKER, "content": MARKER}]}, {"tools": MARKER}):
        asked = {"model": fleet.keys.model, "messages": said, "max_tokens": 4} | more
        statuses.append((await fleet.http.post("/v1/chat/completions", json=asked, headers=HEADERS)).status_code)
    assert statuses[0] == 200
    assert statuses[1] == 400
    for engine in pair.engines:
        logged = engine.log_path.read_text(errors="replace")
        assert MARKER not in logged
        ours = [json.loads(line) for line in logged.splitlines() if line.startswith('{"')]
        assert any(line["event"] == "microserving verbs are there" for line in ours)
