"""One engine in one process, for ``peers.py``: reads requests from stdin, answers on stdout, a JSON object a line.

    python peers_worker.py pyspec|llama-cpp-python|xllamacpp CONFIG

CONFIG and requests are JSON. CONFIG: target, draft (or null), drafter (or null), options, n_threads, n_ctx, n_seq.
Request: prompts (lists of token ids), n (tokens to generate for each). Answer: tokens, wall_s (from the call to its
return), decode_s (without the prompt), n_decode (tokens generated in decode_s), n_pass, accepted, drafted.

Runs under the interpreter of the engine's own environment, so nothing of pyspec is imported but for pyspec.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

Answer = dict[str, Any]
Serve = Callable[[list[list[int]], int], Answer]


def pyspec_engine(config: dict[str, Any]) -> Serve:
    import pyspec

    llm = pyspec.LLM(
        config["target"],
        draft=config["draft"],
        speculation=config["drafter"] or "off",
        n_ctx=config["n_ctx"],
        n_seq_max=config["n_seq"],
        n_threads=config["n_threads"],
        **config["options"],
    )

    def serve(prompts: list[list[int]], n: int) -> Answer:
        start = perf_counter()
        results = llm.generate(prompts, max_tokens=n, ignore_eos=True)
        wall = perf_counter() - start
        times = results[0].stats.times
        prefill = sum(r.stats.times.prefill_us for r in results) / 1e6
        return {
            "tokens": [r.tokens for r in results],
            "wall_s": wall,
            "decode_s": wall - prefill,
            "n_decode": sum(r.stats.n_later for r in results),
            "n_pass": sum(r.stats.n_pass for r in results),
            "drafted": sum(r.stats.n_draft for r in results),
            "accepted": sum(r.stats.n_accepted for r in results),
            "phases_us": {name: getattr(times, name) for name in times.__slots__},
        }

    return serve


def llama_cpp_engine(config: dict[str, Any]) -> Serve:
    from llama_cpp import Llama

    llm = Llama(
        config["target"],
        n_ctx=config["n_ctx"],
        n_threads=config["n_threads"],
        n_threads_batch=config["n_threads"],
        verbose=False,
    )

    def serve(prompts: list[list[int]], n: int) -> Answer:
        tokens: list[int] = []
        first = start = perf_counter()
        for token in llm.generate(prompts[0], temp=0.0, top_k=1):
            if not tokens:
                first = perf_counter()
            tokens.append(token)
            if len(tokens) >= n:
                break
        end = perf_counter()
        return {"tokens": [tokens], "wall_s": end - start, "decode_s": end - first, "n_decode": n - 1}

    return serve


def xllamacpp_engine(config: dict[str, Any]) -> Serve:
    import xllamacpp as x

    p = x.CommonParams()
    p.model.path = config["target"]
    p.n_ctx = config["n_ctx"] * config["n_seq"]
    p.n_parallel = config["n_seq"]
    for cpu in (p.cpuparams, p.cpuparams_batch, p.speculative.draft.cpuparams, p.speculative.draft.cpuparams_batch):
        cpu.n_threads = config["n_threads"]
    p.cache_ram_mib = 0
    p.warmup = True
    p.verbosity = -1
    spec = p.speculative
    options = config["options"]
    if config["drafter"]:
        spec.types = [getattr(x.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{_upper(config['drafter'])}")]
        if config["draft"]:
            spec.draft.mparams.path = config["draft"]
        spec.draft.n_max = options["n_max"]
        spec.draft.p_min = options.get("p_min", 0.0)
        spec.draft.backend_sampling = bool(options.get("backend_sampling", True))
        for name in ("ngram_simple", "ngram_map_k", "ngram_map_k4v"):
            part = getattr(spec, name)
            part.size_n = options.get("size_n", part.size_n)
            part.size_m = options.get("size_m", part.size_m)
        spec.ngram_mod.n_match = options.get("n_match", spec.ngram_mod.n_match)
        spec.ngram_mod.n_max = options.get("mod_n_max", spec.ngram_mod.n_max)
        spec.ngram_mod.n_min = options.get("mod_n_min", spec.ngram_mod.n_min)
    server = x.Server(p)

    def one(prompt: list[int], n: int) -> dict[str, Any]:
        reply = server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": n,
                "n_predict": n,
                "temperature": 0.0,
                "top_k": 1,
                "samplers": ["top_k"],
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                "timings_per_token": False,
            }
        )
        reply = json.loads(reply) if isinstance(reply, (str, bytes)) else reply
        if "error" in reply:
            raise RuntimeError(json.dumps(reply["error"]))
        return reply

    def serve(prompts: list[list[int]], n: int) -> Answer:
        replies: list[Any] = [None] * len(prompts)

        def work(i: int) -> None:
            replies[i] = one(prompts[i], n)

        start = perf_counter()
        if len(prompts) == 1:
            work(0)
        else:
            threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        wall = perf_counter() - start
        timings = [r.get("timings", {}) for r in replies]
        return {
            "texts": [r["choices"][0]["text"] if "choices" in r else r["content"] for r in replies],
            "wall_s": wall,
            "decode_s": timings[0].get("predicted_ms", 0.0) / 1000 if len(prompts) == 1 else None,
            # the server's clock starts when the first token is there
            "n_decode": sum(int(t.get("predicted_n", 0)) for t in timings) - len(prompts),
            "drafted": sum(int(t.get("draft_n", 0)) for t in timings),
            "accepted": sum(int(t.get("draft_n_accepted", 0)) for t in timings),
        }

    return serve


def _upper(name: str) -> str:
    return name.upper().replace("-", "_")


ENGINES = {"pyspec": pyspec_engine, "llama-cpp-python": llama_cpp_engine, "xllamacpp": xllamacpp_engine}


def main() -> None:
    # whatever a library prints must not come between the answers
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = serve(request["prompts"], request["n"])
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=out, flush=True)
    out.flush()
    # a server in the process may not end on its own
    os._exit(0)


if __name__ == "__main__":
    main()
