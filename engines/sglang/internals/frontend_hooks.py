"""What SGLang's HTTP process calls while it starts, and when it aborts."""

import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.utils import TypeBasedDispatcher

from engines.sglang.internals.carried import TrimtabReport, is_ours
from engines.sglang.internals.frontend import Frontend

CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
HTTP_SERVER = "sglang.srt.entrypoints.http_server"


class FrontendHooks:
    """What SGLang's HTTP process calls while it starts."""

    def __init__(self, attach: Callable[[Frontend], Callable[[bytes], None]]) -> None:
        self._attach = attach
        self._frontend: Frontend | None = None

    def register(self) -> None:
        HookRegistry.register(CONTROL + "init_communicators", self.after_init, HookType.AFTER)
        HookRegistry.register(TOKENIZER + "abort_request", self.before_abort, HookType.BEFORE)
        HookRegistry.register(TOKENIZER + "_validate_one_request", self.before_validation, HookType.BEFORE)

    def after_init(self, _: Any, manager: Any) -> None:
        server = sys.modules.get(HTTP_SERVER)
        if server is None:
            return
        self._frontend = Frontend(manager, server.app)
        on_report = self._attach(self._frontend)
        reports = [(TrimtabReport, lambda report: on_report(report.payload))]
        manager._result_dispatcher += TypeBasedDispatcher(reports)

    @staticmethod
    def before_validation(manager: Any, _: Any, ids: Any) -> None:
        """SGLang looks up whatever ids it gets and dies of those it has not. It answers a `ValueError` with 400."""
        vocab_size = int(manager.model_config.vocab_size)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"token ids must be 0 to {vocab_size - 1}")

    def before_abort(self, manager: Any, rid: str = "", abort_all: bool = False) -> None:
        state = manager.rid_to_state.get(rid)
        if self._frontend is not None and state is not None and not state.abort_sent and not is_ours(rid):
            self._frontend.on_abort()
