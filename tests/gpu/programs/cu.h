/*
 * The few entries of CUDA's driver API that the programs here use, by dlopen: no header and no
 * NVIDIA library is needed to build them. Types and numbers are those of cuda.h, CUDA 12.
 * An entry that a driver lacks stays NULL, and what needs it says so.
 */
#ifndef CU_H
#define CU_H
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr, CUmemHandle;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream, *CUevent, *CUarray, *CUmemoryPool;
typedef void *CUgraph, *CUgraphNode, *CUgraphExec;

enum { CU_OUT_OF_MEMORY = 2, CU_NOT_READY = 600 };

typedef struct {
    int type; /* 1: device */
    int id;
} CUmemLocation;

typedef struct {
    int type; /* 1: pinned */
    int handle_types; /* 1: a file descriptor */
    CUmemLocation location;
    void *win32;
    unsigned char flags[8];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags; /* 3: read and write */
} CUmemAccessDesc;

typedef struct {
    size_t width, height;
    int format; /* 0x20: float */
    unsigned channels;
} CUarrayDesc;

typedef struct {
    int type, handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char rest[64];
    const CUmemAccessDesc *access;
    size_t access_count, bytes;
    CUdeviceptr address; /* the answer */
} CUmemAllocNode;

_Static_assert(offsetof(CUmemAllocNode, access) == 88 && sizeof(CUmemAllocNode) == 120,
               "CUDA_MEM_ALLOC_NODE_PARAMS_v1");

#define CU_ENTRIES(X) \
    X(cuInit, "cuInit", (unsigned)) \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *)) \
    X(cuDeviceGet, "cuDeviceGet", (CUdevice *, int)) \
    X(cuDeviceGetName, "cuDeviceGetName", (char *, int, CUdevice)) \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *, CUdevice)) \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, CUdevice)) \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice)) \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext)) \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void)) \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *)) \
    X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t)) \
    X(cuMemAllocPitch, "cuMemAllocPitch_v2", (CUdeviceptr *, size_t *, size_t, size_t, unsigned)) \
    X(cuMemFree, "cuMemFree_v2", (CUdeviceptr)) \
    X(cuMemAllocManaged, "cuMemAllocManaged", (CUdeviceptr *, size_t, unsigned)) \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned)) \
    X(cuMemFreeHost, "cuMemFreeHost", (void *)) \
    X(cuMemsetD8, "cuMemsetD8_v2", (CUdeviceptr, unsigned char, size_t)) \
    X(cuArrayCreate, "cuArrayCreate_v2", (CUarray *, const CUarrayDesc *)) \
    X(cuArrayDestroy, "cuArrayDestroy", (CUarray)) \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", \
      (size_t *, const CUmemAllocationProp *, int)) \
    X(cuMemCreate, "cuMemCreate", \
      (CUmemHandle *, size_t, const CUmemAllocationProp *, unsigned long long)) \
    X(cuMemRelease, "cuMemRelease", (CUmemHandle)) \
    X(cuMemAddressReserve, "cuMemAddressReserve", \
      (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
    X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr, size_t)) \
    X(cuMemMap, "cuMemMap", (CUdeviceptr, size_t, size_t, CUmemHandle, unsigned long long)) \
    X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr, size_t)) \
    X(cuMemSetAccess, "cuMemSetAccess", (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)) \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", \
      (void *, CUmemHandle, int, unsigned long long)) \
    X(cuMemAllocAsync, "cuMemAllocAsync", (CUdeviceptr *, size_t, CUstream)) \
    X(cuMemFreeAsync, "cuMemFreeAsync", (CUdeviceptr, CUstream)) \
    X(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", (CUmemoryPool *, CUdevice)) \
    X(cuMemPoolTrimTo, "cuMemPoolTrimTo", (CUmemoryPool, size_t)) \
    X(cuStreamCreate, "cuStreamCreate", (CUstream *, unsigned)) \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream)) \
    X(cuEventCreate, "cuEventCreate", (CUevent *, unsigned)) \
    X(cuEventRecord, "cuEventRecord", (CUevent, CUstream)) \
    X(cuEventQuery, "cuEventQuery", (CUevent)) \
    X(cuGraphCreate, "cuGraphCreate", (CUgraph *, unsigned)) \
    X(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode", \
      (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUmemAllocNode *)) \
    X(cuGraphInstantiate, "cuGraphInstantiateWithFlags", \
      (CUgraphExec *, CUgraph, unsigned long long)) \
    X(cuGraphLaunch, "cuGraphLaunch", (CUgraphExec, CUstream)) \
    X(cuGraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec)) \
    X(cuGraphDestroy, "cuGraphDestroy", (CUgraph)) \
    X(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", (CUdevice)) \
    X(cuModuleLoadData, "cuModuleLoadData", (CUmodule *, const void *)) \
    X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *)) \
    X(cuLaunchKernel, "cuLaunchKernel", \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
       void **, void **))

#define X(name, symbol, arguments) static CUresult(*name) arguments;
CU_ENTRIES(X)
#undef X

/* Nanoseconds of CLOCK_MONOTONIC, which containers share with the host. */
static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Loads libcuda; says why not and returns -1 where it can't. */
static inline int cu_load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        printf("{\"failed\":\"dlopen\",\"why\":\"libcuda.so.1 does not load\"}\n");
        fprintf(stderr, "%s\n", dlerror());
        return -1;
    }
#define X(name, symbol, arguments) *(void **)&name = dlsym(library, symbol);
    CU_ENTRIES(X)
#undef X
    return 0;
}

/* Loads libcuda and makes a context on the first GPU; reports how long that took. */
static inline int cu_begin(CUdevice *device, double *init_ms, double *context_ms)
{
    CUcontext context;
    const char *what = "cuInit";
    if (cu_load())
        return -1;
    uint64_t begun = now_ns();
    CUresult result = cuInit(0);
    uint64_t initialised = now_ns();
    if (!result) {
        what = "context";
        if (!(result = cuDeviceGet(device, 0)) &&
            !(result = cuDevicePrimaryCtxRetain(&context, *device)))
            result = cuCtxSetCurrent(context);
    }
    *init_ms = (double)(initialised - begun) / 1e6;
    *context_ms = (double)(now_ns() - initialised) / 1e6;
    if (result) {
        printf("{\"failed\":\"%s\",\"error\":%d}\n", what, result);
        return -1;
    }
    return 0;
}
#endif
