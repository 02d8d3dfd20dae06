// Memory of the device, pinned memory, and copies between them.
//
// Device memory is address space of this process: pages cost nothing until something is written to them, so that a small
// machine pretends a card of 80 GB. New pinned memory holds POISON; ../compute.py gives it to new device memory.
#include "device.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>

namespace device {

size_t used = 0;
Ranges on_device, pinned;

bool fits(size_t size) { return model().spills || used + size + CONTEXT <= model().memory; }

bool within(const Ranges& ranges, const void* pointer, uintptr_t* start, size_t* size) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  auto range = std::prev(next);
  if (address >= range->first + range->second) return false;
  if (start) *start = range->first;
  if (size) *size = range->second;
  return true;
}

}  // namespace device

using namespace device;

static const unsigned char POISON = 0x5b;  // as fp32 about 6e16, as a token's id far out of the vocabulary
static const size_t SEGMENT = 2u << 20, PAGE = 4096, MOST_PINNED = 1u << 20;

static size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static void* reserved(size_t size, int protection) {
  void* start = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  madvise(start, size, MADV_NOHUGEPAGE);  // a huge page would be taken whole at its first byte
  return start;
}

// --- allocations -------------------------------------------------------------------------------------------------------

EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Guard guard(mutex);
  *total = model().memory;
  *free = used + CONTEXT < *total ? *total - used - CONTEXT : 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMalloc(void** pointer, size_t size) {
  Guard guard(mutex);
  size = rounded(size, SEGMENT);
  *pointer = fits(size) ? reserved(size, PROT_READ | PROT_WRITE) : nullptr;
  if (!*pointer) return failed(cudaErrorMemoryAllocation);
  on_device[reinterpret_cast<uintptr_t>(*pointer)] = size;
  used += size;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFree(void* pointer) {
  Guard guard(mutex);
  if (!pointer) return cudaSuccess;
  auto range = on_device.find(reinterpret_cast<uintptr_t>(pointer));
  if (range == on_device.end()) {
    misused("device memory freed that was not allocated");
    return failed(cudaErrorInvalidValue);
  }
  wait_for_all();  // as CUDA does
  munmap(pointer, range->second);
  used -= range->second;
  on_device.erase(range);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
EXPORTED cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
EXPORTED cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = (cudaMemPool_t)1;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  Guard guard(mutex);
  size = rounded(size ? size : 1, PAGE);
  size_t in_use = size;
  for (auto& range : pinned) in_use += range.second;
  if (fault("pinned") && in_use > MOST_PINNED) return failed(cudaErrorMemoryAllocation);
  if (posix_memalign(pointer, PAGE, size)) return failed(cudaErrorMemoryAllocation);
  memset(*pointer, POISON, size);
  pinned[reinterpret_cast<uintptr_t>(*pointer)] = size;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFreeHost(void* pointer) {
  Guard guard(mutex);
  wait_for_all();
  pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  free(pointer);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  Guard guard(mutex);
  pinned[reinterpret_cast<uintptr_t>(pointer)] = size;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostUnregister(void* pointer) {
  Guard guard(mutex);
  wait_for_all();
  pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  Guard guard(mutex);
  *found = {};
  void* address = const_cast<void*>(pointer);
  if (within(on_device, pointer)) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = address;
  } else if (within(pinned, pointer)) {
    found->type = cudaMemoryTypeHost;
    found->devicePointer = found->hostPointer = address;
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->hostPointer = address;
    found->device = -2;
  }
  return cudaSuccess;
}
EXPORTED cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return failed(cudaErrorNotSupported); }
EXPORTED cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return failed(cudaErrorNotSupported); }

// --- copies ------------------------------------------------------------------------------------------------------------

// A copy from pageable memory has read it when the call returns; one to pageable memory has written it. All others are
// done when something waits for them.
static cudaError_t copy(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t handle, bool waits) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  bool device_reads = within(on_device, from), device_writes = within(on_device, to);
  if ((kind == cudaMemcpyHostToDevice && (device_reads || !device_writes)) ||
      (kind == cudaMemcpyDeviceToHost && (!device_reads || device_writes)))
    misused("a copy of another kind than its pointers'");
  bool pageable = device_reads != device_writes && !within(pinned, device_reads ? to : from);
  if (stream->captured) {
    if (waits || pageable) return failed(cudaErrorStreamCaptureUnsupported);
    stream->captured->nodes++;
    return cudaSuccess;
  }
  if (device_writes) check_order(stream, to);
  std::shared_ptr<char[]> between(device_reads == device_writes ? nullptr : new char[size]);
  if (device_writes && pageable) {
    memcpy(between.get(), from, size);
    submit(stream, {[=] { memcpy(to, between.get(), size); }});
  } else if (device_reads && !device_writes) {
    submit(stream, {[=] { memcpy(between.get(), from, size); }, [=] { memcpy(to, between.get(), size); }});
  } else {
    submit(stream, {[=] { memmove(to, from, size); }});
  }
  if (waits || (device_reads && pageable)) wait(stream);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, size, kind, stream, false);
}
EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  return copy(to, from, size, kind, nullptr, true);
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, cudaMemcpyDefault, stream, false);
}
EXPORTED cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t handle) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  if (stream->captured) return launch(handle);
  submit(stream, {[=] { memset(to, value, size); }});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }
