"""`karvan launch` of an elastic job whose final values count how often each record was trained."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from forked_programs import ForkedProgram
from support_paths import support_path


class ElasticLaunch:
    """`karvan launch` of a job that counts how often each record is trained."""

    program = support_path("train/elastic_trainer.py")

    def __init__(
        self,
        folder,
        records=600,
        epochs=2,
        trainers="{replicas: 2}",
        pause=0.1,
        mode="hybrid",
        checkpoints=None,
        restarts="max_restarts: 1000\nrestart_window: 1",
        servers=2,
        server_arguments="[]",
        loaders=0,
        workers=0,
        extra="",
        environment=None,
        **settings,
    ):
        self.environment = {**os.environ, **(environment or {})}
        self.workers = workers
        self.folder, self.records, self.epochs = folder, records, epochs
        self.checkpoints = checkpoints or folder / "checkpoints"
        self.data, self.notes = folder / "data", folder / "notes"
        for each in (self.data, self.notes):
            each.mkdir()
        self.write_data()
        arguments = [str(self.data), str(self.checkpoints), str(self.notes), str(epochs)]
        settings = {"PAUSE": str(pause), "ROWS": "1", **settings}
        section = f"{trainers[:-1]}, args: {json.dumps(arguments)}, env: {json.dumps(settings)}, threads: 1}}"
        (folder / "job.yaml").write_text(
            f"name: elastic\nentry: {self.program}\nmode: {mode}\nsharding: dynamic\n"
            f"checkpoints: {self.checkpoints}\n{restarts}\n"
            f"roles:\n  trainers: {section}\n"
            f"  parameter_servers: {{replicas: {servers}, threads: 1, args: {server_arguments}}}\n"
            f"  loaders: {{replicas: {loaders}, threads: 1}}\n"
            f"  embedding_workers: {{replicas: {workers}, threads: 1}}\n"
            f"data: {json.dumps(self.data_of_loaders()) if loaders else 'null'}\n{extra}"
        )
        self.log = folder / "log"
        self.launch()

    def write_data(self):
        """Each record once, in three files."""
        (self.data / "records").write_text(str(self.records))
        for part in range(3):
            mine = [number for number in range(self.records) if number % 3 == part]
            names = ("record", "id") if self.workers else ("record",)  # workers look the id up
            table = pa.table({name: pa.array(mine, pa.int64()) for name in names})
            pq.write_table(table, self.data / f"{part}.parquet")

    def data_of_loaders(self):
        """The `data` of the job, for loaders without a program: as the trainers would read it."""
        files = f"{self.data}/*.parquet"
        return {"train": files, "batch_size": 8, "shuffle": 64, "split_records": 24}

    def command(self):
        """The command that launches the job."""
        return [sys.executable, "-m", "karvan", "launch", str(self.folder / "job.yaml")]

    def launch(self):
        """Start the job, or start it again; its log begins anew."""
        with self.log.open("wb") as output:
            self.process = ForkedProgram(
                self.command(), stdout=output, stderr=subprocess.STDOUT, env=self.environment
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def pids(self, role):
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                values = place.read_bytes().split(b"\0")
                checkpoints = f"KARVAN_CHECKPOINTS={self.checkpoints}".encode()
                if f"KARVAN_ROLE={role}".encode() in values and checkpoints in values:
                    found.append(int(place.parent.name))
        return found

    def worlds(self):
        """The steps and the number of trainers that living trainers have noted last."""
        found = {}
        for path in self.notes.glob("step-*"):
            with suppress(OSError, ValueError):
                step, world = path.read_text().split()
                if Path(f"/proc/{path.name.removeprefix('step-')}").exists():
                    found[int(path.name.removeprefix("step-"))] = (int(step), int(world))
        return found

    def wait(self, condition, seconds=120.0):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def wait_for_world(self, world, seconds=120.0):
        """Wait until this many trainers train together."""
        self.wait(
            lambda: len(self.worlds()) >= world and {each for _, each in self.worlds().values()} == {world},
            seconds,
        )

    def results(self):
        """Wait for the job's end: what its trainers have noted as their results."""
        (self.notes / "hurry").touch()
        try:
            code = self.process.wait(180)
        except subprocess.TimeoutExpired:
            code = "a job that has not ended"
        assert code == 0, f"{code}\n{self.log.read_text()}"
        results = [json.loads(path.read_text()) for path in self.notes.glob("result-*[0-9]")]
        assert results
        return results

    def finish(self, without=()):
        """Wait for the job's end, and check that every record was trained as often as it should: the log.

        without: records that were skipped.
        """
        times = [0.0 if number in without else float(self.epochs) for number in range(self.records)]
        for result in self.results():
            assert result["times"] == times
            assert result["rows"] == times
        return self.log.read_text()
