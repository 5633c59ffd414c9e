// Streams and events. Streams that are threads do their work in order, next to each other and to the host.
#include "device.h"
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {
double milliseconds() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

// A place in a stream that others can wait for.
struct Marker {
  std::mutex lock;
  std::condition_variable changed;
  bool reached = false;
  double at = 0;
  Moment moment;  // what is done here
  explicit Marker(Moment moment) : moment(std::move(moment)) {}
  void reach() {
    std::lock_guard<std::mutex> held(lock);
    reached = true, at = milliseconds();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [this] { return reached; });
  }
  bool over() {
    std::lock_guard<std::mutex> held(lock);
    return reached;
  }
};

struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  bool busy = false;

  Stream() { std::thread([this] { work(); }).detach(); }
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> held(lock);
      changed.wait(held, [this] { return !waiting.empty(); });
      auto next = std::move(waiting.front());
      waiting.pop_front();
      busy = true;
      held.unlock();
      next();
      held.lock();
      busy = false;
      changed.notify_all();
    }
  }
  void add(std::function<void()> work) {
    std::lock_guard<std::mutex> held(lock);
    waiting.push_back(std::move(work));
    changed.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> held(lock);
    return waiting.empty() && !busy;
  }
  void wait() {
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [this] { return waiting.empty() && !busy; });
  }
};

struct Event {
  std::mutex lock;
  std::shared_ptr<Marker> marker;
  std::shared_ptr<Marker> now() {
    std::lock_guard<std::mutex> held(lock);
    return marker;
  }
};

std::mutex lock;
auto& streams = *new std::map<std::pair<int, void*>, Stream*>;  // threads outlive statics

Stream* find(void* stream) {
  std::lock_guard<std::mutex> held(lock);
  Stream*& found = streams[{stream ? -1 : current_device, stream}];
  if (!found) found = new Stream;
  return found;
}
}  // namespace

void issue(void* stream, std::function<void()> work) {
  if (settings.streams) find(stream)->add(std::move(work));
  else work();
}
void launched(void* stream, std::atomic<long>& counter, std::initializer_list<Touch> touches) {
  counter++;
  order_work(stream, settings.kernel_us, touches);
  if (settings.streams && settings.kernel_us) issue(stream, [] { take_time(settings.kernel_us); });
}
void take_time(long microseconds) {
  static std::atomic<unsigned> draws{0};
  if (settings.random) microseconds = microseconds * (draws++ * 2654435761u >> 16 & 1023) / 1023;
  if (settings.streams && microseconds) usleep(microseconds);
}
void wait_for_stream(void* stream) {
  if (settings.streams) find(stream)->wait();
}
void wait_for_device() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> held(lock);
    for (auto& each : streams) all.push_back(each.second);
  }
  for (Stream* stream : all) stream->wait();
}

static int create(void** stream) { *stream = ::operator new(16); return OK; }
ANSWER(cudaStreamCreateWithPriority, void** stream, unsigned, int) { return create(stream); }
ANSWER(cudaStreamCreateWithFlags, void** stream, unsigned) { return create(stream); }
ANSWER(cudaStreamCreate, void** stream) { return create(stream); }
ANSWER(cudaStreamGetPriority, void*, int* priority) { *priority = 0; return OK; }
ANSWER(cudaStreamQuery, void* stream) {
  if (settings.streams && !find(stream)->idle()) return NOT_READY;
  return host_sees(stream_moment(stream)) ? OK : NOT_READY;
}
ANSWER(cudaStreamSynchronize, void* stream) {
  counters.syncs++;
  wait_for_stream(stream), host_behind_stream(stream);
  return OK;
}
ANSWER(cudaDeviceSynchronize) {
  counters.syncs++;
  wait_for_device(), host_behind_all();
  return OK;
}
ANSWER(cudaStreamWaitEvent, void* stream, Event* event, unsigned) {
  if (auto marker = event->now()) {
    stream_behind(stream, marker->moment);
    issue(stream, [marker] { marker->wait(); });
  }
  return OK;
}
ANSWER(cudaStreamIsCapturing, void*, int* status) { *status = 0; return OK; }
ANSWER(cudaStreamGetCaptureInfo, void*, int* status, unsigned long long* id, void*, void*, void*, size_t* count) {
  *status = 0;
  if (id) *id = 0;
  if (count) *count = 0;
  return OK;
}
ANSWER(cudaStreamAddCallback, void* stream, void (*call)(void*, int, void*), void* data, unsigned) {
  issue(stream, [=] { call(stream, OK, data); });
  return OK;
}
ANSWER(cudaLaunchHostFunc, void* stream, void (*call)(void*), void* data) {
  issue(stream, [=] { call(data); });
  return OK;
}

ANSWER(cudaEventCreate, Event** event) { *event = new Event; return OK; }
ANSWER(cudaEventCreateWithFlags, Event** event, unsigned) { *event = new Event; return OK; }
ANSWER(cudaEventDestroy, Event* event) { delete event; return OK; }
static int record(Event* event, void* stream) {
  auto marker = std::make_shared<Marker>(stream_moment(stream));
  {
    std::lock_guard<std::mutex> held(event->lock);
    event->marker = marker;
  }
  issue(stream, [marker] { marker->reach(); });
  return OK;
}
ANSWER(cudaEventRecord, Event* event, void* stream) { return record(event, stream); }
ANSWER(cudaEventRecordWithFlags, Event* event, void* stream, unsigned) { return record(event, stream); }
ANSWER(cudaEventQuery, Event* event) {
  auto marker = event->now();
  if (marker && !marker->over()) return NOT_READY;
  return !marker || host_sees(marker->moment) ? OK : NOT_READY;
}
ANSWER(cudaEventSynchronize, Event* event) {
  counters.syncs++;
  if (auto marker = event->now()) marker->wait(), host_behind(marker->moment);
  return OK;
}
ANSWER(cudaEventElapsedTime, float* elapsed, Event* first, Event* last) {
  auto from = first->now(), to = last->now();
  *elapsed = watched(from->moment) && watched(to->moment) ? (to->moment.at - from->moment.at) / 1000 : to->at - from->at;
  return OK;
}

// -- what tests set and read

#pragma GCC visibility push(default)
extern "C" {
void nullcuda_set(const char* name, long value) {
  wait_for_device();
  std::string setting = name;
  if (setting == "capacity") settings.capacity = value;
  else if (setting == "streams") settings.streams = value;
  else if (setting == "copy_us") settings.copy_us = value;
  else if (setting == "kernel_us") settings.kernel_us = value;
  else if (setting == "random") settings.random = value;
  else if (setting == "contents") settings.contents = value;
  else if (setting == "products") settings.products = value;
}
long nullcuda_count(const char* name) {
  static const std::map<std::string, std::atomic<long>*> COUNTERS{
      {"launches", &counters.launches}, {"triton_launches", &counters.triton_launches}, {"syncs", &counters.syncs},
      {"copies", &counters.copies}, {"mallocs", &counters.mallocs}, {"frees", &counters.frees}, {"pinned", &counters.pinned}};
  auto found = COUNTERS.find(name);
  return found == COUNTERS.end() ? -1 : found->second->load();
}
long nullcuda_used(int device) { return used_bytes(device); }
// A kernel with an effect: after some time, every byte has this value.
void nullcuda_fill(void* stream, char* address, int value, long size, long microseconds) {
  order_work(stream, microseconds, {{address, (size_t)size, true, "kernel"}});
  issue(stream, [=] {
    take_time(microseconds);
    memset(address, value, size);
  });
}
// A kernel that reads: after some time, it counts the bytes that have another value.
void nullcuda_expect(void* stream, const char* address, int value, long size, long microseconds, long* others) {
  order_work(stream, microseconds, {{address, (size_t)size, false, "kernel"}});
  issue(stream, [=] {
    take_time(microseconds);
    *others += size - std::count(address, address + size, (char)value);
  });
}
}
#pragma GCC visibility pop
