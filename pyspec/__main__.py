"""``python -m pyspec``: the command line. ``info`` and ``doctor`` work without typer and rich."""

from __future__ import annotations

import sys

from pyspec.cli import doctor, main, report


def run(argv: list[str]) -> int:
    """The exit code of ``python -m pyspec *argv``."""
    if argv and argv[0] == "info" and set(argv[1:]) <= {"--json"}:
        return report.print_report(as_json="--json" in argv)
    if argv and argv[0] == "doctor" and set(argv[1:]) <= {"--json", "--no-test"}:
        return doctor.print_doctor(as_json="--json" in argv, test="--no-test" not in argv)
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
