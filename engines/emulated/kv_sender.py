"""The sending end of KV transfers."""

import asyncio
from array import array

from engines.emulated.kv_address import KvAddress
from engines.emulated.kv_wire import Offer, Verdict, checksum, payload_of, read_message, send_message
from engines.errors import LayoutMismatch, TransferFailed
from engines.types import KvLayout


def check_layouts(mine: KvLayout, theirs: KvLayout) -> None:
    """Raises `LayoutMismatch` that names what differs."""
    names = [name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(theirs, name)]
    if names:
        differing = ", ".join(f"{name} {getattr(mine, name)} here, {getattr(theirs, name)} there" for name in names)
        raise LayoutMismatch(f"the engines keep KV differently: {differing}")


async def send_kv(address: KvAddress, prompt: "array[int]", stall_s: float, transfer_s: float) -> None:
    """Write `prompt[begin:end]` into a reservation; returns once the receiver holds it.

    No step may take longer than `stall_s`, the receiver's last word no longer than `transfer_s`. Raises
    `TransferFailed`, or what the receiver refused it for.
    """
    payload = payload_of(prompt[address.begin : address.end])
    host, port = address.host_port
    try:
        async with asyncio.timeout(stall_s):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise TransferFailed(f"the receiver at {address.address} cannot be reached: {error!r}") from error
    try:
        await send_message(writer, _offer(address, payload))
        (await read_message(reader, Verdict, stall_s)).raise_if_refused()
        writer.write(payload)
        await writer.drain()
        (await read_message(reader, Verdict, transfer_s)).raise_if_refused()
    except OSError as error:
        raise TransferFailed(f"the connection to {address.address} broke: {error!r}") from error
    finally:
        writer.close()


def _offer(address: KvAddress, payload: bytes) -> Offer:
    return Offer(
        request_id=address.request_id,
        nonce=address.nonce,
        epoch=address.epoch,
        layout=address.layout,
        begin=address.begin,
        end=address.end,
        payload_bytes=len(payload),
        crc32=checksum(payload),
    )
