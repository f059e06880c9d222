"""Private names of other libraries that genlm-sgl uses."""

from __future__ import annotations

from pathlib import Path

from private_names import check

import genlm_sgl
from genlm.plugin import preserve_process_state
from genlm_sgl.cpu.stubs import stub_packages
from genlm_sgl.loading import environment
from genlm_sgl.process_state import quiet


def test_every_private_name_that_is_used_exists_and_is_listed() -> None:
    with preserve_process_state(**environment(cpu=True)), quiet(), stub_packages():
        check(genlm_sgl, Path(__file__).with_name("private_names.txt"))
