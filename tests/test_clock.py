"""The clock that stands still while its process cannot run."""

import os
import signal
import sys
import time
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram

from karvan.clock import ProcessClock

SLEEPER = """
import sys, time
from karvan.clock import clock
begun = clock.now()
print("there", flush=True)
sys.stdin.readline()
print(clock.now() - begun, clock.paused, clock.silence(begun), flush=True)
"""


class Source:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def clock(source):
    made = ProcessClock(source, tick=1000.0)
    made.now()
    return made


def test_time_goes_on_while_it_is_read(clock, source):
    begun = clock.now()
    for _ in range(10):
        source.time += 1.5
        clock.now()
    assert clock.now() == begun + 15
    assert clock.paused == 0
    assert clock.silence(begun) == 15


def test_a_pause_is_not_counted_and_silence_begins_anew_after_it(source):
    clock = ProcessClock(source, tick=0.25)
    begun = clock.now()
    source.time += 1
    heard = clock.now()
    source.time += 3600
    assert clock.now() == pytest.approx(begun + 1.25)
    assert clock.paused == pytest.approx(3599.75)
    assert clock.silence(heard) == 0
    source.time += 1.5
    assert clock.silence(heard) == pytest.approx(1.5)


def test_a_process_that_was_stopped_leaves_the_pause_out():
    with ForkedProgram([sys.executable, "-c", SLEEPER], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout.readline() == "there\n"
        os.kill(process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        time.sleep(3.0)  # the pause itself
        pause = time.monotonic() - stopped
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        running, paused, silence = map(float, process.stdout.readline().split())
    assert paused >= pause - 0.5
    assert silence <= running


def test_a_fork_has_a_clock_of_its_own():
    from karvan.clock import clock

    clock.now()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        begun = clock.now()
        time.sleep(2.5)  # longer than what would be a pause if nobody read the clock
        os.write(write, b"%d" % (clock.now() - begun > 2))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"1"
