"""Model files from the Hugging Face hub.

Needs the package huggingface_hub (extra ``hub``), imported at first use. Its settings apply: cache folder (``HF_HOME``,
``HF_HUB_CACHE``), offline mode (``HF_HUB_OFFLINE``), login, endpoint, and the progress bar it shows on stderr while it
fetches (``HF_HUB_DISABLE_PROGRESS_BARS=1`` turns that off).
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from .errors import ConfigError, ModelLoadError, UnsupportedError

__all__ = ["download"]

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def download(
    repo_id: str,
    filename: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """Path of a model file in the local cache, fetched first if it is not there.

    A file that is split into parts (``...-00001-of-00003.gguf``) is fetched whole; the path is that of the first part.

    Args:
        repo_id: such as ``"HuggingFaceTB/SmolLM2-135M-Instruct-GGUF"``.
        filename: a file of that repository, or a pattern such as ``"*q8_0.gguf"`` that fits exactly one (case does
            not matter; the parts of a split file count as one).
        revision: branch, tag or commit. cache_dir: None: the hub's own. local_files_only: never use the network.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        ConfigError: no file, or more than one, fits the pattern.
        ModelLoadError: the repository or file does not exist, or cannot be reached and is not in the cache.
    """
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as e:
        raise UnsupportedError(
            "from_pretrained needs the package huggingface_hub, which cannot be imported: pip install 'pyspec-llm[hub]'"
        ) from e

    options: dict[str, Any] = {
        "revision": revision,
        "cache_dir": str(cache_dir) if cache_dir is not None else None,
        "local_files_only": local_files_only,
    }
    try:
        if any(c in filename for c in "*?["):
            filename = _match(filename, _list_files(repo_id, **options), repo_id)
        paths = [Path(huggingface_hub.hf_hub_download(repo_id, name, **options)) for name in _parts(filename)]
    # OSError: no connection, disk full, not in the cache; ValueError: a malformed repo_id
    except (HfHubHTTPError, OSError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ModelLoadError(f"cannot get {filename!r} of {repo_id!r} from the Hugging Face hub: {reason}") from e
    return paths[0]


def _parts(filename: str) -> list[str]:
    """The file itself, or all parts of a split file, the first one first."""
    split = _SPLIT.search(filename)
    if not split:
        return [filename]
    stem, n_parts = filename[: split.start()], int(split.group(2))
    return [f"{stem}-{i:05d}-of-{n_parts:05d}.gguf" for i in range(1, n_parts + 1)]


def _list_files(repo_id: str, *, revision: str | None, cache_dir: str | None, local_files_only: bool) -> list[str]:
    """Names of the repository's files; of those in the cache if the network is not to be used or not there."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    unreachable: Exception | None = None
    if not local_files_only:
        try:
            return list(huggingface_hub.HfApi().list_repo_files(repo_id, revision=revision))
        except HfHubHTTPError:
            raise  # the hub has answered: no such repository or revision, or no access
        except OSError as e:
            unreachable = e
        except Exception as e:  # the HTTP client's own connection errors are not all OSError
            if "httpx" not in type(e).__module__:
                raise
            unreachable = e
    try:
        # Nothing is asked of the snapshot but its place: in the cache it may well hold one file of many.
        folder = huggingface_hub.snapshot_download(
            repo_id, revision=revision, cache_dir=cache_dir, local_files_only=True, ignore_patterns=["*"]
        )
    except OSError:
        if unreachable is not None:
            raise OSError(f"the hub cannot be reached ({unreachable}) and the cache does not have it") from unreachable
        raise
    root = Path(folder)
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir())


def _match(pattern: str, names: list[str], repo_id: str) -> str:
    """The one name that fits; only first parts of split files are looked at."""
    firsts = [n for n in names if not (split := _SPLIT.search(n)) or int(split.group(1)) == 1]
    fits = []
    for name in firsts:
        whole = _SPLIT.sub(".gguf", name)
        if any(fnmatch.fnmatch(n.lower(), pattern.lower()) for n in (name, whole)):
            fits.append(name)
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ConfigError(f"filename {pattern!r} fits {len(fits)} files of {repo_id!r}: {', '.join(sorted(fits))}")
    offered = [n for n in firsts if n.endswith(".gguf")]
    shown = ", ".join(offered[:20]) + (", ..." if len(offered) > 20 else "")
    raise ConfigError(f"filename {pattern!r} fits no file of {repo_id!r}; its GGUF files: {shown or 'none'}")
