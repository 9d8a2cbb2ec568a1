// For the shim's own C++ files: the barrier of _shim.cpp.
#ifndef PYSPEC_SHIM_GUARD_H
#define PYSPEC_SHIM_GUARD_H

#include <string>

struct llama_context;
struct pyspec_memory;

// Runs body(data); nothing thrown or asserted inside gets out. Answers what body answers, or a code of pyspec_status.
int pyspec_guarded(int (*body)(void *), void * data);
// Sets pyspec_last_error() of this thread and answers the code.
int pyspec_fail(int code, std::string message);

// Adds up what the context and its model take on all devices.
void pyspec_sum_memory(const llama_context * ctx, pyspec_memory * out);

template <class F> int pyspec_guard(F && f) {
    return pyspec_guarded([](void * data) -> int { return (*(F *) data)(); }, (void *) &f);
}

#endif
