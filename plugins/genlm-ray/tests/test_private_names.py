"""Private names of other libraries that genlm-ray uses."""

from __future__ import annotations

from pathlib import Path

from private_names import check

import genlm_ray


def test_every_private_name_that_is_used_exists_and_is_listed() -> None:
    check(genlm_ray, Path(__file__).with_name("private_names.txt"))
