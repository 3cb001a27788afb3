"""What SGLang carries between its processes for us: bytes, see `engines.sglang.messages`."""

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from engines.sglang.messages import RID_PREFIX


class TrimtabCall(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """From the HTTP process to the scheduler."""

    payload: bytes


class TrimtabReport(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """From the scheduler to the HTTP process."""

    payload: bytes


def register_messages() -> None:
    hook_custom_types(TrimtabCall, TrimtabReport)


def is_ours(rid: str | None) -> bool:
    return (rid or "").startswith(RID_PREFIX)
