// Runs loops and attention by several threads, for the thread sanitizer.

#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "heads.h"

// A pool that is full: it runs each task in the thread that schedules it.
struct FullPool {
  int64_t num_threads() const { return 4; }
  template <typename Task>
  void Schedule(Task task) {
    task();
  }
};

// Starts a thread for each task, and gives it time to be there.
struct Pool {
  std::vector<std::thread> threads;

  ~Pool() {
    for (std::thread& thread : threads) thread.join();
  }
  int64_t num_threads() const { return 4; }
  template <typename Task>
  void Schedule(const Task& task) {
    threads.emplace_back(task);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

// Queries of 4 texts, each of 9 positions and 8 heads, at 64 slots.
template <typename Value>
void Attend() {
  constexpr int64_t kEntries = 4 * 9, kHeads = 8, kSlots = 64, kWidth = 16;
  const std::vector<float> projections(kEntries * 3 * kHeads * kWidth, 0.5f);
  std::vector<Value> keys(4 * kHeads * kSlots * kWidth), values(keys.size());
  const bool mask[kEntries * kSlots] = {true, true};
  const int32_t start[4] = {0, 7, 20, 55};
  std::vector<float> out(kEntries * kHeads * kWidth);
  Pool pool;
  specdec::AttendAll<Value>(
      pool, {projections.data(), 4, 9, kHeads, kHeads, kWidth, kSlots, {}, {},
             nullptr, nullptr, 0, mask, start, keys.data(), values.data(), 1.0f,
             out.data()});
}

// The second loop reads what other threads have written in the first one. Later
// teams get the threads that still wait, and read what earlier ones have written.
template <typename Threads>
void Loop() {
  std::vector<int64_t> first(999), second(999);
  Threads pool;
  for (int64_t round = 0; round < 3; ++round) {
    specdec::Team team(pool, 4, 1 << 20);
    team.For(999, [&](int64_t i) { first[i] = second[i] + i; });
    team.For(999, [&](int64_t i) { second[i] = first[998 - i]; });
  }
  for (int64_t i = 0; i < 999; ++i) {
    if (second[i] != 1996 - i) std::abort();
  }
}

int main() {
  for (int i = 0; i < 100; ++i) {
    Loop<FullPool>();
    Loop<Pool>();
    Attend<float>();
    Attend<uint16_t>();
  }
}
