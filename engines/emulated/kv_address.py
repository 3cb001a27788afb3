"""Where KV may be written: the opaque `kv_addr_info` that `prep_recv` gives out and `remote_send` brings back."""

import base64
import binascii

import msgspec

from engines.errors import BadRequest
from engines.types import KvLayout

MAX_ADDRESS_CHARS = 16 * 1024


class KvAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation, as its receiver wrote it down."""

    address: str
    """`host:port` of the receiver's transfer socket."""
    engine_id: str
    epoch: str
    request_id: str
    nonce: str
    """Distinguishes this reservation from an earlier one of the same request."""
    begin: int
    end: int
    layout: KvLayout
    expires_at_s: float
    """Unix time."""

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)


def decode_address(text: str) -> KvAddress:
    """Raises `BadRequest`."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise BadRequest(f"kv_addr_info of {len(text)} characters is not one that an engine gave out")
    try:
        address = msgspec.json.decode(base64.urlsafe_b64decode(text.encode()), type=KvAddress)
        address.host_port  # noqa: B018  its port must be a number
    except (msgspec.DecodeError, binascii.Error, UnicodeError, ValueError) as error:
        raise BadRequest(f"kv_addr_info is not one that an engine gave out: {error}") from error
    return address
