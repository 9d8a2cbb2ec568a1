"""What the setup.py of a package with one backend module (``wheels/``) does: build the module, put it into a wheel.

Version, requirement and licences are pyspec's. The module has nothing of Python in it, so one wheel serves every
Python on a platform.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

from build_support import native
from build_support.config import ROOT, BuildConfig, BuildError, package_version


class _BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class _AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def setup_module(backend: str, requirements: list[str] | None = None) -> None:
    """Run setuptools for the package ``pyspec-<backend>`` in the current folder.

    Args:
        backend: a name of :data:`build_support.config.BACKEND_FLAGS`.
        requirements: packages that bring libraries the module needs at run time.
    """
    package = f"pyspec_{backend}"

    class BuildModule(build_py):
        def run(self) -> None:
            super().run()
            try:
                env = BuildConfig.from_env()
                # The same folder as an ordinary build with this backend: what is compiled there serves both.
                config = replace(env, backends=tuple(dict.fromkeys((*env.backends, backend))))
                build = native.build(config, module=backend)
            except BuildError as exc:
                raise SystemExit(f"\nerror: {exc}\n") from None
            target = Path(self.build_lib) / package
            target.mkdir(parents=True, exist_ok=True)
            for old in target.glob("libpyspec-*"):
                old.unlink()
            for name in build.libraries:
                shutil.copy2(build.install_dir / name, target)

    # Licence files have to lie in the project.
    licenses = Path("licenses")
    shutil.rmtree(licenses, ignore_errors=True)
    shutil.copytree(ROOT / "licenses", licenses)
    shutil.copy2(ROOT / "LICENSE", licenses / "LICENSE")
    version = package_version()
    setup(
        version=version,
        install_requires=[f"pyspec-llm=={version}", *(requirements or [])],
        distclass=_BinaryDistribution,
        cmdclass={"build_py": BuildModule, "bdist_wheel": _AnyPython},
        script_args=sys.argv[1:],
        options={"build": {"build_base": os.path.join(str(ROOT), "build", "wheels", package)}},
    )
