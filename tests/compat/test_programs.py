"""Programs of other systems: aliases of their packages, the fallback to the CPU, and `karvan run`."""

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forked_programs import run_forked

from karvan.cli.main import main
from karvan.compat.cuda_fallback import cuda_fallback, device_of
from karvan.compat.imports import import_aliases


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `real_adapter` with a module and a package below."""
    below = tmp_path / "real_adapter" / "io"
    below.mkdir(parents=True)
    (tmp_path / "real_adapter" / "__init__.py").write_text("NAME = __name__\n")
    (below / "__init__.py").write_text("from real_adapter.io.files import Reader\n")
    (below / "files.py").write_text("class Reader:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "real_adapter"]:
        del sys.modules[name]


def test_an_alias_gives_the_same_modules(package):
    with import_aliases({"upstream": "real_adapter"}):
        import real_adapter.io.files
        import upstream
        import upstream.io.files
        from upstream.io import Reader

        assert upstream is real_adapter
        assert upstream.NAME == "real_adapter"
        assert upstream.io.files is real_adapter.io.files
        assert Reader is real_adapter.io.files.Reader
        assert Reader.__module__ == "real_adapter.io.files"
        assert real_adapter.io.__spec__.name == "real_adapter.io"
    assert "upstream" not in sys.modules
    assert "upstream.io.files" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        import upstream


def test_a_module_that_the_adapter_lacks_is_named(package):
    with (
        import_aliases({"upstream": "real_adapter"}),
        pytest.raises(ModuleNotFoundError, match=r"'upstream.serving': real_adapter stands for"),
    ):
        import upstream.serving  # noqa: F401


def test_a_package_that_was_imported_already_is_refused(package):
    with (
        pytest.raises(RuntimeError, match="'json' has been imported already"),
        import_aliases({"json": "real_adapter"}),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_programs_run_on_the_cpu_with_one_warning():
    def places():
        return [torch.cuda.set_device, torch.nn.Module.cuda, torch.Tensor.cuda, torch.Tensor.to, torch.load]

    before = places()
    with warnings.catch_warnings(record=True) as found, cuda_fallback():
        warnings.simplefilter("always")
        torch.cuda.set_device(3)
        layer = torch.nn.Linear(1, 1)
        assert layer.cuda() is layer
        assert layer.weight.cuda().is_cpu
        assert device_of("cuda:1") == torch.device("cpu") == device_of(None)
    assert [str(warning.message) for warning in found] == [
        "The program asks for a GPU, but there is none: it runs on the CPU."
    ]
    assert before == places()
    assert device_of("cuda") == torch.device("cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def _loaded(folder, *arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")  # as a GPU's are saved
        torch.save(torch.ones(2), folder / "saved")
    return torch.load(folder / "saved", *arguments, **options)


def _within(context):
    with context:
        return torch.nn.Linear(2, 2).weight + torch.zeros(2, device="cuda")


def _in_threads():
    class Thread(threading.Thread):
        def run(self):
            made.append(torch.ones(2, device="cuda:0") + torch.ones(2).to("cuda"))

    made = []
    thread = Thread()
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.zeros, 2, device="cuda").result() + made[0]


def _streamed():
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    with torch.cuda.stream(torch.cuda.Stream(device="cuda")):
        made = torch.ones(2).cuda(non_blocking=True)
    made.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    ended.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert ended.query()
    assert began.elapsed_time(ended) > 0
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda path: torch.ones(2).to("cuda"), torch.float32),
        (lambda path: torch.ones(2).to(0), torch.float32),
        (lambda path: torch.ones(2).to(torch.cuda.current_device()), torch.float32),
        (lambda path: torch.ones(2).to(torch.device("cuda", 1), torch.float64), torch.float64),
        (lambda path: torch.ones(2).to(device="cuda", dtype=torch.int32), torch.int32),
        (lambda path: torch.ones(2).new_zeros(2, device="cuda"), torch.float32),
        (lambda path: torch.zeros_like(torch.ones(2), device="cuda"), torch.float32),
        (lambda path: torch.tensor([1], device="cuda"), torch.int64),
        (lambda path: torch.arange(2, device=0), torch.int64),
        (lambda path: torch.ones(2).pin_memory(), torch.float32),
        (lambda path: torch.empty(2, pin_memory=True), torch.float32),
        (lambda path: torch.nn.Linear(2, 2).to("cuda:0").weight, torch.float32),
        (lambda path: torch.nn.Linear(2, 2).to(0).weight, torch.float32),
        (lambda path: torch.nn.Linear(2, 2, device="cuda").weight, torch.float32),
        (lambda path: _within(torch.device("cuda")), torch.float32),
        (lambda path: _within(torch.cuda.device(0)), torch.float32),
        (lambda path: _in_threads(), torch.float32),
        (lambda path: _streamed(), torch.float32),
        (lambda path: _loaded(path), torch.float32),
        (lambda path: _loaded(path, "cuda"), torch.float32),
        (lambda path: _loaded(path, map_location={"cuda:0": "cuda:1"}), torch.float32),
        (lambda path: _loaded(path, map_location=lambda storage, place: storage.cuda(0)), torch.float32),
    ],
)
@pytest.mark.filterwarnings("ignore:The program asks for a GPU")
def test_every_way_to_ask_for_a_gpu_stays_on_the_cpu(make, dtype, tmp_path):
    with cuda_fallback():
        made = make(tmp_path)
    assert made.is_cpu
    assert made.dtype is dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_program_for_large_machines_with_gpus_runs_on_a_small_one(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "torch.set_num_interop_threads(0)\n"
        "torch.set_num_threads(1 // 16)\n"
        "torch.set_default_device('cuda')\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda:0'))\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.to(torch.float32) + torch.ones(x.shape[0], device=x.device)\n"
        "made = torch.jit.script(Net())(torch.zeros(2)).tolist()\n"
        "group = dist.new_group([0], backend='nccl')\n"
        "net = torch.nn.Linear(1, 1).cuda()\n"
        "net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0], output_device=0)\n"
        "net(torch.ones(1, 1).cuda()).sum().backward()\n"
        "print(made, dist.get_backend(), dist.get_backend(group), torch.get_num_threads())\n"
    )
    done = run_forked([sys.executable, "-m", "karvan", "run", "--as", "recis", str(program)])
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0] gloo gloo 1\n"), done.stderr
    assert done.stderr.count("The program asks for a GPU") == 1


def test_a_program_has_its_arguments_its_folder_and_its_imports(tmp_path, capfd):
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, recis, column_io, beside\n"
        "print(__name__, recis.__name__, beside.WORD, sys.argv[1:])\nsys.exit(7)\n"
    )
    argv, path = sys.argv, list(sys.path)
    assert main(["run", "--as", "recis", str(program), "--debug", "-x", "1"]) == 7
    sys.modules.pop("beside")
    assert capfd.readouterr().out == "__main__ karvan.compat.recis beside ['--debug', '-x', '1']\n"
    assert (sys.argv, sys.path) == (argv, path)
    assert "recis" not in sys.modules


def test_a_program_of_elasticdl_has_the_address_of_its_master(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1:4321")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(os.environ['MASTER_ADDR'])\n")
    assert main(["run", "--as", "elasticdl", str(program)]) == 0
    assert capfd.readouterr().out == "127.0.0.1:4321\n"


def test_an_error_of_the_program_is_shown_from_its_first_line_on(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text("def work():\n    raise ValueError('mine')\nwork()\n")
    assert main(["run", "--as", "recis", str(program)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[1].strip() == f'File "{program}", line 3, in <module>'
    assert lines[-1] == "ValueError: mine"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--as", "torchrec", "x.py"], "Expected --as recis | persia"),
        (["--as", "recis", "missing.py"], "'missing.py' does not exist"),
        (["x.py"], "--as"),
    ],
)
def test_wrong_usage(words, text, capfd):
    assert main(["run", *words]) == 2
    assert text in capfd.readouterr().err


def test_it_is_a_command_of_the_module(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import recis\nprint('done')\n")
    done = run_forked([sys.executable, "-m", "karvan", "run", "--as", "recis", str(program)])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
