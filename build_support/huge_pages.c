/* Large buffers of ggml's host memory in huge pages, where Linux has them for whoever asks
 * (/sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always").
 *
 * A pass reads all weights once. In pages of 4 KiB that is one walk through the page tables for each, under a hypervisor
 * through two sets of tables, and it empties the TLB of everything else. The linker sends ggml-base's calls of
 * posix_memalign here (--wrap), so the vendored sources stay untouched, and free() takes back what this returns.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* With base pages of another size huge ones may have half a gigabyte: such systems are left alone. */
#define BASE_PAGE 4096L
#define HUGE_PAGE ((size_t) 2 << 20)
/* Smaller buffers would waste more than they gain. */
#define LEAST (2 * HUGE_PAGE)

int __real_posix_memalign(void ** out, size_t alignment, size_t size);
int __wrap_posix_memalign(void ** out, size_t alignment, size_t size);

int __wrap_posix_memalign(void ** out, size_t alignment, size_t size) {
    if (size < LEAST || alignment > HUGE_PAGE || size > SIZE_MAX - HUGE_PAGE || sysconf(_SC_PAGESIZE) != BASE_PAGE) {
        return __real_posix_memalign(out, alignment, size);
    }
    /* whole pages, so that the end of the buffer is in one, too */
    const size_t whole = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const int rc = __real_posix_memalign(out, HUGE_PAGE, whole);
    if (rc != 0) {
        return __real_posix_memalign(out, alignment, size);
    }
    const int before = errno;
    /* a wish: without it the memory is what it was */
    (void) madvise(*out, whole, MADV_HUGEPAGE);
    errno = before;
    return 0;
}
