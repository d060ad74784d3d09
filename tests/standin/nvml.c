/*
 * A stand-in for libnvidia-ml.so.1: answers the calls that the inventory makes as
 * NVIDIA's library does, from a description in the file nvml.txt next to it.
 *
 * One item a line:
 *
 *   init_ms N                initialising takes N milliseconds
 *   init_error N             and fails with this nvmlReturn_t
 *   gpu UUID MINOR BUSID BYTES HEALTH MIG NAME…
 *       HEALTH  ok | lost (has a handle, answers nothing else but its PCI address)
 *               | gone (has no handle)
 *       MIG     - (not supported) | off | on
 *   reserved BYTES   of the GPU above, reserved by the driver; without it none
 *   figures USED UTIL TEMP MILLIWATTS LIMIT   of the GPU above; without them unknown
 *   process PID BYTES UTIL   with a compute context on the GPU above; UTIL - did nothing lately
 *   mig UUID BYTES [GI CI]   a place for a MIG device of the GPU above; UUID - is empty. Without
 *                            its instances the library has no word of them
 *
 * Structures and numbers are those of nvml.h, CUDA 12; with BEFORE_510 the library has the first form
 * of the question about memory alone, as those of drivers before 510 do.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

enum { GPUS_MAX = 16, MIGS_MAX = 8, PROCESSES_MAX = 8 };

struct process_info {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

struct process_sample {
    unsigned pid;
    unsigned long long when;
    unsigned sm, memory, encoder, decoder;
};

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_sub_system_id;
    char bus_id[32];
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct device {
    char uuid[96], bus_id[32], name[96], health[8], mig[8];
    unsigned minor, places, instances[2];
    unsigned long long bytes, reserved;
    int is_mig, has_instances, has_figures;
    unsigned long long used;
    unsigned util, temperature, milliwatts, limit, processes, samples;
    struct process_info process[PROCESSES_MAX];
    struct process_sample sample[PROCESSES_MAX];
    struct device *migs;
};

static struct device gpus[GPUS_MAX], migs[GPUS_MAX][MIGS_MAX];
static unsigned count, users;

static int read_description(long *init_ms, int *init_error)
{
    Dl_info self;
    char path[4096], line[512], *slash, util[16];
    if (!dladdr((void *)&count, &self) || strlen(self.dli_fname) + 16 > sizeof path)
        return UNKNOWN;
    strcpy(path, self.dli_fname);
    slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, "nvml.txt");
    FILE *file = fopen(path, "r");
    if (!file)
        return UNKNOWN;
    count = 0;
    while (fgets(line, sizeof line, file)) {
        struct device device = {0};
        struct process_info process = {0};
        int found;
        if (sscanf(line, "init_ms %ld", init_ms) == 1 || sscanf(line, "init_error %d", init_error) == 1)
            continue;
        if (sscanf(line, "gpu %95s %u %31s %llu %7s %7s %95[^\n]", device.uuid, &device.minor,
                   device.bus_id, &device.bytes, device.health, device.mig, device.name) == 7 &&
            count < GPUS_MAX) {
            device.migs = migs[count];
            gpus[count++] = device;
        } else if (count && sscanf(line, "reserved %llu", &gpus[count - 1].reserved) == 1) {
            continue;
        } else if (count && sscanf(line, "figures %llu %u %u %u %u", &gpus[count - 1].used,
                                   &gpus[count - 1].util, &gpus[count - 1].temperature,
                                   &gpus[count - 1].milliwatts, &gpus[count - 1].limit) == 5) {
            gpus[count - 1].has_figures = 1;
        } else if (count && gpus[count - 1].processes < PROCESSES_MAX &&
                   sscanf(line, "process %u %llu %15s", &process.pid, &process.used, util) == 3) {
            struct device *gpu = &gpus[count - 1];
            gpu->process[gpu->processes++] = process;
            if (strcmp(util, "-"))
                gpu->sample[gpu->samples++] =
                    (struct process_sample){.pid = process.pid, .when = 1, .sm = atoi(util)};
        } else if ((found = sscanf(line, "mig %95s %llu %u %u", device.uuid, &device.bytes,
                                   &device.instances[0], &device.instances[1])) >= 2 &&
                   count && gpus[count - 1].places < MIGS_MAX) {
            device.has_instances = found == 4;
            strcpy(device.health, "ok");
            strcpy(device.name, gpus[count - 1].name);
            device.is_mig = 1;
            migs[count - 1][gpus[count - 1].places++] = device;
        } else {
            fprintf(stderr, "nvml.txt: what is this: %s", line);
            abort();
        }
    }
    fclose(file);
    return SUCCESS;
}

int nvmlInit_v2(void)
{
    long init_ms = 0;
    int init_error = SUCCESS, failure = read_description(&init_ms, &init_error);
    struct timespec pause = {init_ms / 1000, init_ms % 1000 * 1000000};
    if (failure)
        return failure;
    nanosleep(&pause, NULL);
    users += init_error == SUCCESS;
    return init_error;
}

int nvmlShutdown(void)
{
    if (!users)
        return UNINITIALIZED;
    users--;
    return SUCCESS;
}

static int copy(const char *from, char *to, unsigned length)
{
    if (strlen(from) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

static int reachable(const struct device *device)
{
    if (!users)
        return UNINITIALIZED;
    if (!device)
        return INVALID_ARGUMENT;
    return strcmp(device->health, "ok") ? GPU_IS_LOST : SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    return users ? copy("535.129.03", version, length) : UNINITIALIZED;
}

int nvmlDeviceGetCount_v2(unsigned *result)
{
    *result = count;
    return users ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device)
{
    if (!users)
        return UNINITIALIZED;
    if (index >= count)
        return INVALID_ARGUMENT;
    *device = &gpus[index];
    return strcmp(gpus[index].health, "gone") ? SUCCESS : GPU_IS_LOST;
}

int nvmlDeviceGetPciInfo_v3(const struct device *device, struct pci_info *pci)
{
    if (!users || !device)
        return users ? INVALID_ARGUMENT : UNINITIALIZED;
    memset(pci, 0, sizeof *pci);
    return copy(device->bus_id, pci->bus_id, sizeof pci->bus_id);
}

int nvmlDeviceGetUUID(const struct device *device, char *uuid, unsigned length)
{
    int failure = reachable(device);
    return failure ? failure : copy(device->uuid, uuid, length);
}

int nvmlDeviceGetMinorNumber(const struct device *device, unsigned *minor)
{
    int failure = reachable(device);
    if (!failure)
        *minor = device->minor;
    return failure;
}

int nvmlDeviceGetName(const struct device *device, char *name, unsigned length)
{
    int failure = reachable(device);
    return failure ? failure : copy(device->name, name, length);
}

#ifdef BEFORE_510
int nvmlDeviceGetMemoryInfo(const struct device *device, unsigned long long memory[3])
{
    int failure = reachable(device);
    if (failure)
        return failure;
    memory[0] = device->bytes;
    memory[1] = device->bytes - device->used;
    memory[2] = device->used;
    return SUCCESS;
}
#else
int nvmlDeviceGetMemoryInfo_v2(const struct device *device, struct memory_v2 *memory)
{
    int failure = reachable(device);
    if (failure)
        return failure;
    if (memory->version != (sizeof *memory | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    memory->total = device->bytes;
    memory->reserved = device->reserved;
    memory->used = device->used;
    memory->free = device->bytes - device->used;
    return SUCCESS;
}
#endif

static int usage_status(const struct device *device)
{
    int failure = reachable(device);
    return failure || device->has_figures ? failure : NOT_SUPPORTED;
}

int nvmlDeviceGetUtilizationRates(const struct device *device, unsigned rates[2])
{
    int failure = usage_status(device);
    if (!failure)
        rates[0] = device->util, rates[1] = 0;
    return failure;
}

int nvmlDeviceGetTemperature(const struct device *device, unsigned sensor, unsigned *celsius)
{
    int failure = usage_status(device);
    if (!failure)
        *celsius = device->temperature;
    return failure || sensor == 0 ? failure : INVALID_ARGUMENT;
}

int nvmlDeviceGetPowerUsage(const struct device *device, unsigned *milliwatts)
{
    int failure = usage_status(device);
    if (!failure)
        *milliwatts = device->milliwatts;
    return failure;
}

int nvmlDeviceGetEnforcedPowerLimit(const struct device *device, unsigned *milliwatts)
{
    int failure = usage_status(device);
    if (!failure)
        *milliwatts = device->limit;
    return failure;
}

int nvmlDeviceGetComputeRunningProcesses_v3(const struct device *device, unsigned *size,
                                            struct process_info *processes)
{
    int failure = usage_status(device);
    unsigned capacity = *size;
    if (failure)
        return failure;
    *size = device->processes;
    if (capacity < device->processes)
        return INSUFFICIENT_SIZE;
    if (device->processes)
        memcpy(processes, device->process, device->processes * sizeof *processes);
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(const struct device *device, unsigned *size,
                                             struct process_info *processes)
{
    (void)processes;
    *size = 0;
    return usage_status(device);
}

int nvmlDeviceGetProcessUtilization(const struct device *device, struct process_sample *samples,
                                    unsigned *size, unsigned long long since)
{
    int failure = usage_status(device);
    unsigned capacity = *size;
    (void)since;
    if (failure)
        return failure;
    *size = device->samples;
    if (!device->samples)
        return NOT_FOUND;
    if (!samples || capacity < device->samples)
        return INSUFFICIENT_SIZE;
    memcpy(samples, device->sample, device->samples * sizeof *samples);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(const struct device *device, unsigned *current, unsigned *pending)
{
    int failure = reachable(device);
    if (failure)
        return failure;
    if (device->is_mig)
        return INVALID_ARGUMENT;
    if (!strcmp(device->mig, "-"))
        return NOT_SUPPORTED;
    *current = *pending = !strcmp(device->mig, "on");
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(const struct device *device, unsigned *places)
{
    int failure = reachable(device);
    if (!failure)
        *places = device->places;
    return failure;
}

int nvmlDeviceGetMigDeviceHandleByIndex(const struct device *device, unsigned index,
                                        struct device **mig)
{
    int failure = reachable(device);
    if (failure)
        return failure;
    if (index >= device->places || !strcmp(device->migs[index].uuid, "-"))
        return NOT_FOUND;
    *mig = &device->migs[index];
    return SUCCESS;
}

static int instance(const struct device *device, unsigned which, unsigned *id)
{
    int failure = reachable(device);
    if (failure)
        return failure;
    if (!device->is_mig)
        return INVALID_ARGUMENT;
    if (!device->has_instances)
        return NOT_SUPPORTED;
    *id = device->instances[which];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(const struct device *device, unsigned *id)
{
    return instance(device, 0, id);
}

int nvmlDeviceGetComputeInstanceId(const struct device *device, unsigned *id)
{
    return instance(device, 1, id);
}
