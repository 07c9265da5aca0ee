"""Random disturbances of a launched elastic job: processes of all roles are killed and stopped.

A round of chaos waits for a moment, and disturbs one or two processes then:

    moment    while the job trains; while a checkpoint is written; while the process that replaces another one
              starts; right after the last round, so that trainers are still forming a group
    how       SIGKILL; SIGTERM, for trainers; SIGSTOP, and SIGCONT up to seconds later; SIGSTOP for ever, once
              in a job at most, after which the supervisor must replace the process. The launcher is killed,
              too, and the job is launched again
"""

import os
import random
import re
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from elastic_launch import ElasticLaunch
from processes import is_alive, kill
from support_paths import support_path

ROUNDS = 14
LONGEST_STOP = 6.0  # seconds: longer than the limit of servers and loaders, not than that of trainers
_ROLES = {"trainer": 6, "parameter-server": 1, "master": 2, "loader": 3, "launcher": 1}
_HIDDEN = re.compile(r"\..+\.tmp-")


class ChaosLaunch(ElasticLaunch):
    """A launched job whose processes are replaced within seconds if they hang."""

    def __init__(self, folder, *, extra="", **options):
        options = {"pause": 0.15, "records": 4000, "trainers": "{replicas: 3}", **options}
        super().__init__(folder, extra=f"grace: 15\n{extra}", **options)

    def command(self):
        """See `ElasticLaunch.command`."""
        return [sys.executable, str(support_path("launch/hasty_launcher.py")), str(self.folder / "job.yaml")]

    @property
    def run_folder(self):
        """Where the master has its files."""
        return Path(self.environment["KARVAN_JOBS"], "elastic")

    def family(self):
        """All processes of the job, also keepers and what is left of them, by the folder of its run."""
        found = []
        jobs = f"KARVAN_JOBS={self.environment['KARVAN_JOBS']}".encode()
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if jobs in place.read_bytes().split(b"\0") and is_alive(int(place.parent.name)):
                    found.append(int(place.parent.name))
        return found


class Chaos:
    """Disturbs a job for some rounds; the same seed draws the same disturbances."""

    def __init__(self, job, seed, rounds=ROUNDS):
        self._job = job
        self._draw = random.Random(seed)
        self._rounds = rounds
        self._for_ever = self._draw.randrange(2 * rounds)  # in this round, if there is one
        self._stopped = {}  # when a process continues, by its pid; None: never
        self._known = {}  # the processes of a role when it was disturbed last
        self.counts = Counter()

    def run(self):
        """All rounds, until the job has ended or trains no more."""
        try:
            for number in range(self._rounds):
                if not self._await_moment(number):
                    break
                victims = self._draw.choices(
                    list(_ROLES), list(_ROLES.values()), k=self._draw.choice([1, 1, 2])
                )
                for role in victims:
                    self._disturb(role, number)
            until = time.monotonic() + 180.0
            while any(map(is_alive, self._stopped)):
                assert time.monotonic() < until, f"{self._stopped} hang\n{self._job.log.read_text()}"
                self._continue_due()
                time.sleep(0.02)
        finally:
            for pid in self._stopped:
                kill(pid, signal.SIGCONT)

    def __str__(self):
        total = sum(count for (_, how), count in self.counts.items() if how != "for ever")
        said = ", ".join(f"{count} {role} {how}" for (role, how), count in sorted(self.counts.items()))
        return f"{total} disturbances: {said}"

    # Moments

    def _await_moment(self, number):
        """Wait for the moment of the next round; False if there is nothing more to disturb."""
        moment = self._draw.choice(["training", "training", "save", "start", "at once"])
        if moment == "training" or not number:
            before, more = self._steps(), self._draw.randrange(1, 8)
            patience = 20.0 if number else 120.0
            self._wait(lambda: self._steps() != before and self._newest() >= min(more, 3), patience)
            self._wait(lambda: False, self._draw.uniform(0.0, 1.0))
        elif moment == "save":
            self._wait(self._saves, 4.0, 0.003)
        elif moment == "start":
            self._wait(lambda: any(set(self._pids(role)) - pids for role, pids in self._known.items()), 4.0)
            self._wait(lambda: False, self._draw.uniform(0.0, 3.0))
        else:
            self._wait(lambda: False, self._draw.uniform(0.0, 0.5))
        return not self._over()

    def _steps(self):
        return dict(self._job.worlds())

    def _newest(self):
        return max((step for step, _ in self._job.worlds().values()), default=0)

    def _saves(self):
        with suppress(OSError):
            return any(_HIDDEN.match(name) for name in os.listdir(self._job.checkpoints))
        return False

    def _over(self):
        return self._job.process.poll() is not None or any(self._job.notes.glob("result-*"))

    def _wait(self, condition, seconds, poll=0.05):
        """Wait for a condition, if it comes; processes that were stopped for a while continue meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._continue_due()
            if condition() or self._over():
                return
            time.sleep(poll)

    def _continue_due(self):
        now = time.monotonic()
        for pid in [pid for pid, due in self._stopped.items() if due is not None and due <= now]:
            kill(pid, signal.SIGCONT)
            del self._stopped[pid]

    # Disturbances

    def _disturb(self, role, number):
        pids = [pid for pid in self._pids(role) if pid not in self._stopped]
        if not pids:
            return
        victim = self._draw.choice(sorted(pids))
        how = self._draw.choice(["kill", "kill", "stop", "stop", "end"])
        if role == "launcher":
            how = "stop" if self._draw.random() < 0.7 else "kill"
        elif how == "end" and role != "trainer":
            how = "kill"
        self.counts[role, how] += 1
        self._known[role] = set(self._pids(role))
        if how == "stop":
            lasting = number >= self._for_ever and role in ("trainer", "parameter-server", "loader")
            if lasting:
                self._for_ever = self._rounds
                self.counts[role, "for ever"] += 1
            due = time.monotonic() + self._draw.uniform(0.05, LONGEST_STOP)
            self._stopped[victim] = None if lasting else due
            kill(victim, signal.SIGSTOP)
        elif role == "launcher":
            self._launch_again()
        else:
            kill(victim, signal.SIGTERM if how == "end" else signal.SIGKILL)

    def _launch_again(self):
        """Kill the launcher; its job stops, and is launched again."""
        job = self._job
        job.process.kill()
        job.process.wait()
        until = time.monotonic() + 90.0
        while job.family():
            assert time.monotonic() < until, f"{job.family()} are left\n{job.log.read_text()}"
            self._continue_due()
            time.sleep(0.05)
        self._stopped = {}
        job.launch()

    def _pids(self, role):
        return [self._job.process.pid] if role == "launcher" else self._job.pids(role)
