"""What is claimed, and whether it is reproduced: pure functions of published and simulated numbers."""

from dataclasses import dataclass

NEAR = 1 / 4
"""A share or factor is reproduced if it is within so much of the published one, up or down, and has its direction."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, checked."""

    key: str
    """Names it among the reasons."""
    says: str
    published: str
    """The published figure, for people."""
    ours: str
    reproduced: bool

    @property
    def verdict(self) -> str:
        return "reproduced" if self.reproduced else "**not reproduced**"


def near(ours: float, published: float) -> bool:
    """Whether two positive numbers are within `NEAR` of each other; nothing at or below 0 is near anything."""
    if ours <= 0 or published <= 0:
        return False
    return max(ours, published) / min(ours, published) <= 1 + NEAR
