"""What a command cannot do."""


class CliError(Exception):
    """The message is a sentence that says what is wrong and what to do next."""
