#include "batch/lookup_log.h"

#include <algorithm>
#include <bit>

namespace karvan {
namespace {

constexpr size_t kTrainedAtMost = 64;  // trained lookups that wait for an older one, until they are folded

uint32_t saturating_add(uint32_t a, uint32_t b) { return a > UINT32_MAX - b ? UINT32_MAX : a + b; }

}  // namespace

LookupLog::States::States(size_t keys) : states_(keys ? std::bit_ceil(2 * keys) : 0), mask_(states_.size() - 1) {}

const LookupLog::State* LookupLog::States::find(uint64_t hash) const {
  if (states_.empty()) return nullptr;
  for (uint64_t i = hash & mask_;; i = (i + 1) & mask_) {
    if (!states_[i].used) return nullptr;
    if (states_[i].hash == hash) return &states_[i];
  }
}

LookupLog::State& LookupLog::States::at(uint64_t hash) {
  uint64_t i = hash & mask_;
  while (states_[i].used && states_[i].hash != hash) i = (i + 1) & mask_;
  states_[i].used = true;
  states_[i].hash = hash;
  return states_[i];
}

template <class F>
void LookupLog::each_slot(const Lookup& lookup, F&& f) {
  for (uint32_t slot = 0; slot < lookup.plan->slots(); ++slot) {
    Table* const table = lookup.plan->table(slot);
    if (table->cleared() == lookup.cleared[slot]) f(*table, slot);
  }
}

void LookupLog::add(std::shared_ptr<Plan> plan) {
  std::vector<uint64_t> cleared;
  for (uint32_t slot = 0; slot < plan->slots(); ++slot) cleared.push_back(plan->table(slot)->cleared());
  const std::lock_guard lock(mutex_);
  lookups_.push_back({std::move(plan), ++added_, false, false, std::move(cleared)});
}

void LookupLog::trained(const Plan* plan) {
  const std::lock_guard lock(mutex_);
  for (Lookup& lookup : lookups_)
    if (lookup.plan.get() == plan) lookup.trained = true;
  trim();
}

void LookupLog::trim() {
  uint64_t oldest = UINT64_MAX;
  for (const Lookup& lookup : lookups_)
    if (!lookup.trained) oldest = std::min(oldest, lookup.number);
  // What a later lookup found has all uses of those that were in flight at the fold: they have been trained since.
  if (oldest > folded_at_) states_.clear();
  if (states_.empty()) std::erase_if(lookups_, [&](const Lookup& lookup) { return lookup.number < oldest; });
  const auto waiting = std::count_if(lookups_.begin(), lookups_.end(), [](const Lookup& lookup) { return lookup.trained; });
  if (static_cast<size_t>(waiting) > kTrainedAtMost) fold();
}

void LookupLog::start(State& state, uint32_t count, uint32_t last) {
  const bool absent = last == Plan::kAbsent;
  state.known = true;
  state.present = !absent;
  state.count = absent ? 0 : count;
  state.last = absent ? 0 : last;
  state.filter = absent ? count : 0;
}

void LookupLog::use(const Table& table, State& state, uint32_t uses, uint32_t step) {
  if (state.present) {
    state.count = saturating_add(state.count, uses);
    state.last = step;
    return;
  }
  state.filter = static_cast<uint32_t>(std::min<uint64_t>(255, uint64_t{state.filter} + uses));
  state.filter_extra += uses;
  if (!table.would_admit(state.hash, state.filter, step)) return;
  state.present = true;
  state.count = uses;
  state.last = step;
}

template <class F>
LookupLog::Keys LookupLog::keys_of(F&& chosen) const {
  std::unordered_map<const Table*, size_t> counts;
  for (const Lookup& lookup : lookups_)
    if (chosen(lookup))
      each_slot(lookup, [&](Table& table, uint32_t slot) { counts[&table] += lookup.plan->unique_in(slot); });
  Keys keys;
  for (const auto& [table, count] : counts) keys.emplace(table, States(std::max<size_t>(count, 1)));
  for (const Lookup& lookup : lookups_) {
    if (!chosen(lookup)) continue;
    each_slot(lookup, [&](Table& table, uint32_t slot) {
      States& mine = keys.at(&table);
      const auto before = states_.find(&table);
      lookup.plan->each_use(slot, [&](uint64_t hash, uint32_t, uint32_t, uint32_t) {
        State& state = mine.at(hash);
        if (state.known || before == states_.end()) return;
        if (const State* known = before->second.find(hash)) state = *known;
      });
    });
  }
  return keys;
}

LookupLog::Keys LookupLog::replay() const {
  Keys keys = keys_of([](const Lookup& lookup) { return !lookup.trained; });
  for (const Lookup& lookup : lookups_) {
    each_slot(lookup, [&](Table& table, uint32_t slot) {
      const auto mine = keys.find(&table);
      if (mine == keys.end()) return;
      lookup.plan->each_use(slot, [&](uint64_t hash, uint32_t uses, uint32_t count, uint32_t last) {
        State* const state = mine->second.find(hash);
        if (!state) return;
        const bool absent = last == Plan::kAbsent;
        // The latter: it has been evicted since an older lookup found it.
        if (!state->known || (!lookup.folded && state->present && absent)) start(*state, count, last);
        if (!lookup.folded && absent) state->filter_extra -= uses;
        if (lookup.trained) use(table, *state, uses, lookup.plan->step());
      });
    });
  }
  return keys;
}

void LookupLog::fold() {
  states_ = replay();
  std::erase_if(lookups_, [](const Lookup& lookup) { return lookup.trained; });
  for (Lookup& lookup : lookups_) lookup.folded = true;
  folded_at_ = added_;
}

std::vector<Correction> LookupLog::corrections(const Table& table) {
  const std::lock_guard lock(mutex_);
  Keys keys = replay();
  std::vector<Correction> made;
  const auto mine = keys.find(&table);
  if (mine == keys.end()) return made;
  mine->second.each([&](const State& state) { made.push_back({state.hash, state.count, state.last, state.present}); });
  std::sort(made.begin(), made.end(), [](const Correction& a, const Correction& b) { return a.hash < b.hash; });
  return made;
}

void LookupLog::correct_filter(const Table& table, uint8_t* counters) {
  if (!table.counts_before_admission()) return;
  const std::lock_guard lock(mutex_);
  Keys keys = replay();
  const auto mine = keys.find(&table);
  if (mine == keys.end()) return;
  mine->second.each([&](const State& state) { table.change_filter(counters, state.hash, state.filter_extra); });
}

void LookupLog::withdraw(const std::vector<const Plan*>& plans) {
  const std::lock_guard lock(mutex_);
  const auto withdrawn = [&](const Lookup& lookup) {
    return !lookup.trained && std::find(plans.begin(), plans.end(), lookup.plan.get()) != plans.end();
  };
  Keys wanted = keys_of(withdrawn);
  // What the filter has had of them, and what the oldest one found.
  std::unordered_map<const Table*, Table*> tables;
  for (const Lookup& lookup : lookups_) {
    each_slot(lookup, [&](Table& table, uint32_t slot) {
      const auto mine = wanted.find(&table);
      if (mine == wanted.end()) return;
      tables[&table] = &table;
      lookup.plan->each_use(slot, [&](uint64_t hash, uint32_t uses, uint32_t count, uint32_t last) {
        State* const state = mine->second.find(hash);
        if (!state) return;
        if (!state->known) start(*state, count, last);
        if (!lookup.folded && last == Plan::kAbsent) state->filter_extra -= uses;
      });
    });
  }
  std::erase_if(lookups_, withdrawn);
  for (const auto& [table, mutable_table] : tables) rewrite(*mutable_table, wanted.at(table));
  trim();
}

void LookupLog::rewrite(Table& table, States& wanted) {
  const auto folded = states_.find(&table);
  const auto known = [&](uint64_t hash) { return folded == states_.end() ? nullptr : folded->second.find(hash); };
  wanted.each([&](State& state) {
    if (State* const at_fold = known(state.hash)) at_fold->filter_extra = 0;
  });
  for (const Lookup& lookup : lookups_) {
    each_slot(lookup, [&](Table& its, uint32_t slot) {
      if (&its != &table) return;
      lookup.plan->each_use(slot, [&](uint64_t hash, uint32_t uses, uint32_t& count, uint32_t& last) {
        State* const state = wanted.find(hash);
        if (!state) return;
        count = state->present ? state->count : state->filter;
        last = state->present ? state->last : Plan::kAbsent;
        if (State* const at_fold = known(hash); at_fold && lookup.folded && !state->present) at_fold->filter_extra -= uses;
        use(table, *state, uses, lookup.plan->step());
      });
    });
  }
  std::vector<uint64_t> leaving;
  wanted.each([&](const State& state) {
    if (table.counts_before_admission()) table.change_filter(nullptr, state.hash, state.filter_extra);
    if (state.present) table.set_use(state.hash, state.count, state.last);
    else leaving.push_back(unmix(state.hash));
  });
  if (!leaving.empty()) table.erase_keys(leaving.data(), leaving.size());
  table.next_version();
}

size_t LookupLog::in_flight() const {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(
      std::count_if(lookups_.begin(), lookups_.end(), [](const Lookup& lookup) { return !lookup.trained; }));
}

size_t LookupLog::size() const {
  const std::lock_guard lock(mutex_);
  return lookups_.size();
}

}  // namespace karvan
