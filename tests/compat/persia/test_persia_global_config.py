"""`global_config.yml`: keys that map to something, that warn, and that are refused by name."""

import pytest
import yaml

from karvan.job.environment import JobEnvironment


@pytest.fixture
def apply(tmp_path, monkeypatch):
    """Applies a configuration to this process."""
    for name in ("EXPIRE", "BATCHES"):
        monkeypatch.setenv(f"KARVAN_EMBEDDING_WORKER_{name}", "")

    def write(content):
        from persia.bridge.global_config import read_global_config

        path = tmp_path / "global_config.yml"
        path.write_text(yaml.safe_dump(content))
        monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(path))
        read_global_config().apply()

    return write


def test_limits_of_embedding_workers_are_those_of_the_roles(apply):
    apply({"embedding_worker_config": {"forward_buffer_size": 12, "buffered_data_expired_sec": 34}})
    job = JobEnvironment.read()
    assert (job.embedding_worker_batches, job.embedding_worker_expire) == (12, 34)


def test_the_defaults_and_an_empty_file_are_accepted(apply):
    apply(None)
    apply(
        {
            "common_config": {"metrics_config": {"enable_metrics": False}, "job_type": "Train"},
            "embedding_parameter_server_config": {"capacity": 1_000_000_000},
        }
    )
    assert JobEnvironment.read().embedding_worker_batches == 1000


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"common_config": {"metrics_config": {"enable_metrics": True}}}, "enable_metrics: true"),
        ({"common_config": {"job_type": "Infer"}}, r"job_type: Infer.*kv\.InferContext"),
        ({"common_config": {"infer_config": {"servers": ["a:1"]}}}, "infer_config"),
        ({"embedding_parameter_server_config": {"capacity": 5}}, r"capacity: 5.*LRU\(capacity\)"),
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
        ([1], "must be a mapping"),
    ],
)
def test_unknown_keys_and_wrong_values_are_errors(apply, content, text):
    with pytest.raises(ValueError, match=text):
        apply(content)


def test_tuning_of_persias_machinery_warns(apply):
    with pytest.warns(UserWarning, match="num_hashmap_internal_shards=7 of PERSIA has no effect here"):
        apply({"embedding_parameter_server_config": {"num_hashmap_internal_shards": 7}})
