"""Write genlm-llamacpp's demo model: that of genlm-hf as GGUF, with matrices in 8 bits (Q8_0).

`python scripts/make_demo_gguf.py [FILE]`; needs genlm-hf, transformers and gguf.
"""

from __future__ import annotations

import sys
from pathlib import Path

from genlm_llamacpp.checkpoint import write_model

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
SOURCE = PLUGINS / "genlm-hf/src/genlm_hf/demo"
SHIPPED = PLUGINS / "genlm-llamacpp/src/genlm_llamacpp/demo.gguf"


def write(file: Path) -> None:
    """Write the file; always the same bytes."""
    write_model(SOURCE, file, weights="Q8_0")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else SHIPPED)
