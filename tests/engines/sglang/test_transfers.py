"""Whole transfers between two handlers: chunks, aborts, deaths, wrong bytes."""

import pytest

from engines.sglang.messages import (
    AllWritten,
    AskHeld,
    AskLoad,
    Claim,
    Describe,
    Done,
    Failed,
    Prefilled,
    Release,
    Reserve,
    Reserved,
    Sampled,
    Send,
    Sent,
    SetDraining,
    SetKnobs,
    StopSend,
)

N = 21


def reserve(pair, prompt, end=N - 1, request_id="q", ttl_s=30.0):
    answer = pair.receiver.ask(Reserve, request_id=request_id, prompt=prompt[: end * 4], end=end, ttl_s=ttl_s)
    assert isinstance(answer, Reserved), answer
    return answer.address


def send(pair, prompt, address, rid="tt-1-q", chunk=None):
    """The sender's answer, once the generation is through and all notes are delivered."""
    call_id = pair.sender.tell(Send, rid=rid, prompt=prompt, address=address)
    for _ in pair.sender.prefill(rid, prompt[: address.end * 4], chunk):
        pair.settle()
    pair.settle()
    return pair.sender.answer(call_id)


def nothing_is_held(pair):
    for engine in (pair.sender, pair.receiver):
        assert engine.view.held == engine.handler.reservations.tokens == 0
        assert not engine.handler.reservations.writing


@pytest.mark.parametrize("chunk", [None, 1, 4, 7, 100])
def test_the_receiver_caches_what_the_sender_computed(pair, ids, chunk):
    prompt = ids(N)
    address = reserve(pair, prompt)
    sent = send(pair, prompt, address, chunk=chunk)
    assert isinstance(sent, Sent), sent
    assert (sent.report.bytes, sent.report.cached_tokens) == ((N - 1) * 16, 0)
    assert sent.report.prefill_s > 0
    stored = prompt[: (N - 1) * 4]
    assert pair.receiver.view.match(prompt)[0] == N - 1
    assert pair.receiver.view.kv(stored) == pair.sender.view.kv(stored)
    nothing_is_held(pair)


def test_chunks_leave_before_the_last_is_computed(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt)
    pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    passes = pair.sender.prefill("tt-1-q", prompt[: (N - 1) * 4], 5)
    next(passes)
    pair.settle()
    assert pair.network.writes == 1
    assert pair.receiver.view.match(prompt)[0] == 0


def test_only_what_the_receiver_lacks_is_sent(pair, ids):
    prompt = ids(N)
    send(pair, prompt, reserve(pair, prompt, end=8), rid="tt-1-q")
    pair.receiver.ask(Release, request_id="q")
    address = reserve(pair, prompt)
    assert address.begin == 8
    sent = send(pair, prompt, address, rid="tt-2-q")
    assert sent.report.bytes == (N - 1 - 8) * 16
    assert sent.report.cached_tokens == 8
    stored = prompt[: (N - 1) * 4]
    assert pair.receiver.view.kv(stored) == pair.sender.view.kv(stored)


@pytest.mark.parametrize("chunk", [None, 4, 6])
@pytest.mark.parametrize("end", [20, 16, 17])
def test_pages_move_whole(make_pair, ids, end, chunk):
    pair = make_pair(page_size=4)
    prompt = ids(N)
    address = reserve(pair, prompt, end=end)
    assert address.stored_end == end // 4 * 4
    sent = send(pair, prompt, address, chunk=chunk)
    assert sent.report.bytes == address.stored_end * 16
    stored = prompt[: address.stored_end * 4]
    assert pair.receiver.view.match(stored)[0] == address.stored_end
    assert pair.receiver.view.kv(stored) == pair.sender.view.kv(stored)


def test_a_transfer_of_nothing_is_held_at_once(pair, ids):
    prompt = ids(N)
    send(pair, prompt, reserve(pair, prompt))
    pair.receiver.ask(Release, request_id="q")
    address = reserve(pair, prompt)
    assert address.begin == address.end
    sent = send(pair, prompt, address, rid="tt-2-q")
    assert sent.report.bytes == 0


def test_sending_again_what_was_received_is_fine(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt)
    send(pair, prompt, address)
    assert isinstance(send(pair, prompt, address, rid="tt-2-q"), Sent)


def test_other_tokens_are_refused_before_any_byte_moves(pair, ids):
    address = reserve(pair, ids(N))
    refused = send(pair, ids(N, start=50), address)
    assert isinstance(refused, Failed)
    assert refused.code == "transfer_failed"
    assert pair.network.writes == 0


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda pair: pair.receiver.ask(Release, request_id="q"), "reservation_gone"),
        (lambda pair: pair.clock.pass_by(31.0), "reservation_gone"),
        (lambda pair: pair.receiver.ask(SetDraining, on=True), "reservation_gone"),
    ],
)
def test_a_reservation_that_is_gone_takes_nothing(pair, ids, spoil, code):
    address = reserve(pair, ids(N))
    spoil(pair)
    refused = send(pair, ids(N), address)
    assert (refused.status, refused.code) == (410, code)
    assert pair.network.writes == 0
    nothing_is_held(pair)


def test_a_receiver_that_was_started_anew_takes_nothing(pair, ids):
    address = reserve(pair, ids(N))
    other_life = type(address)(**{**{f: getattr(address, f) for f in address.__struct_fields__}, "epoch": "r-0"})
    assert send(pair, ids(N), other_life).code == "reservation_gone"


def test_corrupt_bytes_are_found_never_seen_and_can_be_sent_again(make_pair, ids):
    pair = make_pair(with_checksums=True)
    prompt = ids(N)
    address = reserve(pair, prompt)
    pair.network.corrupt = True
    failed = send(pair, prompt, address, chunk=8)
    assert failed.code == "transfer_failed"
    assert pair.receiver.view.match(prompt)[0] == 0
    pair.network.corrupt = False
    assert isinstance(send(pair, prompt, address, rid="tt-2-q", chunk=8), Sent)
    assert pair.receiver.view.match(prompt)[0] == N - 1


def test_slots_of_an_aborted_reservation_wait_for_the_write_under_way(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt)
    pair.network.slow = True
    call_id = pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    pair.settle()
    list(pair.sender.prefill("tt-1-q", prompt[: (N - 1) * 4]))
    pair.settle()
    pair.receiver.ask(Release, request_id="q")
    pair.settle()
    assert pair.receiver.view.held == N - 1
    assert pair.sender.answer(call_id) is None
    pair.network.slow = False
    pair.settle()
    assert pair.sender.answer(call_id).code == "reservation_gone"
    assert pair.receiver.view.match(prompt)[0] == 0
    nothing_is_held(pair)


def test_a_caller_that_leaves_stops_the_transfer_on_both_sides(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt)
    call_id = pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    pair.settle()
    pair.sender.ask(StopSend, rid="tt-1-q", status=400, code="bad_request", message="left")
    pair.settle()
    assert pair.sender.answer(call_id).message == "left"
    assert pair.receiver.handler.reservations.writing == 0
    assert isinstance(send(pair, prompt, address, rid="tt-2-q"), Sent)


def test_an_aborted_prefill_fails_its_transfer(pair, ids):
    prompt = ids(N)
    call_id = pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=reserve(pair, prompt))
    pair.settle()
    list(pair.sender.prefill("tt-1-q", prompt[: (N - 1) * 4], abort=True))
    assert pair.sender.answer(call_id).code == "bad_request"


def test_a_dead_receiver_fails_the_transfer_and_frees_the_sender(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt)
    pair.network.dead.add("r")
    call_id = pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    list(pair.sender.prefill("tt-1-q", prompt[: (N - 1) * 4]))
    pair.clock.pass_by(10.1)
    pair.sender.handler.poll(busy=False)
    assert pair.sender.answer(call_id).code == "transfer_failed"
    assert pair.sender.view.locks.total() == 0


def test_a_receiver_that_dies_half_way_fails_the_transfer(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt)
    call_id = pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    passes = pair.sender.prefill("tt-1-q", prompt[: (N - 1) * 4], 5)
    next(passes)
    pair.settle()
    pair.network.dead.add("r")
    for _ in passes:
        pair.sender.handler.poll(busy=False)
    assert pair.sender.answer(call_id).code == "transfer_failed"
    assert pair.sender.view.locks.total() == 0
    assert not pair.sender.transport.knows("r")  # so that the two have to meet again


def test_two_transfers_that_share_the_way_say_so(pair, ids):
    prompts = [ids(N), ids(N, 1000)]
    pair.network.slow = True
    call_ids = []
    for number, prompt in enumerate(prompts):
        address = reserve(pair, prompt, request_id=f"q{number}")
        call_ids.append(pair.sender.tell(Send, rid=f"tt-{number}-q", prompt=prompt, address=address))
        pair.settle()
        list(pair.sender.prefill(f"tt-{number}-q", prompt[: (N - 1) * 4]))
    pair.settle()
    pair.network.slow = False
    pair.settle()
    assert [pair.sender.answer(call_id).report.sharing for call_id in call_ids] == [2, 1]


def test_a_dead_sender_frees_the_receiver_within_the_ttl(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt, ttl_s=8.0)
    pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    pair.settle()
    assert pair.receiver.handler.reservations.writing == 1
    pair.clock.pass_by(8.0)
    pair.receiver.handler.poll(busy=False)
    assert pair.receiver.view.held == 0


def test_a_sender_that_is_too_late_writes_nothing_more(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt, ttl_s=8.0)
    call_id = pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    passes = pair.sender.prefill("tt-1-q", prompt[: (N - 1) * 4], 5)
    next(passes)
    pair.settle()
    assert pair.network.writes == 1
    pair.clock.pass_by(7.2)
    for _ in passes:
        pair.sender.handler.poll(busy=False)
    assert (pair.network.writes, pair.sender.answer(call_id).code) == (1, "reservation_gone")


def test_a_long_pass_before_go_is_read_does_not_lengthen_the_time_to_write(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt, ttl_s=8.0)
    call_id = pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    pair.receiver.handler.poll(busy=False)
    pair.clock.pass_by(7.5)
    list(pair.sender.prefill("tt-1-q", prompt[: (N - 1) * 4]))
    pair.sender.handler.poll(busy=False)
    assert (pair.network.writes, pair.sender.answer(call_id).code) == (0, "reservation_gone")


def test_an_unknown_receiver_is_refused_at_once(pair, ids):
    address = reserve(pair, ids(N))
    pair.sender.transport.forget("r")
    assert pair.sender.ask(Send, rid="tt-1-q", prompt=ids(N), address=address).code == "transfer_failed"


def test_two_transfers_at_once_do_not_mix(pair, ids):
    prompts = [ids(N), ids(N, start=100)]
    calls = []
    runs = []
    for number, prompt in enumerate(prompts):
        address = reserve(pair, prompt, request_id=f"q{number}")
        rid = f"tt-{number}-q"
        calls.append(pair.sender.tell(Send, rid=rid, prompt=prompt, address=address))
        runs.append(pair.sender.prefill(rid, prompt[: (N - 1) * 4], 6))
    for _ in range(5):
        for run in runs:
            next(run, None)
            pair.settle()
    for call, prompt in zip(calls, prompts, strict=True):
        assert isinstance(pair.sender.answer(call), Sent)
        stored = prompt[: (N - 1) * 4]
        assert pair.receiver.view.kv(stored) == pair.sender.view.kv(stored)


def test_garbage_between_engines_is_ignored(pair, ids):
    pair.sender.transport.deliver("r", b"\xff\x00garbage")
    pair.sender.transport.deliver("r", b"")
    pair.settle()
    assert isinstance(send(pair, ids(N), reserve(pair, ids(N))), Sent)


def test_a_full_pool_says_no_at_once(pair, ids):
    reserve(pair, ids(60), end=59)
    refused = pair.receiver.ask(Reserve, request_id="other", prompt=ids(20, start=200), end=20, ttl_s=5.0)
    assert (refused.status, refused.code) == (429, "no_kv_room")
    assert refused.retry_after_s


def test_a_claim_keeps_received_kv_and_frees_empty_room(pair, ids):
    prompt = ids(N)
    reserve(pair, prompt)
    pair.receiver.ask(Claim, request_id="q")
    assert pair.receiver.view.held == 0


def test_an_idle_loop_sleeps_briefly_while_memory_is_promised(pair, ids):
    assert not pair.receiver.handler.holds_memory
    reserve(pair, ids(N))
    waits_ms: list[int] = []
    pair.receiver.handler.rest(waits_ms.append, nap=pytest.fail)
    assert pair.receiver.handler.holds_memory
    assert 0 < waits_ms[0] < 10


def test_an_idle_loop_takes_notes_while_it_rests_until_there_is_input(pair, ids):
    address = reserve(pair, ids(N))
    pair.sender.tell(Send, rid="tt-1-q", prompt=ids(N), address=address)
    pair.receiver.handler.poll(busy=False)
    inputs = iter([False, False, True])
    naps: list[float] = []
    pair.sender.handler.rest(lambda wait_ms: next(inputs), naps.append)
    assert len(naps) == 2
    assert pair.sender.handler.holds_memory


def test_an_idle_loop_rests_only_for_a_moment(pair, ids):
    address = reserve(pair, ids(N))
    pair.sender.tell(Send, rid="tt-1-q", prompt=ids(N), address=address)
    begun_s = pair.clock()
    pair.sender.handler.rest(lambda wait_ms: False, pair.clock.pass_by)
    assert pair.clock() - begun_s < 0.1


def test_nothing_stays_promised_in_a_cache_that_is_emptied(pair, ids):
    reserve(pair, ids(N))
    pair.receiver.handler.before_flush()
    nothing_is_held(pair)


def test_load_says_what_is_reserved_apart_from_what_is_used(pair, ids):
    reserve(pair, ids(N))
    load = pair.receiver.ask(AskLoad).load
    assert (load.kv_reserved_tokens, load.kv_used_tokens, load.kv_capacity_tokens) == (N - 1, 0, 64)


def test_knobs_turn_and_bad_ones_change_nothing(pair):
    answer = pair.sender.ask(SetKnobs, chunked_prefill_tokens=32)
    assert (answer.load.chunked_prefill_tokens, answer.load.prefill_decode_interval) == (32, 0)
    refused = pair.sender.ask(SetKnobs, chunked_prefill_tokens=15, prefill_decode_interval=3)
    assert refused.code == "bad_request"
    assert "chunked_prefill_tokens" in refused.message
    assert pair.sender.ask(AskLoad).load.prefill_decode_interval == 0


def test_a_draining_engine_takes_no_transfers(pair, ids):
    address = reserve(pair, ids(N))
    for engine in (pair.sender, pair.receiver):
        engine.ask(SetDraining, on=True)
    assert pair.receiver.ask(Reserve, request_id="x", prompt=ids(5), end=5, ttl_s=5.0).code == "draining"
    assert pair.sender.ask(Send, rid="tt-1-q", prompt=ids(N), address=address).code == "draining"


def test_a_generation_tells_when_it_has_its_first_token(pair, ids):
    list(pair.sender.prefill("tt-5-x", ids(N), 8))
    told = [report for report in pair.sender.view.reports if isinstance(report, Prefilled)]
    assert [event.rid for event in told] == ["tt-5-x"]
    assert told[0].prefill_s == pytest.approx(0.3)
    assert told[0].queue_s == 0.0


def test_passes_are_sampled_with_what_they_computed(pair, ids):
    list(pair.sender.prefill("tt-5-x", ids(N), 8))
    told = [report for report in pair.sender.view.reports if isinstance(report, Sampled)]
    passes = [record for event in told for record in event.passes]
    assert [record.prefill_tokens for record in passes] == [8, 8, 5]
    assert sum(record.prefill_context_tokens for record in passes) == N * (N + 1) // 2
    assert told[-1].totals.passes == 3
    assert told[-1].totals.prefill_tokens == N


def test_a_received_transfer_is_counted(pair, ids):
    prompt = ids(N)
    send(pair, prompt, reserve(pair, prompt))
    received = pair.receiver.ask(AskLoad).totals
    assert received.transfer_bytes == (N - 1) * 16
    assert received.transfers == {"ok": 1}


def test_who_has_written_everything_can_ask_whether_it_is_held_before_the_receivers_note_comes(pair, ids):
    prompt = ids(N)
    address = reserve(pair, prompt)
    pair.sender.tell(Send, rid="tt-1-q", prompt=prompt, address=address)
    pair.settle()
    list(pair.sender.prefill("tt-1-q", prompt[: address.end * 4]))
    (written,) = (report for report in pair.sender.view.reports if isinstance(report, AllWritten))
    assert written.report.bytes == (N - 1) * 16
    answer = pair.receiver.ask(AskHeld, request_id="q", nonce=address.nonce)
    assert isinstance(answer, Done)
    assert not any(isinstance(report, Sent) for report in pair.sender.view.reports)


def test_a_reservation_that_nothing_was_written_to_is_not_held(pair, ids):
    address = reserve(pair, ids(N))
    assert pair.receiver.ask(AskHeld, request_id="q", nonce=address.nonce).code == "transfer_failed"
    assert pair.receiver.ask(AskHeld, request_id="q", nonce="another").code == "reservation_gone"


def test_an_engine_describes_itself(pair):
    described = pair.sender.ask(Describe)
    assert described.peer.agent == "s"
    assert described.peer.layout == pair.sender.view.layout
    assert described.transports == ("memory",)


@pytest.mark.parametrize(("release", "reserved_tokens"), [(False, N - 1), (True, 0)])
def test_whoever_was_answered_can_know_the_load_since(pair, ids, release, reserved_tokens):
    reserve(pair, ids(N))
    if release:
        pair.receiver.ask(SetDraining, on=True)
    *_, told = (report for report in pair.receiver.view.reports if isinstance(report, Sampled))
    assert told.load.kv_reserved_tokens == reserved_tokens
