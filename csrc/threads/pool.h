// The core's own threads.
//
// One batch operation runs at a time in a process and uses all configured threads; the caller works too, so n threads
// means n - 1 workers. Idle workers spin for a few microseconds, then sleep, so that torch's threads have the cores
// between our calls. A fork waits for the running operation; the child starts its own workers on first use.
//
// Torch's threads do not: those of OpenMP spin for milliseconds on a core that our worker needs. So if share_team has said
// how to run something on them, operations of the process's first thread, where torch has them, use no workers.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>

namespace karvan {

// A reference to a callable void(uint32_t task), valid for the duration of one call.
class TaskRef {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, TaskRef>)
  TaskRef(F&& f)  // NOLINT: conversion is the point
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, uint32_t task) { (*static_cast<std::remove_reference_t<F>*>(object))(task); }) {}
  void operator()(uint32_t task) const { call_(object_, task); }

 private:
  void* object_;
  void (*call_)(void*, uint32_t);
};

// Holds the process-wide right to run a batch operation.
class Exclusive {
 public:
  Exclusive();
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

 private:
  std::unique_lock<std::mutex> lock_;
};

bool operation_waits();  // does anybody wait for an Exclusive?

// While it lives, this thread runs parallel() by itself. Work that touches no table then needs no Exclusive, and can run
// at the same time as an operation.
class Alone {
 public:
  Alone();
  ~Alone();
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  bool before_;
};

int thread_count();
void set_thread_count(int count);  // count >= 1; takes effect with the next operation

// How OpenMP runs body(argument) on `threads` threads of the caller's team, itself included, and says how many it has.
struct Team {
  void (*run)(void (*body)(void*), void* argument, unsigned threads, unsigned flags) = nullptr;
  int (*width)() = nullptr;
};
void share_team(Team team);  // a Team{} makes all operations use the core's own threads again

// Runs task(0) … task(tasks - 1), each once, on all threads, and returns when all are done. The caller holds an
// Exclusive. The first exception a task throws is thrown again here after the others have finished. Inside a task it
// runs everything on the task's own thread.
void parallel(uint32_t tasks, TaskRef task);
uint32_t parallel_width();  // threads that parallel() would use if it were called here

}  // namespace karvan
