// NVML: what the card says of itself. Its header is in none of torch's packages; the structures are those of nvml.h.
#include "device.h"

#include <unistd.h>

#include <cstdio>
#include <ctime>

using namespace device;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

struct Memory {
  unsigned long long total, free, used;
};
struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
struct Utilization {
  unsigned gpu, memory;
};

static const unsigned MILLIWATTS = 300000;

// NVML counts by the bus, and CUDA puts the fastest first: with the fault, index 0 is a card that CUDA has second.
static void* const CARD = reinterpret_cast<void*>(1);
static void* const SMALL_CARD = reinterpret_cast<void*>(2);
static const char* const SMALL_NAME = "NVIDIA GeForce GT 1030";
static const char* const SMALL_UUID = "GPU-00000000-0000-0000-0000-000000001030";
static const unsigned long long SMALL_MEMORY = 2147483648;

static int handle(void** device, void* which = CARD) {
  *device = which;
  return SUCCESS;
}

// What NVML reports of a MIG slice in a container and of a device with unified memory.
static int of_memory() {
  if (fault("nvml-denied") || std::string(model().kind) == "MIG") return NO_PERMISSION;
  return fault("nvml-unsupported") || model().integrated ? NOT_SUPPORTED : SUCCESS;
}
static int of_everything() {
  if (fault("nvml-denied")) return NO_PERMISSION;
  return fault("nvml-unsupported") ? NOT_SUPPORTED : SUCCESS;
}

// --- the library and the device --------------------------------------------------------------------------------------------

EXPORTED int nvmlInit_v2() { return fault("nvml-init") ? DRIVER_NOT_LOADED : SUCCESS; }
EXPORTED int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
EXPORTED int nvmlShutdown() { return SUCCESS; }
EXPORTED const char* nvmlErrorString(int) { return "an error of the pretended NVML"; }
EXPORTED int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1 + fault("nvml-order");
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  unsigned first = fault("nvml-order");
  if (index > first) return INVALID_ARGUMENT;
  return handle(device, index < first ? SMALL_CARD : CARD);
}
EXPORTED int nvmlDeviceGetHandleByUUID(const char* wanted, void** device) {
  if (fault("nvml-order") && std::string(wanted) == SMALL_UUID) return handle(device, SMALL_CARD);
  return uuid() == wanted ? handle(device) : NOT_FOUND;
}
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  return fault("oom-assertion") ? NO_PERMISSION : handle(device);
}
EXPORTED int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  snprintf(name, length, "%s", device == SMALL_CARD ? SMALL_NAME : model().name);
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetUUID(void* device, char* found, unsigned length) {
  snprintf(found, length, "%s", device == SMALL_CARD ? SMALL_UUID : uuid().c_str());
  return SUCCESS;
}
EXPORTED int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  snprintf(version, length, "580.00");
  return SUCCESS;
}
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  cudaDriverGetVersion(version);
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = model().major;
  *minor = model().minor;
  return SUCCESS;
}

// --- memory: this process is the only one ------------------------------------------------------------------------------------

EXPORTED int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  Guard guard(mutex);
  if (int refusal = of_memory()) return refusal;
  if (device == SMALL_CARD) {
    *memory = {SMALL_MEMORY, SMALL_MEMORY, 0};
    return SUCCESS;
  }
  *memory = {model().memory, model().memory - used - CONTEXT, used + CONTEXT};
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetMemoryInfo_v2(void*, Memory2* memory) {
  Guard guard(mutex);
  if (int refusal = of_memory()) return refusal;
  *memory = {memory->version, model().memory, 0, model().memory - used - CONTEXT, used + CONTEXT};
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, Process* processes) {
  Guard guard(mutex);
  if (int refusal = of_memory()) return refusal;
  unsigned room = *count;
  *count = 1;
  if (!room) return INSUFFICIENT_SIZE;
  *processes = {static_cast<unsigned>(getpid()), used + CONTEXT, ~0u, ~0u};
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, Process* processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}

// --- telemetry -----------------------------------------------------------------------------------------------------------

EXPORTED int nvmlDeviceGetClockInfo(void*, int, unsigned* megahertz) {
  if (int refusal = of_everything()) return refusal;
  *megahertz = 1410;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* milliwatts) {
  if (int refusal = of_everything()) return refusal;
  *milliwatts = 400000;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  if (int refusal = of_everything()) return refusal;
  *milliwatts = MILLIWATTS;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  if (int refusal = of_everything()) return refusal;
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  *millijoules = static_cast<unsigned long long>((time.tv_sec + time.tv_nsec / 1e9) * MILLIWATTS);
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  if (int refusal = of_everything()) return refusal;
  *celsius = 55;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
  if (int refusal = of_everything()) return refusal;
  *reasons = 0;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetUtilizationRates(void*, Utilization* percent) {
  if (int refusal = of_everything()) return refusal;
  *percent = {97, 60};
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetEccMode(void*, int* current, int* pending) {
  if (int refusal = of_everything()) return refusal;
  *current = *pending = 1;
  return SUCCESS;
}

// --- links to other devices, of which torch asks where memory runs out -----------------------------------------------------

EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }
