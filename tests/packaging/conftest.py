"""Fixtures for tests of the build code: it is not installed, so it is imported from the source tree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for build_support


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree."""
    return ROOT


@pytest.fixture(scope="session")
def sync() -> ModuleType:
    """``vendor/ggml/sync.py`` as a module."""
    spec = importlib.util.spec_from_file_location("sync_under_test", ROOT / "vendor" / "ggml" / "sync.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
