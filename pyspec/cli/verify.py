"""``pyspec verify``: is the text with speculation the text without it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as opt
from . import terminal
from .bench import _labels, show_table

if TYPE_CHECKING:
    from ..runtime import Vocab
    from ..verify import Outcome

__all__ = ["command"]


@terminal.guard
@opt.lookup_options
def command(
    model: opt.Model,
    draft: opt.Drafts = None,
    spec_type: opt.SpecType = "auto",
    k: opt.Ks = None,
    prompts: opt.Prompts = "suite",
    n_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Tokens to compare for each prompt.")] = 128,
    swa_full: opt.SwaFull = "off",
    kv: opt.Kv = None,
    cache_type_k: opt.CacheTypeK = None,
    cache_type_v: opt.CacheTypeV = None,
    draft_cache_type_k: opt.DraftCacheTypeK = None,
    draft_cache_type_v: opt.DraftCacheTypeV = None,
    n_ubatch: opt.UBatch = None,
    exact: Annotated[bool, typer.Option("--exact", help="All in exact mode: no difference is forgiven.")] = False,
    raw: opt.Raw = False,
    n_ctx: opt.NCtx = 0,
    n_threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = None,
    device: opt.Devices = None,
    p_min: opt.PMin = None,
    flash_attn: opt.FlashAttn = "auto",
    json_out: opt.JsonOut = None,
    lookup: dict[str, Any] | None = None,
) -> None:
    """Compare greedy output with speculation and without, token by token.

    identical: all tokens are the same. tie: two tokens were so close that rounding decided, which is measured.
    FAULT: the difference is larger than that; exit code 1.
    """
    from ..bench import make_settings
    from ..prompts import read_prompts
    from ..verify import Verify

    if n_tokens < 1:
        raise typer.BadParameter("-n must be 1 or more")
    opt.check_writable(json_out)
    modes = opt.cache_modes(swa_full, kv, cache_type_k, cache_type_v)
    drafts = draft or []
    settings = make_settings(opt.names(spec_type), opt.integers(k, "--k"), _labels(drafts))
    texts = read_prompts(prompts)
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
        **(lookup or {}),
    )
    with terminal.progress(f"loading {terminal.printable(model)}") as step:
        verify = Verify(
            model, drafts, settings, texts, modes,
            n_tokens=n_tokens, n_ctx=n_ctx, raw=raw, exact=exact, progress=step, options=options,
        )  # fmt: skip
    with verify:
        with terminal.progress("comparing") as step:
            outcomes = verify.run(step)
        n_fault = sum(o.verdict == "FAULT" for o in outcomes)
        if json_out is not None:
            opt.write_json(json_out, _to_dict(verify.model.path.name, outcomes))
        if json_out != "-":
            _print(outcomes, verify.model.vocab)
    if n_fault:
        raise typer.Exit(1)


def _to_dict(model: str, outcomes: list[Outcome]) -> dict[str, Any]:
    return {"model": model, "outcomes": [o.to_dict() for o in outcomes]}


def _print(outcomes: list[Outcome], vocab: Vocab) -> None:
    show_table(
        "With speculation and without",
        ("prompt", "compared", "same tokens", "accepted", "verdict"),
        [(o.prompt, f"{o.left} | {o.right}", str(o.n_tokens), _rates(o), o.verdict) for o in outcomes],
        n_text=2,
    )
    for o in outcomes:
        if o.difference is not None:
            terminal.write(_explain(o, vocab))
    counts = {v: sum(o.verdict == v for o in outcomes) for v in ("identical", "tie", "differs", "FAULT")}
    terminal.write(", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n) + "\n")


def _rates(outcome: Outcome) -> str:
    rates = [f"{rate:.1%}" for rate in outcome.acceptance if rate is not None]
    return " | ".join(rates)


def _explain(o: Outcome, vocab: Vocab) -> str:
    """The first difference in words and figures."""
    d = o.difference
    assert d is not None
    lines = [f"{o.verdict}: prompt {o.prompt}, output token {d.position} (the first is 0)"]
    rows: list[tuple[str, str, str, str]] = [
        ("", "token", f"logit, {d.left_rows}-row pass", f"{d.right_rows}-row pass")
    ]
    sides = ((o.left, d.left_token, 0), (o.right, d.right_token, 1))
    for label, token, i in sides:
        text = "(had ended)" if token is None else f"{token} {vocab.decode([token], skip_special=False)!r}"
        logits = [f"{side[i]:.6f}" if side is not None else "" for side in (d.left_logits, d.right_logits)]
        rows.append((f"  {label}", text, logits[0], logits[1]))
    table = terminal.columns([tuple(terminal.printable(cell) for cell in row) for row in rows], right={2, 3})
    if d.gap is not None:
        lines.append(f"  the two moved against each other by {d.gap:.6f}; rounding alone moves tokens by {d.noise:.6f}")
    if not d.repeatable:
        lines.append(f"  {o.left} did not say the same when asked again")
    return "\n" + lines[0] + "\n" + table + "".join(line + "\n" for line in lines[1:]) + "\n"
