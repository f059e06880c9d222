"""How long does `import genlm` take, and `genlm plugins`?

The physical limit is the start of the interpreter, measured with the same
command line and an empty program. `import torch` is measured for comparison. Each
round starts every contestant once, in turn, in a fresh process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from report import print_report

ROUNDS = 15
EMPTY = "python, empty program"
PROGRAMS = {
    EMPTY: "pass",
    "import genlm": "import genlm",
    "genlm.list_backends()": "import genlm; genlm.list_backends()",
    "genlm plugins": "from genlm.cli import app; app(['plugins'], standalone_mode=False)",
    "import torch": "import torch",
}


def seconds(program: str) -> float:
    """Time a fresh interpreter from its start to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Measure and report."""
    samples: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS + 1):
        for name, program in PROGRAMS.items():
            samples[name].append(seconds(program) * 1e3)
    samples = {name: times[1:] for name, times in samples.items()}  # the first reads the disk
    floor = statistics.median(samples[EMPTY])
    ratios = {name: statistics.median(times) / floor for name, times in samples.items()}
    print_report("import", samples, unit="ms", ratios=ratios, extra={"rounds": ROUNDS})


if __name__ == "__main__":
    main()
