"""One engine behind several models: checks pass, and it is built and closed once."""

from __future__ import annotations

import textwrap
import threading
from contextlib import nullcontext

import pytest
from programs import run_code
from scripted import TIMEOUT_S
from scripted_target import CertifiedEngine, scripted_target

from genlm import EngineClosedError
from genlm.testing import all_checks
from genlm.testing.shared_engine import SharedEngine

from .conftest import RunCheck

SHARED = ("adapters", "contexts", "endings", "populations")
CHECKS = [
    check.id for check in all_checks("engine") if check.function.__module__.endswith(SHARED)
]
"""Checks of what models of one engine could affect in each other."""


class Counted(CertifiedEngine):
    """Notes which threads used it."""

    built = 0

    def __init__(self):
        super().__init__()
        Counted.built += 1
        self.threads = {threading.get_ident()}

    def evaluate(self, queries):
        self.threads.add(threading.get_ident())
        return super().evaluate(queries)

    def add_adapter(self, name, path):
        assert name not in self.adapters, "loaded twice"
        super().add_adapter(name, path)

    def close(self):
        self.threads.add(threading.get_ident())
        super().close()


@pytest.fixture(scope="module")
def target():
    Counted.built = 0
    target = scripted_target(build=Counted, shared=True)
    yield target
    _, shared = SharedEngine.current
    SharedEngine.close_current()
    assert Counted.built == 1
    assert shared.engine.closed
    assert len(shared.engine.threads) == 1
    assert not shared._owners


@pytest.mark.parametrize("raises", ["__init__", "close"])
def test_an_engine_that_cannot_be_built_or_closed_leaves_no_thread_behind(
    raises, caplog
) -> None:
    threads = []

    def fail(*_):
        threads.append(threading.current_thread())
        raise OSError("no")

    broken = type("Broken", (CertifiedEngine,), {raises: fail})
    is_built = raises == "close"
    with nullcontext() if is_built else pytest.raises(OSError, match="no"):
        SharedEngine(broken).close()
    assert ("closing the engine raised" in caplog.text) == is_built
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_an_exit_closes_the_engine_and_its_models(pytestconfig) -> None:
    program = textwrap.dedent("""
        import atexit, sys
        from genlm.testing.shared_engine import SharedEngine
        atexit.register(SharedEngine.close_current)  # before the target is loaded
        sys.path.insert(0, sys.argv[1])
        from scripted_target import CertifiedEngine, scripted_target

        class Announcing(CertifiedEngine):
            def close(self):
                print("closed", flush=True)

        target = scripted_target(build=Announcing, shared=True)
        models = [target.load() for _ in range(20)]
        models[0].next_token_logprobs_sync([1])
    """)
    done = run_code(program, str(pytestconfig.rootpath / "tests/support"), timeout=TIMEOUT_S)
    assert (done.stdout, done.stderr) == ("closed\n", "")


def test_an_adapter_that_one_model_removed_is_loaded_again_for_the_next() -> None:
    class Removing(CertifiedEngine):
        def submit(self, query):
            assert query.adapter is None or query.adapter in self.adapters
            super().submit(query)

        def remove_adapter(self, name):
            del self.adapters[name]

    target = scripted_target(build=Removing, shared=True)
    for _ in range(2):
        with target.load() as lm:
            lm.load_lora(target.adapters["red"], "red")
            assert lm.next_token_logprobs_sync([1, 2], lora_name="red").shape == (
                lm.vocab_size,
            )
            lm.unload_lora("red")
            assert lm.next_token_logprobs_sync([1]) is not None  # the engine has removed it
    SharedEngine.close_current()


def test_one_engine_is_open_at_a_time_and_models_of_the_others_can_be_closed() -> None:
    engines = []

    def build(size=2):
        assert all(engine.closed for engine in engines)
        engines.append(CertifiedEngine())
        return engines[-1]

    target = scripted_target(build=build, shared=True)
    first, again = target.load(), target.load()
    context = first.context([1, 2])
    context.next_token_logprobs_sync()
    assert len(engines) == 1
    with target.load(engine_options={"size": 3}) as other:
        assert other.next_token_logprobs_sync([1]).shape == (other.vocab_size,)
        assert len(engines) == 2
        with pytest.raises(EngineClosedError, match="other options was opened"):
            again.next_token_logprobs_sync([1])
    del context
    first.close()
    again.close()
    with scripted_target(build=build, shared=True).load() as rebuilt:
        assert rebuilt.next_token_logprobs_sync([1]).shape == (rebuilt.vocab_size,)
    assert len(engines) == 3
    SharedEngine.close_current()
    assert engines[2].closed


@pytest.mark.parametrize("check_id", CHECKS)
def test_checks_pass(run_check: RunCheck, target, check_id: str) -> None:
    outcome = run_check(check_id, target)
    assert outcome.status in {"passed", "not applicable", "skipped"}, outcome
