// Streams, events and graphs: the order of work, as late as CUDA allows.
#include "device.h"

#include <ctime>
#include <set>
#include <utility>

namespace device {

static Stream default_stream;

// The last use of memory by a kernel, by the address at which it was allocated.
struct Use {
  Stream* stream;
  uint64_t at;
};
static std::map<uintptr_t, Use> uses;
static std::set<Stream*> streams{&default_stream};

Stream* stream_of(cudaStream_t handle) {
  auto stream = reinterpret_cast<Stream*>(handle);
  return streams.count(stream) ? stream : &default_stream;  // also for cudaStreamLegacy and cudaStreamPerThread
}

void submit(Stream* stream, Work work) {
  stream->submitted++;
  stream->queue.push_back(std::move(work));
}

void finish(Stream* stream, uint64_t until) {
  while (stream->finished < until && !stream->queue.empty()) {
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->finished++;
    if (work.after) finish(work.after, work.until);
    if (work.run) work.run();
    if (work.after || work.arrive) stream->unseen.emplace_back(stream->finished, std::move(work));
  }
}

void wait(Stream* stream, uint64_t until) {
  finish(stream, until);
  if (stream->waited < until) stream->waited = until;
  while (!stream->unseen.empty() && stream->unseen.front().first <= until) {
    Work work = std::move(stream->unseen.front().second);
    stream->unseen.pop_front();
    if (work.after) wait(work.after, work.until);
    if (work.arrive) work.arrive();
  }
}

void wait(Stream* stream) { wait(stream, stream->submitted); }

void wait_for_all() {
  for (Stream* stream : streams) wait(stream);
}

void check_order(Stream* stream, const void* memory) {
  auto use = uses.find(reinterpret_cast<uintptr_t>(memory));
  if (use == uses.end()) return;
  auto [user, at] = use->second;
  if (user != stream && user->waited < at && stream->after[user] < at)
    misused("a copy to memory that another stream may still be using");
}

bool capturing() {
  for (Stream* stream : streams)
    if (stream->captured) return true;
  return false;
}

}  // namespace device

using namespace device;

// For compute.py, which computes now: after what the stream has been given to do before, on this memory.
EXPORTED void pretended_compute(void* handle, void** memory, int count) {
  Guard guard(mutex);
  Stream* stream = stream_of(static_cast<cudaStream_t>(handle));
  submit(stream, {});
  finish(stream, stream->submitted);
  for (int i = 0; i < count; i++) uses[reinterpret_cast<uintptr_t>(memory[i])] = {stream, stream->submitted};
}

// --- streams -----------------------------------------------------------------------------------------------------------

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int) {
  Guard guard(mutex);
  auto stream = new Stream;
  streams.insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its work is still to be done
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  if (stream->captured) return failed(cudaErrorStreamCaptureUnsupported);
  wait(stream);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceSynchronize() {
  Guard guard(mutex);
  if (capturing()) return failed(cudaErrorStreamCaptureUnsupported);
  wait_for_all();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) { return cudaStreamSynchronize(handle); }
EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data, unsigned) {
  Guard guard(mutex);
  submit(stream_of(handle), {[=] { callback(handle, cudaSuccess, data); }});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  Guard guard(mutex);
  submit(stream_of(handle), {[=] { function(data); }});
  return cudaSuccess;
}

// --- events ------------------------------------------------------------------------------------------------------------

// The work of a stream up to `until`. Its time is that of the host, because kernels take none.
struct Event {
  Stream* stream = nullptr;  // none until it is recorded
  uint64_t until = 0;
  double milliseconds = 0;
  int asked = 0;

  bool happened() const { return !stream || stream->waited >= until; }
};

// A program that polls an event goes on in the end.
static const int PATIENCE = 50;

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete event_of(handle);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  Guard guard(mutex);
  Stream* on = stream_of(stream);
  *event_of(handle) = {on, on->submitted, now(), 0};
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  Event* awaited = event_of(event);
  if (!awaited->stream || awaited->stream == stream) return cudaSuccess;
  submit(stream, {nullptr, nullptr, awaited->stream, awaited->until});
  uint64_t& after = stream->after[awaited->stream];
  if (after < awaited->until) after = awaited->until;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Guard guard(mutex);
  Event* event = event_of(handle);
  if (event->stream) wait(event->stream, event->until);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Guard guard(mutex);
  Event* event = event_of(handle);
  if (event->happened()) return cudaSuccess;
  if (++event->asked < PATIENCE) return failed(cudaErrorNotReady);
  wait(event->stream, event->until);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  Guard guard(mutex);
  Event *from = event_of(first), *to = event_of(last);
  if (!from->stream || !to->stream) {
    misused("the time between events of which one was not recorded");
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (!from->happened() || !to->happened()) return failed(cudaErrorNotReady);
  *milliseconds = static_cast<float>(to->milliseconds - from->milliseconds);
  if (*milliseconds == 0) *milliseconds = 0.001f;  // a division by it is a caller's
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventElapsedTime_v2(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  return cudaEventElapsedTime(milliseconds, first, last);
}
EXPORTED cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return failed(cudaErrorNotSupported); }

// --- graphs ------------------------------------------------------------------------------------------------------------

// What is captured is counted and refused where CUDA refuses it. A graph that is launched does nothing.
static unsigned long long captures = 0;

EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  Guard guard(mutex);
  stream_of(handle)->captured = new Graph;
  captures++;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t handle, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(handle, mode);
}
EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Guard guard(mutex);
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(stream_of(handle)->captured, nullptr));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Guard guard(mutex);
  *status = stream_of(handle)->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
  Guard guard(mutex);
  Graph* captured = stream_of(handle)->captured;
  if (status) *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = captures;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(captured);
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) {
  return cudaSuccess;
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) { return launch(stream); }
EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = (cudaUserObject_t)1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
