"""Loaders of a job whose records are leased: they read any task, in the order that everybody expects."""

import json
import re
import threading
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from task_loaders import Numbers, shared_data, task_loaders

import karvan as kv
from karvan.cluster.batch_messages import unpack
from karvan.cluster.loader.service import LoaderStatistics
from karvan.cluster.loader.task_service import TaskService
from karvan.cluster.role_process import RoleSettings
from karvan.data.loading.rank_shares import permutation
from karvan.data.task_records import TaskToRead, after, places_of, records_done
from karvan.discovery.registry import Registry
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.protocol.loader import NoAnswerYet, TaskReadingHello
from karvan.train.choice import require_evaluable
from karvan.wire import Message, RefusedError, WireError
from karvan.wire.server import Caller
from karvan.work.task import Task, TaskKind

ME = Caller("session", TaskReadingHello(loader=0))


def ask(service, tasks, caller=ME):
    """The answer to a call with these tasks, once there is one."""
    sent = [{"task": each.task._asdict(), "ends": each.ends} for each in tasks]
    head = json.loads(json.dumps({"tasks": sent}))
    while True:
        answer = service.answer(Message({"method": "read_batch", **head}), caller)
        if not isinstance(answer.head, NoAnswerYet):
            return answer


def batch_of(answer):
    """The batch of an answer."""
    return unpack(answer.head.batch, answer.arrays)


def rest_of(tasks, records):
    """What is left of tasks after this many records."""
    left = list(tasks)
    while records:
        task, ends = left.pop(0)
        rest = after(task, records)
        records -= min(records, len(places_of(task)))
        if rest is not None:
            left.insert(0, TaskToRead(rest, ends))
    return left


def slowly(tasks, batch_size, seed):
    """The numbers of every batch, one record after the other."""
    batches, batch = [], []
    for task, ends in tasks:
        order = (
            range(task.records) if seed is None else permutation(task.records, seed, task.epoch, task.number)
        )
        for place in range(task.done, task.records):
            if place not in task.skipped:
                batch.append(int(task.path) * 1000 + task.first + int(order[place]))
            if len(batch) == batch_size:
                batches.append(batch)
                batch = []
        if ends and batch:
            batches.append(batch)
            batch = []
    return batches


@st.composite
def lists_of_tasks(draw):
    made = []
    for _ in range(draw(st.integers(1, 5))):
        records = draw(st.integers(1, 20))
        skipped = draw(st.sets(st.integers(0, records - 1), max_size=3))
        task = Task(
            TaskKind.TRAIN,
            draw(st.integers(0, 2)),
            draw(st.integers(0, 99)),
            str(draw(st.integers(0, 2))),
            draw(st.integers(0, 30)),
            records,
            draw(st.integers(0, records - 1)),
            skipped=tuple(sorted(skipped)),
        )
        if len(places_of(task)):
            made.append(TaskToRead(task, draw(st.booleans())))
    if made:
        made[-1] = made[-1]._replace(ends=True)
    return made


@given(
    tasks=lists_of_tasks(),
    batch_size=st.integers(1, 9),
    seed=st.none() | st.integers(0, 3),
    known=st.integers(1, 5),
    restarts=st.sets(st.integers(0, 9)),
)
def test_batches_of_tasks_are_those_of_a_slow_reader(tasks, batch_size, seed, known, restarts):
    """However few tasks a call has, if they have a batch, and wherever another loader takes over."""
    data = shared_data(Numbers([50, 50, 50]), batch_size, seed)
    service = TaskService()
    service.offer(data)
    try:
        left, seen = tasks, []
        while left:
            if len(seen) in restarts:
                service.close()
                service = TaskService()
                service.offer(data)
            sent = known
            while sent < len(left) and not slowly(left[:sent], batch_size, seed):
                sent += 1
            answer = ask(service, left[:sent])
            seen.append(batch_of(answer)["id"].tolist())
            assert answer.head.records == len(seen[-1])
            left = rest_of(left, len(seen[-1]))
        assert seen == slowly(tasks, batch_size, seed)
    finally:
        service.close()


def one_task(**changes):
    return [TaskToRead(Task(TaskKind.TRAIN, 0, 0, "0", 0, 10)._replace(**changes), True)]


def test_tasks_of_other_data_are_refused():
    service = TaskService()
    service.offer(shared_data(Numbers([10])))
    for wrong in ({"path": "1"}, {"first": 1}, {"done": 10}, {"skipped": tuple(range(10))}):
        with pytest.raises(RefusedError, match="expected a task with unread records"):
            ask(service, one_task(**wrong))
    service.close()


def test_a_record_that_cannot_be_read_fails_its_task_and_can_be_tried_again(tmp_path):
    source = Numbers([10, 10], bad=1005)
    service = TaskService()
    service.offer(shared_data(source, batch_size=8))
    tasks = [TaskToRead(one_task()[0].task, False), *one_task(path="1", number=1)]
    assert ask(service, tasks).head.records == 8
    failed = vars(ask(service, rest_of(tasks, 8)).head)
    assert failed == {"failed": "DataError: 1: A bad number.", "task": 1, "kind": "damaged"}
    source.bad = None
    assert batch_of(ask(service, rest_of(tasks, 8)))["id"].tolist() == [8, 9, *range(1000, 1006)]
    service.close()


def train(batches, client, seen=None, after_each=lambda: None):
    """Take and acknowledge everything."""
    seen = [] if seen is None else seen
    for batch in batches:
        seen.append(batch["id"].tolist())
        assert client.acknowledge(records_done(batches.hand_over())) == []
        after_each()
    return seen


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("seed", [None, 3])
def test_two_trainers_get_every_record_once_from_three_loaders(tmp_path, seed):
    source = Numbers([90, 40, 3, 1, 60])
    with task_loaders(tmp_path, *[shared_data(source, 8, seed, records_per_task=10)] * 3) as loaders:
        datas = [loaders.data() for _ in range(2)]
        clients = [loaders.client(data.spec()) for data in datas]
        for epoch in range(2):
            seen = [[], []]
            threads = [
                threading.Thread(target=train, args=(data.lease(client, epoch), client, into))
                for data, client, into in zip(datas, clients, seen, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert sorted(flat(seen[0] + seen[1])) == source.all()
            assert max(map(len, seen[0] + seen[1])) == 8


def test_lost_loaders_cost_nothing_but_time(tmp_path):
    """One goes away and comes back, then the other one; for a while there is none."""
    source = Numbers([300])
    with task_loaders(tmp_path, *[shared_data(source, 4, 0, records_per_task=10)] * 2) as loaders:
        data = loaders.data()
        client = loaders.client(data.spec())
        actions = {
            5: lambda: loaders.lose(0),
            15: lambda: loaders.start(0),
            25: lambda: loaders.lose(1),
            35: lambda: (loaders.lose(0), threading.Timer(1.0, loaders.start, [1]).start()),
            45: lambda: loaders.start(0),
        }
        seen = []
        train(data.lease(client, 0), client, seen, lambda: actions.get(len(seen), lambda: None)())
        assert sorted(flat(seen)) == source.all()


def test_the_batches_of_a_plan_come_in_its_order(tmp_path):
    source = Numbers([50, 9, 30])
    with task_loaders(tmp_path, *[shared_data(source, 4, 7)] * 3) as loaders:
        data = loaders.data()
        plan = data.plan()
        for ranks in (1, 2):
            seen = {}
            for rank in range(ranks):
                batches = data.planned(plan, epoch=1, first=2, rank=rank, ranks=ranks, of_step=3)
                numbers = []
                for batch in batches:
                    ((number, _),) = records_done(batches.hand_over()).items()
                    numbers.append(number)
                    seen[number] = batch["id"].tolist()
                    if len(numbers) == 2 and rank == 0:
                        loaders.lose(0)
                loaders.start(0) if rank == 0 else None
                assert numbers == sorted(numbers)
            assert sorted(seen) == list(range(2, len(plan)))
            for number, ids in seen.items():
                assert [ids] == slowly([TaskToRead(plan.task(1, number), True)], 4, 7)


def test_no_loader_for_too_long_is_an_error_that_says_so(tmp_path):
    with task_loaders(tmp_path, shared_data(Numbers([40]), 4)) as loaders:
        data = loaders.data(timeout=0.5, prefetch=1)
        client = loaders.client(data.spec())
        batches = data.lease(client, 0)
        taken = iter(batches)
        next(taken)
        loaders.lose(0)
        with pytest.raises(
            WireError, match=r"Expected one of 1 loaders to read .* got: there is no loader 0 now"
        ):
            list(taken)
        with pytest.raises(
            WireError, match=r"Expected loader 0 to answer 'describe' within 0.2 s, got: there is"
        ):
            loaders.data(timeout=0.2).spec()


def test_the_record_that_cannot_be_read_is_found(tmp_path):
    source = Numbers([40], bad=17)
    with task_loaders(tmp_path, shared_data(source, 4, seed=5, records_per_task=8)) as loaders:
        data = loaders.data()
        client = loaders.client(data.spec())
        batches = data.lease(client, 0)
        with pytest.raises(RuntimeError, match="loader 0: DataError: 0: A bad number") as caught:
            list(batches)
        suspects = batches.suspects(caught.value)
        assert [str(each.lease.task) for each in suspects] == ["records 16 to 23 of 0 (epoch 0)"]
        assert batches.suspects(ValueError()) == []
        # Records are read in blocks of up to 7, so that one alone cannot be read.
        assert data.search().find(suspects).record.number == 17


def test_the_record_that_a_model_cannot_use_is_found(tmp_path):
    with task_loaders(tmp_path, *[shared_data(Numbers([40]), 4, seed=5, records_per_task=8)] * 2) as loaders:
        data = loaders.data()
        client = loaders.client(data.spec())
        batches = data.lease(client, 0)

        def check(batch):
            if 21 in batch["id"]:
                raise ValueError("a bad number")

        found = []
        for _ in batches:
            found.append(data.search().find(batches.hand_over(), [check]).record)
            client.acknowledge(records_done(batches.hand_over()))
        assert [each.number for each in found if each is not None] == [21]


def test_loaders_of_different_data_are_an_error_before_training(tmp_path):
    one, two = shared_data(Numbers([10]), 4), shared_data(Numbers([10]), 5)
    with (
        task_loaders(tmp_path, one, two) as loaders,
        pytest.raises(ValueError, match="loader 0 and loader 1 read data with different batch_size"),
    ):
        loaders.data().spec()


def test_data_of_loaders_is_not_for_evaluations(tmp_path):
    with task_loaders(tmp_path, shared_data(Numbers([10]))) as loaders:
        data = loaders.data()
        with pytest.raises(TypeError, match="cannot be iterated or evaluated"):
            iter(data)
        with pytest.raises(TypeError, match=r"expected kv.data.read\(…\) as eval_data, got LoadedData"):
            require_evaluable(data, "eval_data")
        with pytest.raises(TypeError, match=r"expected kv.data.read\(…\) as data of predict, got LoadedData"):
            require_evaluable(data, "data of predict")
        require_evaluable(loaders.datas[0], "eval_data")
        require_evaluable([{"id": torch.ones(2)}], "eval_data")


def engine_fitted_to(values):
    return kv.FeatureEngine([kv.Feature("id").normalise()]).fit([{"id": torch.tensor(values)}])


def test_statistics_of_loaders_reach_the_trainer_and_must_be_equal(tmp_path):
    engines = [engine_fitted_to([0.0, 1.0]), engine_fitted_to([0.0, 9.0])]
    datas = [shared_data(Numbers([40]), 4, transform=each) for each in engines]
    statistics = [LoaderStatistics.of([each]) for each in engines]
    (tmp_path / "equal").mkdir()
    with task_loaders(tmp_path / "equal", datas[0], datas[0], statistics=[statistics[0]] * 2) as loaders:
        data = loaders.data(prefetch=1)
        states = data.transform_states()
        ((name, state),) = states.items()
        other = engine_fitted_to([5.0, 6.0])
        other.load_state_dict(state)
        assert other.get_extra_state().keys() == engines[0].get_extra_state().keys()
        client = loaders.client(data.spec())
        taken = iter(data.lease(client, 0))
        next(taken)
        for index in range(2):
            loaders.lose(index)
            loaders.datas = [datas[1]] * 2
            loaders.start(index, statistics[1])
        with pytest.raises(
            ValueError, match="transforms it with other statistics, than when training started"
        ):
            list(taken)
    with task_loaders(tmp_path, *datas, statistics=statistics) as loaders:
        message = f"loader 0 and loader 1 have different statistics of transform '{name}'"
        with pytest.raises(ValueError, match=re.escape(message)):
            loaders.data().transform_states()


@pytest.fixture
def elastic_loader(monkeypatch):
    """A context of a loader in a job with sharding: dynamic."""
    with closing(Registry()) as registry:
        monkeypatch.setenv("KARVAN_SHARDING", "dynamic")
        monkeypatch.setenv("KARVAN_ROLE", "loader")
        yield lambda: kv.LoaderContext(
            settings=RoleSettings(Role.LOADER, JobEnvironment(registry=registry.address))
        )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda data: data.send({"x": torch.ones(2)}), "data.send sends batches that a program makes itself"),
        (lambda data: list(data.epochs()), "data.epochs sends batches that a program makes itself"),
        (lambda data: data.serve([{"x": torch.ones(2)}]), r"expected data.serve\(data.read\(…\)\), got list"),
        (lambda data: None, "has ended and served no data"),
    ],
    ids=["send", "epochs", "serve", "nothing"],
)
def test_a_program_that_makes_batches_itself_is_refused(elastic_loader, program, message):
    with pytest.raises((ValueError, TypeError), match=message), elastic_loader() as data:
        program(data)


def test_read_of_a_loader_gives_all_of_the_data(elastic_loader):
    context = elastic_loader()
    data = context.read({"id": torch.arange(10)}, 4)
    assert isinstance(data, kv.data.SharedData)
    assert data.records == 10
    context._leave()


@pytest.mark.parametrize("given", [{"ordered": True}, {"rank": 0}, {"world_size": 2}])
def test_what_means_nothing_for_leased_records_is_an_error(monkeypatch, given):
    monkeypatch.setenv("KARVAN_ROLE", "loader")
    monkeypatch.setenv("KARVAN_SHARDING", "dynamic")
    with pytest.raises(ValueError, match=f"expected no ordered, .* got {next(iter(given))}"):
        kv.data.from_loaders(loaders=1, **given)
