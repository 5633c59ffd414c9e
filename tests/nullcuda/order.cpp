// The order of work: which access to memory is behind which, and when work is done by the device's own clock.
//
// Streams and threads of the host are actors with vector clocks, as in FastTrack (Flanagan and Freund, PLDI 2009).
// Work on a stream is behind what its stream and the issuing thread have seen; events, waits and queries that find work
// done carry what one actor has seen to another. Every access to device or pinned memory is compared with the latest
// ones to the same bytes: two of which one writes, and neither is behind the other, are a race, whatever came first in
// this run. The same joins, of maxima of times in place of vectors, are a clock on which work takes as long as the
// settings say. Memory that the caching allocator passes on is not seen here, so that its next owner's accesses have to
// be behind those of its last one: that is how memory that is freed too early is found.
//
// All threads are one actor, whose calls are in the order of the program, except those that are set apart: what those
// have seen passes through the locks and queues that tests tell of.
#include "device.h"
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {
struct Access { int actor; long time; std::string what; };
struct Range {  // bytes with the same history, up to `end`
  uintptr_t end;
  Access written{-1, 0, ""};
  std::vector<Access> read;
};

std::mutex lock;
std::atomic<bool> watching{false};
long watch = 0;  // the number of the watch: what earlier ones have seen is forgotten
std::vector<Moment> actors;
std::map<std::pair<int, void*>, int> streams;
std::map<const void*, Moment> released;
std::map<uintptr_t, Range> history;
std::vector<std::string> races;
double engines[64][2];  // when the copy engines of a device are free: to it, and from it
thread_local std::pair<long, int> apart{-1, 0};  // the actor that this thread is in a watch

int new_actor() {
  int number = actors.size();
  actors.push_back({watch, {}, 0});
  actors[number].seen.resize(number + 1), actors[number].seen[number] = 1;
  return number;
}
int host() { return apart.first == watch ? apart.second : 0; }
int stream_actor(void* stream) {
  auto [found, added] = streams.try_emplace({stream ? -1 : current_device, stream}, 0);
  if (added) found->second = new_actor();
  return found->second;
}
void join(Moment& mine, const Moment& other) {
  if (other.watch != mine.watch) return;
  if (mine.seen.size() < other.seen.size()) mine.seen.resize(other.seen.size());
  for (size_t i = 0; i < other.seen.size(); i++) mine.seen[i] = std::max(mine.seen[i], other.seen[i]);
  mine.at = std::max(mine.at, other.at);
}
// What is issued next on a stream is behind what this thread has seen, and not behind what it does next.
int issue_on(void* stream) {
  int actor = stream_actor(stream);
  Moment& mine = actors[host()];
  join(actors[actor], mine);
  mine.seen[host()]++;
  return actor;
}
bool is_compared(const void* address) { return on_device(address) || pinned(address); }
bool behind(int actor, const Access& access) {
  auto& seen = actors[actor].seen;
  return access.actor < 0 || access.actor == actor || (access.actor < (int)seen.size() && seen[access.actor] >= access.time);
}
void compare(int actor, const Access& now, const Access& before, const char* kinds) {
  if (behind(actor, before) || races.size() >= 1000) return;
  races.push_back(std::string(kinds) + ": " + now.what + " is not behind " + before.what);
}
void split(uintptr_t at) {
  auto next = history.upper_bound(at);
  if (next == history.begin()) return;
  auto found = std::prev(next);
  if (found->first == at || found->second.end <= at) return;
  Range rest = found->second;
  found->second.end = at;
  history.emplace(at, rest);
}
void forget(uintptr_t first, uintptr_t end) {
  split(first), split(end);
  history.erase(history.lower_bound(first), history.lower_bound(end));
}
void note(int actor, const void* address, size_t size, bool writes, const std::string& what) {
  uintptr_t first = (uintptr_t)address, end = first + size;
  std::string who = actor == 0 ? "the host" : "actor " + std::to_string(actor);
  Access now{actor, actors[actor].seen[actor], what + " (" + who + ")"};
  split(first), split(end);
  auto at = history.lower_bound(first);
  for (; at != history.end() && at->first < end; ++at) {
    compare(actor, now, at->second.written, writes ? "write after write" : "read after write");
    if (writes) for (auto& read : at->second.read) compare(actor, now, read, "write after read");
  }
  if (writes) {
    history.erase(history.lower_bound(first), at);
    history[first] = {end, now, {}};
    return;
  }
  for (uintptr_t place = first; place < end;) {  // gaps have no history yet
    auto next = history.lower_bound(place);
    if (next == history.end() || next->first > place) {
      uintptr_t until = next == history.end() ? end : std::min(end, next->first);
      next = history.emplace(place, Range{until}).first;
    }
    auto& reads = next->second.read;
    reads.erase(std::remove_if(reads.begin(), reads.end(), [&](auto& read) { return read.actor == actor; }), reads.end());
    reads.push_back(now);
    place = next->second.end;
  }
}
}  // namespace

void order_work(void* stream, long microseconds, std::initializer_list<Touch> touches, int device, int engine) {
  std::vector<Touch> compared;
  if (watching)
    for (auto& touch : touches)
      if (touch.size && is_compared(touch.address)) compared.push_back(touch);
  std::lock_guard<std::mutex> held(lock);
  if (!watching) return;
  int actor = issue_on(stream);
  Moment& mine = actors[actor];
  mine.seen[actor]++;
  if (engine >= 0) mine.at = engines[device][engine] = std::max(mine.at, engines[device][engine]) + microseconds;
  else mine.at += microseconds;
  for (auto& touch : compared) note(actor, touch.address, touch.size, touch.writes, touch.what);
}
Moment stream_moment(void* stream) {
  std::lock_guard<std::mutex> held(lock);
  if (!watching) return {-1, {}, 0};
  return actors[issue_on(stream)];
}
bool watched(const Moment& moment) {
  std::lock_guard<std::mutex> held(lock);
  return watching && moment.watch == watch;
}
void stream_behind(void* stream, const Moment& moment) {
  std::lock_guard<std::mutex> held(lock);
  if (watching) join(actors[stream_actor(stream)], moment);
}
void host_behind(const Moment& moment) {
  std::lock_guard<std::mutex> held(lock);
  if (watching) join(actors[host()], moment);
}
void host_behind_stream(void* stream) { host_behind(stream_moment(stream)); }
void host_behind_all() {
  std::lock_guard<std::mutex> held(lock);
  for (auto& stream : streams) join(actors[host()], Moment(actors[stream.second]));
}
// By the device's clock, where streams are no threads: whoever asks again and again gets there.
bool host_sees(const Moment& moment) {
  std::lock_guard<std::mutex> held(lock);
  if (!watching || moment.watch != watch) return true;
  Moment& mine = actors[host()];
  if (!settings.streams && mine.at < moment.at) {
    mine.at++;
    return false;
  }
  join(mine, moment);
  return true;
}
void forget_accesses(const void* address, size_t size) {
  std::lock_guard<std::mutex> held(lock);
  forget((uintptr_t)address, (uintptr_t)address + size);
}

#pragma GCC visibility push(default)
extern "C" {
void nullcuda_watch(int on) {
  std::lock_guard<std::mutex> held(lock);
  watching = on, watch++;
  actors.clear(), streams.clear(), released.clear(), history.clear(), races.clear();
  std::fill(&engines[0][0], &engines[0][0] + 128, 0);
  new_actor();  // the host
}
long nullcuda_races() { std::lock_guard<std::mutex> held(lock); return races.size(); }
const char* nullcuda_race(long number) { std::lock_guard<std::mutex> held(lock); return races[number].c_str(); }
// The time by the device's clock when everything is done that was given so far, in microseconds.
double nullcuda_clock() {
  std::lock_guard<std::mutex> held(lock);
  double latest = 0;
  for (auto& actor : actors) latest = std::max(latest, actor.at);
  return latest;
}
// This thread is an actor of its own from now on, until the watch ends.
void nullcuda_set_apart() {
  std::lock_guard<std::mutex> held(lock);
  if (watching && apart.first != watch) apart = {watch, new_actor()};
}
// What this thread has seen passes to whoever acquires the same key later.
void nullcuda_release(const void* key) {
  std::lock_guard<std::mutex> held(lock);
  if (!watching) return;
  Moment& mine = actors[host()];
  released[key] = mine;
  mine.seen[host()]++;
}
void nullcuda_acquire(const void* key) {
  std::lock_guard<std::mutex> held(lock);
  auto found = released.find(key);
  if (watching && found != released.end()) join(actors[host()], found->second);
}
// An access of a kernel on a stream or, for the stream -1, of this thread.
void nullcuda_access(void* stream, const void* address, long size, int writes, const char* what) {
  if (!is_compared(address)) return;
  if (stream != (void*)-1) return order_work(stream, 0, {{address, (size_t)size, (bool)writes, what}});
  std::lock_guard<std::mutex> held(lock);
  if (!watching) return;
  note(host(), address, size, writes, what);
}
}
#pragma GCC visibility pop
