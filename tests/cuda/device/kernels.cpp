// Which device it is, and launches: kernels are known by their names and do nothing.
#include "device.h"

#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace device {

std::recursive_mutex mutex;

static const Model& named(const std::string& name) {
  static const std::map<std::string, Model> models{
      {"A100", {"NVIDIA A100-SXM4-40GB", 42298834944, 8, 0, 108, 167936, 166912, 41943040, 1215000}},
      {"H100", {"NVIDIA H100 80GB HBM3", 85017755648, 9, 0, 132, 233472, 232448, 52428800, 2619000}},
      {"V100", {"Tesla V100-SXM2-16GB", 16935682048, 7, 0, 80, 98304, 98304, 6291456, 877000}},
      {"T4", {"Tesla T4", 15642329088, 7, 5, 40, 65536, 65536, 4194304, 5001000}},
      {"RTX3060", {"NVIDIA GeForce RTX 3060", 12622168064, 8, 6, 28, 102400, 101376, 2359296, 7501000}},
      {"RTX4090", {"NVIDIA GeForce RTX 4090", 25262096384, 8, 9, 128, 102400, 101376, 75497472, 10501000}},
      {"GB10", {"NVIDIA GB10", 128527097856, 12, 1, 48, 102400, 101376, 25165824, 0, "GPU", true}},
      {"MIG", {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5100273664, 8, 0, 14, 167936, 166912, 5242880, 1215000, "MIG"}},
      {"WSL2", {"NVIDIA GeForce RTX 3060", 12622168064, 8, 6, 28, 102400, 101376, 2359296, 7501000, "GPU", false, true}},
  };
  return models.at(name);
}

static const char* const UUIDS[] = {"pretended-device", "second-pretended"};

static std::string uuid_of(const Model& model, int number) {
  char text[64];
  auto b = reinterpret_cast<const unsigned char*>(UUIDS[number]);
  snprintf(text, sizeof text, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", model.kind, b[0], b[1], b[2],
           b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
  return text;
}

static std::vector<const Model*> installed() {
  const char *first = getenv("PRETENDED_GPU"), *second = getenv("PRETENDED_SECOND_GPU");
  std::vector<const Model*> models{&named(first ? first : "A100")};
  if (second && *second) models.push_back(&named(second));
  return models;
}

// The numbers of the cards that CUDA takes: up to the first name that it does not know. A UUID may be abbreviated.
static std::vector<int> selected() {
  std::vector<const Model*> models = installed();
  std::vector<int> numbers;
  const char* value = getenv("CUDA_VISIBLE_DEVICES");
  if (!value) {
    for (size_t i = 0; i < models.size(); i++) numbers.push_back(i);
    return numbers;
  }
  std::string rest = std::string(value) + ",";
  for (size_t comma; (comma = rest.find(',')) != std::string::npos; rest = rest.substr(comma + 1)) {
    std::string name = rest.substr(0, comma);
    size_t i = 0;
    while (i < models.size() && name != std::to_string(i) && (name.size() <= 4 || uuid_of(*models[i], i).compare(0, name.size(), name)))
      i++;
    if (i == models.size()) break;
    numbers.push_back(i);
  }
  return numbers;
}

static const std::vector<int>& cards() {
  static const std::vector<int> numbers = selected();
  return numbers;
}

static int number(int index) { return cards().empty() ? 0 : cards().at(index); }

const Model& model(int index) {
  static const std::vector<const Model*> models = installed();
  return *models[number(index)];
}
int visible() { return cards().size(); }
std::string uuid(int index) { return uuid_of(model(index), number(index)); }
const char* uuid_bytes(int index) { return UUIDS[number(index)]; }

bool fault(const char* name) {
  const char* value = getenv("PRETENDED_FAULT");
  return value && ("," + std::string(value) + ",").find("," + std::string(name) + ",") != std::string::npos;
}

int attribute(int number, int index) {
  switch (number) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return 1410000;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return model(index).processors;
    case cudaDevAttrCanMapHostMemory: return 1;
    case cudaDevAttrConcurrentKernels: return 1;
    case cudaDevAttrMemoryClockRate: return model(index).memory_clock;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return model(index).l2_cache;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return model(index).major;
    case cudaDevAttrComputeCapabilityMinor: return model(index).minor;
    case cudaDevAttrIntegrated: return model(index).integrated;
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return model(index).shared_per_processor;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrConcurrentManagedAccess: return 1;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return model(index).shared_per_block;
    case 102: return 1;  // virtual memory management, which the driver alone numbers
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrClusterLaunch: return model(index).major >= 9;
    default: return 0;
  }
}

// --- misuse ------------------------------------------------------------------------------------------------------------

static std::string misuses;
static cudaError_t last_error = cudaSuccess;

void misused(const std::string& what) { misuses += what + "\n"; }

cudaError_t failed(cudaError_t error) { return last_error = error; }

bool launchable(dim3 grid, unsigned threads, size_t shared, const std::string& name) {
  bool possible = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && threads && threads <= 1024 &&
                  shared <= static_cast<size_t>(model().shared_per_block);
  if (!possible) misused("a launch that no device accepts: " + name);
  return possible;
}

static const int LAUNCHES_BEFORE_IT_VANISHES = 3000;

static int launches = 0;

cudaError_t launch(cudaStream_t handle) {
  static const bool vanishes = fault("vanishes");
  if (++launches > LAUNCHES_BEFORE_IT_VANISHES && vanishes) return failed(cudaErrorLaunchFailure);
  Stream* stream = stream_of(handle);
  if (stream->captured) stream->captured->nodes++;
  return cudaSuccess;
}

}  // namespace device

using namespace device;

// --- for the tests -----------------------------------------------------------------------------------------------------

// The notes since the last call, a line each; valid until the next call.
EXPORTED const char* pretended_misuses() {
  Guard guard(mutex);
  static std::string told;
  told = std::move(misuses);
  misuses.clear();
  return told.c_str();
}

// The kernels and graphs that have been launched so far; those of Triton, which compute.py replaces, are not among them.
EXPORTED int pretended_launches() {
  Guard guard(mutex);
  return launches;
}

// Called by what stands for a function that torch has and these files lack. The standard error of the process's start
// is kept, because pytest replaces it.
static const int standard_error = dup(2);
EXPORTED void pretended_lacks(const char* function) {
  dprintf(standard_error, "\nThe pretended device lacks %s, which this torch calls: add it in tests/cuda/device.\n", function);
  _exit(2);
}

// --- launches ----------------------------------------------------------------------------------------------------------

static std::unordered_map<const void*, std::string> names;

struct Launch {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Launch> configured;

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* binary;
  return &binary;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED void __cudaRegisterFunction(void**, const char* function, char* name, const char*, int, void*, void*, void*, void*, int*) {
  Guard guard(mutex);
  names[function] = name;
}
EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configured.push_back({grid, block, shared, stream});
  return 0;
}
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configured.empty()) return cudaErrorInvalidConfiguration;
  Launch last = configured.back();
  configured.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}
EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

static cudaError_t launched(const void* function, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  Guard guard(mutex);
  auto name = names.find(function);
  if (!launchable(grid, block.x * block.y * block.z, shared, name == names.end() ? "?" : name->second))
    return failed(cudaErrorInvalidConfiguration);
  static const bool attention_fails = fault("attention");
  if (attention_fails && name != names.end() && name->second.find("flash") != std::string::npos)
    return failed(cudaErrorLaunchFailure);
  return launch(stream);
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launched((const void*)kernel, grid, block, shared, stream);
}
EXPORTED cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launched(function, grid, block, shared, stream);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launched(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}
EXPORTED cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launched(function, grid, block, shared, stream);
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->maxDynamicSharedSizeBytes = model().shared_per_block;
  found->binaryVersion = found->ptxVersion = model().major * 10 + model().minor;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  *pointer = const_cast<void*>(symbol);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
EXPORTED cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned) {
  *library = (cudaLibrary_t)1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  Guard guard(mutex);
  char* kept = strdup(name);
  names[kept] = name;
  *kernel = (cudaKernel_t)kept;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

// --- the device --------------------------------------------------------------------------------------------------------

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (fault("driver")) return failed(cudaErrorInsufficientDriver);
  if (fault("init")) return failed(cudaErrorSystemDriverMismatch);
  if (!visible()) return failed(cudaErrorNoDevice);
  *count = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int index) { return index ? failed(cudaErrorInvalidDevice) : cudaSuccess; }
EXPORTED cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = fault("driver") ? 12020 : 13000;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int) {
  *value = attribute(number);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  snprintf(id, length, "0000:00:04.0");
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  *found = {};
  const Model& card = model();
  snprintf(found->name, sizeof found->name, "%s", card.name);
  memcpy(found->uuid.bytes, uuid_bytes(), sizeof found->uuid.bytes);
  found->totalGlobalMem = card.memory;
  found->major = card.major;
  found->minor = card.minor;
  found->integrated = card.integrated;
  found->multiProcessorCount = card.processors;
  found->l2CacheSize = card.l2_cache;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = card.shared_per_block;
  found->sharedMemPerMultiprocessor = card.shared_per_processor;
  found->reservedSharedMemPerBlock = 1024;
  found->regsPerBlock = found->regsPerMultiprocessor = found->totalConstMem = 65536;
  found->warpSize = found->maxBlocksPerMultiProcessor = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->memPitch = 2147483647;
  found->textureAlignment = 512;
  found->memoryBusWidth = 5120;
  found->asyncEngineCount = 3;
  found->canMapHostMemory = found->concurrentKernels = found->ECCEnabled = found->unifiedAddressing = 1;
  found->streamPrioritiesSupported = found->managedMemory = found->cooperativeLaunch = 1;
  found->clusterLaunch = card.major >= 9;
  found->pciDeviceID = 4;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORTED cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorSystemDriverMismatch: return "system has unsupported display driver / cuda driver combination";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    default: return "an error of the pretended device";
  }
}
EXPORTED const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
EXPORTED cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- the machine around it ---------------------------------------------------------------------------------------------

EXPORTED int uname(utsname* found) {
  long result = syscall(SYS_uname, found);
  if (!result && model().spills) snprintf(found->release, sizeof found->release, "6.6.87.2-microsoft-standard-WSL2");
  return static_cast<int>(result);
}
