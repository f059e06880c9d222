"""genlm-backend 0.3.1, the published peer, in an environment and processes of its own.

It cannot share an environment with genlm-core: both provide `genlm.backend`'s names.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Peer", "interpreter", "peer_python"]

ENVIRONMENTS = Path(__file__).resolve().parent.parent / ".cache"


def interpreter(name: str, *packages: str, alone: Sequence[str] = ()) -> Path:
    """A Python with packages and this environment's torch and transformers.

    Made in `.cache/` on first use; takes a minute or two.

    Args:
        name: Of the folder.
        packages: As pip takes them.
        alone: Those to install without what they ask for.
    """
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        torch, transformers = map(importlib.metadata.version, ("torch", "transformers"))
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        # Torch first: what the others ask for would bring another build of it.
        subprocess.run([*install, f"torch=={torch.split('+')[0]}"], check=True)
        subprocess.run([*install, f"transformers=={transformers}", *packages], check=True)
        if alone:
            subprocess.run([*install, "--no-deps", *alone], check=True)
        (folder / "ready").touch()
    return python


def peer_python() -> Path:
    """An interpreter with genlm-backend 0.3.1."""
    needed = ("numpy<2.5", "numba", "accelerate", "sentencepiece", "protobuf")
    published = "genlm-backend==0.3.1"
    return interpreter("genlm-backend-0.3.1", *needed, alone=[published])


class Peer:
    """A process that measures genlm-backend when it is told to.

    Args:
        python: An interpreter with genlm-backend.
        script: Reads the name of a measurement per line and prints its figure.
        arguments: Of the script.
        environment: Variables of the process, by default this one's.
    """

    def __init__(
        self,
        python: Path | str,
        script: str,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def measure(self, name: str) -> float:
        """The figure of one measurement; see `ask`."""
        return float(self.ask(name))

    def ask(self, name: str) -> str:
        """The line that the process prints for a measurement.

        Raises:
            RuntimeError: The process ended instead of answering.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"genlm-backend's process ended while it measured {name!r}")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
