// Devices and memory: mapped without being touched, so that capacities are larger than the machine's memory.
#include "device.h"
#include <cuda_runtime_api.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

static long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

Settings settings{(int)number("NULLCUDA_DEVICES", 2), (int)number("NULLCUDA_CAPABILITY", 86),
                  (int)number("NULLCUDA_PROCESSORS", 28), {number("NULLCUDA_CAPACITY", 12L << 30)}, {false}, {0}, {0}, {false}, {true}, {false}};
Counters counters{};
thread_local int current_device = 0;
static thread_local int last_error = OK;

static int failed(int error) { return last_error = error; }

// -- devices

ANSWER(cudaGetDeviceCount, int* count) { *count = settings.devices; return OK; }
ANSWER(cudaGetDevice, int* device) { *device = current_device; return OK; }
ANSWER(cudaSetDevice, int device) {
  if (device < 0 || device >= settings.devices) return failed(INVALID_DEVICE);
  current_device = device;
  return OK;
}

int device_attribute(int attribute) {
  static const std::map<int, int> ATTRIBUTES{
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 101376}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 102400},
      {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 1536}, {cudaDevAttrClockRate, 1777000}, {cudaDevAttrMemoryClockRate, 7501000},
      {cudaDevAttrGlobalMemoryBusWidth, 192}, {cudaDevAttrL2CacheSize, 3 << 20}, {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxBlockDimY, 1024}, {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 16}, {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
      {cudaDevAttrCooperativeLaunch, 1}};
  if (attribute == cudaDevAttrMultiProcessorCount) return settings.processors;
  if (attribute == cudaDevAttrComputeCapabilityMajor) return settings.capability / 10;
  if (attribute == cudaDevAttrComputeCapabilityMinor) return settings.capability % 10;
  auto found = ATTRIBUTES.find(attribute);
  return found == ATTRIBUTES.end() ? 0 : found->second;
}
ANSWER(cudaDeviceGetAttribute, int* value, int attribute, int) { *value = device_attribute(attribute); return OK; }
ANSWER(cudaGetDeviceProperties, cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA null device");
  p->totalGlobalMem = settings.capacity;
  p->major = settings.capability / 10, p->minor = settings.capability % 10;
  p->multiProcessorCount = settings.processors;
  p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 1536;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 101376, p->sharedMemPerMultiprocessor = 102400;
  p->l2CacheSize = 3 << 20, p->memoryBusWidth = 192;
  for (int i = 0; i < 3; i++) p->maxThreadsDim[i] = i < 2 ? 1024 : 64, p->maxGridSize[i] = i ? 65535 : 2147483647;
  p->unifiedAddressing = p->concurrentKernels = 1, p->asyncEngineCount = 2, p->pciBusID = device + 1;
  return OK;
}
ANSWER(cudaDeviceGetPCIBusId, char* text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device + 1); return OK; }
ANSWER(cudaDeviceGetStreamPriorityRange, int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
ANSWER(cudaDriverGetVersion, int* version) { *version = 13000; return OK; }
ANSWER(cudaRuntimeGetVersion, int* version) { *version = 13000; return OK; }
ANSWER(cudaDeviceCanAccessPeer, int* can, int, int) { *can = 1; return OK; }
ANSWER(cudaGetLastError) { int error = last_error; last_error = OK; return error; }
ANSWER(cudaPeekAtLastError) { return last_error; }
static const char* message(int error) {
  static thread_local char text[32];
  if (error == OUT_OF_MEMORY) return "out of memory";
  snprintf(text, sizeof text, "error %d", error);
  return text;
}
extern "C" const char* null_error_name(int error) __asm__("cudaGetErrorName");
extern "C" const char* null_error_name(int error) { return message(error); }
extern "C" const char* null_error_string(int error) __asm__("cudaGetErrorString");
extern "C" const char* null_error_string(int error) { return message(error); }

// -- memory

struct Block { size_t size; int device; };
static std::mutex lock;
static std::map<uintptr_t, Block> device_blocks, pinned_blocks;
static long used[64];
static const size_t PAGE = 2 << 20;

static const Block* block_with(const std::map<uintptr_t, Block>& blocks, const void* address) {
  auto next = blocks.upper_bound((uintptr_t)address);
  if (next == blocks.begin()) return nullptr;
  --next;
  return (uintptr_t)address < next->first + next->second.size ? &next->second : nullptr;
}
bool on_device(const void* address, int* device) {
  std::lock_guard<std::mutex> held(lock);
  const Block* block = block_with(device_blocks, address);
  if (block && device) *device = block->device;
  return block;
}
bool pinned(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  return block_with(pinned_blocks, address);
}
long used_bytes(int device) {
  std::lock_guard<std::mutex> held(lock);
  return used[device];
}
bool allocate(void** address, size_t size) {
  std::lock_guard<std::mutex> held(lock);
  if (used[current_device] + (long)size > settings.capacity) return false;
  // Aligned to the allocator's pages, with the rest of the mapping returned.
  size_t mapped = (size + PAGE - 1) / PAGE * PAGE;
  char* raw = (char*)mmap(nullptr, mapped + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return false;
  char* begin = (char*)(((uintptr_t)raw + PAGE - 1) / PAGE * PAGE);
  if (begin > raw) munmap(raw, begin - raw);
  if (raw + PAGE > begin) munmap(begin + mapped, raw + PAGE - begin);
  device_blocks[(uintptr_t)begin] = {mapped, current_device};
  used[current_device] += mapped;
  counters.mallocs++;
  *address = begin;
  return true;
}
bool release(void* address) {
  wait_for_device();
  host_behind_all();
  std::lock_guard<std::mutex> held(lock);
  auto found = device_blocks.find((uintptr_t)address);
  if (found == device_blocks.end()) return false;
  forget_accesses(address, found->second.size);
  used[found->second.device] -= found->second.size;
  munmap(address, found->second.size);
  device_blocks.erase(found);
  counters.frees++;
  return true;
}
ANSWER(cudaMalloc, void** address, size_t size) { return allocate(address, size) ? OK : failed(OUT_OF_MEMORY); }
ANSWER(cudaFree, void* address) { return !address || release(address) ? OK : failed(INVALID_VALUE); }
ANSWER(cudaMemGetInfo, size_t* free, size_t* total) {
  *total = settings.capacity;
  *free = *total - used_bytes(current_device);
  return OK;
}
static int pin(void* address, size_t size) {
  std::lock_guard<std::mutex> held(lock);
  pinned_blocks[(uintptr_t)address] = {size, 0};
  counters.pinned++;
  return OK;
}
static int unpin(void* address) {
  std::lock_guard<std::mutex> held(lock);
  auto found = pinned_blocks.find((uintptr_t)address);
  if (found == pinned_blocks.end()) return OK;
  forget_accesses(address, found->second.size);
  pinned_blocks.erase(found);
  return OK;
}
ANSWER(cudaHostAlloc, void** address, size_t size, unsigned) {
  if (posix_memalign(address, 4096, size ? size : 1)) return failed(OUT_OF_MEMORY);
  return pin(*address, size);
}
ANSWER(cudaFreeHost, void* address) { wait_for_device(); host_behind_all(); unpin(address); free(address); return OK; }
ANSWER(cudaHostRegister, void* address, size_t size, unsigned) { return pin(address, size); }
ANSWER(cudaHostUnregister, void* address) { return unpin(address); }
ANSWER(cudaPointerGetAttributes, cudaPointerAttributes* found, const void* address) {
  memset(found, 0, sizeof *found);
  int device = 0;
  bool there = on_device(address, &device), host = !there && pinned(address);
  found->type = there ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = device;
  if (there || host) found->devicePointer = (void*)address;
  if (!there) found->hostPointer = (void*)address;
  return OK;
}

// -- copies

static int copy(void* to, const void* from, size_t size, void* stream) {
  counters.copies++;
  int device = 0;
  bool leaves = on_device(from, &device), arrives = on_device(to, &device);
  int engine = leaves == arrives ? -1 : leaves;
  order_work(stream, settings.copy_us, {{from, size, false, "copy"}, {to, size, true, "copy"}}, device, engine);
  if (!settings.contents && on_device(to) && on_device(from)) return OK;
  bool host_may_change = !on_device(from) && !pinned(from), host_reads = !on_device(to) && !pinned(to);
  auto held = host_may_change && settings.streams ? std::make_shared<std::string>((const char*)from, size) : nullptr;
  issue(stream, [=] {
    take_time(settings.copy_us);
    memmove(to, held ? held->data() : from, size);
  });
  if (host_reads) wait_for_stream(stream), host_behind_stream(stream);
  return OK;
}
ANSWER(cudaMemcpy, void* to, const void* from, size_t size, int) {
  copy(to, from, size, nullptr);
  wait_for_stream(nullptr), host_behind_stream(nullptr);
  return OK;
}
ANSWER(cudaMemcpyAsync, void* to, const void* from, size_t size, int, void* stream) { return copy(to, from, size, stream); }
ANSWER(cudaMemcpyPeerAsync, void* to, int, const void* from, int, size_t size, void* stream) { return copy(to, from, size, stream); }
ANSWER(cudaMemcpy2DAsync, char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t width, size_t height, int, void* stream) {
  for (size_t row = 0; row < height; row++) copy(to + row * to_pitch, from + row * from_pitch, width, stream);
  return OK;
}
static int fill(char* address, int value, size_t size, void* stream) {
  order_work(stream, settings.kernel_us, {{address, size, true, "fill"}});
  issue(stream, [=] {
    char* first = (char*)(((uintptr_t)address + 4095) / 4096 * 4096);
    size_t whole = value || address + size < first ? 0 : (address + size - first) / 4096 * 4096;
    if (!whole || !on_device(address)) { memset(address, value, size); return; }
    memset(address, 0, first - address);
    madvise(first, whole, MADV_DONTNEED);  // zeros again, and no longer the machine's memory
    memset(first + whole, 0, address + size - first - whole);
  });
  return OK;
}
ANSWER(cudaMemset, char* address, int value, size_t size) { return fill(address, value, size, nullptr); }
ANSWER(cudaMemsetAsync, char* address, int value, size_t size, void* stream) { return fill(address, value, size, stream); }
