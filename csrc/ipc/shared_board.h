// Messages between the processes of one machine, through memory that they share.
//
// Every rank has a board: a small head that the others map when they join, and two areas for messages that take turns.
// To exchange, a rank writes its messages to the others into an area of its own board, counts the exchange, and copies its
// share from each of the other boards as soon as they have counted it, too. A rank that counts exchange k + 1 has read
// everything of exchange k; so a rank that has seen all of those counts may reuse the area of exchange k.
//
// The memory has no name: a rank opens another's by process and file number (/proc), and it is freed when all have ended.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace karvan {

class Board {
 public:
  struct Place {
    int64_t process = 0;
    int file = -1;
  };
  enum class Outcome { done, late, lost, left };  // lost: the process of another rank has ended

  Board(uint32_t rank, uint32_t ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  Place place() const;
  void join(const std::vector<Place>& places);  // of all ranks; std::runtime_error if one cannot be reached

  // to[r] bytes of `send`, one piece after the other, go to rank r, and of[r] bytes come from there into `receive`. Both
  // sides must agree on the sizes: std::invalid_argument. After any outcome but done, the board cannot be used any more.
  Outcome exchange(const char* send, std::span<const uint64_t> to, char* receive, std::span<const uint64_t> of,
                   double seconds);
  void leave() { left_ = true; }  // ends an exchange that another thread waits in, and all later ones: left
  uint32_t missing() const { return missing_; }  // the rank because of which an exchange was late or lost

 private:
  struct Head;
  struct Mapping;
  struct Peer;

  char* area(uint64_t bytes);  // of the current exchange
  Outcome wait(Peer& peer, double seconds);
  const char* message(Peer& peer);

  uint32_t rank_, ranks_, missing_ = 0, count_ = 0;
  std::atomic<bool> left_{false};
  std::unique_ptr<Mapping> head_, areas_[2];
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace karvan
