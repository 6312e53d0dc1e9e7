#include "core/helpers.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace bequest {
namespace {

constexpr unsigned kMost = 7;  // an image of a million pixels takes four milliseconds of one

struct Job {
  PartFn fn;
  void* context;
  int num_parts;
  int num_begun = 0;
  int num_ended = 0;
};

class Helpers {
 public:
  void run(Job& job) {
    std::unique_lock lock(mutex_);
    start();
    jobs_.push_back(&job);
    if (job.num_parts > 1) wake_.notify_all();
    while (job.num_begun < job.num_parts) do_part(job, lock);
    ended_.wait(lock, [&] { return job.num_ended == job.num_parts; });
  }

 private:
  void start() {
    for (; num_threads_ < num_helpers(); ++num_threads_) std::thread([this] { help(); }).detach();
  }

  void help() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return !jobs_.empty(); });
      do_part(*jobs_.front(), lock);
    }
  }

  // The next one of a job that has some left.
  void do_part(Job& job, std::unique_lock<std::mutex>& lock) {
    const int part = job.num_begun++;
    if (job.num_begun == job.num_parts) std::erase(jobs_, &job);
    lock.unlock();
    job.fn(job.context, part);
    lock.lock();
    if (++job.num_ended == job.num_parts) ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::vector<Job*> jobs_;  // of which parts are left to begin
  int num_threads_ = 0;
};

}  // namespace

int num_helpers() {
  static const auto num = static_cast<int>(std::clamp(std::thread::hardware_concurrency() / 2, 1u, kMost));
  return num;
}

void run_parts_erased(int num_parts, PartFn fn, void* context) {
  static auto* const helpers = new Helpers;  // its threads outlive whatever ends the process
  Job job{fn, context, num_parts};
  helpers->run(job);
}

void copy_in_parts(void* to, const void* from, size_t bytes) {
  constexpr size_t kLeast = 1 << 18;  // of a part
  if (bytes == 0) return;
  const size_t most = 1 + static_cast<size_t>(num_helpers());
  const size_t part = std::max(kLeast, (bytes + most - 1) / most);
  run_parts(static_cast<int>((bytes + part - 1) / part), [=](int number) {
    const size_t begin = part * static_cast<size_t>(number);
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                std::min(part, bytes - begin));
  });
}

}  // namespace bequest
