"""Patterns that a plan may name: those registered under the entry-point group `trimtab.patterns`."""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

GROUP = "trimtab.patterns"

KnownPatterns = Callable[[], Sequence[str]]


def installed_patterns() -> Sequence[str]:
    """Names only; nothing is imported, so a broken plug-in cannot stop the controller."""
    return sorted({found.name for found in entry_points(group=GROUP)})
