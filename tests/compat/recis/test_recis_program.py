"""Programs of the form of RecIS's examples under `karvan run --as recis`, in one process and in two.

That is the CTR example of its documentation, and programs in the form of its deepfm and seq2seq examples.
"""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import orc
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


FM = (
    "--data_paths=./data/ --batch_size=10 --thread_num=1 --prefetch=1 --drop_remainder=true "
    "--gradient_accumulation_steps=4 --output_dir=./ckpt --log_steps=5 --save_steps=2000 --dense_lr 0.05"
)


def _fm_data(folder, records):
    """Numbers of float64 and ids, each in a list, in two files."""
    (folder / "data").mkdir()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, (records, 3), generator=generator)
    columns = {
        "clicked": [[float(row.sum() % 2)] for row in ids],
        **{name: torch.rand(records, 1, generator=generator).double().tolist() for name in ("age", "price")},
        **{name: ids[:, i : i + 1].tolist() for i, name in enumerate(("user", "item", "shop"))},
    }
    table = pa.table(columns)
    for part, rows in enumerate((table.slice(0, records // 2), table.slice(records // 2))):
        orc.write_table(rows, folder / "data" / f"part-{part}.orc")


@pytest.mark.usefixtures("threads")
def test_a_program_of_the_form_of_deepfm_trains_on_the_cpu(tmp_path, monkeypatch, capsys):
    _fm_data(tmp_path, records=104)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    program = PROGRAM.parent / "recis_fm" / "train.py"
    with pytest.warns(UserWarning, match="The program asks for a GPU, but there is none"):
        assert main(["run", "--as", "recis", str(program), *FM.split()]) == 0
    sys.modules.pop("columns")
    out = capsys.readouterr().out
    assert [line[:2] for line in LINE.findall(out)] == [("5", "5"), ("10", "10")]
    assert "hook: 10 batches" in out
    assert "tables: {'user_vector': HashTable_user_vector" in out
    saved = kv.Checkpoints(tmp_path / "ckpt").latest()
    assert saved.step == 3  # of 4, 4 and 2 batches
    assert {name: table.rows for name, table in saved.manifest.tables.items()} == dict.fromkeys(
        (f"{name}_{part}" for name in ("user", "item", "shop") for part in ("vector", "bias")), 5
    )


@pytest.mark.slow
def test_a_program_of_the_form_of_deepfm_trains_on_two_ranks_with_unequal_data(tmp_path):
    _fm_data(tmp_path, records=51)  # six batches of 5 for a rank, and five for the other
    program = PROGRAM.parent / "recis_fm" / "train.py"
    words = FM.replace("batch_size=10", "batch_size=5").replace("drop_remainder=true", "nodrop_remainder")
    done = _run(tmp_path, *TORCHRUN[:-1], str(program), *words.split())
    assert "nan" not in done.stdout
    assert [line[0] for line in LINE.findall(done.stdout)] == ["5", "5"]
    assert kv.Checkpoints(tmp_path / "ckpt").latest().step == 2


@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported")
def test_a_program_of_the_form_of_seq2seq_trains_on_the_cpu(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    sessions = [[[i % 5, i % 7] for i in range(row, row + 1 + row % 9)] for row in range(24)]
    words = [[[f"a{i % 3}"] for i in range(len(session))] for session in sessions]
    table = pa.table({"item": sessions, "action": words, "hour": words})
    orc.write_table(table, tmp_path / "data" / "part.orc")
    monkeypatch.chdir(tmp_path)
    program = PROGRAM.parent / "recis_next_item" / "train.py"
    given = "--data_paths data --batch_size 8 --prefetch 1 --drop_remainder --log_steps 1 --heads=4"
    with pytest.warns(UserWarning, match="The program asks for a GPU, but there is none"):
        assert main(["run", "--as", "recis", str(program), *given.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "<hit_rate=" in line]) == 3
    tables = kv.Checkpoints(tmp_path / "output_dir").latest().manifest.tables
    assert {name: table.rows for name, table in tables.items()} == {"item": 7, "action": 3, "hour": 3}


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
