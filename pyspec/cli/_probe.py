"""What ``pyspec doctor`` does in a process of its own: ``python -m pyspec.cli._probe drivers | device NAME SECONDS``.

Prints one line of JSON. Drivers may print before it, hang, or end the process.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def main(arguments: list[str]) -> int:
    from .. import backends
    from ..backends import _drivers
    from ..errors import PyspecError

    found: dict[str, Any]
    try:
        if arguments[0] == "drivers":
            found = _drivers.drivers()
        else:
            test = backends.check_device(arguments[1], float(arguments[2]))
            found = {
                "ok": test.ok,
                "nmse": test.error if math.isfinite(test.error) else None,
                "n_checked": test.n_checked,
                "bytes_per_s": test.bytes_per_s,
                "flop_per_s": test.flop_per_s,
                "seconds": test.seconds,
            }
    except (PyspecError, ImportError) as e:
        print(" ".join(str(e).split()), file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
