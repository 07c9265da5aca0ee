"""ElasticDL's PS client over Karvan's parameter servers, at real ports."""

import numpy as np
import pytest
import torch
from cluster_helpers import serving

import karvan as kv
from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl.ps_client import EmbeddingTableInfo, PSClient, build_ps_client
from karvan.compat.elasticdl.python.common.tensor_utils import Tensor
from karvan.compat.unsupported import UnsupportedError


def linear(value):
    layer = torch.nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.fill_(value)
        layer.bias.fill_(value)
    return layer


@pytest.fixture(params=[1, 3])
def addresses(request):
    with serving(request.param) as found:
        yield found


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_the_first_model_wins_and_gradients_are_a_list_or_by_name(addresses):
    model, other = linear(1.0), linear(7.0)
    with (
        PSClient(addresses, num_workers=2) as first,
        PSClient(addresses, worker_id=1, num_workers=2) as second,
    ):
        first.push_model(model, sgd(model))
        version, parameters = second.push_model(other, sgd(other))
        assert version == 0
        assert parameters["weight"].tolist() == [[1.0, 1.0]]
        accepted, version = first.push_gradients([torch.tensor([[2.0, 0.0]]), torch.tensor([4.0])])
        assert (accepted, version) == (True, 1)
        assert second.push_gradients({"bias": np.array([2.0], np.float32)}, learning_rate=0.25).accepted
        second.pull_dense_parameters(into=other)
        assert other.weight.tolist() == [[0.0, 1.0]]
        assert other.bias.tolist() == [1.0 - 0.5 * 4 - 0.25 * 2]
        newest = first.pull_dense_parameters()
        for name, parameter in other.named_parameters():
            assert torch.equal(torch.from_numpy(newest.parameters[name]), parameter)


def test_a_worker_that_starts_again_continues(addresses):
    model = linear(0.0)
    gradients = [torch.ones(1, 2), torch.ones(1)]
    for times in (1, 2):
        with PSClient(addresses) as client:
            client.push_model(model, sgd(model, 1.0))
            assert client.push_gradients(gradients).accepted
            assert client.pull_dense_parameters().parameters["bias"].tolist() == [-times]


def test_a_step_waits_for_gradients_and_stale_ones_are_rejected():
    model = linear(0.0)
    gradients = [torch.ones(1, 2), torch.ones(1)]
    options = {"num_workers": 2, "grads_to_wait": 2, "tolerance": 0}
    with (
        serving(1) as addresses,
        PSClient(addresses, **options) as first,
        PSClient(addresses, worker_id=1, **options) as second,
    ):
        for client in (first, second):
            client.push_model(model, sgd(model, 1.0))
        assert first.push_gradients(gradients) == (True, 0)
        assert second.push_gradients([3 * each for each in gradients]) == (True, 1)
        assert first.pull_dense_parameters().parameters["bias"].tolist() == [-2.0]
        infos = [EmbeddingTableInfo("item", 1, kv.init.Constant(0.0))]
        second.push_embedding_table_infos(infos, kv.optim.SGD(lr=1.0))
        rows = {"item": ([3], [[1.0]])}
        assert second.push_gradients(gradients, rows) == (False, 1)
        assert second.pull_embedding_vectors("item", [3]).tolist() == [[0.0]]
        second.pull_dense_parameters()
        assert second.push_gradients(gradients, rows).accepted
        assert second.pull_embedding_vectors("item", [3]).tolist() == [[-1.0]]


def test_staleness_divides_the_learning_rate():
    model = linear(0.0)
    one = {"bias": torch.ones(1)}
    options = {"num_workers": 2, "lr_staleness_modulation": True}
    with (
        serving(1) as addresses,
        PSClient(addresses, **options) as first,
        PSClient(addresses, worker_id=1, **options) as second,
    ):
        for client in (first, second):
            client.push_model(model, sgd(model, 1.0))
        for _ in range(2):
            first.push_gradients(one)
            first.pull_dense_parameters()
        second.push_gradients(one)  # two versions behind
        assert second.pull_dense_parameters().parameters["bias"].tolist() == [-2.5]


def test_embedding_vectors_are_initialised_once_and_gradients_of_equal_ids_are_added(addresses):
    infos = [EmbeddingTableInfo("user", 4), EmbeddingTableInfo("item", 2)]
    with (
        PSClient(addresses, num_workers=2) as first,
        PSClient(addresses, worker_id=1, num_workers=2) as second,
    ):
        for client in (first, second):
            client.push_embedding_table_infos(infos, kv.optim.SGD(lr=0.5))
        before = first.pull_embedding_vectors("user", [7, -1, 7, 2**40])
        assert before.shape == (4, 4)
        assert np.abs(before).min() > 0
        assert np.array_equal(before[0], before[2])
        assert np.array_equal(second.pull_embedding_vector("user", [7, -1, 7, 2**40]), before)
        items = second.pull_embedding_vectors("item", np.array([5]))
        rows = {
            "user": ([7, -1, 7], np.ones((3, 4), np.float32)),
            "item": (torch.tensor([5]), torch.ones(1, 2)),
        }
        assert second.push_gradient({}, rows).accepted
        after = first.pull_embedding_vectors("user", [7, -1, 2**40])
        expected = before[[0, 1, 3]] - np.array([[1.0], [0.5], [0.0]], np.float32)
        assert after == pytest.approx(expected, abs=1e-6)
        assert first.pull_embedding_vectors("item", [5]) == pytest.approx(items - 0.5, abs=1e-6)


def test_a_loop_as_the_design_writes_it_learns():
    torch.manual_seed(1)
    model, features = torch.nn.Linear(3, 1), torch.randn(64, 3)
    labels = features @ torch.tensor([[1.0], [-2.0], [0.5]])
    with serving(2) as addresses, PSClient(addresses) as client:
        client.push_model(model, sgd(model, 0.2))
        for _ in range(60):
            client.pull_variable(into=model)
            model.zero_grad()
            torch.nn.functional.mse_loss(model(features), labels).backward()
            with torch.no_grad():
                grads = [param.grad.numpy() for param in model.parameters()]
                client.push_gradients(grads)
    assert model.weight.detach().numpy() == pytest.approx(np.array([[1.0, -2.0, 0.5]]), abs=0.01)


def test_the_client_of_addresses_takes_the_arguments_of_elasticdl(addresses):
    model = linear(1.0)
    with build_ps_client(",".join(addresses)) as client:
        client.push_model(model, sgd(model))
        client.push_embedding_table_infos([EmbeddingTableInfo("item", 2)], kv.optim.SGD(lr=1.0))
        versions = [-1] * len(addresses)
        parameters, without_model = client.pull_dense_parameters(list(range(len(addresses))), versions)
        assert {name: value.tolist() for name, value in parameters.items()} == {
            "weight": [[1.0] * 2],
            "bias": [1.0],
        }
        assert (without_model, versions) == ([], [0] * len(addresses))
        before = client.pull_embedding_vectors("item", [3, 4])
        grads = [Tensor("bias", np.ones(1, np.float32), None)] * 2
        rows = [Tensor("item", np.ones((2, 2), np.float32), [3, 4]), Tensor("item", np.ones((1, 2)), [3])]
        assert client.push_gradients(grads, rows, 0.25, versions).accepted
        pulled, _ = client.pull_dense_parameters(list(range(len(addresses))), versions)
        assert pulled["bias"].tolist() == [0.5]
        after = client.pull_embedding_vectors("item", [3, 4])
        assert after == pytest.approx(before - np.array([[0.5], [0.25]], np.float32), abs=1e-6)
        with pytest.raises(ContractError, match=f"each of {len(addresses)} servers, got 0"):
            client.push_gradients(grads, rows, 0.25, [])
        with pytest.raises(ContractError, match="expected 'bias' in edl_grads"):
            client.push_gradients([Tensor("bias", np.ones(1), [0])])
        with pytest.raises(UnsupportedError, match="push_model"):
            client.push_dense_parameters([], 0, 0)
    with pytest.raises(ContractError, match="host:port,host:port, got ''"):
        build_ps_client("")


def test_wrong_calls_say_what_is_expected():
    model = linear(0.0)
    for addresses in ("127.0.0.1:1", [object()]):  # as a channel of gRPC
        with pytest.raises(ContractError, match=r"a list of addresses, or what build_channel\(address\)"):
            PSClient(addresses)
    with pytest.raises(ContractError, match="worker_id from 0 to num_workers - 1, got 2 of 2"):
        PSClient(["127.0.0.1:1"], worker_id=2, num_workers=2)
    with serving(1) as addresses, PSClient(addresses) as client:
        with pytest.raises(ContractError, match="in the order of push_model"):
            client.push_gradients([1])
        with pytest.raises(ContractError, match="pull_dense_parameters first"):
            client.push_gradients({"bias": torch.ones(1)})
        client.push_model(model, sgd(model))
        with pytest.raises(ContractError, match="each of 2 parameters, got 1"):
            client.push_gradients([1])
        with pytest.raises(ValueError, match="finite gradients"):
            client.push_gradients({"bias": torch.tensor([torch.nan])})
        assert client.push_gradients({"bias": torch.ones(1)}).accepted
        with pytest.raises(ContractError, match="no embedding table 'user'"):
            client.pull_embedding_vectors("user", [1])
        client.push_embedding_table_infos([EmbeddingTableInfo("user", 2)], kv.optim.SGD(lr=1.0))
        with pytest.raises(ContractError, match=r"shape \(1, 2\), one for each id, got \(1, 1\)"):
            client.push_gradients({}, {"user": ([1], [[1.0]])})
        with pytest.raises(ContractError, match="whole numbers in a list"):
            client.pull_embedding_vectors("user", [[1]])
        with pytest.raises(ContractError, match="already"):
            client.push_embedding_table_infos([EmbeddingTableInfo("user", 2)], kv.optim.SGD(lr=1.0))
        with pytest.raises(ContractError, match="a parameter 'bias', but the module has: weight"):
            client.pull_dense_parameters(into=torch.nn.Linear(2, 1, bias=False))
