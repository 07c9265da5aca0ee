"""Parameter servers and damaged checkpoints: all fill their tables from the newest whole one."""

import logging
import shutil

import pytest
from cluster_helpers import serving
from test_remote_training import Net, assert_same_checkpoint, batches, fit, trainer_of

import karvan as kv
from karvan import distributed
from karvan.checkpoint import DamagedCheckpointError


def name(step):
    return f"step-{step:012d}"


def damage(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def checkpoints_of(folder):
    return kv.Checkpoints(folder, keep_last=None, full_every=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of two servers: 2 full, 4 a delta on it, 6 full, 8 a delta on it."""
    folder = tmp_path_factory.mktemp("trained")
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses)
        trainer_of(checkpoints_of(folder), checkpoint_every=2).fit(batches(), max_steps=8)
    assert [one.kind for one in checkpoints_of(folder).list()] == ["full", "delta"] * 2
    return folder


def test_a_fit_on_servers_continues_from_the_newest_whole_checkpoint_bit_for_bit(trained, tmp_path):
    damaged = shutil.copytree(trained, tmp_path / "damaged")
    direct = shutil.copytree(trained, tmp_path / "direct")
    damage(sorted((damaged / name(6)).glob("tables/user/rank-00001-part-*"))[0])
    for step in (6, 8):
        shutil.rmtree(direct / name(step))
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses)
        fit(checkpoints_of(damaged), 12)
    fit(checkpoints_of(direct), 12)  # in memory
    assert_same_checkpoint(damaged / name(12), direct / name(12))
    assert (damaged / f"damaged-{name(6)}").exists()
    assert (damaged / f"damaged-{name(8)}").exists()


def test_damage_that_a_server_finds_leads_to_the_same_fallback(trained, tmp_path, caplog):
    """The file is whole when the trainer checks it, and damaged when the server reads it."""
    folder = shutil.copytree(trained, tmp_path / "run")
    file = sorted((folder / name(8)).glob("tables/item/rank-00001-part-*"))[0]

    def load(checkpoint):
        check = checkpoint.require_intact

        def check_then_damage():
            check()
            if checkpoint.step == 8:
                damage(file)

        checkpoint.require_intact = check_then_damage
        return checkpoint.load(net)

    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses)
        net = Net()
        kv.optim.Adam(net, lr=0.05)
        with caplog.at_level(logging.WARNING):
            found, _ = checkpoints_of(folder).resume_with(load)
        assert found.step == 6
        kv.checkpoint.save(tmp_path / "again", found.state(), net, step=6)
    assert_same_checkpoint(tmp_path / "again", folder / name(6))
    assert str(file) in caplog.text
    assert (folder / f"damaged-{name(8)}").exists()


def test_servers_keep_nothing_of_a_run_without_a_whole_checkpoint(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    for file in folder.glob("step-*/manifest.json"):
        file.unlink()
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses)
        with pytest.raises(DamagedCheckpointError, match="got 4 damaged"):
            fit(checkpoints_of(folder), 12)
