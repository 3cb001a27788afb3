"""Addresses, layouts and notes."""

import base64

import pytest

from engines.errors import BadRequest, LayoutMismatch, ReservationGone
from engines.sglang.wire import (
    Held,
    KvAddress,
    Offer,
    Refused,
    check_layouts,
    decode_address,
    decode_note,
    encode_note,
)
from engines.types import KvLayout

LAYOUT = KvLayout(model="m", dtype="bfloat16", layers=2, kv_heads=2, head_dim=4)
ADDRESS = KvAddress(
    url="http://127.0.0.1:1",
    agent="a.1",
    epoch="1",
    request_id="ü",
    nonce="n",
    begin=0,
    end=5,
    stored_end=5,
    layout=LAYOUT,
    rows=[(3, 2), (9, 3)],
    expires_at_s=1.5,
)


def test_an_address_survives_its_spelling():
    assert decode_address(ADDRESS.encode()) == ADDRESS


@pytest.mark.parametrize("text", ["", "nonsense", "é", "e30=", "A" * 3_000_000, base64.b64encode(b"[]").decode()])
def test_what_no_engine_gave_out_is_refused(text):
    with pytest.raises(BadRequest, match="kv_addr_info"):
        decode_address(text)


def test_equal_layouts_pass_and_others_are_told_apart_by_name():
    check_layouts(LAYOUT, LAYOUT)
    other = KvLayout(model="m", dtype="float16", layers=2, kv_heads=2, head_dim=4, page_size_tokens=16)
    with pytest.raises(LayoutMismatch, match=r"dtype bfloat16 here, float16 there, page_size_tokens 1 here, 16 there"):
        check_layouts(LAYOUT, other)


def test_notes_survive_their_spelling():
    offer = Offer(send_id="s", request_id="r", nonce="n", epoch="e", begin=1, end=2, tokens_hash=2**64 - 1, rows_hash=7)
    assert decode_note(encode_note(offer)) == offer
    assert decode_note(encode_note(Held(send_id="s"))) == Held(send_id="s")


def test_a_refusal_is_the_error_it_was_made_of():
    error = decode_note(encode_note(Refused.of("s", ReservationGone("gone")))).error()
    assert isinstance(error, ReservationGone)
    assert error.message == "gone"
