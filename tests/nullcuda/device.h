// What the parts of the null device share: its settings, its counters, its memory and its streams.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

// Defines the C function `name`, whatever the headers declare it as: descriptors are passed as plain pointers here.
#define ANSWER(name, ...)                                                    \
  extern "C" __attribute__((visibility("default"))) int null_##name(__VA_ARGS__) __asm__(#name); \
  extern "C" int null_##name(__VA_ARGS__)

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_READY = 600 };

struct Settings {
  int devices, capability, processors;
  std::atomic<long> capacity;     // bytes of each device
  std::atomic<bool> streams;      // whether streams are threads; otherwise all work is done when it is issued
  std::atomic<long> copy_us, kernel_us;  // how long a copy and a kernel take: by the device's clock, and on threads
  std::atomic<bool> random;       // whether work takes any time up to that, on streams that are threads
  std::atomic<bool> contents;     // whether copies between two places of a device are made
  std::atomic<bool> products;     // whether products of float32 matrices are computed
};
extern Settings settings;

struct Counters {
  std::atomic<long> launches, triton_launches, syncs, copies, mallocs, frees, pinned;
};
extern Counters counters;

extern thread_local int current_device;

bool on_device(const void* address, int* device = nullptr);
bool pinned(const void* address);
bool allocate(void** address, size_t size);
bool release(void* address);
long used_bytes(int device);

// Streams. `issue` runs the work now, or on the thread of the stream, behind what it was given before.
void issue(void* stream, std::function<void()> work);
void wait_for_stream(void* stream);
void wait_for_device();

void take_time(long microseconds);  // on the thread of a stream

int device_attribute(int attribute);

// The order of work, while it is watched.
struct Moment { long watch; std::vector<long> seen; double at; };  // what an actor has seen of every other, and when
struct Touch { const void* address; size_t size; bool writes; const char* what; };
void launched(void* stream, std::atomic<long>& counter, std::initializer_list<Touch> touches = {});
int launched_by(void** handle);
void order_work(void* stream, long microseconds, std::initializer_list<Touch> touches, int device = 0, int engine = -1);
Moment stream_moment(void* stream);
bool watched(const Moment& moment);
void stream_behind(void* stream, const Moment& moment);
void host_behind(const Moment& moment);
bool host_sees(const Moment& moment);  // whether it is done; if so, the host is behind it
void host_behind_stream(void* stream);
void host_behind_all();
void forget_accesses(const void* address, size_t size);
