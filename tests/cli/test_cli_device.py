"""Where a config puts tables, batches and the model."""

import pytest
import torch

import karvan as kv
from karvan import distributed
from karvan.cli.config import Config, Model, connect_tables, make_job, make_model
from karvan.cli.output import CommandError

MODEL = {"name": "DLRM", "numbers": ["price"], "ids": ["user"], "dim": 4}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def disconnected():
    yield
    kv.disconnect()


def config(**sections):
    return Config.model_validate({"data": {"train": "clicks/*.parquet"}, "model": MODEL, **sections})


def test_without_a_choice_the_connection_of_the_program_stays():
    before = kv.connect("memory")
    connect_tables(config().connect)
    assert distributed.current() is before


@pytest.mark.parametrize("given", ["memory", {"name": "memory"}, {"name": "memory", "capacity": 9}])
def test_a_connection_is_chosen_by_name(given):
    connect_tables(config(connect=given).connect)
    assert distributed.current().chosen
    assert distributed.current().settings.capacity == (9 if "capacity" in given else None)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("gpu", "connect: connect expects one of memory, cuda, sharded, remote, got 'gpu'."),
        ({"name": "memory", "wire": "bfloat16"}, 'are for connect("sharded"), got "memory"'),
        ({"name": "memory", "rows": 1}, "connect: unknown key 'rows'; there are: wire, "),
        ({"name": "cuda", "capacity": 1}, 'capacity is for connect("memory")'),
        ({"name": "memory", "kind": "cuda"}, "connect: unknown key 'kind'; there are: wire, "),
    ],
)
def test_what_cannot_be_connected_names_the_key(given, problem):
    with pytest.raises(CommandError) as caught:
        connect_tables(config(connect=given).connect)
    assert problem in str(caught.value)


@without_gpu
@pytest.mark.parametrize("given", ["cuda", {"name": "cuda"}, {"name": "sharded", "device": "cuda"}])
def test_tables_on_a_gpu_need_one(given):
    with pytest.raises(CommandError, match=r"connect: kv.connect.*expects a GPU and a torch that is built"):
        make_job(config(connect=given))


@without_gpu
def test_one_table_on_a_gpu_needs_one():
    with pytest.raises(CommandError, match=r'model: Table\(device="cuda"\) of user expects a GPU'):
        make_model(Model(**MODEL, table={"device": "cuda"}))


def test_a_table_may_be_in_memory_by_name():
    model = make_model(Model(**MODEL, tables={"user": {"device": "cpu"}}))
    assert model.embeddings.features["user"].device == "cpu"
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        Model(**MODEL, table={"device": "tpu"})


@without_gpu
def test_batches_on_a_gpu_need_one(place):
    data = {"train": str(place / "train.parquet"), "device": "cuda"}
    with pytest.raises(CommandError, match=r"data: device='cuda' expects a GPU"):
        make_job(config(data=data))


@without_gpu
def test_the_command_says_what_is_missing(place, run):
    answer = run("train", place / "config.yaml", "--set", "connect=cuda")
    assert answer.code != 0
    assert 'connect: kv.connect("cuda") expects a GPU' in " ".join(answer.err.split())


def test_a_config_trains_where_it_says(place, run):
    assert run("train", place / "config.yaml", "--quiet", "--set", "connect=memory").code == 0
    assert distributed.current().chosen
