"""``python -m build_support``: say in one message what a build lacks here. Runs before anything is installed."""

from __future__ import annotations

import importlib.util
import sys

from build_support import preflight
from build_support.config import BuildConfig, BuildError


def main() -> int:
    try:
        for module in ("venv", "ensurepip"):
            if importlib.util.find_spec(module) is None:
                raise BuildError(f"{sys.executable} has no module {module}. Debian or Ubuntu: apt install python3-venv")
        config = BuildConfig.from_env()
        preflight.check(config)
    except BuildError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
