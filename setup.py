"""Build entry for setuptools; the work is in build_support, the metadata in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_support.extensions import BuildExt, command_options, extension_list

setup(ext_modules=extension_list(), cmdclass={"build_ext": BuildExt}, options=command_options())
