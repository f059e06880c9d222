"""Which backend is meant when none is named: block, environment, the only one."""

import asyncio
import threading

import pytest

import genlm


@pytest.fixture
def three(core):
    """A core with engines `a`, `b`, `c` and tries `s`, `t`."""
    for name in "abc":
        core.install(f"genlm-{name}", name)
    for name in "st":
        core.install(f"genlm-{name}", name, kind="trie")
    return core


def engine():
    return genlm.find_backend().name


def trie():
    return genlm.find_backend(kind="trie").name


def test_the_argument_wins_over_the_block_and_the_block_over_the_environment(
    three, monkeypatch
):
    monkeypatch.setenv("GENLM_BACKEND", "a")
    monkeypatch.setenv("GENLM_TRIE", "s")
    assert (engine(), trie()) == ("a", "s")
    with genlm.use_backend("b", trie="t"):
        assert (engine(), trie()) == ("b", "t")
        assert genlm.get_backend("c").distribution == "genlm-c"
        assert genlm.get_trie("s").distribution == "genlm-s"
    assert (engine(), trie()) == ("a", "s")


def test_a_block_chooses_only_the_kind_that_it_names(three, monkeypatch):
    monkeypatch.setenv("GENLM_BACKEND", "a")
    monkeypatch.setenv("GENLM_TRIE", "s")
    with genlm.use_backend(trie="t"):
        assert (engine(), trie()) == ("a", "t")
    with genlm.use_backend("b"):
        assert (engine(), trie()) == ("b", "s")


def test_blocks_nest_and_end_with_an_exception(three):
    with genlm.use_backend("a"):
        with pytest.raises(genlm.UnknownBackendError), genlm.use_backend("zzz"):
            engine()
        assert engine() == "a"


def test_a_block_holds_for_the_function_that_it_decorates(three):
    @genlm.use_backend("c")
    def decorated():
        return engine()

    assert [decorated(), decorated()] == ["c", "c"]


def test_tasks_that_run_at_once_keep_their_own_choice(three):
    async def inside(name, entered, everyone):
        with genlm.use_backend(name):
            entered.set()
            await everyone.wait()
            return engine(), await asyncio.to_thread(engine)

    async def main():
        everyone = asyncio.Event()
        entered = [asyncio.Event() for _ in "abc"]
        tasks = [
            asyncio.create_task(inside(name, event, everyone))
            for name, event in zip("abc", entered, strict=True)
        ]
        for event in entered:
            await event.wait()
        everyone.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [(name, name) for name in "abc"]


def test_threads_that_run_at_once_keep_their_own_choice(three):
    barrier = threading.Barrier(3, timeout=120)
    engines = {}

    def inside(name):
        with genlm.use_backend(name):
            barrier.wait()
            engines[name] = engine()

    threads = [threading.Thread(target=inside, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engines == {name: name for name in "abc"}


def test_a_new_thread_starts_without_the_block(three, monkeypatch):
    monkeypatch.setenv("GENLM_BACKEND", "a")
    engines = []
    with genlm.use_backend("b"):
        thread = threading.Thread(target=lambda: engines.append(engine()))
        thread.start()
        thread.join()
    assert engines == ["a"]


@pytest.mark.parametrize("arguments", [(), (None,), (3,), (print,)])
def test_a_block_without_a_name_is_a_type_error(arguments):
    with pytest.raises(TypeError), genlm.use_backend(*arguments):
        pass


def test_a_full_name_can_be_chosen(three, monkeypatch):
    monkeypatch.setenv("GENLM_BACKEND", "genlm-a:a")
    assert engine() == "a"
    with genlm.use_backend("genlm-b:b"):
        assert engine() == "b"


def test_an_unknown_name_says_where_it_comes_from(core, monkeypatch):
    monkeypatch.setenv("GENLM_BACKEND", "zzz")
    with pytest.raises(genlm.UnknownBackendError, match=r"'zzz' \(from GENLM_BACKEND\)"):
        genlm.get_backend()
    with (
        genlm.use_backend("yyy"),
        pytest.raises(genlm.UnknownBackendError, match=r"'yyy' \(from use_backend\)"),
    ):
        genlm.get_backend()


def test_the_reference_engine_is_chosen_when_nothing_else_is_installed(core):
    assert engine() == "reference"


def test_the_only_engine_beside_the_reference_engine_is_chosen(core):
    core.install("genlm-toy", "toy")
    core.install("genlm-tree", "tree", kind="trie")
    assert (engine(), trie()) == ("toy", "tree")


def test_several_names_of_one_backend_count_as_one(core):
    core.install("genlm-tree", "tree", "trunk", kind="trie")
    assert trie() == "tree"
    core.install("genlm-other", "other", kind="trie")
    with pytest.raises(genlm.UnknownBackendError, match="Installed: other, tree, trunk"):
        genlm.get_trie()


def test_several_engines_are_an_error_that_lists_them(three):
    with pytest.raises(genlm.UnknownBackendError) as caught:
        genlm.get_backend()
    assert str(caught.value) == (
        "no engine chosen. Installed: a, b, c, reference. "
        "Name one: backend='a', use_backend('a') or GENLM_BACKEND"
    )
    with pytest.raises(
        genlm.UnknownBackendError, match=r"get_trie\('s'\), use_backend\(trie='s'\)"
    ):
        genlm.get_trie()


def test_no_trie_at_all_is_an_error_that_says_what_to_install(core):
    with pytest.raises(genlm.UnknownBackendError) as caught:
        genlm.get_trie()
    assert str(caught.value) == (
        "no trie chosen. Installed: none. Install one of genlm-trie-cuda: pip install "
        "genlm-trie-cuda, or pip install ./plugins/genlm-trie-cuda in a clone"
    )


def test_an_engine_that_lacks_its_library_leaves_the_choice_to_one_that_has_it(core, caplog):
    core.install("genlm-a", "a", extra='requires=("no_such_module",)')
    core.install("genlm-b", "b")
    assert engine() == "b"
    assert "ignored the plugin genlm-a:a: needs no_such_module" in caplog.text


def test_a_lone_engine_that_lacks_its_library_is_not_replaced_by_the_reference_engine(core):
    core.install("genlm-a", "a", extra='requires=("no_such_module",)')
    with pytest.raises(genlm.MissingRequirementError, match="pip install genlm-a"):
        genlm.get_backend()


def test_a_lone_well_known_engine_that_is_broken_is_not_replaced_either(core):
    core.install("genlm-hf", "hf", body="1 / 0")
    with pytest.raises(genlm.BrokenPluginError, match="genlm-hf:hf"):
        genlm.get_backend()


def test_a_disabled_engine_counts_for_nothing(core, monkeypatch):
    core.install("genlm-hf", "hf")
    monkeypatch.setenv("GENLM_DISABLE_PLUGINS", "hf")
    assert engine() == "reference"
    with pytest.raises(
        genlm.UnknownBackendError, match=r"Installed: reference\. genlm-hf:hf is"
    ):
        genlm.get_backend("hf")


def test_two_providers_of_the_only_name_are_an_error_with_their_full_names(core):
    core.install("genlm-sgl", "sgl")
    core.install("their-sgl", "sgl")
    with pytest.raises(genlm.UnknownBackendError, match="backend='genlm-sgl:sgl'"):
        genlm.get_backend()
