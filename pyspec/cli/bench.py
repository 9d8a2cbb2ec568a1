"""``pyspec bench``: what speculation gains, and where the time goes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import rich.box
import rich.console
import rich.markup
import rich.table
import typer

from ..config import SamplingParams
from ..errors import ConfigError
from . import options as opt
from . import terminal

if TYPE_CHECKING:
    from ..bench import Bench

__all__ = ["command"]

#: Positions of acceptance that a table shows; JSON has all.
_N_POSITIONS = 6


@terminal.guard
@opt.lookup_options
def command(
    model: opt.Model,
    draft: opt.Drafts = None,
    spec_type: opt.SpecType = "auto",
    k: opt.Ks = None,
    prompts: opt.Prompts = "suite",
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Most tokens to generate for a prompt.")] = 128,
    repeat: Annotated[int, typer.Option("--repeat", metavar="R", help="How often, with new contexts each time.")] = 1,
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="For the same text at a temperature above 0.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Each setting in exact mode, too: what that costs.")] = False,
    ctx_sweep: Annotated[
        str | None, typer.Option("--ctx-sweep", metavar="512,2048", help="Also with contexts filled so far.")
    ] = None,
    batch_cost: Annotated[
        str | None, typer.Option("--batch-cost", metavar="1,2,4,8", help="Also the time of a pass of so many rows.")
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also the best that could have been done with the same drafts.")
    ] = False,
    raw: opt.Raw = False,
    n_ctx: opt.NCtx = 0,
    n_threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = None,
    device: opt.Devices = None,
    cache_type_k: opt.CacheTypeK = None,
    cache_type_v: opt.CacheTypeV = None,
    draft_cache_type_k: opt.DraftCacheTypeK = None,
    draft_cache_type_v: opt.DraftCacheTypeV = None,
    kv: opt.Kv = None,
    swa_full: opt.SwaFull = "off",
    n_ubatch: opt.UBatch = None,
    p_min: opt.PMin = None,
    flash_attn: opt.FlashAttn = "auto",
    json_out: opt.JsonOut = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="OUT.png", help="Draw speed-up and acceptance; needs matplotlib.")
    ] = None,
    synth_len: Annotated[
        float | None,
        typer.Option("--synth-len", metavar="L", help="Accept drafts by lot, L tokens a pass: output not valid."),
    ] = None,
    synth_rates: Annotated[
        str | None, typer.Option("--synth-rates", metavar="0.8,0.5", help="The same, by position in the draft.")
    ] = None,
    lookup: dict[str, Any] | None = None,
) -> None:
    """Measure settings of speculation against plain decoding, in turns on the same prompts.

    PN: prompt tokens. PP, TG: prompt and generated tokens a second. DN, DA: tokens drafted and accepted.
    LOGPROB, PERPLEXITY: of the output, under the target.
    """
    from ..bench import Bench, make_settings
    from ..prompts import read_prompts

    if max_tokens < 1 or repeat < 1:
        raise typer.BadParameter("-n and --repeat must be 1 or more")
    rows, lengths, ks = (
        opt.integers(batch_cost, "--batch-cost"),
        opt.integers(ctx_sweep, "--ctx-sweep"),
        opt.integers(k, "--k"),
    )
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package matplotlib: pip install 'pyspec-llm[bench]'")
    for path in (json_out, plot):
        opt.check_writable(path)
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temp, seed=seed if temp else None, ignore_eos=ignore_eos
    )
    options = opt.load_options(
        n_threads=n_threads,
        n_gpu_layers=n_gpu_layers,
        devices=device,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        draft_cache_type_k=draft_cache_type_k,
        draft_cache_type_v=draft_cache_type_v,
        n_ubatch=n_ubatch,
        p_min=p_min,
        flash_attn=flash_attn,
        synth_len=synth_len,
        synth_rates=opt.numbers(synth_rates, "--synth-rates") or None,
        **(lookup or {}),
    )
    drafts = draft or []
    modes = opt.cache_modes(swa_full, kv, cache_type_k, cache_type_v)
    settings = make_settings(opt.names(spec_type), ks, _labels(drafts), exact=exact, modes=modes)
    texts = read_prompts(prompts)
    with terminal.progress(f"loading {terminal.printable(model)}") as step:
        bench = Bench(model, drafts, settings, texts, sampling, raw=raw, n_ctx=n_ctx, progress=step, options=options)
    with bench:
        report: dict[str, Any] = {"key": _key(bench, repeat, raw)}
        # the short part first: it may refuse
        if rows:
            with terminal.progress("passes") as step:
                report["batch_cost"] = bench.batch_cost(rows, progress=step)
        with terminal.progress("measuring") as step:
            report |= bench.run(repeat, step)
        if oracle:
            from ..oracle import measure

            with terminal.progress("hindsight") as step:
                report["oracle"] = measure(bench, report["runs"], step)
        if lengths:
            with terminal.progress("longer contexts") as step:
                report["ctx_sweep"] = bench.ctx_sweep(lengths, step)
    # as a JSON reader will see it
    report = json.loads(json.dumps(report))
    if json_out is not None:
        opt.write_json(json_out, report)
    if json_out != "-":
        _print(report)
    if plot is not None:
        from .plot import draw

        draw(report, plot)


def _labels(drafts: Sequence[str]) -> list[str]:
    """Short names of files: their last parts, with as much of the folder as tells them apart."""
    parts = [path.replace("\\", "/").split("/") for path in drafts]
    n = next((n for n in range(1, 99) if len({tuple(p[-n:]) for p in parts}) == len(parts)), 1)
    return ["/".join(p[-n:]) for p in parts]


def _key(bench: Bench, repeat: int, raw: bool) -> dict[str, Any]:
    from ..measure import make_key

    sampling = bench.sampling
    return make_key(
        bench.model,
        bench.drafts,
        bench.prompts,
        {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "repeat": repeat,
            "raw": raw,
            "n_ctx": bench.n_ctx,
            **bench.options,
            "n_threads": bench.n_threads,
            "settings": [
                {"label": s.label, "speculation": list(s.speculation), "draft": s.draft, **s.options}
                for s in bench.settings
            ],
        },
    )


# ---- tables ----------------------------------------------------------------------------


def show_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), *, n_text: int = 1
) -> None:
    """A table on stdout. The first ``n_text`` columns are text, the others are figures."""
    console = rich.console.Console(highlight=False, width=1000)  # wide enough that nothing is folded or cut
    table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < n_text else "right")
    for row in rows:
        table.add_row(*(rich.markup.escape(terminal.printable(cell)) for cell in row))
    with console.capture() as capture:
        console.print(table)
        for note in notes:
            console.print(terminal.printable(note), style="dim", markup=False)
    terminal.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))


def _print(report: dict[str, Any]) -> None:
    key, settings = report["key"], report["settings"]
    machine, options = key["machine"], key["options"]
    model = key["model"]
    n_prompts = len(key["prompts"])
    notes = []
    if options.get("synth_len") is not None or options.get("synth_rates"):
        notes.append(
            "SYNTHETIC ACCEPTANCE: drafts are accepted by lot, THE OUTPUT IS NOT VALID. Only speeds say something."
        )
    if machine["load_average"] is not None and machine["load_average"] > 0.5 * (machine["n_cpus"] or 1):
        notes.append(
            f"The machine was busy (load {machine['load_average']:.1f} on {machine['n_cpus']} CPUs): "
            "speeds say little, compare more repeats."
        )
    show_table(
        f"{model['file']} ({model['quantisation']}), {n_prompts} prompts, {options['repeat']} repeat(s), "
        f"{options['n_threads']} thread(s)",
        ("setting", "PN", "generated", "PP t/s", "TG t/s", "speed-up", "median", "p25 - p75", "KV MiB"),
        [
            (
                s["label"],
                str(s["PN"]),
                str(s["generated"]),
                _figure(s["PP"], 1),
                _figure(s["TG"], 1),
                f"{s['speedup']['total']:.2f}",
                f"{s['speedup']['median']:.2f}",
                f"{s['speedup']['p25']:.2f} - {s['speedup']['p75']:.2f}",
                _figure(sum(s["kv_bytes"].values()) / 2**20, 1),
            )
            for s in settings
        ],
        notes,
    )
    show_table(
        "Drafts and output",
        ("setting", "DN", "DA", "accepted", "by position", "a pass", "LOGPROB", "PERPLEXITY", "as plain"),
        [
            (
                s["label"],
                str(s["DN"]),
                str(s["DA"]),
                _share(s["acceptance_rate"]),
                _positions(s["acceptance_per_pos"]),
                _figure(s["mean_accepted_length"], 2),
                f"{s['LOGPROB']:.3f}",
                _figure(s["PERPLEXITY"], 4),
                f"{s['same_as_plain']}/{s['n_runs']}",
            )
            for s in settings
        ],
    )
    if any(len(s["drafters"]) > 1 for s in settings):
        show_table(
            "By drafter",
            ("setting", "drafter", "drafts", "DN", "DA", "accepted"),
            [
                (
                    s["label"],
                    name,
                    str(d["drafts"]),
                    str(d["DN"]),
                    str(d["DA"]),
                    _share(d["DA"] / d["DN"] if d["DN"] else None),
                )
                for s in settings
                for name, d in s["drafters"].items()
            ],
            n_text=2,
        )
    phases = list(settings[0]["time_share"])
    show_table(
        "Time while generating",
        ("setting", *phases),
        [(s["label"], *(_share(s["time_share"][phase]) for phase in phases)) for s in settings],
    )
    if "oracle" in report:
        show_table(
            "Against the best lengths in hindsight, with the same drafts",
            ("setting", "TG t/s", "best TG t/s", "share", "by prompt", "best length"),
            [
                (
                    x["label"],
                    _figure(next(s["TG"] for s in settings if s["label"] == x["label"]), 1),
                    _figure(x["oracle_tg"], 1),
                    f"{x['share']:.2f}",
                    f"{min(x['by_prompt'].values()):.2f} - {max(x['by_prompt'].values()):.2f}",
                    _figure(x["length"], 1),
                )
                for x in report["oracle"]
            ],
        )
    if "ctx_sweep" in report:
        show_table(
            "By tokens in the context",
            ("setting", "tokens", "PP t/s", "TG t/s", "speed-up", "accepted"),
            [
                (
                    x["label"],
                    str(x["n_ctx_used"]),
                    _figure(x["PP"], 1),
                    _figure(x["TG"], 1),
                    f"{x['speedup']['total']:.2f}",
                    _share(x["acceptance_rate"]),
                )
                for x in report["ctx_sweep"]
            ],
        )
    if "batch_cost" in report:
        show_table(
            "One pass of the target",
            ("rows", "ms", "p25 - p75", "times the first"),
            [
                (
                    str(x["rows"]),
                    f"{x['median_us'] / 1000:.2f}",
                    f"{x['p25_us'] / 1000:.2f} - {x['p75_us'] / 1000:.2f}",
                    f"{x['relative']:.2f}",
                )
                for x in report["batch_cost"]
            ],
        )


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _positions(rates: Sequence[float]) -> str:
    shown = " ".join(f"{rate:.2f}" for rate in rates[:_N_POSITIONS])
    return shown + (" ..." if len(rates) > _N_POSITIONS else "")
