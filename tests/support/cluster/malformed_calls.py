"""All services of a job in this process, each with valid calls of its methods, to be mutated by tests."""

import os
import threading
from dataclasses import asdict

import numpy as np
import torch
from call_subject import DIMS, TRAINER, Subject, rule_of, spec_of
from server_calls import AsyncServerSubject, ElasticServerSubject, ServerSubject
from task_loaders import Numbers, shared_data

from karvan.cluster.batch_messages import pack as pack_batch
from karvan.cluster.embedding_worker.service import EmbeddingWorker
from karvan.cluster.loader.epoch_service import EpochService
from karvan.cluster.loader.task_service import TaskService
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.discovery.registry import Registry
from karvan.launch.job_calls import JobService
from karvan.launch.job_spec import JobSpec
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.supervisor import Supervisor
from karvan.protocol.loader import MissingTrainers
from karvan.ragged import Batch, Ragged
from karvan.wire import Server
from karvan.work.service import WorkService
from karvan.work.task import WorkSpec
from karvan.work.trainer_group import TrainerGroup


class WorkerSubject(Subject):
    """An embedding worker in front of a parameter server at a port."""

    def __init__(self, folder):
        self._server = Server(ParameterServer(checkpoints=folder))
        os.environ["KARVAN_PARAMETER_SERVER_ADDRESSES"] = self._server.address
        hello = {**TRAINER, "run": "run", "worker": 0, "servers": 1, "divisor": 1}
        super().__init__("embedding worker", EmbeddingWorker(most=10**9), hello)
        told = {
            "mean": ["t", 4, "mean", None, None, True, "error", None],
            "stack": ["u", 8, "sum", None, [2, 100], False, "error", 0],
        }
        told |= {
            "long": ["u", 8, "sequence", 3, [2, 100], True, "error", None],
            "ragged": ["t", 4, "ragged", None, None, True, "empty", None],
        }
        self._features = told
        self._tables = {name: {"spec": spec_of(name)} for name in DIMS}
        self.makers = {
            "put": self._put,
            "forget": lambda: ({"references": ["nobody"]}, []),
            "abandon": lambda: ({"members": [7]}, []),
            "describe": lambda: ({}, []),
            "engine": self._engine,
            "claim": self._claim,
            "backward": self._backward,
        }
        self._begin()

    def _begin(self):
        servers = self.service._sessions[0].servers
        for name in DIMS:
            servers.call("add_table", {"spec": spec_of(name)})
        self.call("engine", *self._engine())

    def renew(self):
        """A new run of trainers; the server's tables stay."""
        self.meet({**self._hello, "run": f"run {self.number()}"})
        self._begin()

    def _put(self):
        ids = Ragged(torch.arange(11), torch.tensor([0, 3, 3, 9, 11]), torch.ones(11))
        batch = {"mean": ids, "stack": torch.arange(4), "long": Ragged(ids.values, ids.offsets)}
        made = pack_batch({**batch, "ragged": Ragged(ids.values, ids.offsets)})
        return {**made.head, "reference": f"batch {self.number()}"}, made.arrays

    def _engine(self):
        told = {"engine": "e", "features": self._features, "wire": "float32", "tables": self._tables}
        return {**told, "declarations": 1}, []

    def _claim(self):
        head, arrays = self._put()
        self.call("put", head, arrays)
        claim = {"engine": "e", "store": 1, "batch": self.number(), "reference": head["reference"]}
        claim |= {"training": True, "step": 1, "now": 1.0, "done": [], "gone": [], "declarations": 1}
        return claim, []

    def _backward(self):
        claim, _ = self._claim()
        size = self.call("claim", claim).arrays[0].size
        head = {"engine": "e", "store": 1, "sequence": self.number(), "batches": [claim["batch"]]}
        head |= {
            "mine": [0],
            "rules": {"t": rule_of("sgd")},
            "steps": {"t": 1},
            "skipped": [],
            "complete": True,
        }
        head |= {"wire": "float32", "done": [claim["batch"]], "gone": [claim["reference"]], "declarations": 1}
        head["passes"] = [{"reference": claim["reference"], "given": list(range(4))}]
        return head, [np.full(size, 1e-3, np.float32)]

    def fingerprint(self):
        servers = self.service._sessions[0].servers
        rows = [servers.call("snapshot", {"table": t, "part": 0, "parts": 1})[0].arrays for t in DIMS]
        return [array.tobytes() for arrays in rows for array in arrays]

    def close(self):
        super().close()
        self._server.close(0.1)
        del os.environ["KARVAN_PARAMETER_SERVER_ADDRESSES"]


class _Workers:
    """Where a loader puts ids."""

    def put(self, reference, ids):
        pass


class LoaderSubject(Subject):
    """A loader whose program sends the same batch for ever."""

    def __init__(self, folder):
        hello = {"generation": 0, "run": "run", "trainer": 0, "trainers": 1, "kind": "batches", "loader": 0}
        hello |= {"loaders": 1, "ids": ["id"], "epoch": 0, "next": 1, "taken": [3], "end": None}
        hello |= {"positions": [[0, None]], "unfinished": [[0, 0]], "before_unfinished": [0, 0, None]}
        service = EpochService(workers=[_Workers()])
        super().__init__("loader", service, hello)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.makers = {
            "next": lambda: ({"epoch": 0}, []),
            "stay": self._stay,
            "done": lambda: ({"references": [[0, 0, 1]]}, []),
            "resend": lambda: ({"reference": list(self._sent()), "worker": 0}, []),
            "identity": lambda: ({}, []),
            "statistics": lambda: ({"whole": True}, []),
            "leave": lambda: ({}, []),
        }

    def _read(self):
        batch = Batch({"id": torch.arange(3), "x": torch.ones(3)})
        while not self.service.closed:
            if self.service.begin() is None:
                return
            while self.service.send(batch):
                pass

    def renew(self):
        """A new run of trainers."""
        self.meet({**self._hello, "run": f"run {self.number()}"})

    def _stay(self):
        self.call("leave", {})  # so that it is answered at once
        return {}, []

    def _sent(self):
        self.renew()
        while isinstance(self.call("next", {"epoch": 0}).head, MissingTrainers):
            pass
        return next(iter(self.service._sent._held))

    def fingerprint(self):
        return self.service._generation, self.service._world

    def close(self):
        super().close()
        self._thread.join(20)


class TaskReadingSubject(Subject):
    """A loader that reads leased tasks."""

    def __init__(self, folder):
        super().__init__("loader", TaskService(), {"loader": 0})
        self.service.offer(shared_data(Numbers([40])))
        task = {"kind": "train", "epoch": 0, "number": 0, "path": "0", "first": 0, "records": 8, "done": 2}
        task |= {"tries": 0, "skipped": [3]}
        self.makers = {
            "describe": lambda: ({}, []),
            "statistics": lambda: ({"whole": True}, []),
            "read_batch": lambda: ({"tasks": [{"task": dict(task), "ends": True}], "ids": ["id"]}, []),
            "stop_reading": lambda: ({}, []),
        }

    def renew(self):
        """It has no runs."""

    def fingerprint(self):
        return list(self.service._readings)


class RegistrySubject(Subject):
    """The registry, with its store for trainers that meet."""

    def __init__(self, folder):
        super().__init__("registry", Registry(), {})
        who = {"role": "trainer", "index": 0, "address": "h:1", "generation": 0, "pid": 7, "process": "p"}
        self.call("register", who)
        self.call("store_set", {"generation": 0, "keys": ["k"], "sizes": [3]}, [np.zeros(3, np.uint8)])
        values = [np.arange(5, dtype=np.uint8)]
        at = {"generation": 0, "key": "k"}
        activity = {"progress": 3, "idle": 0.5, "task": "step", "waits": {"loader 0": 0.5}, "dumps": True}
        self.makers = {
            "register": lambda: (dict(who), []),
            "beat": lambda: ({**who, "activity": dict(activity)}, []),
            "leave": lambda: (dict(who), []),
            "members": lambda: ({}, []),
            "generation": lambda: ({}, []),
            "store_set": lambda: ({"generation": 0, "keys": ["a", "b"], "sizes": [2, 3]}, values),
            "store_get": lambda: ({"generation": 0, "keys": ["k"]}, []),
            "store_check": lambda: ({"generation": 0, "keys": ["k"]}, []),
            "store_add": lambda: ({"generation": 0, "key": f"n {self.number()}", "amount": 1}, []),
            "store_append": lambda: ({**at, "sizes": [5]}, values),
            "store_compare_set": lambda: ({**at, "sizes": [2, 3]}, values),
            "store_delete": lambda: ({"generation": 0, "key": "none"}, []),
            "store_count": lambda: ({"generation": 0}, []),
        }

    def renew(self):
        """It has no runs."""

    def fingerprint(self):
        answer = self.call("store_get", {"generation": 0, "keys": ["k"]})
        return (
            answer.head.as_json(),
            answer.arrays[0].tobytes(),
            [(m.role, m.index, m.address) for m in self.service.members()],
        )


class WorkSubject(Subject):
    """The ledger of a master."""

    def __init__(self, folder):
        super().__init__("work", WorkService(folder / "ledger"), {})
        self._holder = {"holder": "p/trainer"}
        spec = WorkSpec((("f", 40), ("g", 7)), 3, seed=1, skip_bad_records=2)
        self._spec = {**asdict(spec), "parts": [["f", 40], ["g", 7]]}
        evaluation = {**self._holder, "parts": [["e", 9]], "records_per_task": 4}
        self.makers = {
            "open_work": lambda: ({"spec": dict(self._spec)}, []),
            "lease_tasks": lambda: ({**self._holder, "last_token": 0, "kinds": ["train"], "most": 2}, []),
            "acknowledge_records": lambda: ({**self._holder, "done": [[self._lease(), 1]]}, []),
            "give_back_tasks": lambda: ({**self._holder, "tokens": [self._lease()]}, []),
            "fail_task": self._fail,
            "begin_evaluation": lambda: ({**evaluation, "evaluation": self.number()}, []),
            "begin_prediction": lambda: ({**evaluation, "prediction": self.number()}, []),
            "begin_export": self._export,
            "take_position": lambda: (dict(self._holder), []),
            "restore_position": lambda: ({**self._holder, "state": self._state()}, []),
        }
        self.call("open_work", {"spec": self._spec})

    def renew(self):
        """Nothing is done."""
        self.call("restore_position", {**self._holder, "state": None})

    def _lease(self):
        self.renew()
        head = {**self._holder, "last_token": 0, "kinds": ["train"], "most": 1}
        return self.call("lease_tasks", head).head.leases[0].token

    def _fail(self):
        told = {"token": self._lease(), "error": "bad", "record": None, "number_in_file": None}
        return {**self._holder, **told}, []

    def _export(self):
        self.renew()
        return dict(self._holder), []

    def _state(self):
        self._lease()
        return self.call("take_position", self._holder).head.state

    def fingerprint(self):
        return self.call("take_position", self._holder).head.state


class GroupSubject(Subject):
    """The group of trainers of a master, with one trainer, which others may declare gone."""

    def __init__(self, folder):
        super().__init__("trainer group", TrainerGroup(folder / "group.json"), {})
        self._process = {"process": "p"}
        self.makers = {
            "enter_group": lambda: (dict(self._process), []),
            "join_group": lambda: ({**self._process, "round": self.service.round, "lost": []}, []),
            "watch_group": lambda: ({**self._process, "round": self.service.round}, []),
            "settle_group": lambda: ({**self._process, "round": self.service.round}, []),
            "leave_group": lambda: ({"process": f"other {self.number()}"}, []),
        }
        self.call("enter_group", self._process)

    def renew(self):
        """Another trainer."""
        self.call("leave_group", self._process)
        self._process = {"process": f"p {self.number()}"}

    def fingerprint(self):
        return self.service.members, self.service.round, self.service.gone


class JobSubject(Subject):
    """A master's answers about a job whose processes have not been started."""

    def __init__(self, folder):
        super().__init__("job", JobService(), {})
        trainers = {"min": 1, "max": 4, "replicas": 2}
        spec = JobSpec.model_validate(
            {"name": "j", "entry": "t.py", "sharding": "dynamic", "roles": {"trainers": trainers}}
        )
        self._registry = Registry()
        self._logs = MergedLogs(["trainer-0"])
        work = WorkService(folder / "ledger")
        self.service.supervise(Supervisor(spec, None, self._registry, self._logs, {}, work, None))
        self.makers = {
            "job_status": lambda: ({}, []),
            "scale_job": lambda: ({"trainers": 3}, []),
            "stop_job": lambda: ({"now": False}, []),
        }

    def renew(self):
        """It has no runs."""

    def fingerprint(self):
        return self.call("job_status", {}).head.processes

    def close(self):
        super().close()
        self._registry.close()
        self._logs.close()


SUBJECTS = {
    "server": ServerSubject,
    "elastic server": ElasticServerSubject,
    "async server": AsyncServerSubject,
    "worker": WorkerSubject,
    "loader": LoaderSubject,
    "loader of tasks": TaskReadingSubject,
    "registry": RegistrySubject,
    "work": WorkSubject,
    "trainer group": GroupSubject,
    "job": JobSubject,
}
