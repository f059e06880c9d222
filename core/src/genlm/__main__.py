"""The command `genlm`, also as `python -m genlm`."""

from __future__ import annotations

import sys

_INTERRUPTED = 130
"""Exit status of programs that Ctrl-C ended, as shells report it."""


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also during its import."""
    try:
        from genlm.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("\ngenlm: interrupted\n")
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
