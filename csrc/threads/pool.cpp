#include "threads/pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "memory/buffer.h"
#include "threads/relax.h"

namespace karvan {
namespace {

// How long a worker looks out for the next job before it sleeps: about as long as Python takes from one call of a step to
// the next, because waking costs more than that. After the first spins it yields the core to other threads.
constexpr int kSpins = 1500, kSpinsPerLook = 32;
constexpr auto kWatchful = std::chrono::microseconds(300);
constexpr uint32_t kClosed = UINT32_MAX;  // past the last task of any job
thread_local bool inside_task = false;

// One job at a time. `ticket` packs (job number, next task): a worker claims a task by advancing the ticket, which
// fails once the job has changed, so a worker that wakes late can neither run nor disturb a later job. The ticket is
// closed before the next job's fields are written: whoever has seen one of them can no longer claim on the old ticket.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {}

  ~Pool() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // `team` may run the workers' part; without it they do it themselves.
  void run(uint32_t tasks, const TaskRef& task, const Team& team) {
    const uint64_t job = static_cast<uint64_t>(++job_) << 32;
    ticket_.store(job | kClosed, std::memory_order_release);
    task_.store(&task, std::memory_order_release);
    tasks_.store(tasks, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    ticket_.store(job, std::memory_order_release);
    if (team.run) {
      team.run([](void* pool) { static_cast<Pool*>(pool)->help(); }, this, static_cast<unsigned>(threads_), 0);
    } else {
      while (static_cast<int>(workers_.size()) + 1 < threads_) workers_.emplace_back([this] { work(); });
      wake_.fetch_add(1, std::memory_order_release);
      wake_.notify_all();
      help();
    }
    for (int spin = 0; done_.load(std::memory_order_acquire) != tasks; ++spin) {
      if (spin < kSpins) relax();
      else sched_yield();
    }
    if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

 private:
  void help() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    const uint32_t job = ticket >> 32;
    for (;;) {
      const TaskRef* task = task_.load(std::memory_order_acquire);
      const uint32_t tasks = tasks_.load(std::memory_order_acquire);
      const uint32_t next = static_cast<uint32_t>(ticket);
      if (next >= tasks || ticket >> 32 != job) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire)) {
        continue;
      }
      inside_task = true;
      try {
        (*task)(next);
      } catch (...) {
        std::lock_guard guard(error_mutex_);
        if (!error_) error_ = std::current_exception();
      }
      inside_task = false;
      done_.fetch_add(1, std::memory_order_acq_rel);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work() {
    uint32_t seen = 0;
    while (!stop_.load(std::memory_order_acquire)) {
      const uint32_t now = watch(seen);
      if (now == seen) {
        wake_.wait(seen, std::memory_order_acquire);
        continue;
      }
      seen = now;
      help();
    }
  }

  // Returns another value of wake_ than the one seen, or that one after a while.
  uint32_t watch(uint32_t seen) const {
    uint32_t now = wake_.load(std::memory_order_acquire);
    for (int spin = 0; now == seen && spin < kSpins; ++spin) {
      relax();
      now = wake_.load(std::memory_order_acquire);
    }
    const auto until = std::chrono::steady_clock::now() + kWatchful;
    while (now == seen && std::chrono::steady_clock::now() < until) {
      sched_yield();
      for (int spin = 0; now == seen && spin < kSpinsPerLook; ++spin) {
        relax();
        now = wake_.load(std::memory_order_acquire);
      }
    }
    return now;
  }

  const int threads_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<const TaskRef*> task_{nullptr};
  std::atomic<uint32_t> tasks_{0};
  std::atomic<bool> stop_{false};
  uint32_t job_ = 0;
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

int default_threads() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) return std::max(1, CPU_COUNT(&cpus));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Never destroyed: a worker may still sleep when the process exits.
struct Process {
  std::mutex running;
  std::atomic<int> waiting{0};
  std::atomic<int> wanted{default_threads()};
  Pool* pool = nullptr;
  Team team;

  // The team that an operation of this thread may use. With another number of threads than torch uses, OpenMP would end
  // and start threads at every change.
  Team team_here(int threads) const {
    static thread_local const bool first = getpid() == static_cast<pid_t>(syscall(SYS_gettid));
    return first && team.run && team.width() == threads ? team : Team{};
  }
};

Process& process();

void before_fork() {  // in the order in which an operation takes them
  process().running.lock();
  lock_buffers();
}

void after_fork() {
  unlock_buffers();
  process().running.unlock();
}

void after_fork_in_child() {
  process().pool = nullptr;  // its threads do not exist here, nor do OpenMP's
  process().team = {};
  after_fork();
}

Process& process() {
  static Process* const instance = [] {
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    return new Process;
  }();
  return *instance;
}

[[maybe_unused]] const bool registered = (process(), true);  // before the first fork, whoever makes it

}  // namespace

Exclusive::Exclusive() : lock_(process().running, std::try_to_lock) {
  if (lock_.owns_lock()) return;
  process().waiting.fetch_add(1);
  lock_.lock();
  process().waiting.fetch_sub(1);
}

bool operation_waits() { return process().waiting.load() > 0; }

Alone::Alone() : before_(inside_task) { inside_task = true; }
Alone::~Alone() { inside_task = before_; }

int thread_count() { return process().wanted.load(); }

void set_thread_count(int count) { process().wanted.store(std::max(1, count)); }

void share_team(Team team) {
  Exclusive exclusive;
  process().team = team;
}

uint32_t parallel_width() { return inside_task ? 1 : static_cast<uint32_t>(thread_count()); }

void parallel(uint32_t tasks, TaskRef task) {
  if (tasks <= 1 || parallel_width() == 1) {
    for (uint32_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  Process& p = process();
  const int wanted = p.wanted.load();
  if (!p.pool || p.pool->threads() != wanted) {
    delete p.pool;
    p.pool = nullptr;
    p.pool = new Pool(wanted);
  }
  p.pool->run(tasks, task, p.team_here(wanted));
}

}  // namespace karvan
