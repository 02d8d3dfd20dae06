// A CUDA device that is not there: what its parts share.
//
// The files of this folder stand in for the CUDA runtime, the driver, cuBLAS, NVML and cuDNN's attention, as far as torch
// calls them. A program that loads them first (LD_PRELOAD) runs torch's CUDA build without a GPU: torch's allocator,
// autograd, streams, events and pinned memory are the real ones, device memory is this process's own, copies are made, and
// kernels do nothing. The eager ones are computed over the same memory by ../compute.py.
//
// The device is as late as CUDA allows. An asynchronous copy or a wait joins its stream's queue, and the queue is worked
// off only when the program waits for the stream, for an event of it, or launches what compute.py computes on it. What
// is copied to the host arrives there only when the host waits for it. A program that reads a result before it has
// waited for it finds what was there before.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace device {

// One lock for all state: backward passes and loaders call from threads of their own. It is recursive because working
// off a queue may run a callback that calls back.
extern std::recursive_mutex mutex;
using Guard = std::lock_guard<std::recursive_mutex>;

// --- which device it is ------------------------------------------------------------------------------------------------

struct Model {
  const char* name;
  size_t memory;  // bytes
  int major, minor, processors, shared_per_processor, shared_per_block, l2_cache, memory_clock;
  const char* kind = "GPU";  // or MIG, in NVML's UUID
  bool integrated = false;   // shares the host's memory
  bool spills = false;       // WSL2: Windows takes from the host what the card does not have
};
// An A100 of 40 GB, or another by PRETENDED_GPU. The driver also lists the card of PRETENDED_SECOND_GPU; all else is the
// first that CUDA_VISIBLE_DEVICES selects.
const Model& model(int index = 0);
int visible();                         // number of cards, by CUDA_VISIBLE_DEVICES
std::string uuid(int index = 0);       // with its prefix, as NVML writes it
const char* uuid_bytes(int index = 0);

// Whether PRETENDED_FAULT, names with commas between, has this one:
//   nvml-denied, nvml-unsupported, nvml-init   NVML refuses memory and processes, does not know them, does not start
//   nvml-order     NVML counts a small card first, which is none of CUDA's
//   expandable     expandable segments cannot be mapped: an unknown error
//   not-ready      the same, with the error "device not ready"
//   pinned         no more than 1 MB can be pinned
//   oom-assertion  NVML refuses what torch asks of it where memory runs out, which is an assertion before torch 2.14
//   attention      FlashAttention fails when it runs
//   driver         the driver is older than torch's CUDA
//   init           CUDA does not start
//   vanishes       the card is gone after some launches
bool fault(const char* name);
int attribute(int number, int index = 0);  // of cudaDeviceAttr, whose numbers the driver's attributes share

constexpr size_t CONTEXT = 450u << 20;  // bytes that a process takes besides its allocations

// --- misuse ------------------------------------------------------------------------------------------------------------

// Notes what a real device would not report, or only as a wrong result; tests read the notes.
void misused(const std::string& what);

cudaError_t failed(cudaError_t error);  // keeps it for cudaGetLastError

// --- memory ------------------------------------------------------------------------------------------------------------

extern size_t used;  // bytes of device memory
bool fits(size_t size);

using Ranges = std::map<uintptr_t, size_t>;
extern Ranges on_device, pinned;
bool within(const Ranges& ranges, const void* pointer, uintptr_t* start = nullptr, size_t* size = nullptr);

// --- streams -----------------------------------------------------------------------------------------------------------

struct Graph {
  size_t nodes = 0;
};

struct Stream;

struct Work {
  std::function<void()> run;
  std::function<void()> arrive;  // on the host
  Stream* after = nullptr;       // and only when that stream has finished `until`
  uint64_t until = 0;
};

struct Stream {
  std::deque<Work> queue;
  uint64_t submitted = 0, finished = 0;
  uint64_t waited = 0;                               // up to here the host has waited
  std::deque<std::pair<uint64_t, Work>> unseen;      // what has run, and the host has not waited for
  std::map<Stream*, uint64_t> after;                 // how far others have come before what is submitted next
  Graph* captured = nullptr;                         // while the stream is captured
};

Stream* stream_of(cudaStream_t handle);
void submit(Stream* stream, Work work);
void finish(Stream* stream, uint64_t until);  // as the device does, unseen by the host
void wait(Stream* stream, uint64_t until);    // as the host does
void wait(Stream* stream);
void wait_for_all();
bool capturing();

// Notes a write by a copy on `stream` to memory that kernels on another stream may still be using.
void check_order(Stream* stream, const void* memory);

cudaError_t launch(cudaStream_t stream);  // a kernel, which does nothing
bool launchable(dim3 grid, unsigned threads, size_t shared, const std::string& name);

}  // namespace device
