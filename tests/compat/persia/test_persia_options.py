"""Options of PERSIA that map to something, and those that are refused by name; small modules."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from forked_programs import run_forked
from persia_job import PersiaJob

import karvan as kv
from karvan.compat.unsupported import UnsupportedError


def test_distributed_options():
    from persia.distributed import BaguaDistributedOption, DDPOption, get_default_distributed_option

    assert DDPOption("tcp", "gloo").dense_reduce == "mean"
    assert get_default_distributed_option().backend == "gloo"
    assert BaguaDistributedOption("gradient_allreduce").dense_reduce == "mean"
    for name in ("bytegrad", "qadam", "decentralized", "low_precision_decentralized", "async"):
        with pytest.raises(NotImplementedError, match=f"'{name}'.* is not supported: .*the nearest is"):
            BaguaDistributedOption(name)
    with pytest.raises(NotImplementedError, match="autotune_level"):
        BaguaDistributedOption("gradient_allreduce", autotune_level=1)
    with pytest.raises(ValueError, match="'other'"):
        BaguaDistributedOption("other")
    with pytest.raises(ValueError, match="nccl, gloo, got 'mpi'"):
        DDPOption(backend="mpi")
    with pytest.warns(UserWarning, match=r"master_port=1234 .* no effect here"):
        DDPOption(backend="gloo", master_port=1234)


def make_context(**options):
    from persia.ctx import TrainCtx
    from persia.embedding.optim import SGD

    net = options.pop("model", None) or torch.nn.Linear(1, 1)
    dense = torch.optim.SGD(net.parameters(), lr=0.1)
    return TrainCtx(model=net, **{"embedding_optimizer": SGD(lr=0.1), "dense_optimizer": dense, **options})


def test_options_of_contexts(configure):
    from persia.data import DataLoader, StreamingDataset

    with pytest.raises(TypeError, match=r"of persia\.embedding\.optim, got Adam"):
        make_context(embedding_optimizer=kv.optim.Adam())
    with pytest.raises(ValueError, match="above 1, got 1"):
        make_context(grad_scalar_update_factor=1)
    with pytest.raises(UnsupportedError, match="sparse_optimizer is called embedding_optimizer"):
        make_context(sparse_optimizer=None)
    assert make_context(device_id=-1).device_id is None
    with pytest.raises(NotImplementedError, match="lookup_emb_directly=False"):
        make_context(lookup_emb_directly=False)
    with pytest.warns(UserWarning, match=r"backward_workers_size=2 .* no effect here: .*KARVAN_THREADS"):
        make_context(backward_workers_size=2)
    with make_context() as ctx:
        for name in ("dense_filename", "dense_model_filename", "opt_filename"):
            with pytest.raises(UnsupportedError, match=rf"{name}='x\.pt'"):
                ctx.dump_checkpoint("out", **{name: "x.pt"})
        for name in ("dense_filename", "dense_model_filename", "opt_filename"):
            with pytest.raises(UnsupportedError, match=rf"{name}='x\.pt'"):
                ctx.load_checkpoint("out", **{name: "x.pt"})
        with pytest.raises(UnsupportedError, match="device_id=1 of a single batch"):
            ctx.get_embedding_from_data(None, device_id=1)
        with pytest.raises(TypeError, match="expects a StreamingDataset or an IterableDataset, got list"):
            DataLoader([1])
        with pytest.raises(ValueError, match="embedding_staleness must be at least 1"):
            DataLoader(StreamingDataset(4), embedding_staleness=0)
        with pytest.warns(UserWarning, match="num_workers=3"):
            loader = DataLoader(StreamingDataset(4), num_workers=3)
        with pytest.warns(UserWarning, match="forward_buffer_size=7 .* prepares 10 batches in advance"):
            DataLoader(StreamingDataset(4), forward_buffer_size=7)
        with pytest.raises(RuntimeError, match="data-loaders send"):
            iter(loader)
    with pytest.raises(RuntimeError, match="outside of the context"):
        make_context().get_embedding_size()


def test_a_server_of_inference_says_what_to_use():
    from persia.ctx import InferCtx

    with pytest.raises(NotImplementedError, match=r"InferCtx .* use kv\.InferContext"):
        InferCtx(["localhost:8887"])


def test_a_loader_without_a_job_says_what_it_needs():
    from persia.ctx import DataCtx

    with pytest.raises(RuntimeError, match="PERSIA_NATS_URL, the address of the job's registry"):
        DataCtx()


@pytest.mark.parametrize("name", ["PERSIA_NATS_URL", "PERSIA_NATS_IP"])
def test_the_registry_stands_for_nats(name, monkeypatch):
    from persia.env import join_job

    monkeypatch.setenv("KARVAN_REGISTRY", "")
    assert not join_job()
    monkeypatch.setenv(name, "nats://somewhere:4222")
    assert join_job()
    assert os.environ["KARVAN_REGISTRY"] == "somewhere:4222"
    monkeypatch.setenv("KARVAN_REGISTRY", "")
    monkeypatch.setenv(name, "somewhere")
    with pytest.raises(ValueError, match=f"{name} expects the host:port"):
        join_job()


def test_optimizers_are_karvans():
    from persia.embedding import optim

    adagrad = optim.Adagrad(lr=0.5, g_square_momentum=0.9, vectorwise_shared=True).native(10.0)
    assert isinstance(adagrad, kv.optim.Adagrad)
    assert adagrad.defaults == {
        **adagrad.defaults,
        **{"lr": 0.5, "decay": 0.9, "row_wise": True, "accumulate": "last"},
        **{"initial_accumulator_value": 0.01, "weight_bound": 10.0, "eps": 1e-10},
    }
    adam = optim.Adam(betas=(0.5, 0.6), weight_decay=0.1).native(None)
    assert (adam.defaults["betas"], adam.defaults["weight_decay"]) == ((0.5, 0.6), 0.1)
    sgd = optim.SGD(0.1, momentum=0.9).native(None)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.1, 0.9)


def test_small_modules(tmp_path, monkeypatch):
    from persia import env, logger, service, utils

    monkeypatch.setenv("LOG_LEVEL", "warning")
    assert logger.get_default_logger("quiet").level == 30
    monkeypatch.setenv("LOG_LEVEL", "trace")
    assert logger.get_logger("chatty").level == 10
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="LOG_LEVEL expects trace, debug, info, warn or error, got 'loud'"):
        logger.get_default_logger("unknown")
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "REPLICA_INDEX": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REPLICA_SIZE", "5")
    assert (env.get_rank(), env.get_world_size(), env.get_local_rank()) == (3, 8, 1)
    assert (env.get_replica_index(), env.get_replica_size()) == (2, 5)
    assert service.get_embedding_worker_services() == ["embedding_worker:8887"]
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", "a:1, b:2")
    assert service.get_embedding_worker_services() == ["a:1", "b:2"]
    utils.dump_yaml({"a": [1, 2]}, str(tmp_path / "a.yml"))
    assert utils.load_yaml(str(tmp_path / "a.yml")) == {"a": [1, 2]}
    with pytest.raises(FileNotFoundError, match=r"b\.yml does not exist"):
        utils.load_yaml(str(tmp_path / "b.yml"))
    env.set_env(rank=1, world_size=2)
    env.reload_env()
    assert (env.get_rank(), env.get_world_size(), env.get_local_rank()) == (1, 2, 0)
    assert (env.get_replica_index(), env.get_replica_size()) == (0, 1)
    port = utils.find_free_port()
    assert port >= 10000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        assert utils.find_free_port(port) > port
    try:
        utils.setup_seed(3)
        first = (torch.rand(1).item(), np.random.rand())
        utils.setup_seed(3)
        assert (torch.rand(1).item(), np.random.rand()) == first
    finally:
        torch.use_deterministic_algorithms(False)


def test_import_persia_gives_all_modules_and_a_version():
    import persia

    assert persia.__version__
    assert persia.embedding.optim.SGD(lr=1e-3).lr == 1e-3
    persia.embedding.optim.SGD(lr=1e-3).apply()
    assert persia.sparse.optim.Adam is persia.embedding.optim.Adam
    assert persia.embedding.data.IDTypeFeatureSparse is persia.embedding.data.IDTypeFeature
    assert callable(persia.launcher.cli)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        persia.nothing  # noqa: B018


def test_plain_python_finds_the_adapter(tmp_path):
    (tmp_path / "program.py").write_text(
        "import persia, persia.ctx, karvan.compat.persia.ctx as ours\n"
        "print(persia.ctx.TrainCtx is ours.TrainCtx, persia.__version__)\n"
    )
    command = [sys.executable, str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.stdout.split()[0] == "True", ended.stderr
    command = [sys.executable, "-m", "persia.launcher", "--help"]
    ended = run_forked(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "embedding-parameter-server" in ended.stdout


def test_a_configuration_of_rows_can_be_changed_until_they_are_made(configure):
    from persia.ctx import eval_ctx
    from persia.embedding import EmbeddingConfig

    config = EmbeddingConfig()
    config.weight_bound, config.emb_initialization = 5, (0.5, 0.5)
    batch = make_batch()
    net = torch.nn.Linear(4, 1)
    with make_context(model=net, embedding_config=config) as ctx:
        _, (user,), _ = ctx.prepare_features(ctx.get_embedding_from_data(batch))
        assert torch.equal(user, torch.full((1, 4), 0.5))
        ctx.backward(user.sum())
        ctx.wait_servers_ready()  # in no job, for nothing
        assert (ctx.rank_id, ctx.world_size) == (0, 1)
    with eval_ctx(model=net) as ctx:  # a context without a configuration takes that of the rows
        _, (trained,), _ = ctx.prepare_features(ctx.get_embedding_from_data(batch))
        assert not torch.equal(trained, user)
        assert ctx.embedding_config.weight_bound == 5
    config.weight_bound = 6
    with (
        make_context(model=net, embedding_config=config) as ctx,
        pytest.raises(ValueError, match=r"made with .*weight_bound=5.*, got .*weight_bound=6"),
    ):
        ctx.get_embedding_size()


def make_batch():
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch

    ids = [IDTypeFeatureWithSingleID("user", np.array([1], np.uint64))]
    return PersiaBatch(ids, labels=[Label(np.ones((1, 1), np.float32))])


def test_a_plain_context_evaluates_by_the_names_of_persias_core(configure):
    from persia.ctx import BaseCtx, PreprocessMode, _prepare_feature
    from persia.data import DataLoader, IterableDataset
    from persia.embedding import get_default_embedding_config

    class Own(IterableDataset):
        def __iter__(self):
            return iter([make_batch()])

    config = get_default_embedding_config()
    with BaseCtx(device_id=None) as ctx:
        ctx.common_context.init_nats_publisher(1)
        ctx.common_context.configure_embedding_parameter_servers(
            *config.emb_initialization, config.admit_probability, config.weight_bound > 0, config.weight_bound
        )
        ctx.common_context.wait_servers_ready()
        (data,) = DataLoader(Own())
        _, (user,), (label,) = _prepare_feature(data, PreprocessMode.EVAL)
        assert (user.shape, label.item()) == ((1, 4), 1)
        assert not user.requires_grad
        with pytest.raises(RuntimeError, match=r"inside of a context of PreprocessMode\.TRAIN"):
            _prepare_feature(data)
        with pytest.raises(UnsupportedError, match=r"common_context\.dump of PERSIA is not supported"):
            ctx.common_context.dump("x")


def test_checks_of_data_can_be_skipped(monkeypatch):
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label

    from persia import env

    with pytest.raises(TypeError, match="ids of uint64, got int64"):
        IDTypeFeatureWithSingleID("user", np.ones(2, np.int64))
    monkeypatch.setattr(env, "PERSIA_SKIP_CHECK_DATA", True)
    assert IDTypeFeatureWithSingleID("user", np.ones(2, np.int64)).batch_size == 2
    assert Label(np.ones(2, np.float16)).batch_size == 2


def test_variables_of_the_launcher(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys; from persia.env import get_rank, get_replica_index\n"
        "print('runs', sys.argv[1:], get_rank(), get_replica_index(), flush=True)\n"
    )
    entry = str(tmp_path / "program.py")
    entries = {"PERSIA_NN_WORKER_ENTRY": entry, "PERSIA_DATALOADER_ENTRY": entry}
    job = PersiaJob(tmp_path, {}, PERSIA_LAUNCHER_VERBOSE="1", **entries)
    try:
        trainer = job.start("nn-worker", "--nnodes", 3, "--node-rank", 2)
        loader = job.start("data-loader", "--replica-index", 4, "--replica-size", 5)
        outputs = [job.wait(process) for process in (trainer, loader)]
    finally:
        job.close()
    told = f"execute command: karvan run --as persia {entry}"
    assert [output.count(told) for output in outputs] == [1, 1]
    assert "runs [] 2 0" in outputs[0]
    assert "runs [] 0 4" in outputs[1]
