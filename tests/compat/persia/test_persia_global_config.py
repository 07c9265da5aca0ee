"""`global_config.yml`: keys that map to something, that warn, and that are refused by name."""

import warnings

import numpy as np
import pytest
import torch
import yaml
from persia_job import PersiaJob

from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.launch.job_spec import JobSpec
from karvan.launch.role_programs import environment_of


@pytest.fixture
def apply(tmp_path, monkeypatch):
    """Has the job use a configuration; gives what a process of a role reads from its variables."""

    def write(content, role=Role.EMBEDDING_WORKER):
        from persia.config import read_global_config

        path = tmp_path / "global_config.yml"
        path.write_text(yaml.safe_dump(content))
        monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(path))
        return JobEnvironment.read(read_global_config().variables(role))

    return write


def test_limits_of_embedding_workers_and_servers_are_those_of_the_roles(apply):
    content = {
        "embedding_worker_config": {"forward_buffer_size": 12, "buffered_data_expired_sec": 34},
        "embedding_parameter_server_config": {"capacity": 56},
    }
    worker = JobEnvironment(embedding_worker_batches=12, embedding_worker_expire=34)
    assert apply(content) == worker
    assert apply(content, Role.PARAMETER_SERVER) == JobEnvironment(capacity=56)
    assert apply(content, Role.TRAINER) == JobEnvironment()


def test_the_defaults_and_an_empty_file_are_accepted(apply):
    assert apply(None, Role.PARAMETER_SERVER).capacity is None
    assert apply({"common_config": {"job_type": "Train"}}).embedding_worker_batches == 1000


def keys_kept():
    """Rows of both slots after ids 0-9 were inserted, and after 5 was used and 10 inserted."""
    from persia.ctx import TrainCtx
    from persia.data import DataLoader, IterableDataset
    from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
    from persia.embedding.optim import SGD

    def batch(slot, *keys):
        ids = np.array(keys, np.uint64)
        other = {"user": "item", "item": "user"}[slot]
        features = {slot: ids, other: ids[:0]}
        label = Label(np.ones((1, 1), np.float32))
        return PersiaBatch([IDTypeFeature(name, [each]) for name, each in features.items()], labels=[label])

    class Dataset(IterableDataset):
        def __iter__(self):
            for number in range(10):
                yield batch("user" if number % 2 else "item", number)
            yield batch("user", 5)
            yield batch("item", 10)

    net = torch.nn.Linear(4, 1)
    with TrainCtx(
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        mixed_precision=False,
    ) as ctx:
        kept = []
        for number, data in enumerate(DataLoader(Dataset(4), embedding_staleness=1)):
            _, vectors, _ = ctx.prepare_features(data)
            ctx.backward(net(vectors[0]).sum())
            if number in (9, 11):
                tables = ctx.open()[1].embeddings.tables()
                kept.append(sorted(key for table in tables for key in table.keys().tolist()))
                assert ctx.get_embedding_size() == [len(kept[-1])]
        return kept


LIMIT = {"embedding_parameter_server_config": {"capacity": 5}}
KEPT = [[5, 6, 7, 8, 9], [5, 7, 8, 9, 10]]  # 6 was used least recently


def test_a_capacity_bounds_the_rows_of_all_tables_in_one_process(configure, apply):
    apply(LIMIT)
    assert keys_kept() == KEPT
    apply({})
    assert keys_kept() == [list(range(10)), list(range(11))]


def test_a_server_has_the_capacity_of_its_global_configuration(configure, tmp_path, monkeypatch):
    limit = tmp_path / "limit.yml"
    limit.write_text(yaml.safe_dump(LIMIT))
    job = PersiaJob(tmp_path, {"embedding.yml": "slots_config: {user: {dim: 4}, item: {dim: 4}}"})
    try:
        job.start("embedding-parameter-server", "--port", 0, "--global-config", limit)
        job.start("embedding-worker", "--port", 0)
        monkeypatch.setenv("PERSIA_NATS_URL", job.registry.address)
        assert keys_kept() == KEPT
    finally:
        job.close()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"common_config": {"job_type": "Infer"}}, r"job_type: Infer.*kv\.InferContext"),
        ({"embedding_parameter_server_config": {"enable_incremental_update": True}}, "full_every=n"),
    ],
)
def test_what_is_unsupported_is_refused_by_name(apply, content, text):
    with pytest.raises(NotImplementedError, match=text):
        apply(content)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"common_config": {"job_type": "Serve"}}, "job_type"),
        ({"embedding_worker_config": {"forward_buffer_size": 0}}, "forward_buffer_size"),
        ({"embedding_parameter_server_config": {"capacity": 0}}, "capacity"),
        ({"embedding_server_config": {}, "shard_server_config": {}}, "got both"),
        ([1], "must be a mapping"),
    ],
)
def test_wrong_values_are_errors(apply, content, text):
    with pytest.raises(ValueError, match=text):
        apply(content)


PUBLISHED = {  # the form of PERSIA's own examples
    "common_config": {
        "metrics_config": {"enable_metrics": True, "push_interval_sec": 10},
        "job_type": "Train",
        "infer_config": {"servers": ["a:1"]},
    },
    "embedding_parameter_server_config": {
        "capacity": 56,
        "num_hashmap_internal_shards": 1,
        "enable_incremental_update": False,
        "incremental_buffer_size": 5_000_000,
        "incremental_channel_capacity": 1000,
        "incremental_dir": "x",
        "capcity": 3,
    },
    "embedding_worker_config": {"forward_buffer_size": 1000},
}
WARNINGS = {
    "enable_metrics=True": "karvan status",
    "common_config.metrics_config.push_interval_sec": "seconds between two pushes",
    "infer_config=": "InferContext",
    "num_hashmap_internal_shards=1": "32 shards",
    "incremental_buffer_size=5000000": "kv.Checkpoints(folder, full_every=n)",
    "embedding_parameter_server_config.incremental_channel_capacity": "kv.Checkpoints(folder, full_every=n)",
    "incremental_dir='x'": "kv.Checkpoints(folder, full_every=n)",
    "embedding_parameter_server_config.capcity": "it is no key of PERSIA",
}


def test_keys_without_a_counterpart_warn_once_in_a_process(configure, apply):
    from persia.ctx import eval_ctx

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert apply(PUBLISHED, Role.PARAMETER_SERVER).capacity == 56
        with eval_ctx() as ctx:  # which reads the file several times
            assert ctx.get_embedding_size() == [0]
    texts = [str(each.message) for each in caught if "of PERSIA" in str(each.message)]
    assert len(texts) == len(WARNINGS)
    for key, reason in WARNINGS.items():
        (text,) = (text for text in texts if f"{key} of PERSIA has no effect here: " in text or key in text)
        assert reason in text


def test_names_of_earlier_versions_mean_those_of_now(apply):
    older = {
        "common_config": {"intent": "Train", "metrics_config": None},
        "shard_server_config": {"capacity": 7},
        "middleware_config": {"forward_buffer_size": 8},
    }
    assert apply(older, Role.PARAMETER_SERVER).capacity == 7
    assert apply(older).embedding_worker_batches == 8


def test_slots_of_earlier_versions_warn_once_for_a_key(configure):
    from persia.config import read_slots

    slot = {"dim": 4, "index_prefix": 5, "capacity": 100_000}
    configure(
        {"feature_index_prefix_bit": 12, "slot_config": {"user": slot, "item": slot}, "feature_groups": {}}
    )
    with pytest.warns(UserWarning, match="of PERSIA has no effect") as caught:
        assert {name: slot.dim for name, slot in read_slots().slots_config.items()} == {"user": 4, "item": 4}
    texts = sorted(str(each.message).partition(": ")[2] for each in caught)
    assert [text.split()[0] for text in texts] == ["slots_config.*.capacity", "slots_config.*.index_prefix"]


def test_a_launched_job_has_the_limits_of_its_configuration(configure, tmp_path, monkeypatch):
    from persia.config import with_global_config

    (tmp_path / "limits.yml").write_text(
        yaml.safe_dump({**LIMIT, "embedding_worker_config": {"forward_buffer_size": 9}})
    )

    def launched(**servers):
        roles = {"parameter_servers": servers, "embedding_workers": 1}
        return with_global_config(JobSpec(name="job", entry="a.py", system="persia", roles=roles))

    assert launched(capacity=3).roles.parameter_servers.capacity == 3
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(tmp_path / "limits.yml"))
    spec = launched()
    server = environment_of(spec, Role.PARAMETER_SERVER, 0, registry="a:1", generation=0)
    worker = environment_of(spec, Role.EMBEDDING_WORKER, 0, registry="a:1", generation=0)
    assert (server["KARVAN_CAPACITY"], worker["KARVAN_EMBEDDING_WORKER_BATCHES"]) == ("5", "9")
    with pytest.raises(ValueError, match=r"capacity is 3, and capacity in .*limits.yml is 5"):
        launched(capacity=3)


def test_workers_write_checkpoints(configure, apply, tmp_path):
    from persia.ctx import eval_ctx

    apply({"common_config": {"checkpointing_config": {"num_workers": 3}}})
    with eval_ctx() as ctx:
        checkpoints = ctx.dumps.checkpoints(str(tmp_path / "rows"))
        ctx.dump_embedding(tmp_path / "rows")
    assert checkpoints.writers == 3
    assert checkpoints.latest() is not None
