"""`python -m engines.emulated --profile laptop --port 0 --ready-file F`; `--help` lists every flag."""

import sys

from pydantic import ValidationError
from pydantic_settings import CliApp

from engines.emulated.process import run
from engines.emulated.settings import EmulatedSettings, explain


def main(arguments: list[str]) -> int:
    try:
        settings = CliApp.run(EmulatedSettings, cli_args=arguments)
    except ValidationError as error:
        print(explain(error), file=sys.stderr)  # noqa: T201
        return 2
    return run(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
