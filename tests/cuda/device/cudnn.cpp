// cuDNN, as far as torch computes attention with it: a graph of operations is described to it attribute by attribute, it
// answers with one plan, and the plan is a launch like any other. The rest of cuDNN is the real library, which finds no
// driver. The numbers are those of cudnn_graph.h.
#include "device.h"

#include <cstdlib>
#include <cstring>
#include <map>

using namespace device;

static std::map<void*, cudaStream_t> streams;

EXPORTED int cudnnCreate(void** handle) {
  *handle = malloc(8);
  return 0;
}
EXPORTED int cudnnDestroy(void*) { return 0; }
EXPORTED int cudnnSetStream(void* handle, cudaStream_t stream) {
  Guard guard(mutex);
  streams[handle] = stream;
  return 0;
}
EXPORTED int cudnnGetStream(void* handle, cudaStream_t* stream) {
  Guard guard(mutex);
  *stream = streams[handle];
  return 0;
}

// --- descriptions of the graph, its engines and its plans ----------------------------------------------------------------

enum { HEURISTIC_RESULTS = 202, ENGINE = 300, ENGINE_WORKSPACE = 303, ENGINE_SHARED = 304, PLAN_WORKSPACE = 402, ENGINE_INDEX = 1301 };
enum { INT32 = 23 };

EXPORTED int cudnnBackendCreateDescriptor(int, void** descriptor) { return cudnnCreate(descriptor); }
EXPORTED int cudnnBackendDestroyDescriptor(void* descriptor) {
  free(descriptor);
  return 0;
}
EXPORTED int cudnnBackendSetAttribute(void*, int, int, int64_t, const void*) { return 0; }
EXPORTED int cudnnBackendFinalize(void*) { return 0; }

// One engine is found, the first, which needs neither workspace nor shared memory and has nothing to choose; a real one's
// backward pass takes a workspace. Descriptors that are asked for are the caller's own.
EXPORTED int cudnnBackendGetAttribute(void*, int name, int type, int64_t wanted, int64_t* count, void* values) {
  bool number = name == ENGINE_WORKSPACE || name == ENGINE_SHARED || name == PLAN_WORKSPACE || name == ENGINE_INDEX;
  if (number && wanted > 0 && values) memset(values, 0, type == INT32 ? sizeof(int32_t) : sizeof(int64_t));
  if (count) *count = number || name == HEURISTIC_RESULTS || name == ENGINE;
  return 0;
}

EXPORTED int cudnnBackendExecute(void* handle, void*, void*) {
  Guard guard(mutex);
  return launch(streams[handle]);
}
