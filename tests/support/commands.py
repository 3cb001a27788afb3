"""Commands `trimtab …` that a text advises, beside those that there are."""

import re
from collections.abc import Iterator, Sequence

import click
import typer.main

from controller.cli.root import app


def advised(text: str) -> Iterator[str]:
    """Arguments of every `trimtab …` that stands in backticks or begins a line of a block of code."""
    yield from (" ".join(found.split()) for found in re.findall(r"`trimtab ([^`…]+)[`…]", text))
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        yield from (line.partition("#")[0].strip() for line in re.findall(r"^trimtab (.+)$", block, re.MULTILINE))


def unknown_commands(text: str) -> Sequence[str]:
    """Advised commands that do not exist, or not with those options."""
    return [command for command in advised(text) if not _exists(command.split())]


def _exists(words: list[str]) -> bool:
    found: click.Command = typer.main.get_command(app)
    while words and (below := getattr(found, "commands", None)) is not None:
        if words[0] not in below:
            return False
        found = below[words.pop(0)]
    options = {name for parameter in found.params for name in parameter.opts}
    return {word for word in words if word.startswith("-")} <= options
