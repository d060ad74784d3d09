/*
 * Keeps the first GPU busy with short kernels and tells how many it did, each tenth of a second.
 *
 *   spin [--seconds S]
 *
 * One JSON line: "ticks" are pairs of CLOCK_MONOTONIC nanoseconds and kernels since the beginning, so
 * that who reads them can compare the time before something happened elsewhere with that after.
 */
#include "cu.h"

enum { TICKS = 4096, BATCH = 8, BLOCKS_PER_PROCESSOR = 8, THREADS = 256, PROCESSORS = 16 };

/* Multiplies and adds for as long as it's told, and writes what came of it. */
static const char KERNEL[] =
    ".version 7.0\n"
    ".target sm_75\n"
    ".address_size 64\n"
    ".visible .entry spin(.param .u64 out, .param .u32 rounds)\n"
    "{\n"
    "  .reg .pred %p<2>;\n"
    "  .reg .b32 %r<4>;\n"
    "  .reg .f32 %f<4>;\n"
    "  .reg .b64 %rd<5>;\n"
    "  ld.param.u64 %rd1, [out];\n"
    "  ld.param.u32 %r1, [rounds];\n"
    "  cvta.to.global.u64 %rd2, %rd1;\n"
    "  mov.u32 %r2, %tid.x;\n"
    "  cvt.rn.f32.u32 %f1, %r2;\n"
    "  mov.f32 %f2, 0f3F800347;\n"
    "  mov.u32 %r3, 0;\n"
    "AGAIN:\n"
    "  fma.rn.f32 %f1, %f1, %f2, %f2;\n"
    "  add.s32 %r3, %r3, 1;\n"
    "  setp.lt.u32 %p1, %r3, %r1;\n"
    "  @%p1 bra AGAIN;\n"
    "  mul.wide.u32 %rd3, %r2, 4;\n"
    "  add.s64 %rd4, %rd2, %rd3;\n"
    "  st.global.f32 [%rd4], %f1;\n"
    "  ret;\n"
    "}\n";

static uint64_t ticks[TICKS][2];

static int fail(const char *what, CUresult result)
{
    printf("{\"failed\":\"%s\",\"error\":%d}\n", what, result);
    return 3;
}

int main(int argc, char **argv)
{
    double init_ms, context_ms, seconds = 5;
    CUdevice device;
    CUmodule module;
    CUfunction function;
    CUstream stream;
    CUdeviceptr out;
    CUresult result;
    int processors = 0;
    /* Some 200 µs a kernel on a GPU of 2023; how long doesn't matter, only that it stays so. */
    unsigned rounds = 50000;
    if (argc == 3 && !strcmp(argv[1], "--seconds"))
        seconds = atof(argv[2]);
    if (cu_begin(&device, &init_ms, &context_ms))
        return 3;
    cuDeviceGetAttribute(&processors, PROCESSORS, device);
    if ((result = cuModuleLoadData(&module, KERNEL)))
        return fail("cuModuleLoadData", result);
    if ((result = cuModuleGetFunction(&function, module, "spin")))
        return fail("cuModuleGetFunction", result);
    if ((result = cuStreamCreate(&stream, 1)) || (result = cuMemAlloc(&out, 4 * THREADS)))
        return fail("cuMemAlloc", result);
    void *params[] = {&out, &rounds};
    unsigned blocks = (unsigned)(processors > 0 ? processors : 100) * BLOCKS_PER_PROCESSOR;
    uint64_t begun = 0, told = 0, kernels = 0, count = 0;
    for (;;) {
        for (int i = 0; i < BATCH; i++)
            if ((result = cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, params,
                                         NULL)))
                return fail("cuLaunchKernel", result);
        if ((result = cuStreamSynchronize(stream)))
            return fail("cuStreamSynchronize", result);
        uint64_t now = now_ns();
        /* The first batch pays for loading the kernel. */
        if (!begun) {
            begun = told = now;
            continue;
        }
        kernels += BATCH;
        if (now - told >= 100000000 && count < TICKS) {
            told = now;
            ticks[count][0] = now;
            ticks[count++][1] = kernels;
        }
        if ((double)(now - begun) > seconds * 1e9)
            break;
    }
    double took = (double)(now_ns() - begun) / 1e9;
    printf("{\"kernels\":%llu,\"seconds\":%.3f,\"per_s\":%.2f,\"init_ms\":%.2f,"
           "\"context_ms\":%.2f,\"ticks\":[",
           (unsigned long long)kernels, took, (double)kernels / took, init_ms, context_ms);
    for (uint64_t i = 0; i < count; i++)
        printf("%s[%llu,%llu]", i ? "," : "", (unsigned long long)ticks[i][0],
               (unsigned long long)ticks[i][1]);
    printf("]}\n");
    return 0;
}
