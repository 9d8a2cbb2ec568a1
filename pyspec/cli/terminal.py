"""What goes to stdout and stderr, and how: text on stdout, everything about it on stderr, colour on terminals only."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec

import rich.console
import rich.progress
import typer
from rich.cells import cell_len

from ..errors import PyspecError

__all__ = [
    "EXIT_INTERRUPTED",
    "columns",
    "guard",
    "log_to_stderr",
    "printable",
    "progress",
    "stderr",
    "stdout",
    "write",
]

EXIT_FAILURE = 1
#: 128 + SIGINT, what shells expect of a program ended with Ctrl-C.
EXIT_INTERRUPTED = 130

P = ParamSpec("P")

_CONTROLS = {i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\n\t"} | {0x7F: "\u2421"}
_CONTROLS |= dict.fromkeys(range(128, 160), "�")


def stdout() -> rich.console.Console:
    """The console for results."""
    return rich.console.Console(highlight=False, soft_wrap=True)


def stderr() -> rich.console.Console:
    """The console for everything else."""
    return rich.console.Console(stderr=True, highlight=False)


def printable(text: str) -> str:
    """Text with control characters made visible: what a model writes must not steer the terminal."""
    return text.translate(_CONTROLS)


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Rows of cells as aligned lines; never cut or wrapped, no spaces at the ends.

    Args:
        rows: all of the same length. right: columns that are aligned to the right.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if i in right else cell + space)
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)


def write(text: str) -> None:
    """Text to stdout, at once and as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def guard(command: Callable[P, None]) -> Callable[P, None]:
    """Turn what a command raises into one line on stderr and an exit code.

    ``PYSPEC_TRACEBACK=1`` lets exceptions through.
    """

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _plain_encoding()
            command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _fail("stopped", EXIT_INTERRUPTED)
        except BrokenPipeError:
            # the reader has seen enough (`| head`); what is left in the buffer must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):  # typer's own to handle
            raise
        except Exception as e:
            if os.environ.get("PYSPEC_TRACEBACK", "") not in ("", "0"):
                raise
            _fail(_one_line(e), EXIT_FAILURE)

    return guarded


def _fail(message: str, code: int) -> None:
    print(f"pyspec: {message}", file=sys.stderr)
    raise typer.Exit(code) from None


def _one_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    text = printable(lines[0]) if lines else type(e).__name__
    if isinstance(e, PyspecError):
        return f"{text} (PYSPEC_TRACEBACK=1 shows {len(lines) - 1} more lines)" if len(lines) > 1 else text
    if isinstance(e, OSError):
        return text
    return f"internal error: {type(e).__name__}: {text} (PYSPEC_TRACEBACK=1 shows where; please report it)"


def _plain_encoding() -> None:
    """Whatever the locale, a character it lacks becomes '?' instead of an exception."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def log_to_stderr(verbose: int) -> None:
    """Show pyspec's log: 1 for what it does, 2 for libllama's own lines too."""
    if not verbose:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger = logging.getLogger("pyspec")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose > 1 else logging.INFO)
    if verbose == 1:
        logging.getLogger("pyspec.native").setLevel(logging.WARNING)
    else:
        from .. import backends

        backends.set_log_level(logging.DEBUG)


@contextmanager
def progress(label: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while something goes from 0.0 to 1.0; silent unless stderr is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda done: bar.update(task, completed=done)
