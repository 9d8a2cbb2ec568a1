"""The wrapper between ggml's Vulkan backend and the loader (``build_support/vulkan_bindings.c``), without either.

It is compiled against the few declarations that it uses, with a loader that records what reaches it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "build_support" / "vulkan_bindings.c"
#: Storage buffers, and another type, by Vulkan's numbers.
STORAGE, UNIFORM = 7, 6
N_BINDINGS = int(re.findall(r"#define N_BINDINGS (\d+)", SOURCE.read_text(encoding="utf-8"))[0])

HEADER = """
#include <stdint.h>
#define VKAPI_CALL
typedef void * VkInstance;
typedef void * VkDevice;
typedef enum { VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER = 6, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER = 7 } VkDescriptorType;
typedef struct { uint64_t buffer, offset, range; } VkDescriptorBufferInfo;
typedef struct {
    uint64_t dstSet;
    uint32_t dstBinding, dstArrayElement, descriptorCount;
    VkDescriptorType descriptorType;
    const VkDescriptorBufferInfo * pBufferInfo;
} VkWriteDescriptorSet;
typedef struct { uint64_t srcSet; } VkCopyDescriptorSet;
typedef void (VKAPI_CALL * PFN_vkVoidFunction)(void);
typedef void (VKAPI_CALL * PFN_vkUpdateDescriptorSets)(VkDevice, uint32_t, const VkWriteDescriptorSet *, uint32_t,
                                                       const VkCopyDescriptorSet *);
"""

LOADER = """
#include <string.h>
#include <vulkan/vulkan.h>

PFN_vkVoidFunction __wrap_vkGetInstanceProcAddr(VkInstance instance, const char * name);
static uint64_t * seen;

static void record(VkDevice device, uint32_t n_writes, const VkWriteDescriptorSet * writes, uint32_t n_copies,
                   const VkCopyDescriptorSet * copies) {
    (void) device, (void) copies;
    seen[0] = n_writes, seen[1] = n_copies, seen[2] = writes->dstSet, seen[3] = writes->descriptorCount;
    for (uint32_t i = 0; i < writes->descriptorCount; i++) {
        seen[4 + i] = writes->pBufferInfo[i].buffer + writes->pBufferInfo[i].offset + writes->pBufferInfo[i].range;
    }
}

static void another(void) {}

PFN_vkVoidFunction __real_vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    (void) instance;
    if (strcmp(name, "vkUpdateDescriptorSets") == 0) return (PFN_vkVoidFunction) record;
    return strcmp(name, "vkAnother") == 0 ? another : NULL;
}

/* What is found under a name: 0 nothing, 1 the loader's own, 2 something else. */
int lookup(const char * name) {
    const PFN_vkVoidFunction found = __wrap_vkGetInstanceProcAddr(NULL, name);
    return found == NULL ? 0 : found == another || found == (PFN_vkVoidFunction) record ? 1 : 2;
}

/* One call of vkUpdateDescriptorSets as ggml looks it up, with buffers 1000, 1001, ...; out: what the loader saw. */
void update(uint32_t n_writes, uint32_t n_copies, int type, uint32_t first, uint32_t n, uint64_t * out) {
    VkDescriptorBufferInfo buffers[32];
    for (uint32_t i = 0; i < 32; i++) buffers[i] = (VkDescriptorBufferInfo) { 1000 + i, 1000000, 1000000000 };
    const VkWriteDescriptorSet write = { 77, first, 0, n, (VkDescriptorType) type, buffers };
    const VkWriteDescriptorSet writes[2] = { write, write };
    const VkCopyDescriptorSet copies[2] = { { 1 }, { 2 } };
    seen = out;
    PFN_vkUpdateDescriptorSets f =
        (PFN_vkUpdateDescriptorSets) __wrap_vkGetInstanceProcAddr(NULL, "vkUpdateDescriptorSets");
    f(NULL, n_writes, writes, n_copies, copies);
}
"""


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("vulkan")
    (folder / "vulkan").mkdir()
    (folder / "vulkan" / "vulkan.h").write_text(HEADER, encoding="utf-8")
    (folder / "loader.c").write_text(LOADER, encoding="utf-8")
    out = folder / "wrapper.so"
    subprocess.run(
        [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fPIC", "-shared",
         f"-I{folder}", str(SOURCE), str(folder / "loader.c"), "-o", str(out)],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(out))


def update(
    wrapper: ctypes.CDLL, n: int, *, writes: int = 1, copies: int = 0, kind: int = STORAGE, first: int = 0
) -> tuple[int, int, list[int]]:
    """(writes, copies, entries of a write) that reached the loader."""
    out = (ctypes.c_uint64 * 40)()
    wrapper.update(writes, copies, kind, first, n, out)
    assert out[2] == 77, "the set"
    return out[0], out[1], [value - 1_001_000_000 for value in out[4 : 4 + out[3]]]


@pytest.mark.parametrize("n", range(1, N_BINDINGS + 1))
def test_every_entry_of_a_set_has_a_buffer(wrapper: ctypes.CDLL, n: int) -> None:
    """Those that are written as they are, with their places and lengths; the first one's in all others."""
    assert update(wrapper, n) == (1, 0, [*range(1000, 1000 + n), *[1000] * (N_BINDINGS - n)])


@pytest.mark.parametrize(
    "how",
    [{"writes": 2}, {"copies": 1}, {"kind": UNIFORM}, {"first": 1}],
    ids=lambda how: next(iter(how)),
)
def test_other_calls_pass_as_they_are(wrapper: ctypes.CDLL, how: dict[str, int]) -> None:
    assert update(wrapper, 3, **how) == (how.get("writes", 1), how.get("copies", 0), [1000, 1001, 1002])


def test_more_entries_than_known_pass_as_they_are(wrapper: ctypes.CDLL) -> None:
    assert update(wrapper, N_BINDINGS + 4) == (1, 0, [*range(1000, 1004 + N_BINDINGS)])


def test_other_functions_are_the_loaders_own(wrapper: ctypes.CDLL) -> None:
    assert [wrapper.lookup(name) for name in (b"vkAnother", b"vkUpdateDescriptorSets", b"vkNothing")] == [1, 2, 0]


def test_as_many_entries_as_ggml_has() -> None:
    """The number is ggml's own, in the sources that are built."""
    folder = SOURCE.parents[1] / "vendor" / "ggml" / "llama.cpp" / "ggml" / "src" / "ggml-vulkan"
    if not folder.is_dir():
        pytest.skip("vendor/ggml/llama.cpp is not there: built with PYSPEC_LLAMA_SRC")
    text = "".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("ggml-vulkan*.[ch]*")))
    assert re.findall(r"#define MAX_PARAMETER_COUNT (\d+)", text) == [str(N_BINDINGS)]
