"""The CTR example of RecIS's documentation under `karvan run --as recis`, in one process and in two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import karvan as kv
from karvan.cli.main import main

PROGRAM = Path(__file__).parents[1] / "programs" / "recis_deepctr.py"
SMALL = {
    "bs = 2047": "bs = 70",
    "file_num = 10": "file_num = 3",
    "batch_size=1024": "batch_size=32",
    "np.random.randint(1, 2000": "np.random.randint(1, 40",
    "seq_len=1000": "seq_len=20",
    '"tile_len": 1000': '"tile_len": 20',
    "16000": "320",
    "log_steps=10": "log_steps=2",
}
LINE = re.compile(r"<gstep=(\d+)> <lstep=(\d+)> <qps=[\d.]+> <epoch=(\d+)> <loss=([\d.]+)> <auc=([\d.]+)>")


def _program(folder, **changes):
    """The program with small sizes, in a folder."""
    text = PROGRAM.read_text()
    for old, new in {**SMALL, **changes}.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "deepctr.py").write_text(text)


def _run(folder, *command):
    done = subprocess.run([*command], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def threads(monkeypatch):
    """The program sets numbers of threads, which a process can do only before it has used them."""
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda count: None)
    for name in ("OMP", "OPENBLAS", "MKL", "VECLIB", "NUMEXPR"):
        monkeypatch.setenv(f"{name}_{'MAXIMUM' if name == 'VECLIB' else 'NUM'}_THREADS", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_documented_program_trains_on_the_cpu(tmp_path, monkeypatch, capsys):
    _program(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="The program asks for a GPU, but there is none") as warned:
        assert main(["run", "--as", "recis", "deepctr.py"]) == 0
    assert len([each for each in warned if "GPU" in str(each.message)]) == 1
    lines = LINE.findall(capsys.readouterr().out)
    assert [(gstep, lstep, epoch) for gstep, lstep, epoch, _, _ in lines] == [
        ("2", "2", "0"),
        ("4", "4", "0"),
        ("6", "6", "0"),  # 210 records in batches of 32, the remainder dropped
    ]
    assert not torch.distributed.is_initialized()
    saved = kv.Checkpoints(tmp_path / "ckpt").latest()
    assert saved.step == 6
    tables = saved.manifest.tables
    assert set(tables) == {"sparse1", "sparse2", "sparse3", "sparse4", "sparse5", "sparse1_x_sparse2"}
    files = sorted(saved.path.rglob("*.safetensors"))
    assert files
    for file in files:
        with safe_open(file, framework="np") as opened:
            assert list(opened.keys())


@pytest.mark.slow
def test_the_documented_program_trains_in_a_process_of_its_own(tmp_path):
    _program(tmp_path)
    done = _run(tmp_path, *RUN)
    assert len(LINE.findall(done.stdout)) == 3
    assert done.stderr.count("The program asks for a GPU, but there is none") == 1


RUN = (sys.executable, "-m", "karvan", "run", "--as", "recis", "deepctr.py")
TORCHRUN = (
    sys.executable,
    *("-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d"),
    *("--rdzv-endpoint=127.0.0.1:0", *RUN[1:]),
)


@pytest.mark.slow
def test_the_documented_program_trains_on_two_ranks(tmp_path):
    _program(tmp_path)
    done = _run(tmp_path, *TORCHRUN)
    lines = LINE.findall(done.stdout)
    assert [line[0] for line in lines] == ["2", "2"]  # both ranks log, at step 2 of 3
    assert lines[0][4] == lines[1][4]  # the AUC is that of the samples of both
    assert kv.Checkpoints(tmp_path / "ckpt").latest().step == 3


@pytest.mark.slow
def test_a_run_of_two_ranks_continues_in_one_process(tmp_path):
    _program(tmp_path, **{"train_steps=100": "train_steps=1"})
    _run(tmp_path, *TORCHRUN)
    first = kv.Checkpoints(tmp_path / "ckpt").latest()
    assert first.step == 1
    _program(tmp_path, **{"for i in range(file_num)": "for i in range(0)"})  # the data stays
    _run(tmp_path, *RUN)
    last = kv.Checkpoints(tmp_path / "ckpt").latest()
    assert last.step == 1 + (210 - 2 * 32) // 32  # the records that are left, without the remainder
    assert last.state()["trainer"]["samples"] == 2 * 32 + 4 * 32


@pytest.mark.slow
def test_ranks_with_unequal_data_evaluate_and_reduce_by_id(tmp_path):
    reduced = 'grad_reduce_by="id", filter_hook=FilterHook("GlobalStepFilter", {"filter_step": 1}),'
    evaluated = (
        "train_dataset=train_dataset,\n        hooks=[HashTableFilterHook(1)],"
        '\n        eval_dataset=get_dataset(IOArgs("./fake_data/", 16, 1, 1, False)),'
    )
    _program(
        tmp_path,
        **{
            "bs = 70": "bs = 33",  # 17 records and 16, in batches of 16
            "file_num = 3": "file_num = 1",
            "batch_size=32": "batch_size=16",
            "drop_remainder=True": "drop_remainder=False",
            "log_steps=2": "log_steps=1",
            "import recis\n": "import recis\nfrom recis.hooks import HashTableFilterHook\n"
            "from recis.nn.hashtable_hook import FilterHook\n",
            'combiner="sum",': f'combiner="sum", {reduced}',
            'combiner="tile",': f'combiner="tile", {reduced}',
            'combiner="mean",': f'combiner="mean", {reduced}',
            "train_dataset=train_dataset,": evaluated,
            "trainer.train()": 'trainer.train()\n    logger.info(f"found {trainer.evaluate()}")',
        },
    )
    done = _run(tmp_path, *TORCHRUN)
    assert "nan" not in done.stdout
    found = re.findall(r"found {'loss': ([\d.]+), 'auc': tensor\(([\d.]+)", done.stdout)
    assert len(found) == 2
    assert found[0] == found[1]  # means over the samples of both ranks
    last = kv.Checkpoints(tmp_path / "ckpt").latest()
    assert last.step == 2
    assert last.manifest.tables["sparse2"].rows == 1  # those of the last step alone: the record that was left
