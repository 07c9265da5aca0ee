#include "ipc/shared_board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "threads/relax.h"

namespace karvan {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 2000;
constexpr auto kNap = std::chrono::milliseconds(50);  // between two looks whether the other process lives, or this one leaves
constexpr uint64_t kLeast = 1 << 20;

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

struct Board::Head {
  struct Area {
    int file;
    uint32_t generation;  // changes with the memory
    uint64_t bytes;
  };
  std::atomic<uint32_t> counted;  // exchanges; whoever waits for the next one sleeps on it
  Area areas[2];
};

// Memory that processes share, with its file as long as this one owns it.
struct Board::Mapping {
  static std::unique_ptr<Mapping> make(uint64_t bytes) {
    const int file = static_cast<int>(syscall(SYS_memfd_create, "karvan-board", 1u /* close on exec */));
    if (file < 0) fail("memory to share");
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
      close(file);
      fail("memory to share");
    }
    return std::make_unique<Mapping>(file, bytes);
  }
  static std::unique_ptr<Mapping> open(const Place& place, uint64_t bytes) {
    const std::string path = "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.file);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) fail("the memory of process " + std::to_string(place.process));
    return std::make_unique<Mapping>(file, bytes);
  }
  Mapping(int file_, uint64_t bytes_) : file(file_), bytes(bytes_) {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) {
      close(file);
      fail("memory to share");
    }
    data = static_cast<char*>(at);
  }
  ~Mapping() {
    munmap(data, bytes);
    close(file);
  }
  Head* head() const { return reinterpret_cast<Head*>(data); }

  int file;
  uint64_t bytes;
  char* data;
};

struct Board::Peer {
  Place place;
  std::unique_ptr<Mapping> head, areas[2];
  uint32_t generation[2] = {0, 0};
  int process = -1;  // readable once it has ended; -1 where the system cannot tell
  ~Peer() {
    if (process >= 0) close(process);
  }
};

Board::Board(uint32_t rank, uint32_t ranks) : rank_(rank), ranks_(ranks), head_(Mapping::make(sizeof(Head))) {
  new (head_->data) Head{};
}

Board::~Board() = default;

Board::Place Board::place() const { return {getpid(), head_->file}; }

void Board::join(const std::vector<Place>& places) {
  if (places.size() != ranks_) throw std::invalid_argument("Expected a place for each rank.");
  peers_.clear();
  for (uint32_t r = 0; r < ranks_; ++r) {
    auto peer = std::make_unique<Peer>();
    peer->place = places[r];
    if (r != rank_) {
      peer->head = Mapping::open(places[r], sizeof(Head));
      peer->process = static_cast<int>(syscall(SYS_pidfd_open, places[r].process, 0));
    }
    peers_.push_back(std::move(peer));
  }
}

char* Board::area(uint64_t bytes) {
  std::unique_ptr<Mapping>& mine = areas_[count_ % 2];
  if (!mine || mine->bytes < bytes) {
    mine.reset();
    mine = Mapping::make(std::bit_ceil(std::max(bytes, kLeast)));
    Head::Area& told = head_->head()->areas[count_ % 2];
    told = {mine->file, told.generation + 1, mine->bytes};
  }
  return mine->data;
}

Board::Outcome Board::wait(Peer& peer, double seconds) {
  std::atomic<uint32_t>& counted = peer.head->head()->counted;
  const auto there = [&] { return static_cast<int32_t>(counted.load(std::memory_order_acquire) - count_) >= 0; };
  for (int spin = 0; spin < kSpins; ++spin) {
    if (there()) return Outcome::done;
    relax();
  }
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  while (!there()) {
    if (left_) return Outcome::left;
    const uint32_t seen = counted.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - count_) >= 0) break;
    const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
    syscall(SYS_futex, &counted, FUTEX_WAIT, seen, &nap, nullptr, 0);
    if (there()) break;
    pollfd ended{peer.process, POLLIN, 0};
    if (peer.process >= 0 && poll(&ended, 1, 0) == 1 && !there()) return Outcome::lost;
    if (Clock::now() > until) return Outcome::late;
  }
  return Outcome::done;
}

// An area begins with the places of all ranks' messages in it, and where the last one ends. Null if the memory has gone
// with its process.
const char* Board::message(Peer& peer) {
  const uint32_t turn = count_ % 2;
  const Head::Area told = peer.head->head()->areas[turn];
  if (!peer.areas[turn] || peer.generation[turn] != told.generation) {
    try {
      peer.areas[turn] = Mapping::open({peer.place.process, told.file}, told.bytes);
    } catch (const std::system_error&) {
      return nullptr;
    }
    peer.generation[turn] = told.generation;
  }
  return peer.areas[turn]->data;
}

Board::Outcome Board::exchange(const char* send, std::span<const uint64_t> to, char* receive,
                               std::span<const uint64_t> of, double seconds) {
  if (to.size() != ranks_ || of.size() != ranks_ || peers_.size() != ranks_)
    throw std::invalid_argument("Expected sizes for each rank, after all have joined.");
  if (left_) return Outcome::left;
  ++count_;
  std::vector<uint64_t> from(ranks_ + 1, 0), place(ranks_ + 1, 0);
  place[0] = sizeof(uint64_t) * (ranks_ + 1);
  for (uint32_t r = 0; r < ranks_; ++r) {
    from[r + 1] = from[r] + to[r];
    place[r + 1] = place[r] + (r == rank_ ? 0 : to[r]);
  }
  char* const mine = area(place[ranks_]);
  std::memcpy(mine, place.data(), sizeof(uint64_t) * (ranks_ + 1));
  for (uint32_t r = 0; r < ranks_; ++r)
    if (r != rank_ && to[r]) std::memcpy(mine + place[r], send + from[r], to[r]);
  std::atomic<uint32_t>& counted = head_->head()->counted;
  counted.store(count_, std::memory_order_release);
  syscall(SYS_futex, &counted, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);

  std::vector<uint64_t> into(ranks_ + 1, 0);
  for (uint32_t r = 0; r < ranks_; ++r) into[r + 1] = into[r] + of[r];
  for (uint32_t i = 0; i < ranks_; ++i) {
    const uint32_t r = (rank_ + i) % ranks_;  // not all at the same board at once
    if (r == rank_) {
      if (to[r] != of[r]) throw std::invalid_argument("A rank gets from itself what it sends.");
      if (to[r]) std::memcpy(receive + into[r], send + from[r], to[r]);
      continue;
    }
    if (const Outcome outcome = wait(*peers_[r], seconds); outcome != Outcome::done) {
      missing_ = r;
      return outcome;
    }
    const char* const theirs = message(*peers_[r]);
    if (!theirs) {
      missing_ = r;
      return Outcome::lost;
    }
    uint64_t bounds[2];
    std::memcpy(bounds, theirs + sizeof(uint64_t) * rank_, sizeof bounds);
    if (bounds[1] - bounds[0] != of[r])
      throw std::invalid_argument("Expected " + std::to_string(of[r]) + " bytes from rank " + std::to_string(r) +
                                  ", got " + std::to_string(bounds[1] - bounds[0]) + ": ranks make different calls.");
    if (of[r]) std::memcpy(receive + into[r], theirs + bounds[0], of[r]);
  }
  return Outcome::done;
}

}  // namespace karvan
