"""What `make gpu` does on a GPU, as far as a machine without one can show it."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from documents import REPOSITORY
from programs import run_program

from genlm.testing.checks import all_checks

sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "benchmarks")]
import bench_gpu  # noqa: E402
import gpu as script  # noqa: E402
import gpu_page  # noqa: E402
import source_tree  # noqa: E402

VARIABLES = dict(os.environ)
GPU = {
    "device": "Fast 9000",
    "devices": 1,
    "memory_bytes": 80 * 2**30,
    "cuda": "13.0",
    "python": "3.12.3",
    "packages": {"torch": "2.11.0"},
}


def bench(name: str, code: str, limit_s: float = 60, **others: Any) -> script.Step:
    return script.Step(name, "bench", ("-c", code), limit_s, **others)


def run(path: Path, *chosen: script.Step, total_s: float = 1000) -> dict[str, Any]:
    results = script.load(path, GPU, fresh=False)
    script.run(chosen, path, results, VARIABLES, total_s)
    return json.loads(path.read_text())["steps"]


# -- steps ----------------------------------------------------------------------------


def test_each_step_ends_in_its_own_way_and_says_why(tmp_path):
    found = run(
        tmp_path / "gpu.json",
        bench("good", 'print(\'{"values": {"a": 1}}\')'),
        bench("bad", "raise ValueError('the cause')"),
        bench("endless", "while True: pass", limit_s=1),
        bench("lacking", "", needs=("torch", "no_such_module")),
        bench("unneeded", "", needs=("no_such_module",), optional=True),
    )
    states = {name: step["status"] for name, step in found.items()}
    assert states == {
        "good": "passed",
        "bad": "failed",
        "endless": "timeout",
        "lacking": "missing",
        "unneeded": "absent",
    }
    assert found["good"]["result"] == {"values": {"a": 1}}
    assert found["bad"]["output"][-1] == "ValueError: the cause"
    assert "1 s" in found["endless"]["reason"]
    assert found["lacking"]["reason"] == "not installed: no_such_module"


def test_figures_of_a_benchmark_that_is_ended_are_kept(tmp_path):
    code = 'print(\'{"unit": "ms", "values": {"a": %d}}\', flush=True)'
    endless = "; ".join([code % 1, code % 2, "print('{}', flush=True)"]) + "\nwhile True: pass"
    found = run(tmp_path / "gpu.json", bench("endless", endless, limit_s=2))["endless"]
    assert found["status"] == "timeout"
    assert found["result"]["values"] == {"a": 2}


def test_tests_run_before_benchmarks_and_everything_printed_is_kept(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(): print('seen')\n")
    arguments = ("-m", "pytest", "-s", "-c", os.devnull, str(tmp_path / "test_it.py"))
    tests = script.Step("first", "tests", arguments, 60)
    found = run(tmp_path / "gpu.json", bench("second", "print('{}')"), tests)
    assert list(found) == ["first", "second"]
    assert "seen" in (script.BUILD / "first.log").read_text()


@pytest.mark.parametrize(("name", "kind"), [("cuda", "trie"), ("hf", "engine")])
def test_the_checks_of_a_short_run_exist(name, kind):
    assert script._TINY_CHECKS[name] in {check.id for check in all_checks(kind)}


def test_a_run_out_of_time_leaves_the_rest_for_the_next(tmp_path):
    found = run(tmp_path / "gpu.json", bench("late", "print('{}')"), total_s=0)
    assert found["late"]["status"] == "not run"
    assert "late" not in {n for n, s in found.items() if s["status"] in script.FINISHED}


def test_every_test_is_counted_and_every_skip_has_its_reason(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='needs two')\ndef test_two(): pass\n"
    )
    arguments = ("-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider")

    def step(*only: str) -> script.Step:
        paths = [f"{tmp_path / 'test_it.py'}::{name}" for name in only]
        return script.Step("x", "tests", (*arguments, *paths), 60)

    mixed = script.run_step(step("test_good", "test_bad", "test_two"), VARIABLES, 60)
    assert mixed["status"] == "failed"
    assert mixed["result"]["passed"] == 1
    assert [each["message"][:13] for each in mixed["result"]["failed"]] == ["assert 1 == 2"]
    assert mixed["result"]["skipped"] == {"needs two": 1}
    skipped = script.run_step(step("test_two"), VARIABLES, 60)
    assert (skipped["status"], skipped["reason"]) == ("skipped", "needs two")


def test_results_of_another_machine_are_not_continued(tmp_path):
    path = tmp_path / "gpu.json"
    run(path, bench("good", "print('{}')"))
    other = {**GPU, "device": "Slow 10"}
    with pytest.raises(SystemExit, match="another device: Fast 9000"):
        script.load(path, other, fresh=False)
    assert script.load(path, other, fresh=True) == {"machine": other, "steps": {}}


def test_each_step_has_the_commit_that_it_ran_at(tmp_path):
    path = tmp_path / "gpu.json"
    for name, commit in (("one", "aaaa"), ("two", "bbbb")):
        results = script.load(path, {**GPU, "commit": commit}, fresh=False)
        script.run([bench(name, "print('{}')")], path, results, VARIABLES, 60)
    results = json.loads(path.read_text())
    assert {name: step["commit"] for name, step in results["steps"].items()} == {
        "one": "aaaa",
        "two": "bbbb",
    }
    assert "commit bbbb. Not measured again: one (commit aaaa)." in gpu_page.page(results)


def test_steps_are_those_of_the_page_and_name_what_exists():
    steps = {step.name: step for step in script.steps("cuda", tiny=False)}
    assert {*gpu_page.STEPS, *(goal.step for goal in gpu_page.GOALS)} == steps.keys()
    for step in steps.values():
        for argument in step.arguments:
            assert "/" not in argument or (REPOSITORY / argument).exists(), argument


def test_the_program_reaches_a_benchmark_and_goes_on_where_it_was(tmp_path):
    path, page = tmp_path / "cpu.json", tmp_path / "cpu.md"
    command = [sys.executable, REPOSITORY / "scripts" / "gpu.py", "--device", "cpu", "--tiny"]
    options = ["--out", path, "--page", page, "--total", "600", "--patience", "20"]
    run_program(*command, "draws", *options, cwd=tmp_path)
    found = json.loads(path.read_text())
    assert found["steps"]["draws"]["status"] == "passed"
    assert "Nothing of genlm was measured on a GPU yet" in page.read_text()
    again = run_program(*command, *options[:-4], "--total", "0", cwd=tmp_path, status=1)
    assert "draws          finished before: passed" in again.stdout
    assert set(json.loads(path.read_text())["steps"]) == {
        step.name for step in script.steps("cpu", tiny=True)
    }


# -- the tree of sources --------------------------------------------------------------


def test_plugins_are_found_in_a_tree_of_sources_and_wheels_are_used(tmp_path):
    wheels, build = tmp_path / "wheels", tmp_path / "build"
    wheels.mkdir()
    for name, module in (("carried-1-py3-none-any", "carried"), (source_tree.PEER, "peer")):
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as archive:
            archive.writestr(f"{module}.py", "")
    variables = source_tree.environment(wheels, build)
    code = (
        "import importlib.metadata as m, importlib.util as u, genlm; import carried;"
        "print(*(f'{m.distribution(d)._path}' for d in ('genlm-core', 'genlm-trie-cuda')));"
        "names = [i.name for i in genlm.list_backends() if i.status == 'ok'];"
        "print(*names, u.find_spec('peer'))"
    )
    done = run_program(sys.executable, "-c", code, env=variables, cwd=tmp_path)
    places, found = done.stdout.splitlines()
    assert all(place.startswith(str(build)) for place in places.split())
    assert {"hf", "reference", "cuda", "numpy"} <= set(found.split())
    assert found.endswith("None")
    assert (build / "peer" / "peer.py").exists()


# -- benchmarks -----------------------------------------------------------------------


def measured(name: str) -> bench_gpu.Line:
    """What a line finds on the CPU; vLLM, which changes its process, has one of its own."""
    line = bench_gpu.Line("cpu", tiny=True, rounds=1)
    if not name.startswith("vllm"):
        bench_gpu.LINES[name](line)
        return line
    pytest.importorskip("vllm")
    command = [sys.executable, bench_gpu.__file__, name, "--device", "cpu", "--tiny"]
    found = json.loads(run_program(*command).stdout.splitlines()[-1])
    line.values, line.notes = found["values"], found["notes"]
    return line


OTHER_ON_A_GPU = {"particles-8b", "vllm-first"}
"""Lines that do on the CPU what others do."""


@pytest.mark.parametrize("name", sorted(bench_gpu.LINES.keys() - {"peer", *OTHER_ON_A_GPU}))
def test_every_line_measures_what_its_goals_ask_for(name):
    line = measured(name)
    for goal in gpu_page.GOALS:
        if goal.step == name:
            value = goal.value.replace("trie 32", "trie 2").replace("trie 512", "trie 4")
            for case in bench_gpu.CASES:
                value = value.replace("/".join(map(str, case)), "3/8")
            if " graphs" in value:
                assert line.notes[value] == "needs a CUDA device"
            else:
                assert line.values[value] > 0
    for what, note in line.notes.items():
        assert "Error" not in str(note), what
        if "largest difference" in what:
            assert note <= 1e-4


def test_a_contestant_that_fails_is_noted_and_the_others_go_on():
    def raises() -> float:
        raise MemoryError("too large")

    line = bench_gpu.Line("cpu", tiny=True, rounds=2)
    line.measure({"bad": raises, "good": lambda: 2.0}, "1b 50/64")
    line.ratio("1b 50/64 bad", "1b 50/64 bad", "1b 50/64 good")
    assert line.samples["1b 50/64 good"] == [2.0, 2.0]
    assert line.notes == {"1b 50/64 bad": "MemoryError: too large"}
    assert line.values == {}


# -- the page -------------------------------------------------------------------------


def test_the_page_is_that_of_the_stored_results():
    stored = gpu_page.RESULTS
    results = json.loads(stored.read_text()) if stored.exists() else None
    assert gpu_page.PAGE.read_text("utf-8") == gpu_page.page(results)


def test_the_page_has_a_figure_or_a_reason_for_every_goal(tmp_path):
    slow = {"status": "timeout", "reason": "not finished after 60 s"}
    values = {"1b 50/64 static graph": 1.25, "1b 50/64 lockstep": 0.5}
    notes = {"1b 1000/512 lockstep": "OutOfMemoryError: no | room"}
    rows = {"1b 50/64 genlm": {"median": 2.0, "min": 1.0, "max": 3.0}}
    particles = {"values": values, "notes": notes, "rows": rows}
    results = {
        "machine": GPU,
        "steps": {
            "particles-1b": {"status": "passed", "result": particles},
            "trie": slow,
            "tests-hf": {
                "status": "failed",
                "result": {"passed": 9, "failed": [{}], "skipped": {"needs two": 2}},
            },
        },
    }
    gpu_page.write(results, tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    assert "Measured on 1 x Fast 9000 (80 GiB, CUDA 13.0" in text
    assert "StaticCache as a CUDA graph | >= 1 | 1.25 | yes |" in text
    assert "50/64: times as fast as DynamicCache | >= 1 | 0.50 | no |" in text
    assert "not measured on a GPU: OutOfMemoryError: no / room" in text
    assert "not measured on a GPU: not finished after 60 s" in text
    assert "failed; 9 passed, 1 failed; 2 skipped: needs two" in text
    assert "| 1b 50/64 genlm | 2.000 | 1.000 | 3.000 |" in text
    assert (tmp_path / "assets" / "gpu-particles.svg").exists()
    on_cpu = {**results, "machine": {**GPU, "device": "cpu"}}
    assert gpu_page.page(on_cpu) == gpu_page.page(None)
