// Threads that work through loops together.

#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace specdec {

// The calling thread and, if there is much to do, threads of a pool, for a few
// loops after one another. A pool has `num_threads()` and `Schedule(task)`.
//
// Each thread takes the indices of a part of its own, which are next to one
// another, and then indices that are left of the others' parts. The calling
// thread waits only for indices that another thread has begun, so a pool that
// is busy or blocked delays nothing. Between two loops the others wait without
// sleeping. They are released when the team goes out of scope, and wait a little
// for the next team, which has them sooner than sleeping threads wake up.
class Team {
 public:
  // At most `most` threads take part, and one alone if only few `bytes` are read
  // (or products computed): waking up takes longer than to read kMinBytes.
  template <typename Pool>
  Team(Pool& pool, int64_t most, int64_t bytes) {
    // XLA reports 0 threads where it does not know the number.
    const int64_t threads = bytes < kMinBytes ? 1 : pool.num_threads();
    size_ = std::max<int64_t>(std::min({threads, most, kMaxThreads}), 1);
    shared_ = std::make_shared<Shared>(size_);
    for (int64_t i = 1; i < size_; ++i) {
      if (Seat::Give(shared_)) continue;
      // A pool whose queue is full runs the task at once, in this thread, which
      // must not wait for itself.
      pool.Schedule([shared = shared_, id = std::this_thread::get_id()]() mutable {
        if (id == std::this_thread::get_id()) return;
        if (!shared->Help()) return;
        while (Seat::Wait(shared)) shared->Help();
      });
    }
  }

  ~Team() { shared_->published.store(kClosed, std::memory_order_release); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int64_t size() const { return size_; }

  // Calls `body(index)` for all indices below `count`; at most kMaxLoops times.
  template <typename Body>
  void For(int64_t count, const Body& body) {
    assert(number_ < kMaxLoops);
    Loop& loop = shared_->loops[number_++];
    loop.count = count;
    loop.body = &body;
    loop.call = [](const void* body, int64_t index) {
      (*static_cast<const Body*>(body))(index);
    };
    shared_->published.store(number_, std::memory_order_release);
    shared_->Work(loop, 0);
    Wait([&] { return loop.done.load(std::memory_order_acquire) == count; });
  }

 private:
  static constexpr int64_t kMinBytes = 1 << 18;
  static constexpr int64_t kMaxThreads = 64;
  // Longer than what XLA computes between two kernels of a forward.
  static constexpr std::chrono::microseconds kPatience{100};
  static constexpr int kMaxLoops = 2;
  static constexpr int kClosed = kMaxLoops + 1;

  struct alignas(64) Part {
    std::atomic<int64_t> next{0};
  };

  struct Loop {
    int64_t count = 0;
    const void* body = nullptr;
    void (*call)(const void* body, int64_t index) = nullptr;
    std::vector<Part> parts;
    alignas(64) std::atomic<int64_t> done{0};
  };

  struct Shared {
    explicit Shared(int64_t size) {
      for (Loop& loop : loops) loop.parts = std::vector<Part>(size);
    }

    // Takes indices of the part `own`, then of the parts after it. What is done
    // is counted in the end, as threads disturb one another there.
    void Work(Loop& loop, int64_t own) {
      const int64_t size = loop.parts.size();
      int64_t done = 0;
      for (int64_t i = 0; i < size; ++i) {
        const int64_t part = (own + i) % size;
        const int64_t begin = part * loop.count / size;
        const int64_t length = (part + 1) * loop.count / size - begin;
        // A thread that comes late gets no index, and does not touch the body.
        for (int64_t next; (next = loop.parts[part].next.fetch_add(1)) < length;
             ++done) {
          loop.call(loop.body, begin + next);
        }
      }
      if (done > 0) loop.done.fetch_add(done, std::memory_order_release);
    }

    // Whether the team was still there.
    bool Help() {
      const int64_t own = helpers.fetch_add(1) + 1;
      for (int number = 0; number < kMaxLoops; ++number) {
        int seen = 0;
        Wait([&] {
          seen = published.load(std::memory_order_acquire);
          return seen > number;
        });
        if (seen == kClosed) return number > 0;
        Work(loops[number], own);
      }
      return true;
    }

    std::atomic<int> published{0};  // Loops that may be worked at.
    std::atomic<int64_t> helpers{0};
    Loop loops[kMaxLoops];
  };

  // Where a thread waits for its next team. A team or the thread itself ends the
  // wait, whichever changes the state first.
  struct alignas(64) Seat {
    enum State { kFree, kWaits, kTaken, kGiven };

    std::atomic<int> state{kFree};
    std::shared_ptr<Shared> team;

    static auto& All() {
      static Seat seats[kMaxThreads];
      return seats;
    }

    bool Change(int from, int to) {
      return state.load(std::memory_order_relaxed) == from &&
             state.compare_exchange_strong(from, to);
    }

    // Whether there was a thread, which now works for the team.
    static bool Give(const std::shared_ptr<Shared>& team) {
      for (Seat& seat : All()) {
        if (!seat.Change(kWaits, kTaken)) continue;
        seat.team = team;
        seat.state.store(kGiven, std::memory_order_release);
        return true;
      }
      return false;
    }

    // Whether `team` is another one now, for which the thread has to work.
    static bool Wait(std::shared_ptr<Shared>& team) {
      using Clock = std::chrono::steady_clock;
      for (Seat& seat : All()) {
        if (!seat.Change(kFree, kWaits)) continue;
        team.reset();
        const auto end = Clock::now() + kPatience;
        bool is_given = false;
        Team::Wait([&] {
          is_given = seat.state.load(std::memory_order_acquire) == kGiven;
          return is_given ||
                 (Clock::now() > end && seat.Change(kWaits, kFree));
        });
        if (!is_given) return false;
        team = std::move(seat.team);
        seat.state.store(kFree, std::memory_order_release);
        return true;
      }
      return false;
    }
  };

  // Waits until `is_done()`, at first without giving up the processor. Nobody
  // sleeps, since waking up takes longer than most loops. That is right also
  // where there are more threads than processors: the wait ends with the call
  // of a kernel, a yield lets threads run that have work, and the calling
  // thread takes all indices that no helper has begun, so it waits for none
  // that was not given a processor.
  template <typename IsDone>
  static void Wait(const IsDone& is_done) {
    for (int i = 0; !is_done(); ++i) {
#if defined(__x86_64__)
      if (i < 1000) {
        __builtin_ia32_pause();
        continue;
      }
#endif
      std::this_thread::yield();
    }
  }

  int64_t size_;
  int number_ = 0;
  std::shared_ptr<Shared> shared_;
};

}  // namespace specdec
