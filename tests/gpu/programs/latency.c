/*
 * How long one driver call takes that changes nothing, many times over: behind the gate the monitor
 * makes it, so what is more than without is what the monitor takes. It needs no CUDA.
 *
 *   latency [ROUNDS]
 *
 * One JSON line: percentiles in nanoseconds, and how many calls took up to 2^n ns for each n.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* nvos.h, ctrl0000gpu.h; alike in all releases since 470. */
enum {
    NV_ESC_RM_CONTROL = 0x2a,
    NV_ESC_RM_ALLOC = 0x2b,
    NV01_ROOT_CLIENT = 0x41,
    NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS = 0x201,
    NVOS54_BYTES = 32,
    NVOS64_BYTES = 48,
    ATTACHED_IDS = 32,
    BUCKETS = 40,
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int ascending(const void *one, const void *other)
{
    uint64_t left = *(const uint64_t *)one, right = *(const uint64_t *)other;
    return (left > right) - (left < right);
}

static unsigned long request(unsigned number, unsigned bytes)
{
    return _IOC(_IOC_READ | _IOC_WRITE, 'F', number, bytes);
}

int main(int argc, char **argv)
{
    size_t rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 20000;
    uint64_t *times = calloc(rounds ? rounds : 1, sizeof *times), buckets[BUCKETS] = {0};
    uint32_t nvos64[NVOS64_BYTES / 4] = {0, 0, 0, NV01_ROOT_CLIENT}, ids[ATTACHED_IDS];
    char path[4096];
    /* Another place of the nodes is for the simulated driver, where there is no container. */
    const char *dev = getenv("STANDIN_DEV");
    snprintf(path, sizeof path, "%s/nvidiactl", dev ? dev : "/dev");
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 || !times || !rounds || ioctl(file, request(NV_ESC_RM_ALLOC, NVOS64_BYTES), nvos64) ||
        nvos64[10]) {
        printf("{\"failed\":\"client\",\"status\":%u}\n", nvos64[10]);
        return 3;
    }
    for (size_t i = 0; i < rounds; i++) {
        uint32_t nvos54[NVOS54_BYTES / 4] = {nvos64[2], nvos64[2],
                                             NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS};
        uint32_t *params = ids;
        memcpy(&nvos54[4], &params, sizeof params);
        nvos54[6] = sizeof ids;
        uint64_t begun = now_ns();
        int called = ioctl(file, request(NV_ESC_RM_CONTROL, NVOS54_BYTES), nvos54);
        times[i] = now_ns() - begun;
        if (called || nvos54[7]) {
            printf("{\"failed\":\"control\",\"status\":%u}\n", nvos54[7]);
            return 3;
        }
        int bucket = 0;
        while (bucket < BUCKETS - 1 && times[i] > 1ull << bucket)
            bucket++;
        buckets[bucket]++;
    }
    qsort(times, rounds, sizeof *times, ascending);
    printf("{\"rounds\":%zu,\"p50_ns\":%llu,\"p90_ns\":%llu,\"p99_ns\":%llu,\"max_ns\":%llu,"
           "\"up_to_ns\":{",
           rounds, (unsigned long long)times[rounds / 2],
           (unsigned long long)times[rounds * 9 / 10], (unsigned long long)times[rounds * 99 / 100],
           (unsigned long long)times[rounds - 1]);
    const char *comma = "";
    for (int i = 0; i < BUCKETS; i++)
        if (buckets[i]) {
            printf("%s\"%llu\":%llu", comma, 1ull << i, (unsigned long long)buckets[i]);
            comma = ",";
        }
    printf("}}\n");
    return 0;
}
