"""The commands and their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .._version import __version__
from ..config import SamplingParams
from ..errors import ConfigError
from . import bench as _bench
from . import doctor as _doctor
from . import generate as _generate
from . import inspection, options, report, terminal
from . import lookup as _lookup
from . import sampling as _sampling
from . import structured as _structured
from . import verify as _verify

__all__ = ["app", "run"]

app = typer.Typer(
    name="pyspec",
    help="Speculative decoding for GGUF models: a draft proposes, the target checks, the text stays the same.",
    epilog="Exit codes: 0 done, 1 failure, 2 wrong usage, 130 stopped with Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(_lookup.app)


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        app(args=list(argv) if argv is not None else None, prog_name="pyspec")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    return 0


def _version(value: bool) -> None:
    if value:
        print(f"pyspec {__version__}")
        raise typer.Exit(0)


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


Draft = Annotated[str | None, typer.Option("--draft", metavar="FILE", help="Draft model (GGUF file).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Log to stderr; twice: libllama's log too.")]


@app.command()
@terminal.guard
@options.lookup_options
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Target model (GGUF file).")],
    draft: Draft = None,
    spec_type: Annotated[
        str, typer.Option("--spec-type", metavar="TYPE", help="auto, off, or drafters by priority: A,B,...")
    ] = "auto",
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.")] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from a file; -: stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message; needs --chat.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Most tokens to generate; -1: no limit.")] = 256,
    temp: _sampling.Temp = 0.0,
    top_k: _sampling.TopK = 0,
    top_p: _sampling.TopP = 1.0,
    min_p: _sampling.MinP = 0.0,
    seed: _sampling.Seed = None,
    typical: _sampling.Typical = 1.0,
    top_n_sigma: _sampling.Sigma = -1.0,
    xtc_probability: _sampling.XtcProbability = 0.0,
    xtc_threshold: _sampling.XtcThreshold = 0.1,
    dynatemp_range: _sampling.DynatempRange = 0.0,
    dynatemp_exp: _sampling.DynatempExponent = 1.0,
    repeat_penalty: _sampling.RepeatPenalty = 1.0,
    frequency_penalty: _sampling.FrequencyPenalty = 0.0,
    presence_penalty: _sampling.PresencePenalty = 0.0,
    repeat_last_n: _sampling.RepeatLastN = 64,
    dry_multiplier: _sampling.DryMultiplier = 0.0,
    dry_base: _sampling.DryBase = 1.75,
    dry_allowed_length: _sampling.DryAllowed = 2,
    dry_penalty_last_n: _sampling.DryLastN = 64,
    dry_sequence_breaker: _sampling.DryBreakers = None,
    mirostat: _sampling.Mirostat = 0,
    mirostat_ent: _sampling.MirostatTau = 5.0,
    mirostat_lr: _sampling.MirostatEta = 0.1,
    logit_bias: _sampling.LogitBias = None,
    min_keep: _sampling.MinKeep = 0,
    samplers: _sampling.Samplers = None,
    verification: _sampling.Verification = "auto",
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the text here; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    prediction: Annotated[
        str | None, typer.Option("--prediction", metavar="FILE", help="Text that the answer will mostly repeat.")
    ] = None,
    n_max: Annotated[int | None, typer.Option("--n-max", metavar="K", help="Most tokens drafted a step.")] = None,
    n_min: Annotated[int | None, typer.Option("--n-min", metavar="K", help="Drop shorter drafts.")] = None,
    p_min: Annotated[
        float | None, typer.Option("--p-min", metavar="P", help="Stop a draft at a token less likely.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Passes of one shape: the same text bit by bit whatever is drafted.")
    ] = False,
    n_ctx: Annotated[int, typer.Option("-c", "--n-ctx", help="Context length; 0: the model's, at most 4096.")] = 0,
    n_threads: Annotated[
        int | None, typer.Option("-t", "--threads", help="CPU threads; default: all CPUs it may use.")
    ] = None,
    n_gpu_layers: Annotated[
        int | None, typer.Option("--n-gpu-layers", metavar="N", help="Layers on the GPU; -1: all.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="NAME", help="As 'pyspec devices' lists it; may be repeated."),
    ] = None,
    cache_type_k: options.CacheTypeK = None,
    cache_type_v: options.CacheTypeV = None,
    draft_cache_type_k: options.DraftCacheTypeK = None,
    draft_cache_type_v: options.DraftCacheTypeV = None,
    swa_full: Annotated[bool, typer.Option("--swa-full", help="Full-size cache for sliding-window layers.")] = False,
    flash_attn: options.FlashAttn = "auto",
    n_ubatch: options.UBatch = None,
    lora: options.Loras = None,
    json_schema: _structured.JsonSchema = None,
    compact_json: _structured.CompactJson = False,
    regex: _structured.Regex = None,
    choice: _structured.Choice = None,
    grammar_file: _structured.GrammarFile = None,
    top_logprobs: _structured.TopLogprobs = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No table of counts and speeds on stderr.")] = False,
    verbose: Verbose = 0,
    lookup: dict[str, Any] | None = None,
) -> None:
    """Generate text; stream it to stdout, then print counts and speeds to stderr.

    On a terminal, accepted draft tokens are coloured. Whether the text is that of plain decoding: 'pyspec verify'.
    """
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt with -p or with -f, not both")
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    text = _generate.read_prompt(prompt, file)
    if text is None:
        raise typer.BadParameter("no prompt: give one with -p, -f or on stdin")
    terminal.log_to_stderr(verbose)
    given: dict[str, Any] = {
        "draft": draft,
        "speculation": _speculation(spec_type),
        "n_ctx": n_ctx,
        "n_threads": n_threads,
        "n_seq_max": 1,
    }
    more = {
        "n_max": n_max,
        "n_min": n_min,
        "p_min": p_min,
        "exact": exact or None,
        "n_gpu_layers": n_gpu_layers,
        "devices": device,
        "cache_type_k": cache_type_k,
        "cache_type_v": cache_type_v,
        "lora": options.loras(lora),
        "draft_cache_type_k": draft_cache_type_k,
        "draft_cache_type_v": draft_cache_type_v,
        "swa_full": swa_full or None,
        "flash_attn": options.flash_attn(flash_attn) if flash_attn != "auto" else None,
        "n_ubatch": n_ubatch,
    }
    given.update({name: value for name, value in more.items() if value is not None})
    given.update(lookup or {})
    expected = _generate.read_prompt(None, prediction) if prediction is not None else None
    try:
        params = SamplingParams(
            max_tokens=None if max_tokens == -1 else max_tokens,
            temperature=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            typical_p=typical,
            top_n_sigma=top_n_sigma,
            xtc_probability=xtc_probability,
            xtc_threshold=xtc_threshold,
            dynatemp_range=dynatemp_range,
            dynatemp_exponent=dynatemp_exp,
            penalty_repeat=repeat_penalty,
            penalty_freq=frequency_penalty,
            penalty_present=presence_penalty,
            penalty_last_n=repeat_last_n,
            dry_multiplier=dry_multiplier,
            dry_base=dry_base,
            dry_allowed_length=dry_allowed_length,
            dry_penalty_last_n=dry_penalty_last_n,
            mirostat=mirostat,
            mirostat_tau=mirostat_ent,
            mirostat_eta=mirostat_lr,
            logit_bias=_sampling.parse_logit_bias(logit_bias),
            min_keep=min_keep,
            verification=verification,
            **_structured.given(json_schema, compact_json, regex, choice, grammar_file, top_logprobs),
            **_sampling.given(
                dry_sequence_breakers=tuple(dry_sequence_breaker) if dry_sequence_breaker else None,
                samplers=tuple(s.strip() for s in samplers.split(";") if s.strip()) if samplers is not None else None,
            ),
        )
    except ConfigError as e:
        raise typer.BadParameter(str(e)) from None
    _generate.run(
        model, given, text, params, prediction=expected, chat=chat, system=system, as_json=as_json, quiet=quiet
    )


def _speculation(spec_type: str) -> str | list[str]:
    from ..drafters import registry

    types = [t.strip() for t in spec_type.split(",")]
    if types in (["auto"], ["off"]):
        return types[0]
    for name in types:
        try:
            registry.get(name)
        except ConfigError as e:
            raise typer.BadParameter(f"{e}; or auto, or off") from None
    return types


@app.command()
@terminal.guard
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="GGUF file.")],
    draft: Draft = None,
    ctx: Annotated[
        int | None, typer.Option("--ctx", metavar="N", help="Also the memory of caches for N tokens of a sequence.")
    ] = None,
    k: Annotated[int, typer.Option("--k", metavar="K", help="Draft length, for --ctx.")] = 3,
    n_seq: Annotated[int, typer.Option("--n-seq", metavar="N", help="Sequences, for --ctx.")] = 1,
    kv_unified: Annotated[bool, typer.Option("--kv-unified", help="One cache for all sequences.")] = False,
    n_ubatch: Annotated[int, typer.Option("--n-ubatch", metavar="N", help="Rows of a micro-batch, for --ctx.")] = 512,
    cache_type_k: options.CacheTypeK = None,
    cache_type_v: options.CacheTypeV = None,
    draft_cache_type_k: options.DraftCacheTypeK = None,
    draft_cache_type_v: options.DraftCacheTypeV = None,
    as_json: Json = False,
) -> None:
    """Show what a model file is, and with which speculation types it works as target and as draft.

    --ctx: bytes of the cache with the small window and the full one, and the margin that rejected drafts need.
    """
    sizes = None
    if ctx is not None:
        sizes = inspection.Sizes(
            n_ctx=ctx,
            k=k,
            n_seq=n_seq,
            kv_unified=kv_unified,
            n_ubatch=n_ubatch,
            types=(cache_type_k or "f16", cache_type_v or "f16"),
            draft_types=(draft_cache_type_k or "f16", draft_cache_type_v or "f16"),
        )
    inspection.run(model, draft, as_json, sizes)


@app.command()
@terminal.guard
def devices(as_json: Json = False) -> None:
    """List the devices that models can run on."""
    from .. import backends

    backends.load()
    found = [report.device_dict(d) for d in backends.devices()]
    if as_json:
        print(json.dumps(found))
        return
    rows = [("name", "kind", "vendor", "backend", "free", "total", "description", "capabilities")]
    for d in found:
        sizes = [f"{d[key] / 2**20:,.0f} MiB" for key in ("memory_free_bytes", "memory_total_bytes")]
        rows.append(
            (d["name"], d["kind"], d["vendor"], d["backend"], *sizes, d["description"], ", ".join(d["capabilities"]))
        )
    terminal.write(terminal.columns(rows, right={4, 5}))


@app.command()
@terminal.guard
def doctor(
    as_json: Json = False,
    test: Annotated[
        bool, typer.Option("--test/--no-test", help="Compute on each device for about two seconds.")
    ] = True,
) -> None:
    """Say what was built, what loads, what does not and why, and whether each device computes.

    Exit code 1 if something should be seen to.
    """
    raise typer.Exit(_doctor.print_doctor(as_json, test))


@app.command()
@terminal.guard
def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="GGUF file to read.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="GGUF file to write.")],
    file_type: Annotated[str, typer.Argument(metavar="TYPE", help="F16, Q8_0, Q4_0, Q4_K_M, ...")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite DST.")] = False,
) -> None:
    """Write a copy of a model in another precision, for example a smaller one to use as a draft."""
    from .. import quantize as quantize_file

    if not Path(source).is_file():
        raise ConfigError(f"there is no file {source!r}")
    if Path(destination).exists():
        if Path(destination).samefile(source):
            raise ConfigError("SRC and DST are the same file")
        if not force:
            raise ConfigError(f"{destination!r} exists; --force overwrites it")
    quantize_file(source, destination, file_type)
    sizes = [Path(p).stat().st_size / 1e6 for p in (source, destination)]
    print(f"{destination}: {sizes[1]:,.1f} MB ({source}: {sizes[0]:,.1f} MB)", file=sys.stderr)


app.command(name="bench")(_bench.command)
app.command(name="verify")(_verify.command)


@app.command()
def info(as_json: Json = False) -> None:
    """Print versions, build, backends and devices: what a bug report needs."""
    raise typer.Exit(report.print_report(as_json))
