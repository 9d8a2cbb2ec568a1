"""Every option: its default, its legal range, and the message when it is out of range.

Names and defaults are llama.cpp's where llama.cpp has the option (``include/llama.h``, ``common/common.h``).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._options import GrammarSpec
from ._options import Options as _Options
from ._options import check_finite as _check_finite
from ._options import check_float as _check_float
from ._options import check_int as _check_int
from ._options import json_text as _json_text
from ._options import strings as _strings
from .errors import ConfigError

log = logging.getLogger("pyspec")

__all__ = [
    "CACHE_TYPES",
    "SAMPLERS",
    "VERIFICATIONS",
    "ContextParams",
    "GrammarSpec",
    "ModelParams",
    "SamplingParams",
    "SpeculationParams",
    "default_n_threads",
    "usable_n_threads",
]

#: KV cache types by name, with ggml's type numbers.
CACHE_TYPES: Mapping[str, int] = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip

_FLASH_ATTN: Mapping[Any, int] = {"auto": -1, None: -1, False: 0, True: 1, "off": 0, "on": 1}


def default_n_threads() -> int:
    """CPUs this process may use: affinity mask, then cgroup v2 or v1 quota, never less than 1."""
    try:
        n = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity call
        n = os.cpu_count() or 1
    return max(1, min(n, _cgroup_cpus() or n))


def usable_n_threads(n: int | None, name: str = "n_threads") -> int:
    """``n``, but no more than the CPUs this process may use; None: all of these.

    ggml's threads spin at barriers: with more threads than CPUs a pass takes hundreds of times longer.
    """
    n_cpu = default_n_threads()
    if n is not None and n > n_cpu:
        log.warning("%s=%d is more than the %d CPU(s) this process may use: using %d", name, n, n_cpu, n_cpu)
    return min(n or n_cpu, n_cpu)


def _cgroup_cpus(root: str = "/sys/fs/cgroup", self_file: str = "/proc/self/cgroup") -> int | None:
    """CPUs that this process's control groups allow, the tightest of the group and its parents; None: no limit."""
    limits = []
    for group in _own_groups(root, self_file):
        try:
            if group.endswith(_V1):
                quota, period = (int(_read(f"{group}/cpu.cfs_{x}_us")) for x in ("quota", "period"))
            else:
                quota, period = (int(x) for x in _read(f"{group}/cpu.max").split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            limits.append(max(1, math.ceil(quota / period)))
    return min(limits, default=None)


_V1 = "#v1"


def _read(path: str) -> str:
    with open(path.replace(_V1, ""), encoding="utf-8", errors="surrogateescape") as f:
        return f.read()


def _own_groups(root: str, self_file: str) -> list[str]:
    """Folders of this process's groups and their parents. Without a cgroup namespace the quota sits below the root."""
    groups = {root, f"{root}/cpu{_V1}"}
    try:
        lines = _read(self_file).splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        v1 = "cpu" in controllers.split(",")
        if controllers and not v1:
            continue
        base = f"{root}/cpu" if v1 else root
        parts = [p for p in path.split("/") if p]
        groups.update(f"{base}/{'/'.join(parts[:i])}{_V1 if v1 else ''}" for i in range(1, len(parts) + 1))
    return sorted(groups)


@dataclass(frozen=True, slots=True)
class ModelParams(_Options):
    """How a model file is loaded (``llama_model_params``).

    Attributes:
        n_gpu_layers: layers kept on the GPU; negative: all.
        devices: device names to offload to, as ``pyspec devices`` lists them; None: all; empty: CPU only.
        main_gpu: device index used for the whole model when ``split_mode`` is "none".
        split_mode: "none", "layer", "row" or "tensor".
        tensor_split: share of the model on each device; None: by free memory.
        use_mmap: map the file instead of reading it, so that processes share it and loading takes no time; None: only
            where it cannot lie in huge pages of host memory, which are faster (Linux; not beside a GPU, nor where the
            file takes more than a third of the available memory).
        use_mlock: keep it in RAM.
        check_tensors: validate tensor data while loading (slower; finds NaN and corrupt blocks).
        use_extra_bufts: allow repacked weights; False makes 1-row and n-row kernels agree on K-quants.
        vocab_only: load the tokenizer and metadata, no weights.
        load_mtp: load the multi-token-prediction blocks too (``draft-mtp`` on the target's own file).
    """

    n_gpu_layers: int = -1
    devices: tuple[str, ...] | None = None
    main_gpu: int = 0
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] | None = None
    use_mmap: bool | None = None
    use_mlock: bool = False
    check_tensors: bool = False
    use_extra_bufts: bool = True
    vocab_only: bool = False
    load_mtp: bool = False

    def __post_init__(self) -> None:
        _check_int("n_gpu_layers", self.n_gpu_layers, -(2**31), 2**31 - 1)
        _check_int("main_gpu", self.main_gpu, 0)
        if self.split_mode not in ("none", "layer", "row", "tensor"):
            raise ConfigError(f"split_mode must be 'none', 'layer', 'row' or 'tensor', got {self.split_mode!r}")
        if self.devices is not None:
            if isinstance(self.devices, str) or not all(isinstance(d, str) for d in self.devices):
                raise ConfigError(f"devices must be a sequence of device names, got {self.devices!r}")
            object.__setattr__(self, "devices", tuple(self.devices))
        if self.tensor_split is not None:
            self._check_tensor_split(self.tensor_split)

    def _check_tensor_split(self, shares: Any) -> None:
        if isinstance(shares, (str, bytes)) or not isinstance(shares, Iterable):
            raise ConfigError(f"tensor_split must be a sequence of numbers, one for each device, got {shares!r}")
        shares = tuple(shares)
        for i, share in enumerate(shares):
            _check_float(f"tensor_split[{i}]", share, 0.0)
        if not shares or not 0 < sum(shares) < math.inf:
            raise ConfigError(f"tensor_split must have a share above 0, got {shares!r}")
        object.__setattr__(self, "tensor_split", tuple(float(share) for share in shares))


@dataclass(frozen=True, slots=True)
class ContextParams(_Options):
    """How a context is made (``llama_context_params``; same names).

    Attributes:
        n_ctx: KV cells in all; 0: the model's training length. Split evenly over ``n_seq_max`` sequences unless
            ``kv_unified``.
        n_batch: most rows of one ``decode`` call. n_ubatch: most rows computed at once (<= n_batch).
        n_seq_max: most sequences.
        n_rs_seq: recurrent-state snapshots per sequence for rollback; 0: none.
        n_outputs_max: most output rows of a micro-batch; 0: n_batch.
        n_threads: threads for one row a pass; None: CPUs this process may use, and never more.
        n_threads_batch: for more rows; None: same as n_threads.
        adapt_threads: compute with fewer threads while other processes take the CPUs, as the times of passes say; never
            in exact mode.
        ctx_type: "default" or "mtp".
        rope_freq_base, rope_freq_scale, yarn_*: 0 (yarn: -1) means as the model says.
        flash_attn: True, False or "auto".
        cache_type_k, cache_type_v: "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0" or "iq4_nl".
        offload_kqv: KV cache on the GPU. op_offload: host tensor operations on the GPU.
        swa_full: full-size cache for sliding-window layers.
        kv_unified: one cache shared by all sequences, ``n_ctx`` for them together. Off: ``LLM`` shares one between
            sequences that draft (drafts differ in length), with ``n_ctx`` for each.
    """

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_rs_seq: int = 0
    n_outputs_max: int = 0
    n_threads: int | None = None
    n_threads_batch: int | None = None
    adapt_threads: bool = True
    ctx_type: str = "default"
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_orig_ctx: int = 0
    flash_attn: bool | str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    offload_kqv: bool = True
    op_offload: bool = True
    swa_full: bool = False
    kv_unified: bool = False

    def __post_init__(self) -> None:
        _check_int("n_ctx", self.n_ctx, 0, 2**31 - 1)
        _check_int("n_batch", self.n_batch, 1, 2**31 - 1)
        _check_int("n_ubatch", self.n_ubatch, 1, 2**31 - 1)
        if self.n_ubatch > self.n_batch:
            raise ConfigError(f"n_ubatch ({self.n_ubatch}) must not exceed n_batch ({self.n_batch})")
        _check_int("n_seq_max", self.n_seq_max, 1, 256)
        if self.n_batch < self.n_seq_max:
            raise ConfigError(f"n_batch ({self.n_batch}) must be at least n_seq_max ({self.n_seq_max}): one row each")
        _check_int("n_rs_seq", self.n_rs_seq, 0)
        if self.n_rs_seq and self.n_ubatch < self.n_rs_seq + 2:
            raise ConfigError(
                f"n_ubatch ({self.n_ubatch}) must be at least n_rs_seq + 2 ({self.n_rs_seq + 2}): "
                "the recurrent snapshots of a pass have to fit in one micro-batch"
            )
        _check_int("n_outputs_max", self.n_outputs_max, 0)
        for name in ("n_threads", "n_threads_batch"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 1, 512)
        if not isinstance(self.adapt_threads, bool):
            raise ConfigError(f"adapt_threads must be True or False, got {self.adapt_threads!r}")
        if self.ctx_type not in ("default", "mtp"):
            raise ConfigError(f"ctx_type must be 'default' or 'mtp', got {self.ctx_type!r}")
        if not isinstance(self.flash_attn, (bool, str)) or self.flash_attn not in _FLASH_ATTN:
            raise ConfigError(f"flash_attn must be True, False or 'auto', got {self.flash_attn!r}")
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                raise ConfigError(f"{name} must be one of {', '.join(CACHE_TYPES)}; got {getattr(self, name)!r}")
        if self.cache_type_v not in ("f32", "f16", "bf16") and self.flash_attn_code == 0:
            raise ConfigError(f"cache_type_v={self.cache_type_v!r} needs flash attention; flash_attn is off")

    @property
    def flash_attn_code(self) -> int:
        """llama.h's ``enum llama_flash_attn_type``: -1 auto, 0 off, 1 on."""
        return _FLASH_ATTN[self.flash_attn]


#: Samplers in the order in which they are applied (llama.cpp's default).
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")

#: How drafted tokens are checked; see docs/sampling.md.
VERIFICATIONS = ("auto", "greedy", "match", "rejection", "block")


@dataclass(frozen=True, slots=True)
class SamplingParams(_Options):
    """How one request is sampled (names as in vLLM, or as in llama.cpp where vLLM has none).

    Attributes:
        max_tokens: most tokens to generate; None: until the model stops or the context is full. 0: none.
        temperature: 0 is greedy: the most likely token that bias, penalties, ``typical_p`` and ``xtc`` leave.
        top_k: keep the k most likely tokens; 0: all. top_p: keep the smallest set with this much probability.
        min_p: drop tokens less likely than min_p times the most likely one.
        seed: None: a new one for each request. The same seed gives the same text, whatever else is in the batch; with
            ``verification`` "auto" or "match" also with another drafter or none.
        logprobs: give the log-probability of every output token.
        top_logprobs: also those of the most likely tokens at its place, up to 20; above 0 it implies ``logprobs``.
        logprobs_mode: "raw": of the model's own distribution (temperature 1, before any filter). "processed": of the
            distribution that the token was drawn from.
        stop: strings that end the text; they are not part of it.
        ignore_eos: treat end-of-generation tokens as ordinary ones.
        add_special: add the model's BOS (and EOS) to a text prompt as its metadata says.
        parse_special: read the text of control tokens in a prompt as these tokens.
        skip_special: leave control tokens out of the text.
        logit_bias: token id -> what is added to its logit; -inf forbids it.
        penalty_repeat, penalty_freq, penalty_present: lower the logits of tokens among the last ``penalty_last_n`` of
            prompt and output: divided by the first (a negative one is multiplied), less count times the second, less
            the third. 1, 0 and 0: off. penalty_last_n: -1: all tokens, 0: off.
        dry_multiplier, dry_base, dry_allowed_length: "don't repeat yourself": a token that would make a repetition of
            ``n`` tokens longer, ``n >= dry_allowed_length``, loses ``multiplier * base ** (n - allowed_length)``.
            Multiplier 0: off. dry_penalty_last_n: tokens looked at, -1: all. dry_sequence_breakers: no repetition goes
            across these strings.
        typical_p: keep the tokens whose surprise is nearest to the expected one, with this much probability; 1: off.
        top_n_sigma: drop logits more than this many standard deviations below the largest; 0 or less: off.
        xtc_probability, xtc_threshold: with this probability, drop all but the least of the tokens that have
            ``xtc_threshold`` or more; off at probability 0, or a threshold above 0.5.
        dynatemp_range, dynatemp_exponent: temperature from ``temperature - range`` to ``temperature + range`` by how
            much entropy there is; range 0: off.
        mirostat: 0: off; 1 or 2: keep the surprise near ``mirostat_tau`` with learning rate ``mirostat_eta``. It
            replaces the samplers that cut.
        min_keep: top_p, min_p, typical_p and xtc leave this many tokens.
        samplers: names of :data:`SAMPLERS`, each once, in the order in which they are applied.
        verification: how drafted tokens are checked: "greedy" (needs temperature 0), "match", "rejection" or "block";
            "auto": "rejection" where the drafter draws its tokens and no seed is given, else "match". Changes how many
            are accepted, never the distribution of the text.
        json_schema: the text is JSON that fits this schema: a dict, its text, or a pydantic model class.
        json_whitespace: allow white space between the tokens of JSON; without it more tokens are forced, and drafted.
        regex: the text as a whole matches this regular expression (syntax of Rust's regex crate).
        choice: the text is one of these strings.
        grammar: the text fits this grammar, written in Lark's syntax (as llguidance has it) or llama.cpp's GBNF.
        speculation: drafters to use, of those that are loaded: a name, a list, or "off"; None: all.
        n_max: most tokens drafted a step, if less than what the drafters were loaded with.
        p_min: stop drafting at the first token less likely than this; None: as the drafters were loaded.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    logprobs_mode: str = "raw"
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    add_special: bool = True
    parse_special: bool = True
    skip_special: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    samplers: tuple[str, ...] = SAMPLERS
    verification: str = "auto"
    json_schema: Any = None
    json_whitespace: bool = True
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    speculation: str | tuple[str, ...] | None = None
    n_max: int | None = None
    p_min: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
        _check_finite("temperature", self.temperature, 0.0)
        _check_int("top_k", self.top_k, 0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        if not isinstance(self.logprobs, bool):
            raise ConfigError(f"logprobs must be True or False, got {self.logprobs!r}; how many: top_logprobs")
        _check_int("top_logprobs", self.top_logprobs, 0, 20)
        if self.top_logprobs:
            object.__setattr__(self, "logprobs", True)
        if self.logprobs_mode not in ("raw", "processed"):
            raise ConfigError(f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}")
        self._check_logit_bias()
        _check_finite("penalty_repeat", self.penalty_repeat, 0.0, open_low=True)
        _check_finite("penalty_freq", self.penalty_freq)
        _check_finite("penalty_present", self.penalty_present)
        _check_int("penalty_last_n", self.penalty_last_n, -1, 2**31 - 1)
        _check_finite("dry_multiplier", self.dry_multiplier, 0.0)
        _check_finite("dry_base", self.dry_base, 1.0)
        _check_int("dry_allowed_length", self.dry_allowed_length, 0, 2**31 - 1)
        _check_int("dry_penalty_last_n", self.dry_penalty_last_n, -1, 2**31 - 1)
        object.__setattr__(self, "dry_sequence_breakers", _strings("dry_sequence_breakers", self.dry_sequence_breakers))
        _check_float("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _check_finite("top_n_sigma", self.top_n_sigma)
        _check_float("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _check_float("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _check_finite("dynatemp_range", self.dynatemp_range, 0.0)
        _check_finite("dynatemp_exponent", self.dynatemp_exponent, 0.0)
        _check_int("mirostat", self.mirostat, 0, 2)
        _check_finite("mirostat_tau", self.mirostat_tau, 0.0)
        _check_finite("mirostat_eta", self.mirostat_eta, 0.0)
        _check_int("min_keep", self.min_keep, 0, 2**31 - 1)
        self._check_samplers()
        if self.verification not in VERIFICATIONS:
            raise ConfigError(f"verification must be one of {', '.join(VERIFICATIONS)}; got {self.verification!r}")
        if self.verification == "greedy" and self.temperature > 0:
            raise ConfigError(f"verification='greedy' needs temperature=0, got {self.temperature:g}")
        self._check_grammar()
        self._check_speculation()

    def _check_logit_bias(self) -> None:
        bias: Any = self.logit_bias
        if not isinstance(bias, Mapping):
            raise ConfigError(f"logit_bias must be a dict of token id -> number, got {bias!r}")
        for token, value in bias.items():
            _check_int("a token id in logit_bias", token, 0, 2**31 - 1)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value < math.inf:
                raise ConfigError(f"logit_bias[{token}] must be a finite number or -inf, got {value!r}")
        object.__setattr__(self, "logit_bias", dict(bias))

    def active_samplers(self) -> frozenset[str]:
        """Names of the samplers whose options ask for something."""
        used = {
            "penalties": self.penalty_last_n != 0
            and (self.penalty_repeat != 1.0 or self.penalty_freq != 0.0 or self.penalty_present != 0.0),
            "dry": self.dry_multiplier > 0 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature not in (0.0, 1.0) or self.dynatemp_range > 0,
        }
        return frozenset(name for name, on in used.items() if on)

    def _check_samplers(self) -> None:
        samplers = _strings("samplers", self.samplers)
        if isinstance(self.samplers, str):
            raise ConfigError(f"samplers must be a list of names, got {self.samplers!r}")
        for i, name in enumerate(samplers):
            if name not in SAMPLERS:
                raise ConfigError(f"unknown sampler {name!r}; there are {', '.join(SAMPLERS)}")
            if name in samplers[:i]:
                raise ConfigError(f"samplers names {name!r} twice")
        object.__setattr__(self, "samplers", samplers)
        active = self.active_samplers()
        missing = sorted(active - set(samplers))
        if missing:
            raise ConfigError(f"options of {missing[0]!r} are set, but samplers={samplers!r} leaves it out: add it")
        cuts = sorted(active - {"penalties", "dry", "temperature"})
        if self.mirostat and cuts:
            raise ConfigError(f"mirostat={self.mirostat} replaces {cuts[0]!r}: leave its options at their defaults")
        if self.mirostat and self.dynatemp_range > 0:
            raise ConfigError(f"mirostat={self.mirostat} and dynatemp_range exclude each other")

    def _check_speculation(self) -> None:
        given: Any = self.speculation
        if given is not None:
            names = ((given,) if given != "off" else ()) if isinstance(given, str) else given
            if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) and n for n in names):
                raise ConfigError(f"speculation must be 'off', a drafter's name or a list of names, got {given!r}")
            object.__setattr__(self, "speculation", None if tuple(names) == ("auto",) else tuple(names))
        if self.n_max is not None:
            _check_int("n_max", self.n_max, 1, 1024)
        if self.p_min is not None:
            _check_float("p_min", self.p_min, 0.0, 1.0)

    def _check_grammar(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        if not isinstance(self.json_whitespace, bool):
            raise ConfigError(f"json_whitespace must be True or False, got {self.json_whitespace!r}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a non-empty string, got {value!r}")
        choice: Any = self.choice
        if isinstance(choice, str) or not isinstance(choice, (list, tuple)):
            raise ConfigError(f"choice must be a list of strings, got {choice!r}")
        if not all(isinstance(c, str) and c for c in choice):
            raise ConfigError(f"choice must hold non-empty strings, got {choice!r}")
        object.__setattr__(self, "choice", tuple(choice))
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other: give one")

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """What bounds the text; None: nothing."""
        if self.json_schema is not None:
            return GrammarSpec("json_schema", self.json_schema, not self.json_whitespace)
        if self.choice:
            return GrammarSpec("choice", json.dumps(self.choice))
        for kind, source in (("regex", self.regex), ("grammar", self.grammar)):
            if source is not None:
                return GrammarSpec(kind, source)
        return None


@dataclass(frozen=True, slots=True)
class SpeculationParams(_Options):
    """Options of the drafters (``common_params_speculative`` of llama.cpp; same names and defaults).

    Attributes:
        n_max: most tokens drafted a step by a draft model. n_min: shorter drafts are dropped.
        p_min: stop drafting at the first token less likely than this.
        size_n: length of the n-gram looked up. size_m: most tokens proposed after it.
        min_hits: how often the n-gram must have been seen.
        n_match, mod_n_max, mod_n_min: ngram-mod's n-gram, most tokens proposed, and the least.
        lookup_cache_static, lookup_cache_dynamic: files of ngram-cache: counts of a corpus, read only; and of earlier
            texts, to which what was generated is added when contexts are closed.
        suffix_n_max: most tokens proposed a step by "suffix". suffix_min_match: shortest end of the text looked up.
        suffix_factor, suffix_offset: at most ``factor * length of the match + offset`` tokens are proposed.
        suffix_p_min: stop where a proposal is less likely to be right than this.
        suffix_rate: how fast it learns from a text how likely its repeats are; 0: they count by frequency alone.
        suffix_corpus_max: tokens of past outputs to remember; 0: none. suffix_corpus: file to keep them in: read when
            contexts are made, written when they are closed.
        synth_len, synth_rates: for benchmarks only, the output is not valid: accept drafts by lot, so that a pass with
            a full draft gives ``synth_len`` tokens on average, or by the rate for each position that it is reached.
        prediction_n_max: most tokens proposed a step from a request's prediction.
        grammar_n_max: most tokens proposed a step of those that a request's grammar forces.
        backend_sampling: sample the draft on the device where it can.
        exact: every pass that decides a token evaluates one sequence with ``n_max + 1`` rows, padded where
            the draft is shorter, so that the text is the same bit by bit whatever is drafted; see docs/exactness.md.
            Also with ``speculation="off"``, which is its reference.
    """

    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1
    n_match: int = 24
    mod_n_max: int = 64
    mod_n_min: int = 48
    lookup_cache_static: str | os.PathLike[str] | None = None
    lookup_cache_dynamic: str | os.PathLike[str] | None = None
    suffix_n_max: int = 32
    suffix_min_match: int = 2
    suffix_factor: float = 4.0
    suffix_offset: float = 0.0
    suffix_p_min: float = 0.52
    suffix_rate: float = 0.02
    suffix_corpus_max: int = 262_144
    suffix_corpus: str | None = None
    prediction_n_max: int = 16
    grammar_n_max: int = 16
    synth_len: float | None = None
    synth_rates: tuple[float, ...] = ()
    backend_sampling: bool = True
    exact: bool = False

    def __post_init__(self) -> None:
        _check_int("n_max", self.n_max, 1, 1024)
        _check_int("n_min", self.n_min, 0)
        if self.n_min > self.n_max:
            raise ConfigError(f"n_min ({self.n_min}) must not exceed n_max ({self.n_max})")
        _check_float("p_min", self.p_min, 0.0, 1.0)
        _check_int("size_n", self.size_n, 1, 1024)
        _check_int("size_m", self.size_m, 1, 1024)
        _check_int("min_hits", self.min_hits, 1)
        _check_int("n_match", self.n_match, 1, 1024)
        _check_int("mod_n_max", self.mod_n_max, 1, 1024)
        _check_int("mod_n_min", self.mod_n_min, 0, 1024)
        if self.mod_n_min > self.mod_n_max:
            raise ConfigError(f"mod_n_min ({self.mod_n_min}) must not exceed mod_n_max ({self.mod_n_max})")
        for name in ("lookup_cache_static", "lookup_cache_dynamic"):
            path = getattr(self, name)
            if path is not None and not (isinstance(path, (str, os.PathLike)) and os.fspath(path)):
                raise ConfigError(f"{name} must be a file name or None, got {path!r}")
        _check_int("prediction_n_max", self.prediction_n_max, 1, 1024)
        _check_int("grammar_n_max", self.grammar_n_max, 1, 1024)
        self._check_synthetic()
        _check_int("suffix_n_max", self.suffix_n_max, 1, 1024)
        _check_int("suffix_min_match", self.suffix_min_match, 1, 1024)
        _check_float("suffix_factor", self.suffix_factor, 0.0, 1e6)
        _check_float("suffix_offset", self.suffix_offset, -1e6, 1e6)
        _check_float("suffix_p_min", self.suffix_p_min, 0.0, 1.0, open_low=True)
        _check_float("suffix_rate", self.suffix_rate, 0.0, 1.0)
        _check_int("suffix_corpus_max", self.suffix_corpus_max, 0, 2**28)
        if self.suffix_corpus_max == 1:
            raise ConfigError("suffix_corpus_max must be 0 (off) or at least 2, got 1")
        if self.suffix_corpus is not None and not (isinstance(self.suffix_corpus, str) and self.suffix_corpus):
            raise ConfigError(f"suffix_corpus must be a file name or None, got {self.suffix_corpus!r}")

    def _check_synthetic(self) -> None:
        rates: Any = self.synth_rates
        if isinstance(rates, (str, bytes)) or not isinstance(rates, Iterable):
            raise ConfigError(f"synth_rates must be a sequence of numbers, got {rates!r}")
        object.__setattr__(self, "synth_rates", tuple(rates))
        for i, rate in enumerate(self.synth_rates):
            _check_float(f"synth_rates[{i}]", rate, 0.0, 1.0)
            if i and rate > self.synth_rates[i - 1]:
                raise ConfigError(f"synth_rates must not increase, got {rate:g} after {self.synth_rates[i - 1]:g}")
        if self.synth_len is not None:
            _check_float("synth_len", self.synth_len, 1.0, 1025.0)
            if self.synth_rates:
                raise ConfigError("synth_len and synth_rates exclude each other: give one")
