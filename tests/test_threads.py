"""The native core on torch's threads."""

import os
import sys

import pytest
from forked_programs import run_forked

PROGRAM = """
import os, torch, karvan as kv
from karvan import _native
from karvan.threads import share_torch_threads

torch.set_num_threads(3), kv.set_num_threads(3)


def trained(own_threads):
    torch.manual_seed(0)
    model = kv.models.DLRM(["n"], ["a", "b"], dim=8, bottom=[16], top=[16])
    assert share_torch_threads()
    if own_threads:
        _native.share_team(0, 0)
    optimizer = kv.optim.Adagrad(model, lr=0.1)
    for step in range(5):
        ids = torch.randint(0, 5000, (2, 4096), generator=torch.Generator().manual_seed(step))
        model({"n": torch.rand(4096), "a": ids[0], "b": ids[1]}).sum().backward()
        optimizer.step()
    model.eval()
    return model({"n": torch.ones(100), "a": ids[0, :100], "b": ids[1, :100]}), model


def threads():
    return len(os.listdir("/proc/self/task"))


trained(own_threads=False)  # starts whatever threads torch wants
before = threads()
shared, model = trained(own_threads=False)
assert threads() == before, (threads(), before)
child = os.fork()
if child == 0:  # torch's threads are not there, and waiting for them would take forever
    torch.set_num_threads(1)
    ids = torch.arange(4096)
    model.embeddings({"a": ids, "b": ids})
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
own, _ = trained(own_threads=True)
assert torch.equal(shared, own)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has other threads elsewhere")
def test_training_on_torchs_threads_needs_no_more_and_gives_the_same_bits():
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = run_forked([sys.executable, "-c", PROGRAM], env=environment)
    assert done.returncode == 0, done.stderr
