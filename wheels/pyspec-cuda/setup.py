"""Builds the module from the pyspec source tree that this folder lies in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from build_support.config import BuildConfig
from build_support.cuda import runtime_requirements
from build_support.module_package import setup_module

setup_module("cuda", runtime_requirements(BuildConfig.from_env()))
