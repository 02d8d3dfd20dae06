// The driver's own functions, which Triton and torch's expandable segments call.
#include "device.h"

#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

using namespace device;

static const CUcontext CONTEXT_HANDLE = reinterpret_cast<CUcontext>(8);

// --- the device and its context ------------------------------------------------------------------------------------------

EXPORTED CUresult cuInit(unsigned) {
  if (fault("init")) return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  return visible() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
EXPORTED CUresult cuDriverGetVersion(int* version) {
  cudaDriverGetVersion(version);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetCount(int* count) {
  *count = visible();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  snprintf(name, length, "%s", model(device).name);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  memcpy(uuid->bytes, uuid_bytes(device), sizeof uuid->bytes);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceTotalMem_v2(size_t* total, CUdevice device) {
  *total = model(device).memory;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice device) {
  *value = attribute(number, device);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = CONTEXT_HANDLE;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = CONTEXT_HANDLE;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_UNKNOWN     ? "unknown error"
          : error == CUDA_ERROR_NOT_READY ? "device not ready"
                                          : "an error of the pretended driver";
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorName(CUresult error, const char** name) {
  if (error != CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) return cuGetErrorString(error, name);
  *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
  return CUDA_SUCCESS;
}

// torch looks the driver's functions up by name, and does without one that is not supported.
static CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*function) *function = reinterpret_cast<void*>(unsupported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- modules and launches: Triton's kernels ------------------------------------------------------------------------------

EXPORTED CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(8);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
EXPORTED CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
EXPORTED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORTED CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(strdup(name));
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute number, CUfunction) {
  *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute number, int value) {
  if (number != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value <= model().shared_per_block) return CUDA_SUCCESS;
  Guard guard(mutex);
  misused(std::string("more shared memory than the device has: ") + reinterpret_cast<const char*>(function));
  return CUDA_ERROR_INVALID_VALUE;
}
EXPORTED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void**, void**) {
  Guard guard(mutex);
  if (!launchable(dim3(gx, gy, gz), bx * by * bz, shared, reinterpret_cast<const char*>(function))) return CUDA_ERROR_INVALID_VALUE;
  launch(stream);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                        config->blockDimZ, config->sharedMemBytes, config->hStream, parameters, extra);
}
EXPORTED CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void** parameters) {
  return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, nullptr);
}
EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 2;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_SUCCESS; }
EXPORTED CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) {
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return CUDA_SUCCESS; }

// --- pointers ------------------------------------------------------------------------------------------------------------

EXPORTED CUresult cuPointerGetAttribute(void* value, CUpointer_attribute number, CUdeviceptr pointer) {
  Guard guard(mutex);
  auto address = reinterpret_cast<const void*>(pointer);
  switch (number) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (!within(on_device, address) && !within(pinned, address)) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<CUdeviceptr*>(value) = pointer;
      break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(value) = CONTEXT_HANDLE; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(value) = CU_MEMORYTYPE_DEVICE; break;
    default: *static_cast<unsigned*>(value) = 0;
  }
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* size, CUdeviceptr pointer) {
  Guard guard(mutex);
  uintptr_t address = 0;
  if (!within(on_device, reinterpret_cast<const void*>(pointer), &address, size)) return CUDA_ERROR_INVALID_VALUE;
  if (start) *start = address;
  return CUDA_SUCCESS;
}

// --- virtual memory: a reservation is address space, and what is created for it counts as memory ----------------------------

EXPORTED CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = 2u << 20;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* start = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = reinterpret_cast<CUdeviceptr>(start);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  munmap(reinterpret_cast<void*>(pointer), size);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  Guard guard(mutex);
  if (!fits(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new size_t(size));
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Guard guard(mutex);
  auto size = reinterpret_cast<size_t*>(handle);
  used -= *size;
  delete size;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  Guard guard(mutex);
  auto start = reinterpret_cast<void*>(pointer);
  if (mprotect(start, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
  madvise(start, size, MADV_NOHUGEPAGE);
  on_device[pointer] = size;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  if (fault("not-ready")) return CUDA_ERROR_NOT_READY;
  return fault("expandable") || model().spills ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
EXPORTED CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  Guard guard(mutex);
  wait_for_all();
  auto start = reinterpret_cast<void*>(pointer);
  madvise(start, size, MADV_DONTNEED);
  mprotect(start, size, PROT_NONE);
  on_device.erase(pointer);
  return CUDA_SUCCESS;
}
