#include "ipc/shared_board.h"

#include <csignal>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

std::vector<std::unique_ptr<Board>> boards(uint32_t ranks) {
  std::vector<std::unique_ptr<Board>> all;
  std::vector<Board::Place> places;
  for (uint32_t r = 0; r < ranks; ++r) {
    all.push_back(std::make_unique<Board>(r, ranks));
    places.push_back(all.back()->place());
  }
  for (auto& board : all) board->join(places);
  return all;
}

// The size and the bytes of the message of a rank to another in some exchange, which both sides can tell.
uint64_t size_of(uint32_t exchange, uint32_t from, uint32_t to) {
  Random random(exchange * 1000 + from * 30 + to);
  const uint64_t kind = below(random, 10);
  return kind < 2 ? 0 : kind < 9 ? below(random, 3000) : below(random, 3'000'000);
}
char byte_of(uint32_t exchange, uint32_t from, uint32_t to, uint64_t at) {
  return static_cast<char>(exchange * 7 + from * 31 + to * 5 + at);
}

uint32_t wrong_exchanges(Board& board, uint32_t rank, uint32_t ranks, uint32_t exchanges) {
  uint32_t wrong = 0;
  for (uint32_t e = 0; e < exchanges; ++e) {
    std::vector<uint64_t> to, of;
    std::vector<char> send, expected;
    for (uint32_t r = 0; r < ranks; ++r) {
      to.push_back(size_of(e, rank, r)), of.push_back(size_of(e, r, rank));
      for (uint64_t i = 0; i < to[r]; ++i) send.push_back(byte_of(e, rank, r, i));
      for (uint64_t i = 0; i < of[r]; ++i) expected.push_back(byte_of(e, r, rank, i));
    }
    std::vector<char> received(expected.size(), 'x');
    wrong += board.exchange(send.data(), to, received.data(), of, 60) != Board::Outcome::done || received != expected;
  }
  return wrong;
}

}  // namespace

TEST(messages_of_any_size_reach_whom_they_are_for) {
  for (const uint32_t ranks : {1u, 2u, 5u}) {
    const auto all = boards(ranks);
    std::atomic<uint32_t> wrong{0};
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] { wrong += wrong_exchanges(*all[r], r, ranks, 60); });
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0u);
  }
}

TEST(sizes_that_do_not_agree_and_ranks_that_do_not_come_are_told) {
  const std::vector<uint64_t> four{0, 4}, none{0, 0};
  char buffer[8] = {};
  {
    const auto all = boards(2);
    std::thread other([&] { CHECK(all[1]->exchange(buffer, none, nullptr, none, 10) == Board::Outcome::done); });
    bool told = false;
    try {
      char other_buffer[8];
      all[0]->exchange(other_buffer, none, other_buffer, std::vector<uint64_t>{0, 3}, 10);
    } catch (const std::invalid_argument&) {
      told = true;
    }
    other.join();
    CHECK(told);
  }
  const auto all = boards(2);
  CHECK(all[0]->exchange(buffer, four, nullptr, none, 0.2) == Board::Outcome::late);
  CHECK_EQ(all[0]->missing(), 1u);
}

TEST(one_who_leaves_waits_for_nobody) {
  const std::vector<uint64_t> none{0, 0};
  const auto all = boards(2);
  std::thread waits([&] { CHECK(all[0]->exchange(nullptr, none, nullptr, none, 60) == Board::Outcome::left); });
  all[0]->leave();
  waits.join();
  CHECK(all[0]->exchange(nullptr, none, nullptr, none, 60) == Board::Outcome::left);
}

#if !KARVAN_TSAN  // which does not follow threads into a forked child

TEST(processes_exchange_and_one_that_dies_is_noticed) {
  int to_child[2], to_parent[2];
  CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
  std::fflush(nullptr);
  Board mine(0, 2);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    Board board(1, 2);
    const Board::Place here = board.place();
    Board::Place there;
    if (write(to_parent[1], &here, sizeof here) != sizeof here) _exit(3);
    if (read(to_child[0], &there, sizeof there) != sizeof there) _exit(4);
    board.join({there, here});
    const bool good = wrong_exchanges(board, 1, 2, 40) == 0;
    if (!good) _exit(1);
    kill(getpid(), SIGKILL);
  }
  const Board::Place here = mine.place();
  Board::Place there;
  CHECK(read(to_parent[0], &there, sizeof there) == sizeof there);
  CHECK(write(to_child[1], &here, sizeof here) == sizeof here);
  mine.join({here, there});
  CHECK_EQ(wrong_exchanges(mine, 0, 2, 40), 0u);
  const std::vector<uint64_t> none{0, 0};
  CHECK(mine.exchange(nullptr, none, nullptr, none, 30) == Board::Outcome::lost);
  CHECK_EQ(mine.missing(), 1u);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  for (const int file : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(file);
}

#endif
