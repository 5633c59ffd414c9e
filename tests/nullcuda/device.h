// What the parts of the null device share: its settings, its counters, its memory and its streams.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

// Defines the C function `name`, whatever the headers declare it as: descriptors are passed as plain pointers here.
#define ANSWER(name, ...)                                                    \
  extern "C" __attribute__((visibility("default"))) int null_##name(__VA_ARGS__) __asm__(#name); \
  extern "C" int null_##name(__VA_ARGS__)

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_READY = 600 };

struct Settings {
  int devices, capability, processors;
  std::atomic<long> capacity;     // bytes of each device
  std::atomic<bool> streams;      // whether streams are threads; otherwise all work is done when it is issued
  std::atomic<long> copy_us, kernel_us;  // how long a copy and a kernel take, on streams that are threads
  std::atomic<bool> contents;     // whether copies between two places of a device are made
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
void launched(void* stream, std::atomic<long>& counter);
void wait_for_stream(void* stream);
void wait_for_device();

int device_attribute(int attribute);
