"""What the ranks do in `test_gpu_ranks.py`: a model on a device, its rows in the memory of the ranks."""

import torch
import torch.distributed as dist
from trainer_programs import net_of, numbers_of, shares, trainer_of

import karvan as kv
from karvan import distributed


def fit(world, device):
    """Two epochs and an evaluation, with the data of so many ranks."""
    trainer = trainer_of(net_of(), device=device)
    made = numbers_of(trainer, trainer.fit(shares(world), epochs=2, eval_data=shares(world, seed=1)))
    assert all(value.device.type == torch.device(device).type for value in made["dense"].values())
    return made | {"dense": {name: value.cpu() for name, value in made["dense"].items()}}


def one_rank(device):
    """A fit with rows in this process, and one as the only rank of a job; dense tensors go by its group."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain = fit(1, device)
    kv.connect("sharded", timeout=60)
    value = torch.ones(3, device=device)
    dist.all_reduce(value)
    sharded = fit(1, device)
    backend = type(dist.group.WORLD._get_backend(torch.device(device))).__name__
    distributed.disconnect()
    return plain, sharded, (backend, value.tolist())


def two_ranks(device):
    """The same fit twice, by ranks that share a device: NCCL refuses that, so all goes by gloo."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("gloo")
    kv.connect("sharded", timeout=60)
    made = [fit(2, device), fit(2, device)]
    distributed.disconnect()
    dist.destroy_process_group()
    return made
