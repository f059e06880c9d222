"""How thorough a run is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "PROFILES", "QUICK", "Profile"]


@dataclass(frozen=True)
class Profile:
    """Numbers of examples.

    Attributes:
        name: What users ask for.
        examples: Examples of each property.
        programs: Random programs of the stateful machine.
        program_steps: The most calls in one of them.
        draws: Draws that a goodness-of-fit test is made of.
        shrink: Whether to look for the smallest failing example, which takes longer than
            finding one.
    """

    name: str
    examples: int
    programs: int
    program_steps: int
    draws: int
    shrink: bool = True


QUICK = Profile("quick", examples=20, programs=25, program_steps=20, draws=1000)
FULL = Profile("full", examples=150, programs=80, program_steps=50, draws=5000)

PROFILES = {profile.name: profile for profile in (QUICK, FULL)}
