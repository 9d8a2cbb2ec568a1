/* Every entry of ggml's descriptor sets holds a buffer that exists.
 *
 * All of ggml's Vulkan kernels share one layout of twelve storage buffers. A kernel that has fewer writes as many entries
 * and leaves the rest of the set as it was: with the buffers of another kernel, which may be freed by then. Vulkan allows
 * that, as no shader reads those entries. Mesa's software driver (lavapipe, seen in 22.3.6) takes all entries of a set that
 * is bound, and counts references in the freed buffer objects: it damages the heap. So the rest is filled with the first
 * buffer of the write. ggml writes a set again before its next use if any buffer was destroyed since, so that one exists.
 *
 * The linker sends ggml-vulkan's references to vkGetInstanceProcAddr here (--wrap), so the vendored sources stay untouched.
 */
#include <string.h>
#include <vulkan/vulkan.h>

/* ggml's MAX_PARAMETER_COUNT: the number of entries in its layout. */
#define N_BINDINGS 12

PFN_vkVoidFunction VKAPI_CALL __real_vkGetInstanceProcAddr(VkInstance instance, const char * name);
PFN_vkVoidFunction VKAPI_CALL __wrap_vkGetInstanceProcAddr(VkInstance instance, const char * name);

/* The loader's own function, which serves all instances and devices. */
static PFN_vkUpdateDescriptorSets real_update;

static void VKAPI_CALL update(VkDevice device, uint32_t n_writes, const VkWriteDescriptorSet * writes, uint32_t n_copies,
                              const VkCopyDescriptorSet * copies) {
    /* that is how ggml writes: all buffers of one set, from the first entry on */
    if (n_writes == 1 && n_copies == 0 && writes->descriptorType == VK_DESCRIPTOR_TYPE_STORAGE_BUFFER &&
        writes->dstBinding == 0 && writes->descriptorCount > 0 && writes->descriptorCount < N_BINDINGS) {
        VkDescriptorBufferInfo buffers[N_BINDINGS];
        for (uint32_t i = 0; i < N_BINDINGS; i++) {
            buffers[i] = writes->pBufferInfo[i < writes->descriptorCount ? i : 0];
        }
        VkWriteDescriptorSet whole = *writes;
        whole.descriptorCount = N_BINDINGS;
        whole.pBufferInfo = buffers;
        real_update(device, 1, &whole, 0, NULL);
        return;
    }
    real_update(device, n_writes, writes, n_copies, copies);
}

PFN_vkVoidFunction VKAPI_CALL __wrap_vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    const PFN_vkVoidFunction found = __real_vkGetInstanceProcAddr(instance, name);
    if (found == NULL || strcmp(name, "vkUpdateDescriptorSets") != 0) {
        return found;
    }
    real_update = (PFN_vkUpdateDescriptorSets) found;
    return (PFN_vkVoidFunction) update;
}
