"""`global_config.yml`: keys that map to something, that warn, and that are refused by name."""

import numpy as np
import pytest
import torch
import yaml
from persia_job import PersiaJob

from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role


@pytest.fixture
def apply(tmp_path, monkeypatch):
    """Has the job use a configuration; gives what a process of a role reads from its variables."""

    def write(content, role=Role.EMBEDDING_WORKER):
        from persia.bridge.global_config import read_global_config

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
        ({"common_config": {"metrics_config": {"enable_metrics": True}}}, "enable_metrics: true"),
        ({"common_config": {"job_type": "Infer"}}, r"job_type: Infer.*kv\.InferContext"),
        ({"common_config": {"infer_config": {"servers": ["a:1"]}}}, "infer_config"),
        ({"embedding_parameter_server_config": {"enable_incremental_update": True}}, "full_every=n"),
        ({"embedding_parameter_server_config": {"incremental_dir": "x"}}, "enable_incremental_update"),
    ],
)
def test_what_is_unsupported_is_refused_by_name(apply, content, text):
    with pytest.raises(NotImplementedError, match=text):
        apply(content)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"common": {}}, "unknown key 'common'"),
        ({"common_config": {"job_type": "Serve"}}, "job_type"),
        ({"embedding_worker_config": {"forward_buffer_size": 0}}, "forward_buffer_size"),
        ({"embedding_parameter_server_config": {"capacity": 0}}, "capacity"),
        ([1], "must be a mapping"),
    ],
)
def test_unknown_keys_and_wrong_values_are_errors(apply, content, text):
    with pytest.raises(ValueError, match=text):
        apply(content)


def test_tuning_of_persias_machinery_warns(apply):
    with pytest.warns(UserWarning, match="num_hashmap_internal_shards=7 of PERSIA has no effect here"):
        apply({"embedding_parameter_server_config": {"num_hashmap_internal_shards": 7}})


def test_workers_write_checkpoints(configure, apply, tmp_path):
    from persia.ctx import eval_ctx

    apply({"common_config": {"checkpointing_config": {"num_workers": 3}}})
    with eval_ctx() as ctx:
        checkpoints = ctx.dumps.checkpoints(str(tmp_path / "rows"))
        ctx.dump_embedding(tmp_path / "rows")
    assert checkpoints.writers == 3
    assert checkpoints.latest() is not None
