"""What every engine does with a process: the same locally and on a Ray cluster."""

import os
import signal
import subprocess
import sys

from launch_helpers import wait_until
from processes import is_alive, state_of

FAMILY = (
    "import os, subprocess, sys, time",
    "sleep = ['sleep', '1000']",
    "script = f'import subprocess; print(subprocess.Popen({sleep}, start_new_session=True, stdout=2).pid)'",
    "daemon = subprocess.check_output([sys.executable, '-c', script], text=True).strip()",
    "others = [subprocess.Popen(sleep, start_new_session=own).pid for own in (False, True)]",
    "print(os.getpid(), daemon, *others)",
    "time.sleep(1000)",
)


def family_of(run):
    """A process and the three that it has started: beside it, in a session of its own, and a daemon."""
    return [int(pid) for pid in run.first_line().split()]


def test_exit_codes_and_lines_are_those_of_the_process(start):
    programs = {
        "print('a'); raise SystemExit(0)": 0,
        "raise SystemExit(75)": 75,
        "import os; print('last', end='', flush=True); os._exit(255)": 255,
        "import os; os.kill(os.getpid(), 9)": -9,
        "import os; os.kill(os.getpid(), 11)": -11,
    }
    runs = [start(code, index=index) for index, code in enumerate(programs)]
    assert [run.end() for run in runs] == list(programs.values())
    assert [run.handle.poll() for run in runs] == list(programs.values())
    assert [run.lines for run in runs] == [["a"], [], ["last"], [], []]


def test_a_program_that_does_not_exist_ends_with_1_and_says_so(start):
    run = start(command=("/no/such/program",))
    assert run.end() == 1
    assert run.lines == ["/no/such/program: No such file or directory."]


def test_the_process_has_the_environment_and_the_folder_of_the_launcher(start, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KARVAN_DEBUG", "1")
    monkeypatch.setenv("KARVAN_JOB", "another")
    names = ["MINE", "KARVAN_DEBUG", "KARVAN_JOB", "PYTHONUNBUFFERED"]
    run = start(
        "import os",
        f"print(os.getpid(), os.getcwd(), [os.environ.get(name) for name in {names}])",
        "print(len(os.environ['LONG']), os.getsid(0) == os.getpid(), os.environ.get('OMP_NUM_THREADS'))",
        environment={"MINE": "ä", "LONG": "x" * 100_000},
    )
    assert run.end() == 0
    assert run.lines[0] == f"{run.handle.pid} {tmp_path} ['ä', '1', None, '1']"
    assert run.lines[1] in (f"100000 True {given}" for given in (None, os.environ.get("OMP_NUM_THREADS")))


def test_much_output_arrives_whole_and_in_order(start):
    run = start("for i in range(30_000): print(i, '.' * (i % 97))", "print('y' * 200_000)")
    assert run.end() == 0
    assert run.lines[:30_000] == [f"{i} {'.' * (i % 97)}" for i in range(30_000)]
    assert "".join(run.lines[30_000:]) == "y" * 200_000  # in pieces


def test_lines_arrive_while_the_process_runs(start):
    run = start(
        "import sys", "print('here')", "print('there', file=sys.stderr)", "sys.stdin.read()", "input()"
    )
    assert run.first_line() == "here"
    assert run.end() == 1  # there is no input
    assert run.lines[1] == "there"


def test_stop_is_sigterm_to_the_process_which_may_end_in_its_own_way(start):
    run = start(
        "import signal, sys, time",
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(5)))",
        "print('ready')",
        "time.sleep(1000)",
    )
    run.first_line()
    run.handle.stop()
    assert run.end() == 5
    assert run.lines == ["ready", "saved"]
    run.handle.stop()  # does nothing


def test_kill_reaches_all_that_the_process_has_started(start):
    run = start(*FAMILY)
    everybody = family_of(run)
    assert len(everybody) == 4
    assert all(map(is_alive, everybody))
    run.handle.kill()
    assert run.end() == -9
    assert not any(map(is_alive, everybody))


def test_suspend_and_resume_keep_their_order_and_reach_all(start):
    run = start(*FAMILY)
    everybody = family_of(run)
    run.handle.suspend()
    wait_until(lambda: {state_of(pid) for pid in everybody} == {"T"}, "all to be stopped")
    for _ in range(20):
        run.handle.resume()
        run.handle.suspend()
    run.handle.resume()
    wait_until(lambda: "T" not in {state_of(pid) for pid in everybody}, "all to continue")


def test_dump_stacks_is_sigquit(start):
    run = start(
        "import faulthandler, signal, time",
        "faulthandler.register(signal.SIGQUIT)",
        "print('ready')",
        "def hang_here(): time.sleep(1000)",
        "hang_here()",
    )
    run.first_line()
    run.handle.dump_stacks()
    wait_until(lambda: any("hang_here" in line for line in run.lines), "the stacks")


def test_a_process_whose_keeper_is_killed_counts_as_killed(start):
    run = start("import os, time", "print(os.getppid())", "time.sleep(1000)")
    os.kill(int(run.first_line()), signal.SIGKILL)
    assert run.end() == -9
    wait_until(lambda: not is_alive(run.handle.pid))


def test_nothing_but_the_engine_of_that_name_imports_ray(tmp_path):
    script = (
        "import sys; sys.modules['ray'] = None;"
        "import karvan.launch.engines.choice, karvan.launch.supervisor, karvan.cli.main"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
