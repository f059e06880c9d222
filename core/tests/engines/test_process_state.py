"""What a library changes in the process is put back, under the eyes of other threads."""

from __future__ import annotations

import gc
import logging
import os
import random
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from genlm import ModelLoadError, preserve_process_state
from genlm.plugin import claim_process, release_process


def state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "handlers": list(logging.root.handlers),
        "level": logging.root.level,
        "excepthook": sys.excepthook,
    }


def intrude() -> None:
    """Change all of it, as engines do."""
    os.environ["GENLM_ADDED"] = "1"
    os.environ["GENLM_CHANGED"] = "changed"
    del os.environ["GENLM_REMOVED"]
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_num_threads = print
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    logging.root.handlers[:] = [logging.NullHandler()]
    logging.root.setLevel(logging.CRITICAL)
    sys.excepthook = print


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENLM_CHANGED", "as it was")
    monkeypatch.setenv("GENLM_REMOVED", "as it was")


def test_everything_is_put_back() -> None:
    before = state()
    with preserve_process_state():
        intrude()
        changed = state()
    assert state() == before
    assert [name for name in before if changed[name] == before[name]] == []


def test_it_is_put_back_after_an_error_too() -> None:
    before = state()
    with suppress(ZeroDivisionError), preserve_process_state(GENLM_SET="1"):
        intrude()
        raise ZeroDivisionError
    assert state() == before


def test_variables_are_set_for_the_body_only() -> None:
    with preserve_process_state(GENLM_SET="1", GENLM_CHANGED="2"):
        assert (os.environ["GENLM_SET"], os.environ["GENLM_CHANGED"]) == ("1", "2")
    assert "GENLM_SET" not in os.environ
    assert os.environ["GENLM_CHANGED"] == "as it was"


def test_uses_may_be_nested() -> None:
    before = state()
    with preserve_process_state(GENLM_SET="outer"):
        outer = state()
        with preserve_process_state(GENLM_SET="inner"):
            intrude()
        assert state() == outer
    assert state() == before


def test_another_thread_never_misses_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads all the time, and threads take turns every few instructions."""
    names = [f"GENLM_LEFT_ALONE_{number}" for number in range(50)]
    for name in names:
        monkeypatch.setenv(name, "here")
    missed: list[str] = []
    rounds, ended = 0, threading.Event()

    def read() -> None:
        nonlocal rounds
        while not ended.is_set():
            missed.extend(name for name in names if os.environ.get(name) != "here")
            rounds += 1

    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        while rounds < 500 and not missed:
            with preserve_process_state(GENLM_SET="1"):
                os.environ["GENLM_CHANGED"] = "changed"
    finally:
        ended.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert missed == []


def test_a_library_that_is_not_used_is_not_imported() -> None:
    code = (
        "import sys, genlm.plugin; genlm.plugin.free_memory_bytes()\n"
        "assert 'preserve_process_state' in dir(genlm.plugin)\n"
        "assert not {'torch', 'numpy', 'genlm.engines.process_state'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- one engine of a library ----------------------------------------------------------


class Owner:
    """Stands for an engine."""


def test_a_second_engine_of_a_library_is_refused_until_the_first_is_released() -> None:
    first, second = Owner(), Owner()
    claim_process(first, "Solo", "use another process")
    claim_process(second, "Other", "wait")  # another library
    with pytest.raises(ModelLoadError, match=r"second Solo engine.*or use another process"):
        claim_process(second, "Solo", "use another process")
    release_process(first)
    claim_process(second, "Solo", "use another process")
    release_process(first)  # holds no claim any more
    with pytest.raises(ModelLoadError):
        claim_process(first, "Solo", "use another process")
    release_process(second)  # both of its claims
    claim_process(first, "Solo", "")
    claim_process(first, "Other", "")
    release_process(first)


def test_an_engine_that_is_garbage_collected_frees_the_process() -> None:
    owner = Owner()
    claim_process(owner, "Solo", "")
    del owner
    gc.collect()
    claim_process(last := Owner(), "Solo", "")
    release_process(last)
