"""All that touches SGLang's internals. Tested with the versions in `TESTED_VERSIONS`.

Everything is done with hooks that SGLang offers to plugins; nothing of SGLang's is changed on disk. Imported inside
SGLang's processes only.

The scheduler process: `scheduler_hooks`, `scheduler_view`. The HTTP process: `frontend_hooks`, `frontend`. Between
them: `carried`.
"""

from engines.sglang.internals.carried import register_messages
from engines.sglang.internals.frontend import Frontend, Observer
from engines.sglang.internals.frontend_hooks import FrontendHooks
from engines.sglang.internals.scheduler_hooks import SchedulerHooks
from engines.sglang.internals.scheduler_view import SchedulerView
from engines.sglang.internals.version import TESTED_VERSIONS, UntestedVersion, check_version

__all__ = [
    "TESTED_VERSIONS",
    "Frontend",
    "FrontendHooks",
    "Observer",
    "SchedulerHooks",
    "SchedulerView",
    "UntestedVersion",
    "check_version",
    "register_messages",
]
