// Calls llama.cpp's own n-gram drafting (common/speculative.h, common/ngram-cache.h) and prints what it drafts.
// Compiled and run by record_ngram.py; not part of the package.
//
// stdin, separated by white space:
//   MODE TYPE size_n size_m min_hits n_match mod_n_max mod_n_min n_max STATIC DYNAMIC n_seq
//   and for each sequence: n_tokens n_prompt tokens...
// MODE spec    decode the tokens behind the prompt with drafts, all sequences in turn: begin, draft, accept
//      once    a new state for each position that is drafted at: nothing is carried over
//      lookup  as llama-lookup: n-gram caches over the whole history, with 8 tokens a draft
//      create  as llama-lookup-create: write the 2-grams of the tokens to STATIC
//      context write what a context level of 1- to 4-grams holds to DYNAMIC
// stdout: for each draft "seq position n tokens..."; the token at the position is the last known one.

#include "common.h"
#include "ngram-cache.h"
#include "speculative.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

// What the compiled files need of the rest of llama.cpp. Anything else they name is never called.
#include "log.h"

int common_log_get_verbosity_thold(void) { return -1; }
struct common_log * common_log_main() { return nullptr; }
void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}

common_time_meas::common_time_meas(int64_t & t_acc, bool) : t_start_us(0), t_acc(t_acc) {}
common_time_meas::~common_time_meas() {}

extern "C" {
int64_t ggml_time_ms(void) { return 0; }
int64_t ggml_time_us(void) { return 0; }
[[noreturn]] void ggml_abort(const char * file, int line, const char * format, ...) {
    va_list args;
    va_start(args, format);
    std::fprintf(stderr, "%s:%d: ", file, line);
    std::vfprintf(stderr, format, args);
    std::exit(3);
}
}

struct Sequence {
    llama_tokens tokens;
    size_t       n_prompt = 0;
    size_t       pos      = 0;
    llama_tokens prompt;
    llama_tokens draft;
};

static void print(size_t seq, size_t pos, const llama_tokens & draft) {
    std::printf("%zu %zu %zu", seq, pos, draft.size());
    for (const llama_token token : draft) {
        std::printf(" %d", token);
    }
    std::printf("\n");
}

static size_t n_right(const Sequence & s) {
    size_t n = 0;
    while (n < s.draft.size() && s.pos + 1 + n < s.tokens.size() && s.tokens[s.pos + 1 + n] == s.draft[n]) {
        ++n;
    }
    return n;
}

static void request(common_speculative * spec, size_t i, Sequence & s, int n_max) {
    s.prompt.assign(s.tokens.begin(), s.tokens.begin() + s.pos);
    s.draft.clear();
    common_speculative_draft_params & p = common_speculative_get_draft_params(spec, i);
    p          = {};
    p.drafting = true;
    p.n_max    = n_max;
    p.pos0     = s.pos;
    p.id_last  = s.tokens[s.pos];
    p.prompt   = &s.prompt;
    p.result   = &s.draft;
}

static void decode(common_params_speculative & params, std::vector<Sequence> & seqs, int n_max) {
    common_speculative * spec = common_speculative_init(params, seqs.size());
    for (size_t i = 0; i < seqs.size(); ++i) {
        Sequence & s = seqs[i];
        s.pos        = s.n_prompt;
        common_speculative_begin(spec, i, llama_tokens(s.tokens.begin(), s.tokens.begin() + s.n_prompt));
    }
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < seqs.size(); ++i) {
            if (seqs[i].pos < seqs[i].tokens.size()) {
                request(spec, i, seqs[i], n_max);
                more = true;
            }
        }
        common_speculative_draft(spec);
        for (size_t i = 0; i < seqs.size(); ++i) {
            Sequence & s = seqs[i];
            if (s.pos < s.tokens.size()) {
                print(i, s.pos, s.draft);
                const size_t n = n_right(s);
                if (!s.draft.empty()) {
                    common_speculative_accept(spec, i, n);
                }
                s.pos += 1 + n;
            }
        }
    }
    common_speculative_free(spec);
}

static void once(common_params_speculative & params, std::vector<Sequence> & seqs, int n_max) {
    for (size_t i = 0; i < seqs.size(); ++i) {
        Sequence & s = seqs[i];
        for (s.pos = s.n_prompt; s.pos < s.tokens.size(); ++s.pos) {
            common_speculative * spec = common_speculative_init(params, 1);
            request(spec, 0, s, n_max);
            common_speculative_draft(spec);
            print(i, s.pos, s.draft);
            common_speculative_free(spec);
        }
    }
}

static void lookup(const std::string & path_static, const std::string & path_dynamic, std::vector<Sequence> & seqs) {
    for (size_t i = 0; i < seqs.size(); ++i) {
        common_ngram_cache context, dynamic, fixed;
        if (path_static != "-") {
            fixed = common_ngram_cache_load(path_static);
        }
        if (path_dynamic != "-") {
            dynamic = common_ngram_cache_load(path_dynamic);
        }
        Sequence &   s = seqs[i];
        llama_tokens known(s.tokens.begin(), s.tokens.begin() + s.n_prompt);
        common_ngram_cache_update(context, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, known, known.size(), false);
        for (s.pos = s.n_prompt; s.pos < s.tokens.size(); ++s.pos) {
            known.push_back(s.tokens[s.pos]);
            common_ngram_cache_update(context, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, known, 1, false);
            s.draft = { known.back() };
            common_ngram_cache_draft(known, s.draft, 8, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, context, dynamic, fixed);
            s.draft.erase(s.draft.begin());
            print(i, s.pos, s.draft);
        }
    }
}

int main() {
    std::string                 mode, type, path_static, path_dynamic;
    int                         size_n, size_m, min_hits, n_max;
    size_t                      n_seq;
    common_params_speculative   params;
    std::cin >> mode >> type >> size_n >> size_m >> min_hits >> params.ngram_mod.n_match >> params.ngram_mod.n_max >>
        params.ngram_mod.n_min >> n_max >> path_static >> path_dynamic >> n_seq;
    for (auto * map : { &params.ngram_simple, &params.ngram_map_k, &params.ngram_map_k4v }) {
        map->size_n   = size_n;
        map->size_m   = size_m;
        map->min_hits = min_hits;
    }
    params.ngram_cache.lookup_cache_static  = path_static == "-" ? "" : path_static;
    params.ngram_cache.lookup_cache_dynamic = path_dynamic == "-" ? "" : path_dynamic;
    std::vector<Sequence> seqs(n_seq);
    for (Sequence & s : seqs) {
        size_t n;
        std::cin >> n >> s.n_prompt;
        s.tokens.resize(n);
        for (llama_token & token : s.tokens) {
            std::cin >> token;
        }
    }
    if (!std::cin) {
        std::fprintf(stderr, "the input is incomplete\n");
        return 2;
    }
    if (mode == "create" || mode == "context") {
        common_ngram_cache cache;
        const bool         fixed = mode == "create";
        llama_tokens &     all   = seqs[0].tokens;
        common_ngram_cache_update(cache, fixed ? LLAMA_NGRAM_STATIC : LLAMA_NGRAM_MIN,
                                  fixed ? LLAMA_NGRAM_STATIC : LLAMA_NGRAM_MAX, all, all.size(), false);
        common_ngram_cache_save(cache, fixed ? path_static : path_dynamic);
        return 0;
    }
    if (mode == "lookup") {
        lookup(path_static, path_dynamic, seqs);
        return 0;
    }
    params.types = { common_speculative_type_from_name(type) };
    if (mode == "spec") {
        decode(params, seqs, n_max);
    } else if (mode == "once") {
        once(params, seqs, n_max);
    } else {
        std::fprintf(stderr, "unknown mode %s\n", mode.c_str());
        return 2;
    }
    return 0;
}
