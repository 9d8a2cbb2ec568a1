"""What ``pyspec generate --stats`` says of ``--spec-type auto``."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from pyspec.cli.generate import _control_rows
from pyspec.stats import ControlStats


def test_rows_of_the_controller() -> None:
    known = {
        "suffix": {"asked": 0, "value": 0.1, "parked": 0},
        "draft-simple": {"asked": 5, "value": 0.25, "parked": 1},
    }
    control = ControlStats(9, {"suffix": 2, "draft-simple": 4}, n_not_worth=1, n_nothing=2, drafters=known)
    control.row_us, control.pass_us = 2000.0, {1: 2000.0, 3: 2500.0}
    assert _control_rows(control) == [
        ("auto", "9 steps", "draft-simple 4, suffix 2, not worth it 1, nothing proposed 2"),
        ("pass by rows", "2.00 ms", "1: 1.00 3: 1.25"),
        ("draft-simple", "5 asked", "gains +0.25 passes each time, parked"),
    ]


def test_no_rows_without_a_controller() -> None:
    assert _control_rows(None) == []
