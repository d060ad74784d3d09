/*
 * A stand-in for libcuda.so.1 on the simulated driver: the entries of ../programs/cu.h, made of the
 * driver's calls that memory comes by, so that the programs and the table can be tested where there
 * is no GPU. It shows that they ask and judge rightly; how NVIDIA's own library behaves it can't.
 *
 * Every CUDA path ends in one kind of allocation here. What differs is what keeps memory alive:
 * a handle, a duplicate in the place of a mapping, or an exported file. Kernels go to the simulation's
 * runlist, which says when they end: a write to the GPU's node is the doorbell, and a read of it reports them.
 *
 * Layouts are those of driver 535, which the simulation has unless set otherwise.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_READY = 600, NOT_PERMITTED = 800, UNKNOWN = 999 };
enum { FB_INFO_ENTRIES = 0x36, ENGINE_GRAPHICS = 1 };
enum { KERNEL_NS = 500000, SLICE_US = 2048, CILP = 2 };

static int control_file = -1, gpu_file = -1, uvm_file = -1, bell_file = -1;
static uint32_t client, device, subdevice, next_handle = 0xc0000001;
static uint64_t kernels_launched, kernels_ended;
static uint32_t group;

/* A block of memory, which is its own address for the caller. */
struct memory {
    uint32_t handle, alias;
    uint64_t bytes;
};

static int call(unsigned number, void *params, size_t bytes)
{
    return ioctl(control_file, _IOC(_IOC_READ | _IOC_WRITE, 'F', number, bytes), params);
}

static uint32_t make(uint32_t parent, uint32_t handle, uint32_t class, void *params)
{
    uint32_t nvos64[12] = {client, parent, handle, class};
    memcpy(&nvos64[4], &params, sizeof params);
    if (call(0x2b, nvos64, 48))
        return 0xffff;
    if (class == 0x41)
        client = nvos64[2];
    return nvos64[10];
}

static uint32_t control(uint32_t object, uint32_t command, void *params, uint32_t bytes)
{
    uint32_t nvos54[8] = {client, object, command, 0, 0, 0, bytes};
    memcpy(&nvos54[4], &params, sizeof params);
    return call(0x2a, nvos54, 32) ? 0xffff : nvos54[7];
}

static void free_object(uint32_t handle)
{
    uint32_t nvos00[4] = {client, device, handle};
    call(0x29, nvos00, 16);
}

/* A node of the driver, below the directory that a variable names where there is no container. */
static int node(const char *name, int flags)
{
    char path[4096];
    const char *dev = getenv("STANDIN_DEV");
    snprintf(path, sizeof path, "%s/%s", dev ? dev : "/dev", name);
    return open(path, O_RDWR | O_CLOEXEC | flags);
}

int cuInit(unsigned flags)
{
    uint32_t device_params[14] = {0}, subdevice_params[1] = {0};
    (void)flags;
    if (control_file >= 0)
        return OK;
    control_file = node("nvidiactl", 0);
    gpu_file = node("nvidia0", 0);
    if (control_file < 0 || gpu_file < 0)
        return NO_DEVICE;
    device = next_handle++;
    subdevice = next_handle++;
    if (make(0, 0, 0x41, NULL) || make(client, device, 0x80, device_params) ||
        make(device, subdevice, 0x2080, subdevice_params))
        return UNKNOWN;
    return OK;
}

int cuDriverGetVersion(int *version)
{
    *version = 12020;
    return OK;
}

int cuDeviceGet(int *gpu, int index)
{
    *gpu = index;
    return index ? 101 : OK;
}

int cuDeviceGetName(char *name, int bytes, int gpu)
{
    (void)gpu;
    strncpy(name, "simulated", (size_t)bytes);
    return OK;
}

static int heap(size_t *free_bytes, size_t *total_bytes)
{
    uint32_t list[1 + 2 * FB_INFO_ENTRIES] = {2, 0x16, 0, 0x09, 0};
    if (control(subdevice, 0x20801303, list, sizeof list))
        return UNKNOWN;
    *free_bytes = (size_t)list[2] << 10;
    *total_bytes = (size_t)list[4] << 10;
    return OK;
}

int cuDeviceTotalMem_v2(size_t *bytes, int gpu)
{
    size_t free_bytes;
    (void)gpu;
    return heap(&free_bytes, bytes);
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    return heap(free_bytes, total_bytes);
}

int cuDeviceGetAttribute(int *value, int attribute, int gpu)
{
    (void)gpu;
    *value = attribute == 16 ? 8 : 0;
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int gpu)
{
    (void)gpu;
    *context = &client;
    return OK;
}

int cuCtxSetCurrent(void *context)
{
    (void)context;
    return OK;
}

/* Rings the doorbell: so many kernels more, and the one that is asked about next. */
static int ring(uint64_t count, uint64_t until)
{
    struct { uint32_t client, group; uint64_t kernel_ns, count, until; } bell = {
        client, group, KERNEL_NS, count, until};
    return pwrite(bell_file, &bell, sizeof bell, 0) == sizeof bell ? OK : UNKNOWN;
}

/*
 * Waits for a kernel, but no longer than the simulation knows ahead. A sleep that is too long makes no
 * kernel slower, as long as there are others in the queue.
 */
static int await_kernel(uint64_t kernel)
{
    uint64_t answer[2];
    if (ring(0, kernel) || pread(bell_file, answer, sizeof answer, 0) != sizeof answer)
        return UNKNOWN;
    kernels_ended = answer[0];
    if (kernels_ended < kernel) {
        struct timespec rest = {(time_t)(answer[1] / 1000000000), (long)(answer[1] % 1000000000)};
        nanosleep(&rest, NULL);
    }
    return OK;
}

int cuCtxSynchronize(void)
{
    int result = OK;
    while (!result && kernels_ended < kernels_launched)
        result = await_kernel(kernels_launched);
    return result;
}

/* An event is the number of the kernel that it comes after. */
int cuEventCreate(uint64_t **event, unsigned flags)
{
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event ? OK : OUT_OF_MEMORY;
}

int cuEventRecord(uint64_t *event, void *stream)
{
    (void)stream;
    *event = kernels_launched;
    return OK;
}

int cuEventQuery(const uint64_t *event)
{
    if (kernels_ended < *event && await_kernel(*event))
        return UNKNOWN;
    return kernels_ended < *event ? NOT_READY : OK;
}

static int take(uint64_t bytes, struct memory **made)
{
    uint32_t params[32] = {0x63706775};
    struct memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return OUT_OF_MEMORY;
    memory->handle = next_handle++;
    memory->bytes = bytes;
    params[6] = 1 << 23; /* pages of 4 KiB */
    memcpy(&params[16], &bytes, sizeof bytes);
    uint32_t status = make(device, memory->handle, 0x40, params);
    if (status) {
        free(memory);
        return status == 0x51 ? OUT_OF_MEMORY : UNKNOWN;
    }
    *made = memory;
    return OK;
}

static int give(struct memory *memory)
{
    if (memory->handle)
        free_object(memory->handle);
    if (memory->alias)
        free_object(memory->alias);
    free(memory);
    return OK;
}

static struct memory *at(unsigned long long address)
{
    struct memory *memory;
    memcpy(&memory, &address, sizeof memory);
    return memory;
}

static int take_at(unsigned long long *address, uint64_t bytes)
{
    struct memory *memory = NULL;
    int result = take(bytes, &memory);
    if (!result)
        *address = (uintptr_t)memory;
    return result;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    return take_at(address, bytes);
}

int cuMemAllocPitch_v2(unsigned long long *address, size_t *pitch, size_t width, size_t height,
                       unsigned element)
{
    (void)element;
    *pitch = (width + 511) / 512 * 512;
    return take_at(address, *pitch * height);
}

/* Managed memory is where the host's address is the GPU's, so it has its own kind of name. */
static struct {
    void *at;
    size_t bytes;
} managed[1024];

static size_t managed_count;

int cuMemFree_v2(unsigned long long address)
{
    for (size_t i = 0; i < managed_count; i++)
        if (address == (uintptr_t)managed[i].at) {
            munmap(managed[i].at, managed[i].bytes);
            managed[i] = managed[--managed_count];
            return OK;
        }
    return give(at(address));
}

int cuMemAllocManaged(unsigned long long *address, size_t bytes, unsigned flags)
{
    uint64_t initialize[2] = {0};
    (void)flags;
    if (managed_count == sizeof managed / sizeof *managed)
        return UNKNOWN;
    if (uvm_file < 0)
        uvm_file = node("nvidia-uvm", 0);
    if (uvm_file < 0 || ioctl(uvm_file, 0x30000001, initialize))
        return UNKNOWN;
    void *place = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED)
        return OUT_OF_MEMORY;
    void *mapped = mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, uvm_file,
                        (off_t)(uintptr_t)place);
    if (mapped == MAP_FAILED) {
        int why = errno;
        munmap(place, bytes);
        errno = why;
        /* As libcuda 580 says. */
        return why == EPERM ? NOT_PERMITTED : why == EINVAL || why == EFAULT ? INVALID : UNKNOWN;
    }
    managed[managed_count].at = mapped;
    managed[managed_count++].bytes = bytes;
    *address = (uintptr_t)mapped;
    return OK;
}

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    *memory = malloc(bytes);
    return *memory ? OK : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *memory)
{
    free(memory);
    return OK;
}

int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t bytes)
{
    (void)address, (void)value, (void)bytes;
    return OK;
}

struct array_description {
    size_t width, height;
    int format;
    unsigned channels;
};

int cuArrayCreate_v2(void **array, const struct array_description *asked)
{
    struct memory *memory = NULL;
    int result = take(asked->width * asked->height * asked->channels * 4, &memory);
    if (!result)
        *array = memory;
    return result;
}

int cuArrayDestroy(void *array)
{
    return give(array);
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *asked, int option)
{
    (void)asked, (void)option;
    *bytes = 2 << 20;
    return OK;
}

int cuMemCreate(unsigned long long *handle, size_t bytes, const void *asked,
                unsigned long long flags)
{
    (void)asked, (void)flags;
    return take_at(handle, bytes);
}

/* An address is a name for a mapping that is yet to be. */
struct mapping {
    uint32_t alias;
};

int cuMemAddressReserve(unsigned long long *address, size_t bytes, size_t alignment,
                        unsigned long long hint, unsigned long long flags)
{
    (void)bytes, (void)alignment, (void)hint, (void)flags;
    struct mapping *mapping = calloc(1, sizeof *mapping);
    *address = (uintptr_t)mapping;
    return mapping ? OK : OUT_OF_MEMORY;
}

static struct mapping *mapping_at(unsigned long long address)
{
    struct mapping *mapping;
    memcpy(&mapping, &address, sizeof mapping);
    return mapping;
}

int cuMemAddressFree(unsigned long long address, size_t bytes)
{
    (void)bytes;
    free(mapping_at(address));
    return OK;
}

int cuMemMap(unsigned long long address, size_t bytes, size_t offset, unsigned long long handle,
             unsigned long long flags)
{
    uint32_t nvos55[7] = {client, device, next_handle++, client, at(handle)->handle};
    (void)bytes, (void)offset, (void)flags;
    if (call(0x34, nvos55, 28) || nvos55[6])
        return UNKNOWN;
    mapping_at(address)->alias = nvos55[2];
    return OK;
}

int cuMemUnmap(unsigned long long address, size_t bytes)
{
    (void)bytes;
    free_object(mapping_at(address)->alias);
    return OK;
}

int cuMemSetAccess(unsigned long long address, size_t bytes, const void *access, size_t count)
{
    (void)address, (void)bytes, (void)access, (void)count;
    return OK;
}

int cuMemRelease(unsigned long long handle)
{
    return give(at(handle));
}

int cuMemExportToShareableHandle(int *descriptor, unsigned long long handle, int type,
                                 unsigned long long flags)
{
    uint32_t params[6] = {1, device, device, at(handle)->handle};
    (void)type, (void)flags;
    int file = node("nvidiactl", 0);
    params[4] = (uint32_t)file;
    if (file < 0 || control(client, 0x3d05, params, sizeof params)) {
        close(file);
        return UNKNOWN;
    }
    *descriptor = file;
    return OK;
}

int cuStreamCreate(void **stream, unsigned flags)
{
    (void)flags;
    *stream = &kernels_launched;
    return OK;
}

int cuStreamSynchronize(void *stream)
{
    (void)stream;
    return cuCtxSynchronize();
}

int cuMemAllocAsync(unsigned long long *address, size_t bytes, void *stream)
{
    (void)stream;
    return take_at(address, bytes);
}

int cuMemFreeAsync(unsigned long long address, void *stream)
{
    (void)stream;
    return give(at(address));
}

int cuDeviceGetDefaultMemPool(void **pool, int gpu)
{
    (void)gpu;
    *pool = &client;
    return OK;
}

int cuMemPoolTrimTo(void *pool, size_t bytes)
{
    (void)pool, (void)bytes;
    return OK;
}

/* A graph has one node, which takes memory. */
struct graph {
    uint64_t bytes;
    unsigned long long *address;
    struct memory *memory;
};

int cuGraphCreate(void **graph, unsigned flags)
{
    (void)flags;
    *graph = calloc(1, sizeof(struct graph));
    return *graph ? OK : OUT_OF_MEMORY;
}

int cuGraphAddMemAllocNode(void **node, struct graph *graph, const void *before, size_t count,
                           unsigned char *params)
{
    (void)before, (void)count;
    memcpy(&graph->bytes, params + 104, 8);
    struct memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return OUT_OF_MEMORY;
    graph->memory = memory;
    memcpy(params + 112, &memory, sizeof memory);
    *node = graph;
    return OK;
}

int cuGraphInstantiateWithFlags(void **executable, struct graph *graph, unsigned long long flags)
{
    struct graph *copy = malloc(sizeof *copy);
    (void)flags;
    if (!copy)
        return OUT_OF_MEMORY;
    *copy = *graph;
    *executable = copy;
    return OK;
}

int cuGraphLaunch(struct graph *executable, void *stream)
{
    struct memory *made = NULL;
    (void)stream;
    int result = take(executable->bytes, &made);
    if (!result) {
        *executable->memory = *made;
        free(made);
    }
    return result;
}

int cuGraphExecDestroy(void *executable)
{
    free(executable);
    return OK;
}

int cuGraphDestroy(void *graph)
{
    free(graph);
    return OK;
}

int cuDeviceGraphMemTrim(int gpu)
{
    (void)gpu;
    return OK;
}

/*
 * Who loads a module computes, and has a channel group with a channel for it. In CUDA's order: the group is
 * scheduled, then has its preemption mode and its slice.
 */
int cuModuleLoadData(void **module, const void *image)
{
    uint32_t group_params[5] = {0, 0, 0, ENGINE_GRAPHICS};
    (void)image;
    if (!group) {
        uint32_t channel = next_handle + 1;
        group = next_handle;
        next_handle += 2;
        uint8_t schedule[2] = {1};
        uint32_t mode[8] = {1, group, 0, CILP};
        uint64_t slice_us = SLICE_US;
        if (make(device, group, 0xa06c, group_params) || make(group, channel, 0xc56f, NULL) ||
            control(group, 0xa06c0101, schedule, sizeof schedule) ||
            control(subdevice, 0x20801210, mode, sizeof mode) ||
            control(group, 0xa06c0103, &slice_us, sizeof slice_us))
            return UNKNOWN;
        /* Read again each time: the kernel would keep its last answer. */
        bell_file = node("nvidia0", O_DIRECT);
        if (bell_file < 0)
            return UNKNOWN;
    }
    *module = &client;
    return OK;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    (void)module, (void)name;
    *function = &client;
    return OK;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **extra)
{
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
    (void)shared, (void)stream, (void)params, (void)extra;
    kernels_launched++;
    return ring(1, 0);
}
