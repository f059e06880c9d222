"""Private names of other libraries that genlm-vllm uses."""

from __future__ import annotations

from pathlib import Path

from private_names import check

import genlm_vllm


def test_every_private_name_that_is_used_exists_and_is_listed() -> None:
    check(genlm_vllm, Path(__file__).with_name("private_names.txt"))
