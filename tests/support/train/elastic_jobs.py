"""A master in the test's own process, and trainers of `elastic_trainer.py` that are started and killed."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from forked_programs import ForkedProgram
from free_ports import free_port
from support_paths import support_path

from karvan.discovery.registry import Registry
from karvan.job.roles import Role
from karvan.wire import Security
from karvan.work.service import WorkService
from karvan.work.task import holder_of
from karvan.work.trainer_group import TrainerGroup


class ElasticJob:
    """A job without a launcher: start trainers by `start`, kill them, wait for the result.

    host, server_host: where the master and servers listen. security: the variables of token and TLS that all
    processes have.
    """

    def __init__(
        self,
        folder,
        records=600,
        least=1,
        epochs=2,
        program="elastic_trainer",
        servers=0,
        lost_after=5.0,
        loaders=0,
        loader_program=None,
        host="127.0.0.1",
        server_host=None,
        security=None,
        workers=0,
        worker_settings=None,
        **settings,
    ):
        self.folder = folder
        self._host, self._server_host, self._security = host, server_host or host, security or {}
        self.program = support_path(f"train/{program}.py")
        self.records, self.epochs = records, epochs
        self.data, self.notes, self.checkpoints = folder / "data", folder / "notes", folder / "checkpoints"
        for each in (self.data, self.notes):
            each.mkdir()
        (self.data / "records").write_text(str(records))
        for part in range(3):
            mine = [number for number in range(records) if number % 3 == part]
            columns = {"record": mine}
            if workers:  # which look these up, while trainers get the record
                columns |= {"id": mine, "user": [number % 37 for number in mine]}
            table = {name: pa.array(values, pa.int64()) for name, values in columns.items()}
            pq.write_table(pa.table(table), self.data / f"{part}.parquet")
        self.settings = {key: str(value) for key, value in settings.items()}
        self.trainers = []
        self.servers = []
        self._least, self._lost_after = least, lost_after
        self._open()
        for index in range(servers):
            self.start_server(index, servers)
        self._worker_settings = {"KARVAN_EMBEDDING_WORKER_COUNT": str(workers)} if workers else {}
        self.settings |= self._worker_settings
        self.workers = {}
        self._servers = servers
        for index in range(workers):
            self.start_worker(index, **(worker_settings or {}))
        self.loaders = {}
        self._loader_program = loader_program
        for index in range(loaders):
            self.start_loader(index, loaders)
        if loaders:
            self.settings |= {"KARVAN_LOADER_COUNT": str(loaders)}
        if servers:
            self.settings |= {"ROWS": "1", "KARVAN_PARAMETER_SERVER_COUNT": str(servers)}

    def start_server(self, index, count):
        options = {"index": index, "count": count, "registry": self.registry.address}
        command = [sys.executable, "-m", "karvan", "role", "parameter-server"]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += [f"--checkpoints={self.checkpoints}", f"--host={self._server_host}"]
        environment = {**os.environ, **self._security}
        with (self.folder / f"server-{index}.log").open("wb") as output:
            server = ForkedProgram(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        server.log = self.folder / f"server-{index}.log"
        self.servers.append(server)

    def start_worker(self, index, **settings):
        """Start an embedding worker, or one that replaces it; DIE_AT: see `dying_worker.py`."""
        environment = {
            **os.environ,
            "KARVAN_REGISTRY": self.registry.address,
            "KARVAN_INDEX": str(index),
            "KARVAN_COUNT": self._worker_settings["KARVAN_EMBEDDING_WORKER_COUNT"],
            "KARVAN_PARAMETER_SERVER_COUNT": str(self._servers),
            "KARVAN_THREADS": "1",
            **{key: str(value) for key, value in settings.items()},
        }
        log = self.folder / f"worker-{index}.log"
        command = [sys.executable, "-m", "karvan", "role", "embedding-worker"]
        if "DIE_AT" in settings:
            command = [sys.executable, support_path("cluster/dying_worker.py")]
        with log.open("ab") as output:
            worker = ForkedProgram(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        worker.log = log
        self.workers[index] = worker

    def start_loader(self, index, count):
        """Start a loader without a program, which reads the `data` of the job, or with one."""
        files = f"{self.data}/*.parquet"
        data = {"files": files, "batch_size": 8, "shuffle": 64, "split_records": 24}
        environment = {
            **os.environ,
            "KARVAN_REGISTRY": self.registry.address,
            "KARVAN_ROLE": "loader",
            "KARVAN_INDEX": str(index),
            "KARVAN_COUNT": str(count),
            "KARVAN_SHARDING": "dynamic",
            "KARVAN_DATA": json.dumps(data),
            "KARVAN_CHECKPOINTS": str(self.checkpoints),
            **self._worker_settings,
        }
        program = self._loader_program
        arguments = ["-m", "karvan", "role", "loader"] if program is None else [support_path(program), files]
        log = self.folder / f"loader-{index}.log"
        with log.open("ab") as output:
            loader = ForkedProgram(
                [sys.executable, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        loader.log = log
        self.loaders[index] = loader

    def _open(self, port=0):
        (self.folder / "master").mkdir(exist_ok=True)
        self.work = WorkService(self.folder / "master" / "work.db")
        self.group = TrainerGroup(
            self.folder / "master" / "group.json",
            least=self._least,
            lost_after=self._lost_after,
            settled=self._settled,
        )
        security = Security.from_environment(self._security)
        self.registry = Registry(self._host, port or free_port(), security, beside=[self.work, self.group])

    def _settled(self, processes):
        for process in processes:
            self.work.release_process(process)

    def restart_master(self):
        port = int(self.registry.address.rpartition(":")[2])
        self.registry.close()
        self.work.close()
        self._open(port)

    def start(self, **settings):
        index = len(self.trainers)
        environment = {
            **os.environ,
            "KARVAN_REGISTRY": self.registry.address,
            "KARVAN_ROLE": "trainer",
            "KARVAN_INDEX": str(index % 1000),
            "KARVAN_COUNT": "1000",
            "KARVAN_PROCESS": f"process{index}",
            "KARVAN_SHARDING": "dynamic",
            "OMP_NUM_THREADS": "1",
            **self._security,
            **self.settings,
            **{key: str(value) for key, value in settings.items()},
        }
        command = [sys.executable, self.program, self.data, self.checkpoints, self.notes, str(self.epochs)]
        output = (self.folder / f"trainer-{index}.log").open("wb")
        trainer = ForkedProgram(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        output.close()
        trainer.log = self.folder / f"trainer-{index}.log"
        trainer.name = holder_of(Role.TRAINER, index % 1000, f"process{index}")
        self.trainers.append(trainer)
        return trainer

    def kill(self, trainer):
        """Kill a trainer, and notice it, as the engine of a job does."""
        trainer.kill()
        self.note_end(trainer)

    def note_end(self, trainer):
        """A trainer has ended, or is about to."""
        trainer.wait()
        self.work.release_predictions(trainer.name)
        self.group.remove(trainer.name)

    def step(self, trainer):
        """The last step that a trainer has noted, and the number of trainers in it."""
        try:
            step, world = (self.notes / f"step-{trainer.pid}").read_text().split()
        except (FileNotFoundError, ValueError):
            return 0, 0
        return int(step), int(world)

    def batches(self, trainer):
        """How many times a trainer has noted a step."""
        try:
            return len((self.notes / f"steps-{trainer.pid}").read_text().split())
        except FileNotFoundError:
            return 0

    def wait(self, condition, seconds=60.0):
        due = time.monotonic() + seconds
        while not (value := condition()):
            failed = self.trainers and all(each.poll() not in (None, 0) for each in self.trainers)
            if failed or time.monotonic() > due:
                raise AssertionError(f"waited in vain\n{self.logs()}")
            time.sleep(0.005)
        return value

    def _processes(self):
        return (*self.trainers, *self.servers, *self.loaders.values(), *self.workers.values())

    def logs(self):
        processes = self._processes()
        return "\n".join(f"{each.log.name}:\n{each.log.read_text()[-3000:]}" for each in processes)

    def hurry(self):
        (self.notes / "hurry").touch()

    def results(self, count, seconds=60.0):
        """The results of so many trainers that have ended."""
        found = self.wait(lambda: len(list(self.notes.glob("result-*[0-9]"))) >= count, seconds)
        assert found
        return [json.loads(path.read_text()) for path in self.notes.glob("result-*[0-9]")]

    def close(self):
        for process in self._processes():
            process.kill()
            process.wait()
        self.registry.close()
        self.work.close()


@contextmanager
def elastic_job(folder, **options):
    """A job; all of its processes are killed afterwards."""
    job = ElasticJob(folder, **options)
    try:
        yield job
    finally:
        job.close()
