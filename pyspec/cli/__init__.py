"""The command line: ``pyspec generate | inspect | devices | doctor | quantize | bench | verify | info``.

Exit codes: 0 done, 1 failure, 2 wrong usage, 130 stopped with Ctrl-C.

Needs typer and rich (extra ``cli``); this module imports neither by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``argv`` None: the arguments of the process."""
    try:
        from . import app
    except ImportError as e:
        package = (e.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"pyspec: the command line needs the package {package}: pip install 'pyspec-llm[cli]' "
            "('python -m pyspec info' and 'python -m pyspec doctor' work without it)",
            file=sys.stderr,
        )
        return 1
    return app.run(argv)
