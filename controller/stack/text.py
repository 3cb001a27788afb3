"""What `trimtab up` tells the operator once it serves."""

import shutil
import sys
from pathlib import Path

from controller.stack.running import RunningStack

HELLO = '{"model": "%s", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'


def welcome(stack: RunningStack, state_file: Path | None, needs_key: bool) -> str:
    """Addresses, a request to try, and how to change the plan."""
    command = program()
    key = "-H 'authorization: Bearer '$TRIMTAB_API_KEY " if needs_key else ""
    where = f"token in {state_file}" if state_file else "token as you gave it"
    return f"""
Trimtab is up.
  OpenAI API   {stack.url}/v1   model: {stack.model}
  Admin API    {stack.admin_url}   {where}
  Console      {stack.admin_url}/console/
  Logs         {stack.log_dir}

Send a request:
  curl {stack.url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{HELLO % stack.model}'
Change the plan, live:
  {command} plan set balanced --offload-ratio 0.1
Watch:
  {command} top

Ctrl-C stops everything.
"""


def program() -> str:
    """How to call this command line from here: by name where the shell finds it, else by path."""
    return "trimtab" if shutil.which("trimtab") or not sys.argv[0].endswith("trimtab") else sys.argv[0]
