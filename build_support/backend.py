"""The PEP 517 build backend: setuptools, with pip as a build requirement only where the source must be fetched."""

from __future__ import annotations

import os
from typing import Any

from setuptools import build_meta

from build_support import cuda
from build_support.config import BuildConfig, BuildError
from build_support.native import load_sync

prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable

_Settings = dict[str, Any] | None


def _fetch_requirements(*, pinned: bool = False) -> list[str]:
    if (os.environ.get("PYSPEC_LLAMA_SRC") and not pinned) or load_sync().TREE_DIR.is_dir():
        return []
    return ["pip"]


def _cuda_requirements() -> list[str]:
    try:
        return cuda.missing_requirements(BuildConfig.from_env())
    except BuildError:
        return []  # the build says it, with more to go by


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _fetch_requirements() + _cuda_requirements()


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _fetch_requirements() + _cuda_requirements()


def get_requires_for_build_sdist(config_settings: _Settings = None) -> list[str]:
    return build_meta.get_requires_for_build_sdist(config_settings) + _fetch_requirements(pinned=True)


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    sync = load_sync()
    try:
        sync.sync()  # the sdist carries the pinned tree, so that it builds without a network
    except sync.SyncError as exc:
        raise SystemExit(f"\nerror: {exc}\n") from None
    return build_meta.build_sdist(sdist_directory, config_settings)
