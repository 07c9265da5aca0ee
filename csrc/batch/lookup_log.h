// Lookups that ran before their batch is trained, and the contents of tables without them.
//
// A training lookup counts the uses of its keys at once, but its batch may be trained much later, or never. The log holds
// every lookup from its run until its batch is trained. A capture asks it for corrections: for each key of a lookup in
// flight, the count and last use by the batches trained so far, and whether these would have admitted the key.
// The live table stays as it is. A lookup that is withdrawn, because its batch will never be trained, is undone in the
// live table in the same way.
//
// The reference is a replay: start with the state of a key that the oldest lookup in the log found, and repeat the uses of
// the batches that have been trained, in the order of their lookups. So trained lookups stay in the log as long as an older
// one, of another trainer, is in flight. If many accumulate because a trainer has stopped, they are folded into one state
// for each key of the lookups in flight; a batch that is trained later is replayed after them, which can change at which
// use a key is admitted, not how many uses are counted from then on.
//
// Rows that a lookup in flight has evicted are not restored.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "batch/plan.h"
#include "table/capture.h"

namespace karvan {

class LookupLog {
 public:
  // Inside of a batch operation: a plan that was run for training, with what it found.
  void add(std::shared_ptr<Plan> plan);
  void trained(const Plan* plan);  // at any time; plans that are not in the log are ignored
  // Inside of a batch operation: these batches will never be trained.
  void withdraw(const std::vector<const Plan*>& plans);

  // Inside of a batch operation: a table without the lookups in flight, sorted by hash; then the counters of its filter.
  std::vector<Correction> corrections(const Table& table);
  void correct_filter(const Table& table, uint8_t* counters);

  size_t in_flight() const;
  size_t size() const;  // with those that were trained, and not folded yet

 private:
  struct Lookup {
    std::shared_ptr<Plan> plan;
    uint64_t number;                // in the order of runs
    bool trained = false;           // otherwise it is in flight
    bool folded = false;            // states_ has what it found
    std::vector<uint64_t> cleared;  // by slot: how often its table had been emptied
  };
  // A key as the batches trained so far make it.
  struct State {
    uint64_t hash = 0;
    bool used = false, known = false, present = false;
    uint32_t count = 0, last = 0;
    uint32_t filter = 0;       // the count of the admission filter for a key without a row
    int64_t filter_extra = 0;  // uses that the filter should have counted, minus those that it has counted
  };
  // Open addressing by the hash, which is well mixed.
  class States {
   public:
    explicit States(size_t keys = 0);
    const State* find(uint64_t hash) const;
    State* find(uint64_t hash) { return const_cast<State*>(std::as_const(*this).find(hash)); }
    State& at(uint64_t hash);  // an unused one becomes this key's
    template <class F>
    void each(F&& f) {
      for (State& state : states_)
        if (state.used) f(state);
    }

   private:
    std::vector<State> states_;
    uint64_t mask_ = 0;
  };

  using Keys = std::unordered_map<const Table*, States>;
  template <class F>
  Keys keys_of(F&& chosen) const;  // of the lookups for which chosen(Lookup), with what states_ knows of them
  Keys replay() const;             // the keys of lookups in flight
  void fold();
  void trim();
  void rewrite(Table& table, States& wanted);  // the lookups that stay, and the table, after others have been withdrawn
  static void start(State& state, uint32_t count, uint32_t last);
  static void use(const Table& table, State& state, uint32_t uses, uint32_t step);
  template <class F>
  static void each_slot(const Lookup& lookup, F&& f);  // f(table, slot) for the tables that have not been emptied since

  mutable std::mutex mutex_;
  std::vector<Lookup> lookups_;
  Keys states_;  // after a fold
  uint64_t added_ = 0, folded_at_ = 0;
};

}  // namespace karvan
