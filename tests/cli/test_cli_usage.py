"""Help, versions, and what wrong usage gives."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

COMMANDS = [
    *(
        "demo",
        "train",
        "evaluate",
        "predict",
        "inspect",
        "plot",
        "launch",
        "status",
        "logs",
        "stop",
        "role",
        "import-checkpoint",
        "bench",
        "doctor",
        "version",
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_shows_an_example(run, command):
    ran = run(command, "--help")
    assert ran.code == 0
    assert f"karvan {command}" in ran.out.split("Examples:")[1]


def test_the_help_lists_all_commands_and_exit_codes(run):
    for ran in (run("--help"), run()):
        assert ran.code == 0
        assert all(command in ran.out for command in COMMANDS)
        assert "130" in ran.out


def test_help_and_version_do_not_wait_for_torch():
    script = (
        "import sys; from karvan.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['train', '--help']) == 0\n"
        "assert main(['launch', '--help']) == 0 and main(['version']) == 0\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'karvan.cli.config', 'karvan.settings'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_version_tells_versions(run):
    assert run("version").out.startswith("karvan ")
    assert {"karvan", "python", "torch"} <= set(run("version", "--json", "-").json)


def test_json_goes_to_a_file_beside_the_text_or_to_stdout_instead_of_it(run, tmp_path):
    told = run("version", "--json", "-").json
    ran = run("version", "--json", tmp_path / "version.json")
    assert ran.out == run("version").out
    assert json.loads((tmp_path / "version.json").read_text()) == told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "trian"),
        (["train"], "--example"),
        (["train", "--nonsense"], "--nonsense"),
        (["train", "x.yaml", "--epochs", "0"], "--epochs"),
        (["train", "x.yaml", "--epochs", "many"], "--epochs"),
        (["predict", "x.yaml"], "--out"),
        (["predict", "x.yaml", "--out", "x.txt"], ".parquet or .csv"),
        (["predict", "x.yaml", "--out", "nowhere/x.csv"], "nowhere"),
        (["evaluate"], "FILE.py|CONFIG.yaml"),
        (["inspect"], "PATH"),
        (["inspect", ".", "--key", "user"], "--key"),
        (["inspect", ".", "--key", "user", "abc"], "abc"),
        (["plot"], "RUN"),
        (["launch"], "--example"),
        (["launch", "x.yaml", "--set", "mode"], "name=value"),
        (["demo", "--rows", "5"], "10000"),
        (
            ["bench", "--json", "nowhere/x.json"],
            "--json expects - or a path in a folder that exists, got 'nowhere",
        ),
        (["version", "--json", "nowhere/x.json"], "--json expects - or a path in a folder that exists, got"),
        (["version", "--json"], "--json"),
        (["bench", "--folder", "nowhere"], "nowhere"),
        (["role"], "NAME"),
        (["logs"], "JOB"),
        (["stop"], "JOB"),
        (["logs", "x", "--tail", "-1"], "--tail"),
        (["role", "cook"], "parameter-server"),
    ],
)
def test_wrong_usage_is_told_in_a_line_or_two_and_exits_with_2(run, arguments, said):
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert len(ran.err.splitlines()) <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "none.yaml"],
        ["train", "none.py"],
        ["inspect", "none"],
        ["plot", "none"],
        ["evaluate", "none.yaml"],
        ["launch", "none.yaml"],
        ["status", "none"],
        ["logs", "none"],
        ["stop", "none.yaml"],
    ],
)
def test_what_is_not_there_exits_with_3(run, arguments):
    ran = run(*arguments)
    assert (ran.code, ran.out) == (3, "")
    assert "none" in ran.err


def test_debug_shows_where_an_error_comes_from(run):
    ran = run("train", "none.yaml", "--debug")
    assert ran.code == 3
    assert "Traceback" in ran.err
    assert "error: none.yaml" in ran.err


def test_doctor_finds_all_that_is_needed(run, tmp_path):
    ran = run("doctor", "--folder", tmp_path, "--json", "-")
    assert ran.code == 0
    found = {each["what"]: each for each in ran.json}
    assert {"torch", "kernels", "cores", "torch threads", "bf16 on the CPU", "huge pages", "memory"} <= set(
        found
    )
    assert {each["state"] for each in ran.json} <= {"ok", "slow", "optional"}
    assert all(each["advice"] for each in ran.json if each["state"] == "slow")
    assert found["platform"]["value"].startswith(f"Linux {platform.machine()}, glibc ")
    assert {"/dev/shm", "open files", "ray", "confluent-kafka", "tensorboard", "pyodps"} <= set(found)
    lines = run("doctor", "--folder", tmp_path).out.splitlines()
    assert lines[0].split()[:2] == ["ok", "platform"]
    assert all(line == line.rstrip() and "…" not in line for line in lines)


def test_doctor_names_an_old_package_and_checks_the_rest_although_one_is_broken(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    (tmp_path / "torch-2.9.1+cpu.dist-info").mkdir()
    (tmp_path / "torch-2.9.1+cpu.dist-info/METADATA").write_text("Name: torch\nVersion: 2.9.1+cpu\n")
    (tmp_path / "numpy-99.0.dist-info").mkdir()
    (tmp_path / "numpy-99.0.dist-info/METADATA").write_text("Name: numpy\nVersion: 99.0\n")
    ended = subprocess.run(
        [sys.executable, "-m", "karvan", "doctor", "--json", "-", "--folder", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    found = {each["what"]: each for each in json.loads(ended.stdout)}
    assert (found["torch"]["state"], found["torch"]["value"]) == ("missing", "2.9.1+cpu")
    assert found["torch"]["advice"] == "Karvan needs at least 2.11: pip install 'torch>=2.11'"
    assert found["numpy"]["state"] == "ok"
    assert "libcudart" in found["gpu"]["value"]
    assert found["open files"]["state"] == "ok"


def test_doctor_knows_the_newest_torch_that_is_tested():
    from karvan.cli.commands import doctor

    constraints = Path(__file__).parents[2] / "constraints.txt"
    [pinned] = re.findall(r"^torch==(\d+\.\d+)", constraints.read_text(), re.MULTILINE)
    assert pinned == doctor._NEWEST_TORCH


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_on_another_system_the_import_says_what_is_needed(system):
    script = f"import sys; sys.platform = {system!r}\ntry: import karvan\nexcept ImportError as e: print(e)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(
        f"Karvan needs Linux on x86_64 or aarch64, got {system}. On Windows use WSL"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_doctor_says_what_tables_on_a_gpu_lack(run, tmp_path):
    ran = run("doctor", "--folder", tmp_path, "--json", "-")
    (gpu,) = [each for each in ran.json if each["what"].startswith(("GPU", "Triton"))]
    assert gpu["state"] == "optional"
    assert gpu["value"].startswith("none: torch.")
    assert 'kv.connect("cuda")' in gpu["advice"]
    assert all(word in gpu["advice"] for word in ("GPU", "CUDA", "Triton"))


def test_doctor_tells_what_is_missing(run, tmp_path):
    ran = run("doctor", "--folder", tmp_path / "none", "--json", "-")
    assert ran.code == 1
    assert [each["what"] for each in ran.json if each["state"] == "missing"] == [
        f"disk at {tmp_path / 'none'}"
    ]


def test_bench_says_what_limits_a_run(run, tmp_path, monkeypatch):
    import json

    from karvan.cli.commands import bench

    monkeypatch.setattr(bench, "_BATCH", 64)
    monkeypatch.setattr(bench, "_FEATURES", 3)
    ran = run("bench", "--quick", "--folder", tmp_path, "--json", tmp_path / "bench.json")
    assert ran.code == 0
    numbers = json.loads((tmp_path / "bench.json").read_text())
    rates = {each["part"]: each["rate"] for each in numbers["parts"]}
    assert set(rates) == {"sparse step", "dense step", "reading Parquet", "checkpoint", "disk"}
    assert min(rates.values()) > 0
    assert f"limited by: {numbers['limited_by']}" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]  # nothing else stays
