"""`pytest --forks N`: N processes run the tests, all forked from the one that has collected them.

Collecting imports torch, karvan and all tests, which takes seconds, and so does the fork server of
`forked_programs`, which they share. So there may be more processes than cores: many tests wait for others.

A process gets the tests of one module after the other, so that the fixtures of a module are made once.
Modules that take longest come first (`SLOWEST`), and the others fill the gaps. A process that dies fails the
test that it was running; another one goes on with the rest of the module.
"""

import os
import signal
import threading
import time
import traceback
import warnings
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
import torch
from forked_programs import end_fork, fork_context

_PATIENCE = 10.0  # seconds in which processes of an interrupted run end

# Modules that take longest: the last of them would be waited for if they did not come first.
SLOWEST = (
    "tests/store/test_conformance.py",
    "tests/test_walkthroughs.py",
    "tests/train/test_elastic_fit.py",
    "tests/distributed/test_trainer_ranks.py",
    "tests/train/test_resume.py",
    "tests/cluster/test_async_mode.py",
    "tests/cli/test_cli_exit.py",
    "tests/train/test_elastic_rows.py",
    "tests/train/test_daily.py",
    "tests/launch/test_import_folders.py",
    "tests/cluster/embedding_worker/test_embedding_worker.py",
    "tests/launch/test_master_process.py",
    "tests/cluster/test_remote.py",
    "tests/test_readme.py",
    "tests/test_package.py",
    "tests/store/test_tier.py",
    "tests/checkpoint/test_object_store.py",
    "tests/cluster/test_loader_role.py",
    "tests/models/test_models_learn.py",
    "tests/train/test_owner_fit.py",
    "tests/test_digests.py",
    "tests/launch/test_token.py",
    "tests/data/test_retry.py",
)


class ForkedWorkers:
    """The plugin of the process that collects; it hands out modules, and shows what the others report."""

    def __init__(self, config, count):
        self._config, self._count = config, count
        self._workers = []
        self._started = 0

    def pytest_sessionstart(self, session):
        """Start the fork server, which imports torch and karvan while this process does."""
        if not session.config.option.collectonly:
            fork_context()

    def pytest_runtestloop(self, session):
        """Run all tests; as pytest's own loop, but for where they run."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        if session.config.option.collectonly:
            return True
        self._session = session
        self._modules = ordered(session.items)
        self._config._tmp_path_factory.getbasetemp()
        try:
            for _ in range(min(self._count, len(self._modules))):
                self._start()
            while self._workers:
                for connection in wait([worker.connection for worker in self._workers]):
                    self._serve(next(each for each in self._workers if each.connection is connection))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
        return True

    def _start(self):
        here, there = Pipe()
        name = f"gw{self._started}"
        self._started += 1
        if (pid := os.fork()) == 0:
            here.close()
            for worker in self._workers:
                worker.connection.close()
            _Worker(self._session, there, name).main()
        there.close()
        worker = SimpleNamespace(name=name, pid=pid, connection=here, module=[], running=None)
        # What pytest shows of a report's worker, as of those of pytest-xdist.
        worker.gateway, worker._workerinfocache = SimpleNamespace(id=name), f"[{name}]"
        self._workers.append(worker)

    def _serve(self, worker):
        """Take what a worker says; it may have ended."""
        kind, *content = self._receive(worker)
        hook = self._config.hook
        if kind == "end":
            self._ended(worker)
        elif kind == "module":
            worker.module = self._modules.pop(0) if self._modules else []
            with suppress(OSError):  # it has died since
                worker.connection.send(worker.module)
        elif kind == "test":
            (worker.running,) = content
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=content[0])
            report.node = worker
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            (text, category, filename, line), options = content
            message = warnings.WarningMessage(text, category, filename, line)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **options})

    def _receive(self, worker):
        try:
            return worker.connection.recv()
        except (EOFError, OSError):
            return ["end"]

    def _ended(self, worker):
        """A worker has nothing more to do, or has died with its test."""
        self._workers.remove(worker)
        worker.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if not worker.module and not code:
            return
        if worker.running is not None:
            item = self._session.items[worker.running]
            text = f"{worker.name} ended with code {code} in, or after, {item.nodeid}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            report.node = worker
            self._config.hook.pytest_runtest_logreport(report=report)
        if rest := [index for index in worker.module if worker.running is None or index > worker.running]:
            self._modules.insert(0, rest)
        if self._modules:
            self._start()

    def _end(self):
        """Workers that still run have to end: the run was interrupted."""
        for worker in self._workers:
            worker.connection.close()
            os.kill(worker.pid, signal.SIGTERM)
        until = time.monotonic() + _PATIENCE
        for worker in self._workers:
            while os.waitpid(worker.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.01)


def ordered(items):
    """The indices of tests by module: first those that take long, then the others as they were collected."""
    by_path = groupby(range(len(items)), lambda index: items[index].nodeid.partition("::")[0])
    modules = [(path, list(indices)) for path, indices in by_path]
    place = {path: number for number, path in enumerate(SLOWEST)}
    modules.sort(key=lambda module: place.get(module[0], len(place)))
    return [indices for _, indices in modules]


class _Worker:
    """A process that runs the tests of modules, and reports; a plugin of its own."""

    def __init__(self, session, connection, name):
        self._session, self._config = session, session.config
        self._connection = connection
        self._name = name
        self._begun = False
        self._capture = self._config.pluginmanager.getplugin("capturemanager")
        self._lock = threading.Lock()  # warnings come from any thread

    def main(self):
        """Run tests until there are no more modules, and end."""
        code = 1
        try:
            self._prepare()
            self._run()
            code = 0
        except KeyboardInterrupt:  # as the first process, which says so
            pass
        except BaseException:
            self._capture.stop_global_capturing()
            traceback.print_exc()
        finally:
            end_fork(code)

    def _run(self):
        while module := self._ask():
            items = [self._session.items[index] for index in module]
            following = [*items[1:], _NoTest(self._session)]
            for index, item, nextitem in zip(module, items, following, strict=True):
                self._send("test", index)
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        self._session._setupstate.teardown_exact(None)

    def _prepare(self):
        """Be a process of its own: its streams, folder for files, threads and name."""
        plugins = self._config.pluginmanager
        plugins.unregister(name="terminalreporter")
        self._capture.stop_global_capturing()  # into files of the first process
        self._capture.start_global_capturing()
        plugins.register(self)  # which is told of all warnings so far
        self._begun = True
        os.environ["PYTEST_XDIST_WORKER"] = self._name  # as of pytest-xdist, for tests and fixtures
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        folders = self._config._tmp_path_factory
        folders._basetemp = folders.getbasetemp() / f"popen-{self._name}"
        folders._basetemp.mkdir(mode=0o700)
        # The server is a process of the parent's, which cannot be waited for here.
        forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None

    def _ask(self):
        self._send("module")
        return self._connection.recv()

    def _send(self, *message):
        with self._lock:
            self._connection.send(message)

    def pytest_runtest_logreport(self, report):
        """Have the first process show it."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("report", data)

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        """Have the first process list it."""
        if not self._begun:
            return
        what = warning_message
        summary = str(what.message), what.category, what.filename, what.lineno
        self._send("warning", summary, {"when": when, "nodeid": nodeid, "location": location})


class _NoTest:
    """What follows the last test of a module: all fixtures end but those of the session."""

    def __init__(self, session):
        self._session = session

    def listchain(self):
        """What is set up for it."""
        return [self._session]
