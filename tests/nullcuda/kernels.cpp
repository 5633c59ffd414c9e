// Kernels, through the runtime and the driver: they are counted, and do nothing.
#include "device.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>

static char memory[1 << 16];  // what handles and symbols point to

extern "C" void** null_register() __asm__("__cudaRegisterFatBinary");
extern "C" void** null_register() { return (void**)memory; }
// An answer other than 0 keeps the caller from launching the kernel itself.
ANSWER(__cudaPushCallConfiguration, dim3, dim3, size_t, void* stream) { launched(stream, counters.launches); return 1; }
ANSWER(__cudaPopCallConfiguration, void*, void*, void*, void*) { return INVALID_VALUE; }
ANSWER(__cudaGetKernel, const void** kernel, const void* function) { *kernel = function; return OK; }
ANSWER(__cudaLaunchKernel, const void*, dim3, dim3, void**, size_t, void* stream) { launched(stream, counters.launches); return OK; }
ANSWER(cudaLaunchKernel, const void*, dim3, dim3, void**, size_t, void* stream) { launched(stream, counters.launches); return OK; }
ANSWER(cudaLaunchCooperativeKernel, const void*, dim3, dim3, void**, size_t, void* stream) { launched(stream, counters.launches); return OK; }
ANSWER(cudaLaunchKernelExC, const cudaLaunchConfig_t* config, const void*, void**) { launched(config->stream, counters.launches); return OK; }
ANSWER(cudaFuncGetAttributes, cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = settings.capability;
  found->maxDynamicSharedSizeBytes = 101376;
  return OK;
}
static int occupancy(int* blocks) { *blocks = 2; return OK; }
ANSWER(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, const void*, int, size_t) { return occupancy(blocks); }
ANSWER(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int* blocks, const void*, int, size_t, unsigned) { return occupancy(blocks); }
ANSWER(cudaGetSymbolAddress, void** address, const void*) { *address = memory; return OK; }
ANSWER(cudaLibraryLoadData, void** library) { *library = memory; return OK; }
ANSWER(cudaLibraryGetKernel, void** kernel) { *kernel = memory; return OK; }

// -- the driver: Triton's launches, and the table that PyTorch asks for functions

static int handle(void** made) { *made = malloc(16); return OK; }
ANSWER(cuDriverGetVersion, int* version) { *version = 13000; return OK; }
ANSWER(cuGetErrorString, int, const char** text) { *text = "null device"; return OK; }
ANSWER(cuGetErrorName, int, const char** text) { *text = "null device"; return OK; }
ANSWER(cuDeviceGet, int* device, int number) { *device = number; return OK; }
ANSWER(cuDeviceGetCount, int* count) { *count = settings.devices; return OK; }
ANSWER(cuDeviceGetName, char* text, int size, int) { snprintf(text, size, "NVIDIA null device"); return OK; }
ANSWER(cuDeviceGetAttribute, int* value, int attribute, int) { *value = device_attribute(attribute); return OK; }
ANSWER(cuDeviceTotalMem_v2, size_t* total, int) { *total = settings.capacity; return OK; }
ANSWER(cuDevicePrimaryCtxGetState, int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return OK;
}
ANSWER(cuDevicePrimaryCtxRetain, void** context, int) { *context = memory; return OK; }
ANSWER(cuCtxGetCurrent, void** context) { *context = memory; return OK; }
ANSWER(cuCtxPopCurrent_v2, void** context) { *context = memory; return OK; }
ANSWER(cuCtxGetDevice, int* device) { *device = current_device; return OK; }
ANSWER(cuCtxSynchronize) { counters.syncs++; wait_for_device(); return OK; }
ANSWER(cuModuleLoadData, void** module) { return handle(module); }
ANSWER(cuModuleLoadDataEx, void** module) { return handle(module); }
ANSWER(cuModuleLoad, void** module) { return handle(module); }
ANSWER(cuModuleGetFunction, void** function) { return handle(function); }
ANSWER(cuModuleGetGlobal_v2, void** address, size_t* size) {
  *address = memory;
  if (size) *size = 8;
  return OK;
}
ANSWER(cuFuncGetAttribute, int* value, int attribute, void*) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return OK;
}
ANSWER(cuLaunchKernel, void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream) { launched(stream, counters.triton_launches); return OK; }
ANSWER(cuLaunchCooperativeKernel, void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream) { launched(stream, counters.triton_launches); return OK; }
ANSWER(cuLaunchKernelEx, const CUlaunchConfig* config) { launched(config->hStream, counters.triton_launches); return OK; }
ANSWER(cuPointerGetAttribute, void* value, int attribute, void* address) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(void**)value = address;
  else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) *(void**)value = memory;
  else *(int*)value = 0;
  return OK;
}
ANSWER(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks) { return occupancy(blocks); }
ANSWER(cuOccupancyMaxActiveClusters, int* clusters) { *clusters = 8; return OK; }
ANSWER(cuMemAlloc_v2, void** address, size_t size) { return allocate(address, size) ? OK : OUT_OF_MEMORY; }
ANSWER(cuMemFree_v2, void* address) { return release(address) ? OK : INVALID_VALUE; }
ANSWER(cuMemcpyHtoDAsync_v2, void* to, const void* from, size_t size, void*) { memcpy(to, from, size); return OK; }
ANSWER(cuStreamGetCtx, void*, void** context) { *context = memory; return OK; }

static int answer_zero() { return OK; }
static void* entry(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  if (!found) found = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  return found ? found : (void*)answer_zero;
}
ANSWER(cuGetProcAddress_v2, const char* name, void** function, int, uint64_t, int* status) {
  *function = entry(name);
  if (status) *status = 0;
  return OK;
}
ANSWER(cudaGetDriverEntryPointByVersion, const char* name, void** function, unsigned, unsigned long long, int* status) {
  *function = entry(name);
  if (status) *status = 0;
  return OK;
}
