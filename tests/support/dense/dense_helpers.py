"""What tests of dense parameters share."""

import json

import torch
from torch import nn

from karvan.checkpoint.state_tree import as_tensor, decode, encode
from karvan.cluster.parameter_server.dense_parameters import DenseParameters

SGD = {"name": "SGD", "options": {"lr": 0.5}}
MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def one_server(settings=None, optimizer=SGD, **options):
    server = DenseParameters(settings, **options)
    start_with(server, {"w": torch.zeros(2)}, optimizer)
    return server


def start_with(server, parameters, optimizer=SGD):
    """Give a server a model, as rank 0 of a job does."""
    server.load_state(new_state(parameters, optimizer))


def new_state(parameters, optimizer):
    return {
        "version": 0,
        "optimizer": optimizer,
        "parameters": {name: each.detach() for name, each in parameters.items()},
        "slots": {name: {} for name in parameters},
        "waiting": [],
        "answers": {},
    }


def push(server, value, version, trainer="a", sequence=0, **options):
    gradient = {"w": torch.full((2,), float(value))}
    return server.push_gradients(gradient, version, trainer=trainer, sequence=sequence, **options)


def values_of(server):
    return server.pull()[1]["w"].tolist()


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 5, generator=generator) for _ in range(count)]


def backward(model, batch):
    (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()


def same(one, other):
    one, other = dict(one), dict(other)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def make_servers(count, settings=None):
    return [DenseParameters(settings) for _ in range(count)]


def through_a_checkpoint(state):
    tree, stored = encode(state)
    return decode(json.loads(json.dumps(tree)), {name: as_tensor(each) for name, each in stored.items()})
