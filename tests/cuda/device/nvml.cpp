// NVML: what the card says of itself. Its header is in none of torch's packages; the structures are those of nvml.h.
#include "device.h"

#include <unistd.h>

#include <cstdio>
#include <ctime>

using namespace device;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

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

static int handle(void** device) {
  *device = reinterpret_cast<void*>(1);
  return SUCCESS;
}

// --- the library and the device --------------------------------------------------------------------------------------------

EXPORTED int nvmlInit_v2() { return SUCCESS; }
EXPORTED int nvmlInitWithFlags(unsigned) { return SUCCESS; }
EXPORTED int nvmlShutdown() { return SUCCESS; }
EXPORTED const char* nvmlErrorString(int) { return "an error of the pretended NVML"; }
EXPORTED int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { return index ? INVALID_ARGUMENT : handle(device); }
EXPORTED int nvmlDeviceGetHandleByUUID(const char*, void** device) { return handle(device); }
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return handle(device); }
EXPORTED int nvmlDeviceGetName(void*, char* name, unsigned length) {
  snprintf(name, length, "%s", model().name);
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetUUID(void*, char* uuid, unsigned length) {
  snprintf(uuid, length, "GPU-pretended");
  return SUCCESS;
}
EXPORTED int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  snprintf(version, length, "580.00");
  return SUCCESS;
}
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = model().major;
  *minor = 0;
  return SUCCESS;
}

// --- memory: this process is the only one ------------------------------------------------------------------------------------

EXPORTED int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  Guard guard(mutex);
  *memory = {model().memory, model().memory - used - CONTEXT, used + CONTEXT};
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetMemoryInfo_v2(void*, Memory2* memory) {
  Guard guard(mutex);
  *memory = {memory->version, model().memory, 0, model().memory - used - CONTEXT, used + CONTEXT};
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, Process* processes) {
  Guard guard(mutex);
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
  *megahertz = 1410;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* milliwatts) {
  *milliwatts = 400000;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = MILLIWATTS;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  *millijoules = static_cast<unsigned long long>((time.tv_sec + time.tv_nsec / 1e9) * MILLIWATTS);
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  *celsius = 55;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
  *reasons = 0;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetUtilizationRates(void*, Utilization* percent) {
  *percent = {97, 60};
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetEccMode(void*, int* current, int* pending) {
  *current = *pending = 1;
  return SUCCESS;
}

// --- links to other devices, of which torch asks where memory runs out -----------------------------------------------------

EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }
