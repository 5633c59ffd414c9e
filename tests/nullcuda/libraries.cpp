// cuBLAS and cuDNN, as far as PyTorch reads their answers: versions, descriptors, workspaces and recurrent layers.
// Every convolution, and every product but one, is in the generated answers, which count a launch.
#include "device.h"
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half { unsigned short x; };
struct __nv_bfloat16 { unsigned short x; };
#include <cublasLt.h>
#include <cudnn.h>
#include <cstdlib>
#include <cstdio>
#include <cstring>

// A handle of either library begins with the stream that its kernels are launched on.
static int handle(void** made) { *made = calloc(1, 64); return OK; }
static int set_stream(void** handle, void* stream) { *handle = stream; return OK; }
ANSWER(cublasSetStream_v2, void** handle, void* stream) { return set_stream(handle, stream); }
ANSWER(cudnnSetStream, void** handle, void* stream) { return set_stream(handle, stream); }
ANSWER(cudnnGetStream, void** handle, void** stream) { *stream = *handle; return OK; }
int launched_by(void** handle) { launched(*handle, counters.launches); return OK; }
ANSWER(cublasLtMatmul, void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*, void*, size_t, void* stream) {
  launched(stream, counters.launches);
  return OK;
}
// The product of two float32 matrices, which lie by columns: the one kernel whose numbers can be asked for.
ANSWER(cublasSgemm_v2, void** handle, int left, int right, int rows, int columns, int inner, const float* alpha, const float* a, int lda, const float* b, int ldb, const float* beta, float* c, int ldc) {
  auto bytes = [](int stride, int lines, int line) { return ((size_t)stride * (lines - 1) + line) * sizeof(float); };
  size_t of_a = left ? bytes(lda, rows, inner) : bytes(lda, inner, rows), of_b = right ? bytes(ldb, inner, columns) : bytes(ldb, columns, inner);
  launched(*handle, counters.launches, {{a, of_a, false, "product"}, {b, of_b, false, "product"}, {c, bytes(ldc, columns, rows), true, "product"}});
  if (!settings.products) return OK;
  float scale = *alpha, kept = *beta;
  issue(*handle, [=] {
    for (int j = 0; j < columns; j++)
      for (int i = 0; i < rows; i++) {
        double sum = 0;
        for (int p = 0; p < inner; p++) sum += (double)a[left ? i * (size_t)lda + p : p * (size_t)lda + i] * b[right ? p * (size_t)ldb + j : j * (size_t)ldb + p];
        float& result = c[j * (size_t)ldc + i];
        result = scale * sum + (kept ? kept * result : 0);
      }
  });
  return OK;
}
ANSWER(cublasCreate_v2, void** made) { return handle(made); }
ANSWER(cublasLtMatmulDescCreate, void** made) { return handle(made); }
ANSWER(cublasLtMatrixLayoutCreate, void** made) { return handle(made); }
ANSWER(cublasLtMatmulPreferenceCreate, void** made) { return handle(made); }
ANSWER(cublasGetPointerMode_v2, void*, int* mode) { *mode = 0; return OK; }
ANSWER(cublasGetMathMode, void*, int* mode) { *mode = 0; return OK; }
extern "C" size_t null_lt_version() __asm__("cublasLtGetVersion");
extern "C" size_t null_lt_version() { return 130100; }
ANSWER(cublasLtMatmulAlgoGetHeuristic, void*, void*, void*, void*, void*, void*, void*, int, cublasLtMatmulHeuristicResult_t* found, int* count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  return OK;
}

// -- cuDNN

struct Tensor { int dims, size[8], stride[8], type, format; };
struct Rnn { int mode, bidirectional, type, input, hidden, projection, layers; bool biased; };
struct Sequence { int type, steps, batch, width; };
static size_t item_bytes(int type) { return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16 ? 2 : 4; }

extern "C" size_t null_cudnn_version() __asm__("cudnnGetVersion");
extern "C" size_t null_cudnn_version() { return CUDNN_VERSION; }
extern "C" size_t null_cudnn_cudart() __asm__("cudnnGetCudartVersion");
extern "C" size_t null_cudnn_cudart() { return 13000; }
extern "C" const char* null_cudnn_error(int) __asm__("cudnnGetErrorString");
extern "C" const char* null_cudnn_error(int) { return "null device"; }
ANSWER(cudnnGetProperty, int property, int* value) {
  *value = property == MAJOR_VERSION ? CUDNN_MAJOR : property == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return OK;
}
ANSWER(cudnnCreate, void** made) { return handle(made); }
#define DESCRIPTOR(name) ANSWER(cudnnCreate##name##Descriptor, void** made) { *made = calloc(1, 256); return OK; }
DESCRIPTOR(Tensor) DESCRIPTOR(Filter) DESCRIPTOR(Convolution) DESCRIPTOR(RNN) DESCRIPTOR(RNNData) DESCRIPTOR(Dropout)
DESCRIPTOR(Activation) DESCRIPTOR(CTCLoss) DESCRIPTOR(Pooling) DESCRIPTOR(SpatialTransformer)
ANSWER(cudnnSetTensorNdDescriptor, Tensor* it, int type, int dims, const int* size, const int* stride) {
  it->type = type, it->dims = dims;
  for (int i = 0; i < dims && i < 8; i++) it->size[i] = size[i], it->stride[i] = stride[i];
  return OK;
}
ANSWER(cudnnSetFilterNdDescriptor, Tensor* it, int type, int format, int dims, const int* size) {
  it->type = type, it->format = format, it->dims = dims;
  for (int i = 0; i < dims && i < 8; i++) it->size[i] = size[i];
  return OK;
}
ANSWER(cudnnGetTensorNdDescriptor, Tensor* it, int most, int* type, int* dims, int* size, int* stride) {
  *type = it->type, *dims = it->dims;
  for (int i = 0; i < it->dims && i < most; i++) size[i] = it->size[i], stride[i] = it->stride[i];
  return OK;
}
ANSWER(cudnnGetFilterNdDescriptor, Tensor* it, int most, int* type, int* format, int* dims, int* size) {
  *type = it->type, *format = it->format, *dims = it->dims;
  for (int i = 0; i < it->dims && i < most; i++) size[i] = it->size[i];
  return OK;
}

// The workspace of every convolution is the same: cuDNN's own choice is not known here.
static size_t convolution_workspace() {
  const char* text = getenv("NULLCUDA_CONVOLUTION_WORKSPACE");
  return text ? atol(text) : 4 << 20;
}
#define CONVOLUTION(name, Result)                                                                          \
  ANSWER(cudnnGetConvolution##name##Algorithm_v7, void*, void*, void*, void*, void*, int, int* count, Result* found) { \
    memset(found, 0, sizeof *found);                                                                       \
    found->memory = convolution_workspace(), found->determinism = CUDNN_DETERMINISTIC;                     \
    *count = 1;                                                                                            \
    return OK;                                                                                             \
  }                                                                                                        \
  ANSWER(cudnnGetConvolution##name##WorkspaceSize, void*, void*, void*, void*, void*, int, size_t* size) { \
    *size = convolution_workspace();                                                                       \
    return OK;                                                                                             \
  }
CONVOLUTION(Forward, cudnnConvolutionFwdAlgoPerf_t)
CONVOLUTION(BackwardData, cudnnConvolutionBwdDataAlgoPerf_t)
CONVOLUTION(BackwardFilter, cudnnConvolutionBwdFilterAlgoPerf_t)
ANSWER(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, void*, int, int, void*, void*, void*, void*, void*, size_t* size) { *size = 0; return OK; }
ANSWER(cudnnGetBatchNormalizationBackwardExWorkspaceSize, void*, int, int, void*, void*, void*, void*, void*, void*, void*, size_t* size) { *size = 0; return OK; }
ANSWER(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, void*, int, int, void*, void*, size_t* size) { *size = 0; return OK; }

ANSWER(cudnnSetRNNDescriptor_v8, Rnn* it, int, int mode, int bias, int direction, int, int type, int, int, int input, int hidden, int projection, int layers, void*, unsigned) {
  *it = {mode, direction == CUDNN_BIDIRECTIONAL, type, input, hidden, projection, layers, bias != CUDNN_RNN_NO_BIAS};
  return OK;
}
ANSWER(cudnnSetRNNDataDescriptor, Sequence* it, int type, int, int steps, int batch, int width, const int*, void*) { *it = {type, steps, batch, width}; return OK; }
static int gates(const Rnn* it) { return it->mode == CUDNN_LSTM ? 4 : it->mode == CUDNN_GRU ? 3 : 1; }
static int directions(const Rnn* it) { return it->bidirectional ? 2 : 1; }

// Where a matrix or bias lies: all matrices, layer by layer, then all biases. The end of all of them for layer -1.
struct Place { size_t first; int rows, columns; };
static Place find(const Rnn* it, int layer, int number, bool bias) {
  bool projected = it->projection && it->projection != it->hidden;
  int width = projected ? it->projection : it->hidden, each = 2 * gates(it);
  size_t first = 0;
  for (int at = 0; at < it->layers * directions(it); at++)
    for (int k = 0; k < each + projected; k++) {
      int rows = k < each ? it->hidden : it->projection;
      int columns = k >= each ? it->hidden : k < gates(it) && at < directions(it) ? it->input : k < gates(it) ? width * directions(it) : width;
      if (!bias && at == layer && k == number) return {first, rows, columns};
      first += (size_t)rows * columns;
    }
  for (int at = 0; at < it->layers * directions(it); at++)
    for (int k = 0; k < each; k++) {
      if (bias && at == layer && k == number) return {first, it->hidden, 1};
      first += it->biased ? it->hidden : 0;
    }
  return {first, 0, 0};
}
ANSWER(cudnnGetRNNWeightSpaceSize, void*, Rnn* it, size_t* size) { *size = find(it, -1, 0, true).first * item_bytes(it->type); return OK; }
static void describe(Tensor* to, void** address, bool there, const char* space, const Rnn* it, Place place) {
  if (to) to->dims = 0;
  if (address) *address = nullptr;
  if (!to || !address || !there) return;
  int size[3] = {1, place.rows, place.columns}, stride[3] = {place.rows * place.columns, place.columns, 1};
  null_cudnnSetTensorNdDescriptor(to, it->type, 3, size, stride);
  *address = (void*)(space + place.first * item_bytes(it->type));
}
ANSWER(cudnnGetRNNWeightParams, void*, Rnn* it, int layer, size_t, const char* space, int number, Tensor* matrix, void** matrix_at, Tensor* bias, void** bias_at) {
  bool projected = it->projection && it->projection != it->hidden;
  describe(matrix, matrix_at, number < 2 * gates(it) + projected, space, it, find(it, layer, number, false));
  describe(bias, bias_at, number < 2 * gates(it) && it->biased, space, it, find(it, layer, number, true));
  return OK;
}
// cuDNN's own sizes are not published; these grow as they do, and differ from all other sizes.
ANSWER(cudnnGetRNNTempSpaceSizes, void*, Rnn* it, int mode, Sequence* x, size_t* work, size_t* reserve) {
  size_t rows = (size_t)x->steps * x->batch * directions(it) * it->hidden * item_bytes(it->type);
  *work = rows * gates(it);
  if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? rows * it->layers * (gates(it) + 2) : 0;
  return OK;
}
ANSWER(cudnnDropoutGetStatesSize, void*, size_t* size) { *size = (size_t)settings.processors * 2048 * 12; return OK; }
