#include "core/threads.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "core/check.h"

namespace bequest {
namespace {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

// Epoch, number of chunks and next chunk live in one word, so that one fetch_add both claims a chunk and
// tells whose chunk it is. A worker that wakes late claims past the end and goes back to sleep; the caller
// never waits for it.
constexpr int kFieldBits = 20;
constexpr uint64_t kFieldMask = (1u << kFieldBits) - 1;
constexpr int64_t kMaxChunks = 1 << (kFieldBits - 1);  // leaves room for late claims past the end

class ThreadPool {
 public:
  explicit ThreadPool(int threads) : size_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~ThreadPool() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  void run(int64_t count, int64_t grain, ChunkFn fn, void* context) {
    int64_t chunks = (count + grain - 1) / grain;
    if (chunks > kMaxChunks) {
      grain = (count + kMaxChunks - 1) / kMaxChunks;
      chunks = (count + grain - 1) / grain;
    }
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (chunks <= 1 || size_ == 1 || !lock.owns_lock()) {
      fn(context, 0, count);
      return;
    }
    fn_ = fn;
    context_ = context;
    count_ = count;
    grain_ = grain;
    done_.store(0, std::memory_order_relaxed);
    ++epoch_;
    state_.store(epoch_ << (2 * kFieldBits) | static_cast<uint64_t>(chunks) << kFieldBits,
                 std::memory_order_release);
    wake_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
    take_chunks();
    for (int spins = 0; done_.load(std::memory_order_acquire) < chunks; ++spins) {
      if (spins < 4096) {
        pause_cpu();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void take_chunks() {
    while (true) {
      const uint64_t ticket = state_.fetch_add(1, std::memory_order_acq_rel);
      const uint64_t chunks = ticket >> kFieldBits & kFieldMask;
      const uint64_t chunk = ticket & kFieldMask;
      if (chunk >= chunks) return;
      // The claimed chunk is not done, so the job cannot be replaced under us.
      const int64_t begin = static_cast<int64_t>(chunk) * grain_;
      const int64_t end = begin + grain_ < count_ ? begin + grain_ : count_;
      fn_(context_, begin, end);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void work() {
    uint32_t seen = 0;
    while (true) {
      // Kernels of one step follow each other within microseconds: spin that long before sleeping.
      for (int spins = 0; spins < 2000 && wake_.load(std::memory_order_acquire) == seen; ++spins) pause_cpu();
      wake_.wait(seen, std::memory_order_acquire);
      seen = wake_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      take_chunks();
    }
  }

  const int size_;
  std::vector<std::thread> workers_;
  std::mutex busy_;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> wake_{0};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  uint64_t epoch_ = 0;
  ChunkFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  int64_t grain_ = 1;
};

std::unique_ptr<ThreadPool>& pool() {
  static std::unique_ptr<ThreadPool> instance = std::make_unique<ThreadPool>(1);
  return instance;
}

}  // namespace

void set_num_threads(int n) {
  check(n >= 1, "the number of threads must be at least 1");
  if (pool()->size() != n) pool() = std::make_unique<ThreadPool>(n);
}

int num_threads() { return pool()->size(); }

void parallel_for_erased(int64_t count, int64_t grain, ChunkFn fn, void* context) {
  if (count <= 0) return;
  pool()->run(count, grain < 1 ? 1 : grain, fn, context);
}

}  // namespace bequest
