// cuBLAS and cuBLASLt: products of matrices are launches like any other. Enumerations and handles are passed as what
// they are to the machine, an int and a pointer.
#include "device.h"

#include <cstdlib>
#include <cstring>
#include <map>

using namespace device;

static std::map<void*, cudaStream_t> streams;
static thread_local int math_mode = 0, pointer_mode = 0;

static int product(void* handle) {
  Guard guard(mutex);
  return launch(streams[handle]);
}

// --- handles -----------------------------------------------------------------------------------------------------------

EXPORTED int cublasCreate_v2(void** handle) {
  *handle = malloc(8);
  return 0;
}
EXPORTED int cublasDestroy_v2(void*) { return 0; }
EXPORTED int cublasSetStream_v2(void* handle, cudaStream_t stream) {
  Guard guard(mutex);
  streams[handle] = stream;
  return 0;
}
EXPORTED int cublasGetStream_v2(void* handle, cudaStream_t* stream) {
  Guard guard(mutex);
  *stream = streams[handle];
  return 0;
}
EXPORTED int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
EXPORTED int cublasSetMathMode(void*, int mode) {
  math_mode = mode;
  return 0;
}
EXPORTED int cublasGetMathMode(void*, int* mode) {
  *mode = math_mode;
  return 0;
}
EXPORTED int cublasSetPointerMode_v2(void*, int mode) {
  pointer_mode = mode;
  return 0;
}
EXPORTED int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = pointer_mode;
  return 0;
}
EXPORTED int cublasSetSmCountTarget(void*, int) { return 0; }

// --- products ----------------------------------------------------------------------------------------------------------

EXPORTED int cublasGemmEx(void* handle) { return product(handle); }
EXPORTED int cublasGemmStridedBatchedEx(void* handle) { return product(handle); }
EXPORTED int cublasSgemm_v2(void* handle) { return product(handle); }
EXPORTED int cublasSgemmStridedBatched(void* handle) { return product(handle); }
EXPORTED int cublasSgemv_v2(void* handle) { return product(handle); }
EXPORTED int cublasSdot_v2(void* handle) { return product(handle); }

// --- cuBLASLt: one algorithm that needs no workspace ---------------------------------------------------------------------

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

EXPORTED size_t cublasLtGetVersion() { return 130000; }
EXPORTED int cublasLtCreate(void** handle) { return cublasCreate_v2(handle); }
EXPORTED int cublasLtDestroy(void*) { return 0; }
EXPORTED int cublasLtMatrixLayoutCreate(void** layout, int, uint64_t, uint64_t, int64_t) { return cublasCreate_v2(layout); }
EXPORTED int cublasLtMatrixLayoutDestroy(void* layout) {
  free(layout);
  return 0;
}
EXPORTED int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
EXPORTED int cublasLtMatmulDescCreate(void** description, int, int) { return cublasCreate_v2(description); }
EXPORTED int cublasLtMatmulDescDestroy(void* description) { return cublasLtMatrixLayoutDestroy(description); }
EXPORTED int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
EXPORTED int cublasLtMatmulPreferenceCreate(void** preference) { return cublasCreate_v2(preference); }
EXPORTED int cublasLtMatmulPreferenceDestroy(void* preference) { return cublasLtMatrixLayoutDestroy(preference); }
EXPORTED int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
EXPORTED int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Heuristic* found, int* count) {
  *count = wanted > 0;
  if (wanted > 0) *found = {};
  return 0;
}
EXPORTED int cublasLtMatmulAlgoInit(void*, int, int, int, int, int, int, int, void*) { return 0; }
EXPORTED int cublasLtMatmulAlgoCheck(void*, void*, void*, void*, void*, void*, const void*, Heuristic* found) {
  *found = {};
  return 0;
}
EXPORTED int cublasLtMatmulAlgoConfigSetAttribute(void*, int, const void*, size_t) { return 0; }
EXPORTED int cublasLtMatmulAlgoConfigGetAttribute(const void*, int, void* value, size_t size, size_t* written) {
  memset(value, 0, size);
  if (written) *written = size;
  return 0;
}
EXPORTED int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  Guard guard(mutex);
  return launch(stream);
}
