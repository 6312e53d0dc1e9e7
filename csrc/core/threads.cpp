#include "core/threads.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/check.h"

namespace bequest {
namespace {

using namespace std::chrono_literals;

// Kernels of one step follow each other within microseconds: a worker waits that long before it sleeps.
constexpr auto kWorkerPatience = 100us;
// The caller waits for chunks in progress; past this a worker has probably lost its core, so give it ours.
constexpr auto kCallerPatience = 200us;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("isb");  // `yield` is a no-op on most cores
#endif
}

template <class Ready>
bool spin_until(Ready ready, std::chrono::nanoseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

// A range of chunks is one word, its end and its next chunk, so that one fetch_add claims a chunk and tells
// whether there is one. A thread that comes late claims past the end and goes on; nobody waits for it.
constexpr int kFieldBits = 31;
constexpr uint64_t kFieldMask = (uint64_t{1} << kFieldBits) - 1;
constexpr int64_t kMaxChunks = int64_t{1} << (kFieldBits - 1);  // leaves room for late claims past the end

struct alignas(64) ChunkRange {
  std::atomic<uint64_t> word{0};

  void set(int64_t begin, int64_t end) {
    word.store(static_cast<uint64_t>(end) << kFieldBits | static_cast<uint64_t>(begin),
               std::memory_order_release);
  }
  // The next chunk, or -1.
  int64_t claim() {
    const uint64_t ticket = word.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t chunk = ticket & kFieldMask;
    return chunk < ticket >> kFieldBits ? static_cast<int64_t>(chunk) : -1;
  }
};

class ThreadPool {
 public:
  explicit ThreadPool(int threads) : size_(threads), ranges_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~ThreadPool() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  void run(int64_t count, int64_t grain, ChunkFn fn, void* context) {
    if (const int64_t least = (count + kMaxChunks - 1) / kMaxChunks; grain < least) grain = least;
    const int64_t chunks = (count + grain - 1) / grain;
    if (chunks <= 1 || size_ == 1 || busy_.exchange(true, std::memory_order_acquire)) {
      fn(context, 0, 0, count);
      return;
    }
    fn_ = fn;
    context_ = context;
    count_ = count;
    grain_ = grain;
    done_.store(0, std::memory_order_relaxed);
    // Who is still looking for chunks of the job before may find one of these: all about it is written
    // already.
    for (int i = 0; i < size_; ++i) ranges_[i].set(chunks * i / size_, chunks * (i + 1) / size_);
    wake_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
    take_chunks(0);
    const auto finished = [&] { return done_.load(std::memory_order_acquire) == chunks; };
    if (!spin_until(finished, kCallerPatience))
      while (!finished()) std::this_thread::yield();
    busy_.store(false, std::memory_order_release);
  }

 private:
  void take_chunks(int worker) {
    for (int i = 0; i < size_; ++i) {
      ChunkRange& range = ranges_[(worker + i) % size_];
      for (int64_t chunk; (chunk = range.claim()) >= 0;) {
        // The claimed chunk is not done, so the job cannot be replaced under us.
        const int64_t begin = chunk * grain_;
        const int64_t end = begin + grain_ < count_ ? begin + grain_ : count_;
        fn_(context_, worker, begin, end);
        done_.fetch_add(1, std::memory_order_release);
      }
    }
  }

  void work(int worker) {
    uint32_t seen = 0;
    while (true) {
      spin_until([&] { return wake_.load(std::memory_order_acquire) != seen; }, kWorkerPatience);
      wake_.wait(seen, std::memory_order_acquire);
      seen = wake_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      take_chunks(worker);
    }
  }

  const int size_;
  std::vector<ChunkRange> ranges_;
  std::vector<std::thread> workers_;
  std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> wake_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  ChunkFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  int64_t grain_ = 1;
};

// Never destroyed: at exit a daemon thread may still be inside a kernel.
ThreadPool*& pool() {
  static ThreadPool* instance = new ThreadPool(1);
  return instance;
}

}  // namespace

void set_num_threads(int n) {
  check(n >= 1, "the number of threads must be at least 1");
  if (pool()->size() == n) return;
  delete pool();
  pool() = new ThreadPool(n);
}

int num_threads() { return pool()->size(); }

void parallel_for_erased(int64_t count, int64_t grain, ChunkFn fn, void* context) {
  if (count <= 0) return;
  pool()->run(count, grain < 1 ? 1 : grain, fn, context);
}

}  // namespace bequest
