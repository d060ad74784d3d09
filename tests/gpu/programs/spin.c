/*
 * Keeps the first GPU busy with short kernels and reports how many it did, each tenth of a second.
 *
 *   spin [--seconds S] [--tick-ms N] [--ahead N] [--rounds N] [--batch N] [--rest-us N]
 *
 * A JSON line when it begins to compute, and one at the end, which SIGTERM brings sooner: "ticks" are
 * pairs of CLOCK_MONOTONIC nanoseconds and kernels since the beginning, so that who reads them can
 * compare the time before something happened elsewhere with that after. Where no kernel ended for
 * longer than between two ticks, the last before and the first after have ticks of their own. Where a
 * kernel failed, a third line says so.
 *
 * It waits for each batch of eight kernels before it begins another, so the GPU rests in between. With
 * --ahead there are always so many kernels in its queue, and it's never the one that lets another in.
 * With --batch and --rest-us (and --ahead 0) it computes so many kernels, then rests so long. --rounds
 * makes kernels longer: 50000 unless said otherwise.
 */
#include "cu.h"
#include <signal.h>

enum { TICKS = 1 << 16, BATCH = 8, MOST_AHEAD = 64 };
enum { BLOCKS_PER_PROCESSOR = 8, THREADS = 256, PROCESSORS = 16 };

/* Multiplies and adds for the given number of rounds, and writes the result. */
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
static uint64_t tick_count;
static volatile sig_atomic_t over;

static void end_soon(int signal)
{
    (void)signal;
    over = 1;
}

static void tick(uint64_t when, uint64_t kernels)
{
    if (tick_count < TICKS) {
        ticks[tick_count][0] = when;
        ticks[tick_count++][1] = kernels;
    }
}

static int fail(const char *what, CUresult result)
{
    printf("{\"failed\":\"%s\",\"error\":%d}\n", what, result);
    return 3;
}

/* A kernel, and the event that it ended. */
static struct {
    CUfunction function;
    CUstream stream;
    CUevent ended[MOST_AHEAD];
    unsigned blocks;
    void **params;
} gpu;

static CUresult launch(void)
{
    return cuLaunchKernel(gpu.function, gpu.blocks, 1, 1, THREADS, 1, 1, 0, gpu.stream, gpu.params,
                          NULL);
}

/* Kernels that ended since the last time: a batch, or with some ahead the oldest. */
static CUresult compute(int ahead, int batch, int rest_us, uint64_t *ended)
{
    static uint64_t launched, waited;
    CUresult result = 0;
    *ended = 0;
    if (!ahead) {
        for (int i = 0; i < batch && !result; i++)
            result = launch();
        if (!result)
            result = cuStreamSynchronize(gpu.stream);
        *ended = (uint64_t)batch;
        if (rest_us)
            usleep((useconds_t)rest_us);
        return result;
    }
    while (!result && launched < waited + (uint64_t)ahead) {
        if (!(result = launch()))
            result = cuEventRecord(gpu.ended[launched++ % (uint64_t)ahead], gpu.stream);
    }
    if (result)
        return result;
    /* Not cuEventSynchronize, which would wait for ever where somebody took us off the GPU. */
    CUevent oldest = gpu.ended[waited % (uint64_t)ahead];
    while ((result = cuEventQuery(oldest)) == CU_NOT_READY && !over)
        usleep(20);
    if (result == CU_NOT_READY)
        return 0;
    waited++;
    *ended = 1;
    return result;
}

int main(int argc, char **argv)
{
    double init_ms, context_ms, seconds = 5;
    CUdevice device;
    CUmodule module;
    CUdeviceptr out;
    CUresult result;
    int processors = 0, ahead = 0, batch = BATCH, rest_us = 0;
    uint64_t tick_ns = 100000000;
    /* Some 200 µs a kernel on a GPU of 2023; how long doesn't matter, only that it stays so. */
    unsigned rounds = 50000;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seconds"))
            seconds = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "--tick-ms"))
            tick_ns = (uint64_t)atoi(argv[i + 1]) * 1000000;
        else if (!strcmp(argv[i], "--ahead"))
            ahead = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--rounds"))
            rounds = (unsigned)atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--batch"))
            batch = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--rest-us"))
            rest_us = atoi(argv[i + 1]);
        else
            return 2;
    }
    if (ahead < 0 || ahead > MOST_AHEAD || batch < 1 || rest_us < 0)
        return 2;
    struct sigaction action = {.sa_handler = end_soon};
    sigaction(SIGTERM, &action, NULL);
    if (cu_begin(&device, &init_ms, &context_ms))
        return 3;
    cuDeviceGetAttribute(&processors, PROCESSORS, device);
    if ((result = cuModuleLoadData(&module, KERNEL)))
        return fail("cuModuleLoadData", result);
    if ((result = cuModuleGetFunction(&gpu.function, module, "spin")))
        return fail("cuModuleGetFunction", result);
    if ((result = cuStreamCreate(&gpu.stream, 1)) || (result = cuMemAlloc(&out, 4 * THREADS)))
        return fail("cuMemAlloc", result);
    /* Without times, which would cost some. */
    for (int i = 0; i < ahead; i++)
        if ((result = cuEventCreate(&gpu.ended[i], 2)))
            return fail("cuEventCreate", result);
    void *params[] = {&out, &rounds};
    gpu.params = params;
    gpu.blocks = (unsigned)(processors > 0 ? processors : 100) * BLOCKS_PER_PROCESSOR;
    uint64_t begun = 0, kernels = 0, ended, last = 0;
    while (!over) {
        if ((result = compute(ahead, batch, rest_us, &ended)) || !ended)
            break;
        uint64_t now = now_ns();
        /* The first pays for loading the kernel. */
        if (!begun) {
            begun = last = now;
            printf("{\"computing\":true,\"begun_ns\":%llu}\n", (unsigned long long)now);
            fflush(stdout);
            continue;
        }
        uint64_t reported_ns = tick_count ? ticks[tick_count - 1][0] : begun;
        if (now - last >= tick_ns && last != reported_ns)
            tick(last, kernels);
        kernels += ended;
        if (now - reported_ns >= tick_ns)
            tick(now, kernels);
        last = now;
        if ((double)(now - begun) > seconds * 1e9)
            break;
    }
    /* What came last, where nothing came after it. */
    if (tick_count && ticks[tick_count - 1][0] != last)
        tick(last, kernels);
    double took = (double)(now_ns() - begun) / 1e9;
    printf("{\"kernels\":%llu,\"seconds\":%.3f,\"per_s\":%.2f,\"init_ms\":%.2f,"
           "\"context_ms\":%.2f,\"ticks\":[",
           (unsigned long long)kernels, took, (double)kernels / took, init_ms, context_ms);
    for (uint64_t i = 0; i < tick_count; i++)
        printf("%s[%llu,%llu]", i ? "," : "", (unsigned long long)ticks[i][0],
               (unsigned long long)ticks[i][1]);
    printf("]}\n");
    return result ? fail("a kernel", result) : 0;
}
