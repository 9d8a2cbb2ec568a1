"""Say in one message what a build lacks here. Runs before anything is installed.

python -m build_support                 compilers, headers, the SDKs of the chosen backends
    python -m build_support requirements    print the Python packages that the chosen backends need and that are missing
"""

from __future__ import annotations

import importlib.util
import sys

from build_support import cuda, preflight
from build_support.config import BuildConfig, BuildError


def main(arguments: list[str]) -> int:
    try:
        if arguments == ["requirements"]:
            print(*cuda.missing_requirements(BuildConfig.from_env()), sep="\n")
            return 0
        for module in ("venv", "ensurepip"):
            if importlib.util.find_spec(module) is None:
                raise BuildError(f"{sys.executable} has no module {module}. Debian or Ubuntu: apt install python3-venv")
        config = BuildConfig.from_env()
        preflight.check(config, packages=False)
    except BuildError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
