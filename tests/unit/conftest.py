"""Fixtures of the unit tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``fake_cli.FakeLLM`` in the place of ``pyspec.llm.LLM``; ``fake.made`` has the objects."""
    from fake_cli import put_fake

    return put_fake(monkeypatch)
