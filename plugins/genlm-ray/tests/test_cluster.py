"""A cluster on this machine starts although Ray fails at first, and failures say why."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
import subprocess
import sys

import ray._private.node
from genlm_ray import cluster
from genlm_ray.conformance import CLUSTER

failures = int(sys.argv[1])
find_node = ray._private.services.get_node
started = []
popen = subprocess.Popen.__init__


def spied(self, *arguments, **options):
    started.append(self)
    popen(self, *arguments, **options)


def failing(*arguments):
    # Ray calls this when its processes run; it raises when they do not find each other.
    global failures
    if failures:
        failures -= 1
        raise OSError("the node timed out")
    return find_node(*arguments)


subprocess.Popen.__init__ = spied
ray._private.services.get_node = failing
try:
    cluster.connect(None, CLUSTER, may_start=True)
except cluster.ModelLoadError as error:
    print("raised", error)
print("alive", sum(process.poll() is None for process in started), "of", len(started))
print("joined", ray.is_initialized())
ray.shutdown()
"""


def outcome(failures: int) -> str:
    program = textwrap.dedent(PROGRAM)
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", program, str(failures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr
    return done.stdout


def test_a_cluster_that_did_not_start_is_started_again():
    found = outcome(failures=1)
    assert "raised" not in found
    assert "joined True" in found


def test_after_three_failures_the_error_says_so_and_no_process_is_left():
    found = outcome(failures=3)
    assert (
        "asked for a Ray cluster, started on this machine: OSError: the node timed out" in found
    )
    assert "alive 0 of" in found
    assert "joined False" in found
