// A GPU that is not there: libcuda.so.1, and what torch calls of the CUDA runtime, cuBLAS and NCCL, for the tests in
// this folder. It answers as an H100 does, or as an A100. Memory is reserved, copies are made, every kernel, product and
// wait is counted by name and size, and every message noted in its order; none is run, so values on the device are those
// that were copied there, or 0.
//
// It is preloaded, so torch's libraries find these functions before NVIDIA's own. A function that they want and that is
// not here is generated as one that is counted as "unanswered NAME" and returns 0, success: scripts/
// check_cuda_without_gpu.py writes unanswered.inc.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
// nccl.h wants the headers of narrow numbers for their types in kernels; they want a header that no wheel has.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#define EXPORT extern "C" __attribute__((visibility("default")))
// A function of a library whose header is not at hand, or would be long: by the first of its arguments.
#define NAMED(symbol) __asm__(#symbol) __attribute__((visibility("default")))

// --- what happened, for the tests -------------------------------------------------------------------------------------

static std::mutex lock;
static std::map<std::string, long> counted;

static void count(const std::string& what) {
  std::lock_guard<std::mutex> hold(lock);
  ++counted[what];
}

static std::string sizes(std::initializer_list<long> numbers) {
  std::string text;
  for (long n : numbers) text += (text.empty() ? "" : "x") + std::to_string(n);
  return text;
}

// What was counted since the last call: lines of "NUMBER<tab>WHAT". The text is valid until the next call.
EXPORT const char* null_gpu_take() {
  static std::string text;
  std::lock_guard<std::mutex> hold(lock);
  text.clear();
  for (auto& [what, number] : counted) text += std::to_string(number) + "\t" + what + "\n";
  counted.clear();
  return text.c_str();
}

// --- the device -------------------------------------------------------------------------------------------------------

struct Device {
  const char* name;
  int major, minor, processors, l2;
  size_t memory, shared_of_block, shared_of_processor;  // bytes
};
static const Device kDevices[] = {
    {"NVIDIA H100 80GB HBM3", 9, 0, 132, 52428800, 85045608448, 232448, 233472},
    {"NVIDIA B200", 10, 0, 148, 132644864, 191000000000, 232448, 233472},
    {"NVIDIA A100-SXM4-80GB", 8, 0, 108, 41943040, 85198045184, 166912, 167936},
};
static const Device* device = kDevices;

// Answer as the device whose name has this word, from now on. torch asks once: call it before torch does.
EXPORT int null_gpu_become(const char* word) {
  for (auto& each : kDevices)
    if (std::strstr(each.name, word) != nullptr) return device = &each, 1;
  return 0;
}

static size_t memory() {  // in bytes; the variable is for tests of what happens when it runs out
  static const char* gib = std::getenv("NULL_GPU_MEMORY_GIB");
  return gib == nullptr ? device->memory : (size_t)(std::atof(gib) * (1 << 30));
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, device->name);
  p->major = device->major;
  p->minor = device->minor;
  p->multiProcessorCount = device->processors;
  p->totalGlobalMem = memory();
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = device->shared_of_block;
  p->sharedMemPerMultiprocessor = device->shared_of_processor;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = device->l2;
  p->memoryBusWidth = 5120;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device->minor; break;
    case cudaDevAttrMultiProcessorCount: *value = device->processors; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device->shared_of_block; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;  // scans are cut by it, and would never end if it were 0
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t) { return "of the null GPU"; }
EXPORT const char* cudaGetErrorName(cudaError_t) { return "of the null GPU"; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  return std::snprintf(text, size, "0000:01:00.0"), cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}

// --- the capture of CUDA graphs: what the thread that captures asks for is noted, and what it may not ask for refused ---
// One capture at a time, which other threads don't share, as torch begins ours. Nothing runs when a graph is launched.

static thread_local bool captures = false, is_relaxed = false;  // relaxed: it may allocate meanwhile
static bool is_broken = false;
static long number_of_capture = 0, nodes = 0;
static cudaStream_t origin = nullptr;
static std::set<cudaStream_t> captured, unjoined;  // streams in the capture, and those whose work it does not wait for

// Whether the driver would refuse this now, as a call that waits or frees; the capture is then lost.
static bool refuses(const std::string& what) {
  if (!captures || is_relaxed) return false;
  return count("refused in a capture: " + what), is_broken = true;
}

// Some work on a stream: a node of the graph, or nothing that a replay does again.
static void note_work(const std::string& what, cudaStream_t stream) {
  if (!captures) return;
  if (captured.count(stream) == 0) return count("not captured: " + what);
  nodes++;
  if (stream != origin) unjoined.insert(stream);
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  cudaStreamCaptureMode before = is_relaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
  is_relaxed = *mode == cudaStreamCaptureModeRelaxed;
  return *mode = before, cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  count("capture");
  number_of_capture++, nodes = 0, is_broken = false, captures = true;
  captured = {origin = stream}, unjoined.clear();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  captures = false, captured.clear();
  *graph = nullptr;
  if (is_broken) return cudaErrorStreamCaptureInvalidated;
  if (!unjoined.empty()) return cudaErrorStreamCaptureUnjoined;
  return *graph = (cudaGraph_t) new long(nodes), cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = captured.count(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
  if (id != nullptr) *id = number_of_capture;
  return cudaStreamIsCapturing(stream, status);
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  return *number = *(long*)graph, cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = (cudaGraphExec_t)graph, cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return count("replay"), cudaSuccess; }

// --- memory: the host's, reserved and so never there until somebody writes to it --------------------------------------

static const size_t kCopied = 1 << 20;  // bytes up to which the device itself moves something: more would become real
static std::map<const char*, size_t> of_device, of_host;
static size_t used = 0;

static bool lies_in(const std::map<const char*, size_t>& blocks, const void* address) {
  auto after = blocks.upper_bound((const char*)address);
  if (after == blocks.begin()) return false;
  --after;
  return (const char*)address < after->first + after->second;
}

static bool on_device(const void* address) {
  std::lock_guard<std::mutex> hold(lock);
  return lies_in(of_device, address);
}

static bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> hold(lock);
  return lies_in(of_host, address);
}

EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (refuses("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
  std::lock_guard<std::mutex> hold(lock);
  if (bytes == 0) return *address = nullptr, cudaSuccess;
  if (used + bytes > memory()) return cudaErrorMemoryAllocation;
  *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) return cudaErrorMemoryAllocation;
  used += of_device[(const char*)*address] = bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void* address) {
  if (refuses("cudaFree")) return cudaErrorStreamCaptureUnsupported;
  std::lock_guard<std::mutex> hold(lock);
  auto found = of_device.find((const char*)address);
  if (found == of_device.end()) return cudaSuccess;  // of a null pointer too
  used -= found->second;
  munmap(address, found->second);
  of_device.erase(found);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return *total = memory(), *free = memory() - used, cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  if (refuses("cudaHostAlloc")) return cudaErrorStreamCaptureUnsupported;
  std::lock_guard<std::mutex> hold(lock);
  *address = std::aligned_alloc(4096, (bytes / 4096 + 1) * 4096);
  of_host[(const char*)*address] = bytes + 1;  // so that an empty block has an address of its own
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void* address) {
  if (refuses("cudaFreeHost")) return cudaErrorStreamCaptureUnsupported;
  std::lock_guard<std::mutex> hold(lock);
  of_host.erase((const char*)address);
  std::free(address);
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* address) {
  std::lock_guard<std::mutex> hold(lock);
  std::memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeUnregistered;
  if (lies_in(of_device, address)) a->type = cudaMemoryTypeDevice, a->devicePointer = (void*)address;
  if (lies_in(of_host, address)) a->type = cudaMemoryTypeHost, a->hostPointer = a->devicePointer = (void*)address;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  bool there = on_device(to), here = on_device(from), pinned = is_pinned(there ? from : to);
  std::string way = there ? (here ? "on the device" : "to the device") : "to the host";
  if (!(there && here) && !pinned) {  // a replay would copy from where something was once, and the host waits
    way += ", not pinned";
    if (refuses("copy " + way)) return cudaErrorStreamCaptureUnsupported;
  }
  count("copy " + way);
  note_work("copy " + way, stream);
  if (!(there && here) || bytes <= kCopied) std::memmove(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (refuses("cudaMemcpy")) return cudaErrorStreamCaptureUnsupported;
  count("wait cudaMemcpy");
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  count("memset");
  note_work("memset", stream);
  if (bytes <= kCopied) std::memset(to, value, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbols[1 << 16];
  return *address = symbols, cudaSuccess;
}

// --- streams and events: all is done as soon as it is asked for -------------------------------------------------------

struct Event {
  timespec at;
  cudaStream_t stream;  // where it was recorded last, and in which capture if in one
  long capture;
};

static void* anything[8];  // what a handle points to that nobody looks into

static cudaError_t new_stream(cudaStream_t* stream) {
  return *stream = (cudaStream_t) new char[64], cudaSuccess;  // torch tells streams by their addresses
}
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return new_stream(s); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return new_stream(s); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* s) { return new_stream(s); }

static cudaError_t wait(const std::string& what) {
  if (refuses(what)) return cudaErrorStreamCaptureUnsupported;
  return count("wait " + what), cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait("cudaStreamSynchronize"); }
EXPORT cudaError_t cudaDeviceSynchronize() { return wait("cudaDeviceSynchronize"); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait("cudaEventSynchronize"); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = (cudaEvent_t) new Event{}, cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Event*)event, cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Event* e = (Event*)event;
  e->stream = stream, e->capture = captures && captured.count(stream) ? number_of_capture : 0;
  return clock_gettime(CLOCK_MONOTONIC, &e->at), cudaSuccess;
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t) {
  return refuses("cudaEventQuery") ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Event* e = (Event*)event;
  if (!captures || (e->capture != number_of_capture && captured.count(stream) == 0)) return cudaSuccess;
  if (e->capture != number_of_capture)  // work that the graph does not have
    return refuses("to wait for what came before") ? cudaErrorStreamCaptureIsolation : cudaSuccess;
  captured.insert(stream);
  if (stream != origin) unjoined.insert(stream);
  return unjoined.erase(e->stream), cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  timespec a = ((Event*)begin)->at, b = ((Event*)end)->at;
  return *ms = (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6, cudaSuccess;
}

// --- kernels ----------------------------------------------------------------------------------------------------------

// Filled while torch's libraries are loaded, before any thread, and by Triton under Python's lock.
static std::unordered_map<const void*, std::string>& names() {
  static std::unordered_map<const void*, std::string> of_kernels;
  return of_kernels;
}

static void count_kernel(const void* kernel, dim3 grid, dim3 block, void* stream) {
  auto found = names().find(kernel);
  std::string name = found == names().end() ? "unknown" : found->second;
  note_work("kernel " + name, (cudaStream_t)stream);
  count("kernel " + name + " <<<" + sizes({grid.x, grid.y, grid.z}) + ", " + sizes({block.x, block.y, block.z}) + ">>>");
}

EXPORT void** __cudaRegisterFatBinary(void*) { return anything; }
EXPORT void __cudaRegisterFunction(
    void**, const char* kernel, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  names()[kernel] = name;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t s) {
  return count_kernel((const void*)kernel, grid, block, s), cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t s) {
  return count_kernel(kernel, grid, block, s), cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void**) {
  return count_kernel(kernel, how->gridDim, how->blockDim, how->stream), cudaSuccess;
}

// kernel<<<...>>>(...) is compiled to a push of what is in the brackets, and a function that pops it.
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} brackets;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  return brackets = {grid, block, shared, stream}, 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = brackets.grid, *block = brackets.block, *shared = brackets.shared, *(void**)stream = brackets.stream;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  std::memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 10 * device->major + device->minor;
  a->maxDynamicSharedSizeBytes = device->shared_of_block;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  return *n = 2, cudaSuccess;
}

// --- cuBLAS: which product, of which size -----------------------------------------------------------------------------

#define GIVES_HANDLE(symbol)              \
  extern "C" int give_##symbol(void**) NAMED(symbol); \
  int give_##symbol(void** handle) { return *handle = anything, 0; }
GIVES_HANDLE(cublasCreate_v2)
GIVES_HANDLE(cublasLtMatmulDescCreate)
GIVES_HANDLE(cublasLtMatmulPreferenceCreate)

#define GIVES_ZERO(symbol)             \
  extern "C" int zero_##symbol(void*, int*) NAMED(symbol); \
  int zero_##symbol(void*, int* mode) { return *mode = 0, 0; }
GIVES_ZERO(cublasGetMathMode)
GIVES_ZERO(cublasGetPointerMode_v2)

#define PRODUCT(symbol)                                                                 \
  extern "C" int product_##symbol(void*, int, int, int, int, int) NAMED(symbol);        \
  int product_##symbol(void*, int ta, int tb, int m, int n, int k) {                    \
    return count("product " #symbol " " + std::string(ta ? "t" : "n") + (tb ? "t" : "n") + " " + sizes({m, n, k})), 0; \
  }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)

struct Matrix {
  long rows, columns;
};
extern "C" int new_matrix(Matrix**, int, unsigned long, unsigned long, long) NAMED(cublasLtMatrixLayoutCreate);
int new_matrix(Matrix** matrix, int, unsigned long rows, unsigned long columns, long) {
  return *matrix = new Matrix{(long)rows, (long)columns}, 0;
}
extern "C" int free_matrix(Matrix*) NAMED(cublasLtMatrixLayoutDestroy);
int free_matrix(Matrix* matrix) { return delete matrix, 0; }
extern "C" int matmul(void*, void*, void*, void*, Matrix*, void*, Matrix*) NAMED(cublasLtMatmul);
int matmul(void*, void*, void*, void*, Matrix* a, void*, Matrix* b) {
  return count("product cublasLtMatmul " + sizes({a->rows, a->columns, b->rows, b->columns})), 0;
}
extern "C" int heuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int*)
    NAMED(cublasLtMatmulAlgoGetHeuristic);
int heuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* found) {
  return std::memset(result, 0, 64), *found = 1, 0;
}

// --- cuDNN: one engine for every graph of operators, which needs no workspace -----------------------------------------

GIVES_HANDLE(cudnnCreate)
// As CUDNN_TYPE_... has them: numbers of 8 and 4 bytes are answered 0, lists of notes are empty.
enum { kInt64 = 3, kNumericalNote = 11, kBehaviorNote = 21, kInt32 = 23 };
extern "C" int new_descriptor(int, void**) NAMED(cudnnBackendCreateDescriptor);
int new_descriptor(int, void** descriptor) { return *descriptor = anything, 0; }
extern "C" int get_attribute(void*, int, int type, long, long* found, void* value) NAMED(cudnnBackendGetAttribute);
int get_attribute(void*, int, int type, long, long* found, void* value) {
  if (found != nullptr) *found = type != kNumericalNote && type != kBehaviorNote;
  if (value != nullptr && (type == kInt64 || type == kInt32)) std::memset(value, 0, type == kInt64 ? 8 : 4);
  return 0;
}
extern "C" int execute(void*, void*, void*) NAMED(cudnnBackendExecute);
int execute(void*, void*, void*) { return count("product cuDNN"), 0; }
#define SUCCEEDS(symbol)                      \
  extern "C" int success_##symbol() NAMED(symbol); \
  int success_##symbol() { return 0; }
SUCCEEDS(cudnnBackendSetAttribute)
SUCCEEDS(cudnnBackendFinalize)
SUCCEEDS(cudnnBackendDestroyDescriptor)
SUCCEEDS(cudnnSetStream)

// --- NCCL: this process is one rank of a group whose others do as it does ---------------------------------------------

struct ncclComm {
  int size, rank;
  std::string id;  // the same on all ranks of the group
};

static std::string sent;
static thread_local int depth = 0;   // of ncclGroupStart
static std::atomic<long> batch{0};  // what one group of calls sends has one number

// What was sent since the last call, in order: lines of "GROUP<tab>RANK<tab>SIZE<tab>BATCH<tab>KIND<tab>DTYPE<tab>
// NUMBER<tab>PEER", RANK and PEER being of the group. The text is valid until the next call.
EXPORT const char* null_gpu_take_sent() {
  static std::string text;
  std::lock_guard<std::mutex> hold(lock);
  text.swap(sent);
  sent.clear();
  return text.c_str();
}

static size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}

static ncclResult_t note(
    const char* kind, size_t n, ncclDataType_t type, int peer, const ncclComm* comm, cudaStream_t stream) {
  static const char* names[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
                                "bfloat16", "float8_e4m3fn", "float8_e5m2"};  // as ncclDataType_t has them
  note_work(kind, stream);
  if (depth == 0) ++batch;
  std::lock_guard<std::mutex> hold(lock);
  sent += comm->id;
  for (long number : {(long)comm->rank, (long)comm->size, batch.load()}) sent += "\t" + std::to_string(number);
  sent += std::string("\t") + kind + "\t" + names[type] + "\t" + std::to_string(n) + "\t" + std::to_string(peer) + "\n";
  return ncclSuccess;
}

// Give `copies` of what this rank sent, one after the other, as if all ranks had sent it.
static ncclResult_t collective(
    const char* kind, const void* from, void* to, size_t n, ncclDataType_t type, int copies, ncclComm* comm,
    cudaStream_t stream) {
  size_t bytes = n * bytes_of(type);
  for (int i = 0; i < copies && bytes * copies <= kCopied; i++) std::memmove((char*)to + i * bytes, from, bytes);
  return note(kind, n, type, -1, comm, stream);
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> number{0};
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "%d.%d", (int)getpid(), number++);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
EXPORT const char* ncclGetErrorString(ncclResult_t) { return "of the null GPU"; }
EXPORT const char* ncclGetLastError(ncclComm_t) { return ""; }
EXPORT ncclResult_t ncclGroupStart() { return depth++ == 0 ? (void)++batch : (void)0, ncclSuccess; }
EXPORT ncclResult_t ncclGroupEnd() { return --depth, ncclSuccess; }
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return *comm = new ncclComm{size, rank, id.internal}, ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return ncclCommInitRank(comm, size, id, rank);
}
EXPORT ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int size, int rank, int, ncclUniqueId* id, ncclConfig_t*) {
  return ncclCommInitRank(comm, size, *id, rank);
}
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) { return *size = comm->size, ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
EXPORT ncclResult_t ncclAllReduce(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  return collective("all_reduce", from, to, n, type, 1, comm, stream);
}
EXPORT ncclResult_t ncclBroadcast(
    const void* from, void* to, size_t n, ncclDataType_t type, int, ncclComm_t comm, cudaStream_t stream) {
  return collective("broadcast", from, to, n, type, 1, comm, stream);
}
EXPORT ncclResult_t ncclAllGather(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return collective("all_gather", from, to, n, type, comm->size, comm, stream);
}
EXPORT ncclResult_t ncclReduceScatter(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  return collective("reduce_scatter", from, to, n, type, 1, comm, stream);
}
EXPORT ncclResult_t ncclAlltoAll(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return collective("all_to_all", (const char*)from + comm->rank * n * bytes_of(type), to, n, type, comm->size, comm, stream);
}
EXPORT ncclResult_t ncclSend(const void*, size_t n, ncclDataType_t type, int to, ncclComm_t comm, cudaStream_t stream) {
  return note("send", n, type, to, comm, stream);
}
EXPORT ncclResult_t ncclRecv(void*, size_t n, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
  return note("receive", n, type, from, comm, stream);
}

// --- the driver, which torch asks for contexts and Triton for its kernels ---------------------------------------------

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* n) { return *n = 1, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);  // the numbers are the same
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = (CUcontext)anything, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)anything, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult, const char** text) { return *text = "of the null GPU", CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { return *n = 1, CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return *module = (CUmodule)anything, CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return *module = (CUmodule)anything, CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = (CUfunction) new char;
  names()[*function] = name;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(
    CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, CUstream s,
    void**, void**) {
  return count_kernel(kernel, dim3{gx, gy, gz}, dim3{bx, by, bz}, s), CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction kernel, void**, void**) {
  dim3 grid{how->gridDimX, how->gridDimY, how->gridDimZ}, block{how->blockDimX, how->blockDimY, how->blockDimZ};
  count_kernel(kernel, grid, block, how->hStream);
  return CUDA_SUCCESS;
}

// --- and what is asked for by name at run time, or not answered -------------------------------------------------------

static int unanswered() { return count("unanswered function of the driver, asked for by name"), 0; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = (void*)unanswered;
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

#define UNANSWERED(symbol)                                \
  extern "C" int unanswered_##symbol() NAMED(symbol);     \
  int unanswered_##symbol() { return count("unanswered " #symbol), 0; }
#include "unanswered.inc"
