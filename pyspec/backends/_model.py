"""Owner of a loaded model file: facts about it, its vocabulary, its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ..config import ModelParams
from ..errors import ConfigError, ModelLoadError, NativeError
from ..types import I32Array
from . import _binding
from ._gguf import check_file, split_paths
from ._memory import is_mapped
from ._ownership import Handle, Native, creating, exiting, park_if_exiting
from ._select import check_split, select_devices
from ._status import ERR_ABORT, drain_log, last_error, last_log, raise_status

__all__ = ["ModelHandle"]

Progress = Callable[[float], "bool | None"]

_SPLIT_MODES = ("none", "layer", "row", "tensor")
_SPECIAL = (
    "bos", "eos", "eot", "sep", "nl", "pad", "mask", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
)  # fmt: skip

#: Architectures whose graph hands out nextn rows; for others libllama leaves rows of zeros without a word.
NEXTN_ARCHITECTURES = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "dflash", "eagle3", "gemma4",
    "gemma4-assistant", "glm-dsa", "glm4moe", "glm5-next", "gpt-oss", "hy_v3", "mimo2", "mistral4", "nemotron_h",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
})  # fmt: skip


class _Progress:
    """Keeps what must not pass through C: the callback's exception and its wish to stop."""

    def __init__(self, callback: Progress | None) -> None:
        self._callback = callback
        self.error: BaseException | None = None
        self.cancelled = False

    def __call__(self, value: float) -> bool:
        if self.error is not None or self.cancelled or exiting():
            return False
        try:
            # even without a callback: entering Python here lets a pending Ctrl-C stop the load
            answer = None if self._callback is None else self._callback(value)
            self.cancelled = answer is not None and not answer
        except BaseException as exc:
            self.error = exc
        return self.error is None and not self.cancelled


class ModelHandle(Handle):
    """Owner of a ``llama_model``. Thread-safe; calls on one model are served one after the other.

    Args:
        path: a GGUF file; of a split model the first part.
        params: how to load it.
        progress: called with 0 to 1 on the calling thread; False stops the load, exceptions go to the caller.

    Raises:
        ModelLoadError: the file cannot be read, is malformed or too large, or ``progress`` stopped it.
        BackendNotFoundError: a device that is not there. ConfigError: options that do not fit this machine.
    """

    def __init__(
        self, path: str | os.PathLike[str], params: ModelParams | None = None, progress: Progress | None = None
    ) -> None:
        params = ModelParams() if params is None else params
        self.params = params
        self.path = check_file(path)
        self.load_mtp = params.load_mtp
        _binding.load()
        ffi, lib = _binding.ffi, _binding.lib
        self._ffi, self._lib = ffi, lib
        state = _Progress(progress)
        handle = ffi.new_handle(state)
        native_params = native_model_params(params.override(use_mmap=is_mapped(self.path, params)))
        native_params.params.progress_callback = lib.pyspec_py_progress
        native_params.params.progress_callback_user_data = handle
        out = ffi.new("struct llama_model **")
        with creating():
            rc = lib.pyspec_model_load(os.fsencode(self.path), native_params.params, out)
            if not rc:
                self._native = Native("model", out[0], lib.pyspec_model_free)
        if rc:
            self._raise_load(rc, state)
        try:
            if state.error is not None:  # raised in the last call, after which nothing was left to stop
                raise state.error
            self._read_info()
        except BaseException:
            self.close()
            raise
        drain_log()

    def _raise_load(self, rc: int, state: _Progress) -> NoReturn:
        reason, log = last_error(), last_log()
        park_if_exiting()
        drain_log()
        if state.error is not None:
            raise state.error
        if state.cancelled:
            raise ModelLoadError(f"loading {self.path!r} was stopped by the progress callback")
        if rc == ERR_ABORT:
            reason = f"a native assertion failed: {reason}"
        lines = "\n  ".join((reason, *log))
        raise ModelLoadError(f"model {self.path!r} cannot be loaded; native log:\n  {lines}")

    def _read_info(self) -> None:
        ffi, lib = self._ffi, self._lib
        ptr = self._open().ptr
        info = ffi.new("struct pyspec_model_info *")
        rc = lib.pyspec_get_model_info(ptr, info)
        if rc:
            raise_status(rc, "pyspec_get_model_info", f"reading the properties of {self.path!r}", "lost")
        self._vocab = lib.llama_model_get_vocab(ptr)
        self.n_vocab = int(info.n_vocab)
        self.n_ctx_train = int(info.n_ctx_train)
        self.n_embd = int(info.n_embd)
        self.n_embd_inp = int(info.n_embd_inp)
        self.n_embd_out = int(info.n_embd_out)
        self.n_layer = int(info.n_layer)
        self.n_layer_nextn = int(info.n_layer_nextn)
        self.n_head = int(info.n_head)
        self.n_head_kv = int(info.n_head_kv)
        self.n_swa = int(info.n_swa)
        self.n_params = int(info.n_params)
        self.size_bytes = int(info.size_bytes)
        self.vocab_type = int(info.vocab_type)
        self.n_pos_per_embd = int(info.n_pos_per_embd)
        self.is_recurrent = bool(info.is_recurrent)
        self.is_hybrid = bool(info.is_hybrid)
        self.is_diffusion = bool(info.is_diffusion)
        self.has_encoder = bool(info.has_encoder)
        self.has_decoder = bool(info.has_decoder)
        self.add_bos = bool(info.add_bos)
        self.add_eos = bool(info.add_eos)
        self.dflash_selector_top_k = int(info.dflash_selector_top_k)
        self.target_layer_ids = tuple(int(lib.pyspec_model_target_layer(ptr, i)) for i in range(info.n_target_layers))
        self._special = {name: int(getattr(info, name)) for name in _SPECIAL}
        buf = ffi.new("char[]", 512)
        lib.pyspec_model_text(ptr, 0, buf, 512)
        self.desc = ffi.string(buf).decode("utf-8", "replace")
        lib.pyspec_model_text(ptr, 1, buf, 512)
        self.ftype_name = ffi.string(buf).decode("utf-8", "replace")
        self._metadata: dict[str, str] | None = None
        self._eog: frozenset[int] | None = None
        self._mtp_only: bool | None = None
        self.architecture = self.metadata().get("general.architecture", "")

    def __repr__(self) -> str:
        return f"<ModelHandle {self.path!r}{' closed' if self.closed else ''}>"

    # ---- facts ----

    def metadata(self) -> dict[str, str]:
        """Scalar metadata of the file as text; arrays are left out or shortened by libllama. A copy."""
        if self._metadata is None:
            with self._locked() as ptr:
                count = self._lib.pyspec_model_meta_count(ptr)
                self._metadata = {self._meta(ptr, i, 0): self._meta(ptr, i, 1) for i in range(count)}
        return dict(self._metadata)

    def _meta(self, ptr: Any, i: int, what: int) -> str:
        length, size = self._ffi.new("int32_t *"), 256
        while True:
            buf = self._ffi.new("char[]", size)
            rc = self._lib.pyspec_model_meta(ptr, i, what, buf, size, length)
            if rc:
                raise_status(rc, "llama_model_meta_val_str_by_index", f"metadata entry {i} of {self.path!r}")
            if length[0] < size:
                return str(self._ffi.string(buf).decode("utf-8", "replace"))
            size = length[0] + 1

    def chat_template(self, name: str | None = None) -> str | None:
        """The chat template of that name (None: the default one), or None if the file has none."""
        with self._locked() as ptr:
            text = self._lib.pyspec_model_chat_template(ptr, self._ffi.NULL if name is None else name.encode())
            return None if text == self._ffi.NULL else self._ffi.string(text).decode("utf-8", "replace")

    @property
    def is_mtp_only(self) -> bool:
        """The file holds multi-token-prediction blocks but not the model they belong to.

        libllama loads such a file and says nothing; a plain context on it ends the process at the first decode.
        """
        if self._mtp_only is None:
            self._mtp_only = self.n_layer_nextn > 0 and not self.has_tensor("blk.0.attn_norm.weight")
        return self._mtp_only

    def has_tensor(self, name: str) -> bool:
        """Whether the file, or one of its parts, holds a tensor of this name."""
        found = self._ffi.new("bool *")
        for path in split_paths(self.path):
            rc = self._lib.pyspec_gguf_has_tensor(os.fsencode(path), name.encode(), found)
            if rc:
                raise_status(rc, "gguf_init_from_file", f"reading {path!r} again")
            if found[0]:
                return True
        return False

    # ---- vocabulary ----

    def special_tokens(self) -> dict[str, int]:
        """Ids of bos, eos, eot, sep, nl, pad, mask and fim_*; -1: the model has none. A copy."""
        return dict(self._special)

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> I32Array:
        """Token ids of a UTF-8 text; invalid UTF-8 is replaced, as libllama does it.

        Args:
            text: UTF-8, NUL allowed.
            add_special: add BOS and EOS as the metadata says. parse_special: read the text of control tokens as them.

        Returns:
            int32 [n], owned by the caller.

        Raises:
            ConfigError: longer than 2 GiB. NativeError: the tokenizer failed (nothing is lost).
        """
        if len(text) >= 2**31 - 16:
            raise ConfigError(f"text of {len(text)} bytes is too long for the tokenizer (2 GiB)")
        n = self._ffi.new("int32_t *")
        capacity = len(text) + 8
        while True:
            out = np.empty(capacity, np.int32)
            dst = self._ffi.from_buffer("int32_t[]", out)
            with self._locked():
                rc = self._lib.pyspec_tokenize(
                    self._vocab, text, len(text), dst, capacity, add_special, parse_special, n
                )
            if rc:
                self._raise_vocab(rc, "llama_tokenize", "tokenizing")
            if n[0] <= capacity:
                return np.array(out[: n[0]])
            capacity = int(n[0])

    def _raise_vocab(self, rc: int, func: str, what: str) -> NoReturn:
        reason, log = last_error(), last_log()
        raise NativeError(f"{what}: {reason}", func=func, code=rc, log=log, state="unchanged")

    def _token(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise ConfigError(f"token id {token} is not in [0, {self.n_vocab})")
        return token

    def token_text(self, token: int) -> bytes:
        """The vocabulary's own spelling of a token, as stored in the file."""
        with self._locked():
            text = self._lib.pyspec_token_text(self._vocab, self._token(token))
            return b"" if text == self._ffi.NULL else bytes(self._ffi.string(text))

    def token_piece(self, token: int, special: bool) -> bytes:
        """The bytes a token stands for; may be part of a character. Control tokens: empty unless ``special``."""
        self._token(token)
        size, n = 64, self._ffi.new("int32_t *")
        while True:
            buf = self._ffi.new("char[]", size)
            with self._locked():
                rc = self._lib.pyspec_token_piece(self._vocab, token, special, buf, size, n)
            if rc:
                self._raise_vocab(rc, "llama_token_to_piece", f"token {token}")
            if n[0] <= size:
                return bytes(self._ffi.buffer(buf, n[0]))
            size = int(n[0])

    def token_attr(self, token: int) -> int:
        """Attribute bits (``enum llama_token_attr``)."""
        return self._token_number("pyspec_token_attr", token)

    def is_eog(self, token: int) -> bool:
        """True for every token that ends a generation (EOS, EOT ...)."""
        return self._token(token) in self.eog_tokens()

    def is_control(self, token: int) -> bool:
        """True for tokens that steer the model and are not text."""
        return bool(self._token_number("pyspec_token_is_control", token))

    def _token_number(self, func: str, token: int) -> int:
        with self._locked():
            value = int(getattr(self._lib, func)(self._vocab, self._token(token)))
        if value < 0:
            self._raise_vocab(value, func, f"token {token}")
        return value

    def eog_tokens(self) -> frozenset[int]:
        """Every end-of-generation token; scanned once."""
        if self._eog is None:
            n, capacity = self._ffi.new("int32_t *"), 256
            while True:
                out = self._ffi.new("int32_t[]", capacity)
                with self._locked():
                    rc = self._lib.pyspec_eog_tokens(self._vocab, out, capacity, n)
                if rc:
                    self._raise_vocab(rc, "llama_vocab_is_eog", "end-of-generation tokens")
                if n[0] <= capacity:
                    self._eog = frozenset(out[i] for i in range(n[0]))
                    break
                capacity = int(n[0])
        return self._eog

    def _locked(self) -> _Locked:
        return _Locked(self)


class _Locked:
    """Holds a handle's lock and gives its pointer; raises ClosedError if it is gone."""

    __slots__ = ("_handle", "_native")

    def __init__(self, handle: ModelHandle) -> None:
        self._handle = handle
        self._native = handle._open()  # before the lock: in a forked child the lock may be held for ever

    def __enter__(self) -> Any:
        self._native.lock.acquire()
        if self._native.ptr is None:
            self._native.lock.release()
            raise self._handle._closed_error()
        return self._native.ptr

    def __exit__(self, *exc: object) -> None:
        self._native.lock.release()


class native_model_params:
    """``llama_model_params`` with the memory it points to, for as long as this object lives."""

    __slots__ = ("devices", "params", "tensor_split")

    def __init__(self, options: ModelParams) -> None:
        ffi, lib = _binding.ffi, _binding.lib
        params = ffi.new("struct llama_model_params *", lib.llama_model_default_params())
        chosen = select_devices(options.devices)
        check_split(options, chosen)
        self.devices = ffi.NULL
        if chosen is not None:
            handles = [lib.pyspec_device_handle(d.index) for d in chosen]
            self.devices = ffi.new("ggml_backend_dev_t[]", [*handles, ffi.NULL])
            params.devices = self.devices
        limit = int(lib.llama_max_devices())
        self.tensor_split = ffi.NULL
        if options.tensor_split is not None:
            shares = list(options.tensor_split)
            if len(shares) > limit:
                raise ConfigError(f"tensor_split has {len(shares)} entries, at most {limit} devices are possible")
            self.tensor_split = ffi.new("float[]", shares + [0.0] * (limit - len(shares)))
            params.tensor_split = self.tensor_split
        params.n_gpu_layers = options.n_gpu_layers
        params.main_gpu = options.main_gpu
        params.split_mode = _SPLIT_MODES.index(options.split_mode)
        # enum llama_load_mode: none, mmap, mlock, both
        params.load_mode = (
            (lib.LLAMA_LOAD_MODE_MMAP_MLOCK if options.use_mlock else lib.LLAMA_LOAD_MODE_MMAP)
            if options.use_mmap is not False and lib.llama_supports_mmap()
            else (lib.LLAMA_LOAD_MODE_MLOCK if options.use_mlock else lib.LLAMA_LOAD_MODE_NONE)
        )
        params.check_tensors = options.check_tensors
        params.use_extra_bufts = options.use_extra_bufts
        params.vocab_only = options.vocab_only
        params.load_mtp = options.load_mtp
        self.params = params
