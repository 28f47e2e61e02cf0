// The threads behind `pg_parallel`. Compiled for the baseline.
//
// One word says which job is posted and how many of its parts nobody has taken; who takes the count down by one does that part. A job's
// description is only changed when all of its parts are done, so whoever took a part may read it.
//
// Who waits spins, and sleeps when that takes too long. A waiter that finds time missing between two looks at the clock shares its processor
// with others: from then on it sleeps early, and spins longer again with each piece of work that came in time.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#endif

namespace {

constexpr int64_t LONG_SPIN = 4'000'000;  // ns; longer than what lies between two steps of an engine
constexpr int64_t GREEDY_SPIN = 5'000;    // from here on whoever wants the processor is let in
constexpr int64_t SHORT_SPIN = 20'000;    // where others want the processor
constexpr int64_t JOIN_SPIN = 200'000;    // for parts that others have begun
constexpr int64_t STOLEN = 50'000;        // a gap that no interrupt explains
constexpr int MOST = 1023;                // threads beside the caller

int64_t now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Spins until `ready`; false when `limit` ns passed before. *stolen: whether the processor was taken away meanwhile.
template <class F>
bool spin(int64_t limit, bool* stolen, F ready) {
  int64_t start = 0, last = 0;
  for (;;) {
    for (int i = 0; i < 16; i++) {
      if (ready()) return true;
      relax();
    }
    int64_t time = now();
    if (!start) start = last = time;
    if (time - last > STOLEN) *stolen = true;
    if (time - start > limit || *stolen) return ready();
    last = time;
    if (time - start > GREEDY_SPIN) std::this_thread::yield();
  }
}

class Sleepers {
 public:
  // Sleeps until `ready`, which somebody makes true before calling `wake`.
  template <class F>
  void sleep(F ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    count_.fetch_add(1);
    condition_.wait(lock, ready);
    count_.fetch_sub(1);
  }
  void wake() {
    if (count_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // nobody is between looking and sleeping
    condition_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<int> count_{0};
};

thread_local bool inside = false;

class Pool {
 public:
  void run(int64_t parts, int threads, void (*body)(void*, int64_t), void* context) {
    if (inside || parts > UINT32_MAX || !owner_.try_lock()) {
      for (int64_t i = 0; i < parts; i++) body(context, i);
      return;
    }
    std::lock_guard<std::mutex> owned(owner_, std::adopt_lock);
    grow(std::min(threads - 1, MOST));
    parts_ = parts, body_ = body, context_ = context;
    done_.store(0, std::memory_order_relaxed);
    int helpers = (int)std::min<int64_t>(std::min(threads - 1, size_), parts - 1);
    helpers_.store(helpers, std::memory_order_relaxed);
    job_.store(((job_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | (uint64_t)parts);
    for (int id = 0; id < helpers; id++) idle_[id]->wake();
    inside = true;
    work();
    inside = false;
    join(parts);
  }

 private:
  // Takes parts until none is left.
  void work() {
    int64_t mine = 0, parts = 0;
    for (;;) {
      uint64_t job = job_.load(std::memory_order_acquire);
      uint32_t left = (uint32_t)job;
      if (left == 0) break;
      if (!job_.compare_exchange_weak(job, job - 1)) continue;
      parts = parts_;
      body_(context_, parts - left);
      mine++;
      if (left == 1) break;
    }
    if (mine && done_.fetch_add(mine) + mine == parts) waiting_.wake();
  }

  void join(int64_t parts) {
    auto ready = [&] { return done_.load() == parts; };
    bool stolen = false;
    if (!spin(join_spin_, &stolen, ready)) waiting_.sleep(ready);
    join_spin_ = stolen ? SHORT_SPIN : std::min(2 * join_spin_, JOIN_SPIN);
  }

  void grow(int count) {
    for (; size_ < count && !refused_; size_++) {
      if (!idle_[size_]) idle_[size_] = new Sleepers;
#if defined(__linux__) || defined(__APPLE__)
      sigset_t all, before;  // signals are for the threads of the program
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
      try {
        std::thread([this, id = size_] { serve(id); }).detach();
      } catch (const std::system_error&) {
        refused_ = true;  // no more threads to be had: there is work for those that are there
        size_--;
      }
#if defined(__linux__) || defined(__APPLE__)
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    }
  }

  void serve(int id) {
    inside = true;
    int64_t limit = LONG_SPIN;
    auto ready = [&] { return (uint32_t)job_.load() != 0 && id < helpers_.load(std::memory_order_relaxed); };
    for (;;) {
      bool stolen = false;
      if (!spin(limit, &stolen, ready)) idle_[id]->sleep(ready);
      limit = stolen ? SHORT_SPIN : std::min(2 * limit, LONG_SPIN);
      work();
    }
  }

  alignas(64) std::atomic<uint64_t> job_{0};  // number << 32 | parts that nobody has taken
  int64_t parts_ = 0;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  std::atomic<int> helpers_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) Sleepers waiting_;
  Sleepers* idle_[MOST] = {};
  std::mutex owner_;
  int size_ = 0;
  bool refused_ = false;
  int64_t join_spin_ = JOIN_SPIN;
};

// Never destroyed: threads look at it until the process ends. After a fork the child has none of the threads, and begins anew.
std::atomic<Pool*> pool{nullptr};

Pool* fresh() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool.store(new Pool);
#if defined(__linux__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool), inside = false; });
#endif
  });
  return pool.load();
}

}  // namespace

void pg_parallel(int64_t parts, int threads, void (*body)(void* context, int64_t part), void* context) {
  Pool* here = pool.load(std::memory_order_acquire);
  (here ? here : fresh())->run(parts, threads, body, context);
}
