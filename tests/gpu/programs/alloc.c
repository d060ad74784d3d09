/*
 * Takes memory of the first GPU by each path of CUDA's driver API until it is refused.
 *
 *   alloc [--cap-mib N] [--seconds S] QUESTION...
 *
 * One JSON line a question. What a path takes it holds until it has been refused, in pieces that
 * become smaller to find the end; then it gives everything back and takes one piece again. Nothing
 * goes past the cap, so that a quota that doesn't hold is seen without filling the GPU.
 *
 * Questions about processes fork before CUDA is loaded, so each process is one as any.
 */
#define _GNU_SOURCE
#include "cu.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { PIECES = 8192 };
#define MIB (1ull << 20)

/* How long what was given back may take to be free. */
#define PATIENCE_NS 6000000000ull

/* How long it waits for what it gave back; longer if no test judges the time (ALLOC_PATIENCE_S). */
static unsigned long long patience_ns(void)
{
    const char *seconds = getenv("ALLOC_PATIENCE_S");
    return seconds ? strtoull(seconds, NULL, 10) * 1000000000ull : PATIENCE_NS;
}


static uint64_t cap = 1024 * MIB;
static double seconds = 2;
static CUdevice device;
static CUstream stream;

/* What keeps a piece alive; how it's made and given back depends on the path. */
struct piece {
    unsigned long long handle;
    void *object;
    size_t bytes;
    int descriptor;
};

static struct piece pieces[PIECES];

struct path {
    const char *name;
    uint64_t first, least; /* bytes of the first piece, and of the smallest */
    CUresult (*take)(struct piece *, const char **where);
    void (*give)(struct piece *);
    void (*settle)(void); /* after everything was given back */
};

static CUresult info(uint64_t *free_bytes, uint64_t *total_bytes)
{
    size_t free_now = 0, total = 0;
    CUresult result = cuMemGetInfo(&free_now, &total);
    *free_bytes = free_now;
    *total_bytes = total;
    return result;
}

static CUresult take_plain(struct piece *piece, const char **where)
{
    *where = "cuMemAlloc";
    return cuMemAlloc(&piece->handle, piece->bytes);
}

static void give_plain(struct piece *piece)
{
    cuMemFree(piece->handle);
}

/* Managed memory, which no program touches. */
static CUresult take_managed(struct piece *piece, const char **where)
{
    *where = "cuMemAllocManaged";
    return cuMemAllocManaged(&piece->handle, piece->bytes, 1);
}

static CUresult take_pitched(struct piece *piece, const char **where)
{
    size_t pitch = 0;
    *where = "cuMemAllocPitch";
    /* Rows of 16 KiB, which is a multiple of any pitch. */
    return cuMemAllocPitch(&piece->handle, &pitch, 16384, piece->bytes / 16384, 16);
}

static CUmemAllocationProp properties(int handle_types)
{
    CUmemAllocationProp asked = {.type = 1, .handle_types = handle_types, .location = {1, device}};
    return asked;
}

static CUresult take_vmm(struct piece *piece, const char **where)
{
    CUmemAllocationProp asked = properties(0);
    *where = "cuMemCreate";
    return cuMemCreate(&piece->handle, piece->bytes, &asked, 0);
}

static void give_vmm(struct piece *piece)
{
    cuMemRelease(piece->handle);
}

/* Memory that a mapping alone keeps alive: its handle is released at once. */
static CUresult take_mapped(struct piece *piece, const char **where)
{
    CUmemAllocationProp asked = properties(0);
    CUmemAccessDesc access = {{1, device}, 3};
    CUmemHandle handle;
    CUresult result;
    *where = "cuMemAddressReserve";
    if ((result = cuMemAddressReserve(&piece->handle, piece->bytes, 0, 0, 0)))
        return result;
    *where = "cuMemCreate";
    if (!(result = cuMemCreate(&handle, piece->bytes, &asked, 0))) {
        *where = "cuMemMap";
        if (!(result = cuMemMap(piece->handle, piece->bytes, 0, handle, 0))) {
            *where = "cuMemSetAccess";
            if ((result = cuMemSetAccess(piece->handle, piece->bytes, &access, 1)))
                cuMemUnmap(piece->handle, piece->bytes);
        }
        cuMemRelease(handle);
    }
    if (result)
        cuMemAddressFree(piece->handle, piece->bytes);
    return result;
}

static void give_mapped(struct piece *piece)
{
    cuMemUnmap(piece->handle, piece->bytes);
    cuMemAddressFree(piece->handle, piece->bytes);
}

/* Memory that a descriptor alone keeps alive. */
static CUresult take_exported(struct piece *piece, const char **where)
{
    CUmemAllocationProp asked = properties(1);
    CUmemHandle handle;
    CUresult result;
    *where = "cuMemCreate";
    if ((result = cuMemCreate(&handle, piece->bytes, &asked, 0)))
        return result;
    *where = "cuMemExportToShareableHandle";
    result = cuMemExportToShareableHandle(&piece->descriptor, handle, 1, 0);
    cuMemRelease(handle);
    return result;
}

static void give_exported(struct piece *piece)
{
    close(piece->descriptor);
}

static CUresult take_async(struct piece *piece, const char **where)
{
    CUresult result;
    *where = "cuMemAllocAsync";
    if ((result = cuMemAllocAsync(&piece->handle, piece->bytes, stream)))
        return result;
    *where = "cuStreamSynchronize";
    return cuStreamSynchronize(stream);
}

static void give_async(struct piece *piece)
{
    cuMemFreeAsync(piece->handle, stream);
}

/* A pool keeps what it was given back. */
static void settle_async(void)
{
    CUmemoryPool pool;
    cuStreamSynchronize(stream);
    if (!cuDeviceGetDefaultMemPool(&pool, device))
        cuMemPoolTrimTo(pool, 0);
}

static CUresult take_array(struct piece *piece, const char **where)
{
    /* Rows of 8192 times four floats: 128 KiB. */
    CUarrayDesc asked = {8192, piece->bytes / (8192 * 16), 0x20, 4};
    *where = "cuArrayCreate";
    return cuArrayCreate(&piece->object, &asked);
}

static void give_array(struct piece *piece)
{
    cuArrayDestroy(piece->object);
}

/* One graph with one node that takes memory and no node that frees it. */
static CUresult take_graph(struct piece *piece, const char **where)
{
    CUmemAccessDesc access = {{1, device}, 3};
    CUmemAllocNode node = {.type = 1, .location = {1, device}, .access = &access,
                           .access_count = 1, .bytes = piece->bytes};
    CUgraph graph;
    CUgraphNode made;
    CUgraphExec executable;
    CUresult result;
    *where = "cuGraphCreate";
    if ((result = cuGraphCreate(&graph, 0)))
        return result;
    *where = "cuGraphAddMemAllocNode";
    if (!(result = cuGraphAddMemAllocNode(&made, graph, NULL, 0, &node))) {
        *where = "cuGraphInstantiate";
        if (!(result = cuGraphInstantiate(&executable, graph, 0))) {
            *where = "cuGraphLaunch";
            if (!(result = cuGraphLaunch(executable, stream)))
                result = cuStreamSynchronize(stream);
            cuGraphExecDestroy(executable);
        }
    }
    cuGraphDestroy(graph);
    piece->handle = node.address;
    return result;
}

static void settle_graph(void)
{
    cuCtxSynchronize();
    cuDeviceGraphMemTrim(device);
}

static const struct path PATHS[] = {
    {"plain", 256 * MIB, 2 * MIB, take_plain, give_plain, NULL},
    {"pitched", 256 * MIB, 2 * MIB, take_pitched, give_plain, NULL},
    {"vmm", 256 * MIB, 2 * MIB, take_vmm, give_vmm, NULL},
    {"mapped", 256 * MIB, 2 * MIB, take_mapped, give_mapped, NULL},
    {"exported", 256 * MIB, 2 * MIB, take_exported, give_exported, NULL},
    {"async", 256 * MIB, 32 * MIB, take_async, give_async, settle_async},
    {"array", 256 * MIB, 2 * MIB, take_array, give_array, NULL},
    {"graph", 256 * MIB, 32 * MIB, take_graph, give_plain, settle_graph},
    {"managed-fill", 256 * MIB, 2 * MIB, take_managed, give_plain, NULL},
};

struct taken {
    uint64_t bytes;
    int count;
    CUresult error;
    const char *where;
};

/* Takes until a smallest piece is refused, or the cap is reached. */
static struct taken fill(const struct path *path, uint64_t most)
{
    struct taken taken = {0, 0, 0, ""};
    for (uint64_t size = path->first; size >= path->least; size /= 2) {
        while (taken.count < PIECES && taken.bytes + size <= most) {
            struct piece *piece = &pieces[taken.count];
            memset(piece, 0, sizeof *piece);
            piece->bytes = size;
            const char *where = "";
            CUresult result = path->take(piece, &where);
            if (result) {
                taken.error = result;
                taken.where = where;
                break;
            }
            taken.bytes += size;
            taken.count++;
        }
    }
    return taken;
}

static void give_all(const struct path *path, int count)
{
    while (count)
        path->give(&pieces[--count]);
    if (path->settle)
        path->settle();
}

static void ask_path(const struct path *path)
{
    uint64_t before, peak, after, total;
    const char *where = "";
    info(&before, &total);
    struct taken taken = fill(path, cap);
    info(&peak, &total);
    uint64_t given_ns = now_ns();
    give_all(path, taken.count);
    /* What a descriptor kept is the monitor's to notice. */
    do {
        info(&after, &total);
    } while (after + path->least < before && now_ns() - given_ns < patience_ns() && !usleep(1000));
    double back_ms = (double)(now_ns() - given_ns) / 1e6;
    pieces[0].bytes = path->least;
    CUresult again = path->take(&pieces[0], &where);
    if (!again)
        give_all(path, 1);
    printf("{\"path\":\"%s\",\"bytes\":%llu,\"pieces\":%d,\"error\":%d,\"where\":\"%s\","
           "\"free_before\":%llu,\"free_at_peak\":%llu,\"free_after\":%llu,\"total\":%llu,"
           "\"back_ms\":%.1f,\"again_error\":%d}\n",
           path->name, (unsigned long long)taken.bytes, taken.count, taken.error, taken.where,
           (unsigned long long)before, (unsigned long long)peak, (unsigned long long)after,
           (unsigned long long)total, back_ms, again);
}

/* Managed memory: whether it's refused, with what, and whether all else goes on. */
static void ask_managed(void)
{
    CUdeviceptr managed = 0, plain = 0;
    uint64_t before, after, total;
    int errno_after = 0;
    info(&before, &total);
    CUresult result = cuMemAllocManaged(&managed, 64 * MIB, 1), touched = 0;
    errno_after = errno;
    if (!result && !(touched = cuMemsetD8(managed, 1, 64 * MIB)))
        touched = cuCtxSynchronize();
    info(&after, &total);
    if (!result)
        cuMemFree(managed);
    CUresult again = cuMemAlloc(&plain, 2 * MIB);
    if (!again)
        cuMemFree(plain);
    printf("{\"path\":\"managed\",\"error\":%d,\"touch_error\":%d,\"errno\":%d,"
           "\"free_before\":%llu,\"free_after\":%llu,\"plain_error\":%d}\n",
           result, touched, errno_after, (unsigned long long)before, (unsigned long long)after,
           again);
}

/* The host's memory isn't the GPU's: it's had past any quota. */
static void ask_host(void)
{
    void *memory = NULL;
    uint64_t before, after, total;
    info(&before, &total);
    CUresult result = cuMemHostAlloc(&memory, 64 * MIB, 0);
    info(&after, &total);
    if (!result)
        cuMemFreeHost(memory);
    printf("{\"path\":\"host\",\"error\":%d,\"free_before\":%llu,\"free_after\":%llu}\n", result,
           (unsigned long long)before, (unsigned long long)after);
}

/* Fills the quota, then asks for more as often as it can for a while. */
static void ask_churn(void)
{
    uint64_t refused = 0, given = 0, begun = now_ns(), end = begun + (uint64_t)(seconds * 1e9);
    struct taken taken = fill(&PATHS[0], cap);
    uint64_t filled = now_ns();
    while (now_ns() < end) {
        CUdeviceptr more;
        if (cuMemAlloc(&more, 64 * MIB)) {
            refused++;
        } else {
            given++;
            cuMemFree(more);
        }
    }
    give_all(&PATHS[0], taken.count);
    printf("{\"path\":\"churn\",\"bytes\":%llu,\"refused\":%llu,\"given\":%llu,"
           "\"filled_ns\":%llu,\"ended_ns\":%llu}\n",
           (unsigned long long)taken.bytes, (unsigned long long)refused,
           (unsigned long long)given, (unsigned long long)filled, (unsigned long long)now_ns());
}

/* What processes tell each other. */
struct board {
    volatile uint64_t bytes[8];
    volatile int error[8];
    volatile int ready, go, leave;
};

static struct board *board;

static int begin(double *init_ms, double *context_ms)
{
    double init = 0, context = 0;
    if (cu_begin(&device, init_ms ? init_ms : &init, context_ms ? context_ms : &context))
        return -1;
    return cuStreamCreate && !cuStreamCreate(&stream, 1) ? 0 : -1;
}

/* A process that fills up to `most`, says so, and holds it until it is asked to exit. */
static pid_t filler(int place, uint64_t most, int waits)
{
    fflush(stdout);
    pid_t child = fork();
    if (child)
        return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (begin(NULL, NULL)) {
        board->error[place] = -1;
        __atomic_fetch_add(&board->ready, 1, __ATOMIC_SEQ_CST);
        _exit(1);
    }
    if (waits) {
        __atomic_fetch_add(&board->ready, 1, __ATOMIC_SEQ_CST);
        while (!board->go)
            usleep(100);
    }
    struct taken taken = fill(&PATHS[0], most);
    board->bytes[place] = taken.bytes;
    board->error[place] = taken.error;
    __atomic_fetch_add(&board->ready, 1, __ATOMIC_SEQ_CST);
    while (!board->leave)
        usleep(1000);
    give_all(&PATHS[0], taken.count);
    _exit(0);
}

static int wait_ready(int count)
{
    for (int i = 0; i < 60000; i++) {
        if (board->ready >= count)
            return 0;
        usleep(1000);
    }
    return -1;
}

static void leave_all(void)
{
    board->leave = 1;
    while (wait(NULL) > 0 || errno == EINTR) {
    }
}

static void begin_board(void)
{
    memset((void *)board, 0, sizeof *board);
}

static void say_processes(const char *name, int count, int failed)
{
    unsigned long long sum = 0;
    for (int i = 0; i < count; i++)
        sum += board->bytes[i];
    printf("{\"path\":\"%s\",\"bytes\":%llu,\"each\":[", name, sum);
    for (int i = 0; i < count; i++)
        printf("%s%llu", i ? "," : "", (unsigned long long)board->bytes[i]);
    printf("],\"errors\":[");
    for (int i = 0; i < count; i++)
        printf("%s%d", i ? "," : "", board->error[i]);
    printf("],\"timed_out\":%d}\n", failed);
}

/* One holds a third of the cap, another takes what it can. */
static void ask_second(void)
{
    begin_board();
    filler(0, cap / 3, 0);
    int failed = wait_ready(1);
    filler(1, cap, 0);
    failed |= wait_ready(2);
    say_processes("second", 2, failed);
    leave_all();
}

/* Four that have a context each take what they can at once. */
static void ask_four(void)
{
    begin_board();
    for (int i = 0; i < 4; i++)
        filler(i, cap, 1);
    int failed = wait_ready(4);
    board->go = 1;
    failed |= wait_ready(8);
    say_processes("four", 4, failed);
    leave_all();
}

/* One that holds all it could get is killed; how soon can another have as much? */
static void ask_killed(void)
{
    begin_board();
    pid_t victim = filler(0, cap, 0);
    int failed = wait_ready(1);
    uint64_t held = board->bytes[0], best = 0;
    uint64_t begun = now_ns();
    kill(victim, SIGKILL);
    waitpid(victim, NULL, 0);
    double back_ms = -1;
    if (!failed && held) {
        failed = begin(NULL, NULL);
        double context_ms = (double)(now_ns() - begun) / 1e6;
        for (int i = 0; !failed && i < 500; i++) {
            struct taken taken = fill(&PATHS[0], held);
            if (taken.bytes > best)
                best = taken.bytes;
            give_all(&PATHS[0], taken.count);
            if (taken.bytes == held) {
                back_ms = (double)(now_ns() - begun) / 1e6;
                break;
            }
            usleep(10000);
        }
        printf("{\"path\":\"killed\",\"held\":%llu,\"again\":%llu,\"back_ms\":%.1f,"
               "\"context_ms\":%.1f}\n",
               (unsigned long long)held, (unsigned long long)best, back_ms, context_ms);
        return;
    }
    printf("{\"path\":\"killed\",\"held\":%llu,\"again\":0,\"back_ms\":-1}\n",
           (unsigned long long)held);
}

/* Holds what it can get until standard input ends. */
static void ask_hold(void)
{
    char byte;
    struct taken taken = fill(&PATHS[0], cap);
    printf("{\"path\":\"hold\",\"bytes\":%llu,\"error\":%d}\n", (unsigned long long)taken.bytes,
           taken.error);
    fflush(stdout);
    while (read(0, &byte, 1) > 0) {
    }
    give_all(&PATHS[0], taken.count);
}

static void ask_info(double init_ms, double context_ms)
{
    char name[128] = "";
    int version = 0;
    size_t device_total = 0;
    uint64_t free_bytes = 0, total = 0;
    cuDriverGetVersion(&version);
    cuDeviceGetName(name, sizeof name, device);
    cuDeviceTotalMem(&device_total, device);
    CUresult result = info(&free_bytes, &total);
    printf("{\"path\":\"info\",\"name\":\"%s\",\"cuda\":%d,\"device_total\":%zu,\"error\":%d,"
           "\"total\":%llu,\"free\":%llu,\"init_ms\":%.2f,\"context_ms\":%.2f}\n",
           name, version, device_total, result, (unsigned long long)total,
           (unsigned long long)free_bytes, init_ms, context_ms);
}

/* Of these each makes processes of its own, and there must be no CUDA in ours yet. */
static const struct {
    const char *name;
    void (*ask)(void);
} FORKING[] = {{"second", ask_second}, {"four", ask_four}, {"killed", ask_killed}};

static const struct {
    const char *name;
    void (*ask)(void);
} OTHERS[] = {
    {"managed", ask_managed}, {"host", ask_host}, {"churn", ask_churn}, {"hold", ask_hold}};

#define COUNT(list) (sizeof(list) / sizeof *(list))

/* Runs a question that forks in a process of its own; returns whether it was one. */
static int ask_forking(const char *question)
{
    for (size_t i = 0; i < COUNT(FORKING); i++)
        if (!strcmp(question, FORKING[i].name)) {
            fflush(stdout);
            if (!fork()) {
                FORKING[i].ask();
                fflush(stdout);
                _exit(0);
            }
            wait(NULL);
            return 1;
        }
    return 0;
}

static int ask(const char *question, double init_ms, double context_ms)
{
    if (!strcmp(question, "info")) {
        ask_info(init_ms, context_ms);
        return 0;
    }
    for (size_t i = 0; i < COUNT(PATHS); i++)
        if (!strcmp(question, PATHS[i].name)) {
            ask_path(&PATHS[i]);
            return 0;
        }
    for (size_t i = 0; i < COUNT(OTHERS); i++)
        if (!strcmp(question, OTHERS[i].name)) {
            OTHERS[i].ask();
            return 0;
        }
    fprintf(stderr, "alloc: there is no question %s\n", question);
    return 2;
}

int main(int argc, char **argv)
{
    int first = 1, begun = 0;
    double init_ms = 0, context_ms = 0;
    for (; first + 1 < argc && !strncmp(argv[first], "--", 2); first += 2) {
        if (!strcmp(argv[first], "--cap-mib"))
            cap = strtoull(argv[first + 1], NULL, 10) * MIB;
        else if (!strcmp(argv[first], "--seconds"))
            seconds = atof(argv[first + 1]);
        else
            return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED)
        return 1;
    for (int i = first; i < argc; i++)
        if (ask_forking(argv[i]))
            argv[i] = NULL;
    for (int i = first; i < argc; i++) {
        if (!argv[i])
            continue;
        if (!begun && begin(&init_ms, &context_ms))
            return 3;
        begun = 1;
        int status = ask(argv[i], init_ms, context_ms);
        if (status)
            return status;
    }
    return 0;
}
