#include "threads/pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <stdexcept>
#include <thread>
#include <vector>

#include "memory/buffer.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

// Before main, so that the pool's fork handlers are always the first to be registered, as in a program that
// sets its thread count when it starts.
const int kDefaultThreads = thread_count();

// Each task once? Returns how many were not.
uint32_t wrong_runs(uint32_t tasks) {
  std::vector<std::atomic<uint32_t>> runs(tasks);
  parallel(tasks, [&](uint32_t task) { runs.at(task).fetch_add(1); });
  uint32_t wrong = 0;
  for (const auto& r : runs) wrong += r.load() != 1;
  return wrong;
}

// Runs `body` in a child with a time limit; true if it ends in time and returns true.
template <class Body>
bool succeeds_in_child(Body&& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Shares a team of three threads, and three it shall be.
struct WithTeam {
  explicit WithTeam(Team team) {
    set_thread_count(3);
    share_team(team);
  }
  ~WithTeam() {
    share_team({});
    set_thread_count(before);
  }
  int before = thread_count();
};

}  // namespace

TEST(parallel_runs_each_task_once) {
  CHECK(kDefaultThreads >= 1);
  for (int threads : {1, 2, 4}) {
    const WithThreads with(threads);
    CHECK_EQ(thread_count(), threads);
    for (uint32_t tasks : {0u, 1u, 2u, 3u, 7u, 64u, 1000u}) CHECK_EQ(wrong_runs(tasks), 0u);
  }
}

TEST(thread_count_may_change_between_calls) {
  const int before = thread_count();
  {
    const Exclusive exclusive;
    Random random(1);
    for (int i = 0; i < 60; ++i) {
      set_thread_count(static_cast<int>(1 + below(random, 5)));
      CHECK_EQ(wrong_runs(static_cast<uint32_t>(below(random, 40))), 0u);
    }
    set_thread_count(0);
    CHECK_EQ(thread_count(), 1);
  }
  set_thread_count(before);
}

TEST(nested_parallel_runs_inline) {
  const WithThreads with(4);
  std::atomic<uint32_t> runs{0}, elsewhere{0};
  parallel(20, [&](uint32_t) {
    const auto me = std::this_thread::get_id();
    parallel(30, [&](uint32_t) {
      runs.fetch_add(1);
      elsewhere.fetch_add(std::this_thread::get_id() != me);
    });
  });
  CHECK_EQ(runs.load(), 600u);
  CHECK_EQ(elsewhere.load(), 0u);
}

TEST(an_exception_comes_out_after_the_other_tasks_ended) {
  for (int threads : {2, 4}) {
    const WithThreads with(threads);
    for (uint32_t thrower : {0u, 17u, 49u}) {
      std::atomic<uint32_t> ended{0};
      bool caught = false;
      try {
        parallel(50, [&](uint32_t task) {
          if (task == thrower) throw std::runtime_error("task failed");
          ended.fetch_add(1);
        });
      } catch (const std::runtime_error& error) {
        caught = std::string(error.what()) == "task failed";
      }
      CHECK(caught);
      CHECK_EQ(ended.load(), 49u);
      CHECK_EQ(wrong_runs(50), 0u);
    }
    // Several at once: one of them comes out, none later.
    bool caught = false;
    try {
      parallel(50, [](uint32_t) { throw std::runtime_error("all fail"); });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    CHECK(caught);
    CHECK_EQ(wrong_runs(50), 0u);
  }
  const WithThreads alone(1);
  bool caught = false;
  try {
    parallel(3, [](uint32_t) { throw std::runtime_error("inline"); });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  CHECK(caught);
}

// Sizes change from job to job: a worker that is late for a small job must not take a task of the larger one
// that follows while that is being set up.
TEST(many_tiny_jobs_finish_with_each_task_run_once) {
  for (int threads : {2, 4}) {
    const WithThreads with(threads);
    Random random(2);
    std::vector<std::atomic<uint32_t>> runs(24);
    uint64_t wrong = 0;
    for (int job = 0; job < 10000; ++job) {
      const auto tasks = static_cast<uint32_t>(job % 2 ? 12 + below(random, 12) : 2 + below(random, 3));
      for (uint32_t t = 0; t < tasks; ++t) runs[t].store(0, std::memory_order_relaxed);
      parallel(tasks, [&](uint32_t task) { runs[task].fetch_add(1, std::memory_order_relaxed); });
      for (uint32_t t = 0; t < tasks; ++t) wrong += runs[t].load(std::memory_order_relaxed) != 1;
    }
    CHECK_EQ(wrong, 0u);
  }
}

TEST(exclusive_lets_one_operation_run_at_a_time) {
  const int before = thread_count();
  set_thread_count(2);
  std::atomic<int> inside{0}, clashes{0}, wrong{0};
  auto work = [&] {
    for (int i = 0; i < 300; ++i) {
      const Exclusive exclusive;
      clashes.fetch_add(inside.fetch_add(1) != 0);
      wrong.fetch_add(static_cast<int>(wrong_runs(9)));
      inside.fetch_sub(1);
    }
  };
  std::thread other(work);
  work();
  other.join();
  CHECK_EQ(clashes.load(), 0);
  CHECK_EQ(wrong.load(), 0);
  set_thread_count(before);
}

// What OpenMP does, by threads that are started for every job.
std::atomic<int> team_jobs{0};
int team_width = 3;
void run_team(void (*body)(void*), void* argument, unsigned threads, unsigned) {
  team_jobs.fetch_add(1);
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(body, argument);
  body(argument);
  for (std::thread& other : others) other.join();
}
const Team kTeam{run_team, [] { return team_width; }};

TEST(a_team_runs_operations_of_the_first_thread) {
  const WithTeam with(kTeam);
  team_jobs = 0;
  {
    const Exclusive exclusive;
    CHECK_EQ(wrong_runs(50), 0u);
    CHECK_EQ(wrong_runs(2), 0u);
    bool caught = false;
    try {
      parallel(20, [](uint32_t task) {
        if (task == 7) throw std::runtime_error("seven");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    CHECK(caught);
  }
  CHECK_EQ(team_jobs.load(), 3);
  std::thread([] {
    const Exclusive exclusive;
    CHECK_EQ(wrong_runs(50), 0u);
  }).join();
  CHECK_EQ(team_jobs.load(), 3);  // another thread has no team of its own
  team_width = 2;
  {
    const Exclusive exclusive;
    CHECK_EQ(wrong_runs(50), 0u);
  }
  CHECK_EQ(team_jobs.load(), 3);  // nor is one used that has another size
  team_width = 3;
}

#if !KARVAN_TSAN  // which does not follow threads into a forked child

TEST(a_forked_child_has_no_team) {
  const WithTeam with(kTeam);
  CHECK(succeeds_in_child([] {
    team_jobs = 0;
    const Exclusive exclusive;
    return wrong_runs(50) == 0 && team_jobs.load() == 0;
  }));
}

TEST(a_forked_child_runs_parallel_with_its_own_threads) {
  const int before = thread_count();
  set_thread_count(4);
  {
    const Exclusive exclusive;
    CHECK_EQ(wrong_runs(50), 0u);  // the parent's workers exist now
  }
  CHECK(succeeds_in_child([] {
    const Exclusive exclusive;
    return wrong_runs(100) == 0 && wrong_runs(3) == 0;
  }));
  const Exclusive exclusive;
  CHECK_EQ(wrong_runs(50), 0u);
  set_thread_count(before);
}

TEST(fork_waits_for_a_running_operation_and_does_not_block_it) {
  // In a child, because a deadlock is what may go wrong.
  CHECK(succeeds_in_child([] {
    set_thread_count(2);
    std::atomic<bool> stop{false};
    std::thread busy([&] {
      while (!stop.load()) {
        const Exclusive exclusive;
        for (int i = 0; i < 20; ++i) const Buffer scratch(10000);
        wrong_runs(4);
      }
    });
    bool good = true;
    for (int i = 0; i < 60; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        const Exclusive exclusive;
        const Buffer scratch(10000);
        _exit(wrong_runs(8) == 0 ? 0 : 1);
      }
      int status = 1;
      waitpid(child, &status, 0);
      good &= status == 0;
    }
    stop.store(true);
    busy.join();
    return good;
  }));
}

#endif
