"""The versions of SGLang that this was tested with."""

from importlib.metadata import version

TESTED_VERSIONS = ("0.5.23",)


class UntestedVersion(Exception):
    """This SGLang is another than what the plugin was tested with."""


def check_version(allow_untested: bool) -> None:
    """Raises `UntestedVersion`."""
    found = version("sglang")
    if found not in TESTED_VERSIONS and not allow_untested:
        raise UntestedVersion(
            f"Trimtab's plugin was tested with SGLang {', '.join(TESTED_VERSIONS)}, this is {found}. Install a tested "
            "version, set TRIMTAB_SGLANG_UNTESTED_VERSION=1 to try all the same, or leave the plugin out with "
            "SGLANG_PLUGINS."
        )
