"""Modules that another user leaves in the folder in which a job is launched are imported by nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from karvan.launch.engines.choice import check_engine
from karvan.launch.job_spec import JobSpec
from karvan.launch.role_programs import commands_of, open_import_folders

KARVAN = Path(sys.executable).with_name("karvan")
OTHERS = (
    *("click", "cloudpickle", "fsspec", "karvan", "numpy", "pandas", "pyarrow", "pydantic", "rich", "torch"),
    *("sitecustomize", "typer", "typing_extensions", "usercustomize", "yaml"),
)

TRAP = """
import os, sys
with open(os.environ["EXECUTED"], "a") as file:
    file.write(f"{__name__} {sys.orig_argv}\\n")
"""

# A trainer's program that imports modules of its folder, here and in a process that it spawns.
PROGRAM = """
import json, multiprocessing, sys
import sibling, yaml
note = sys.argv[1]
if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        child = pool.apply(sibling.name)
    with open(note, "w") as file:
        names = {"sibling": sibling.name(), "child": child}
        json.dump({"path": sys.path[0], "yaml": yaml.__file__, **names}, file)
"""


@pytest.fixture
def traps(tmp_path):
    """A folder that everybody may write to, with a module of every name that a process may import."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in (*sys.stdlib_module_names, *OTHERS):
        (folder / f"{name}.py").write_text(TRAP)
    return folder


@pytest.fixture
def environment(tmp_path):
    slots = tmp_path / "embedding_config.yml"
    slots.write_text("slots_config: {age: {dim: 8}}\n")
    return {
        **os.environ,
        "EXECUTED": str(tmp_path / "executed"),
        "KARVAN_JOBS": str(tmp_path / "jobs"),
        "PERSIA_EMBEDDING_CONFIG": str(slots),
    }


def write_program(folder, text=PROGRAM):
    folder.mkdir()
    (folder / "sibling.py").write_text("def name():\n    return 'a module of the program'\n")
    (folder / "train.py").write_text(text)


@pytest.mark.parametrize("system", [None, "persia"])
def test_a_job_that_is_launched_in_an_open_folder_imports_nothing_from_it(
    tmp_path, traps, environment, system
):
    write_program(tmp_path / "project")
    as_system = "" if system is None else f"system: {system}\n"
    (tmp_path / "job.yaml").write_text(
        f"name: traps\nentry: {tmp_path / 'project' / 'train.py'}\n{as_system}"
        f"roles:\n  trainers: {{args: [{tmp_path / 'note'}]}}\n  embedding_workers: 1\n  loaders: 0\n"
    )
    command = [KARVAN, "launch", str(tmp_path / "job.yaml")]
    done = subprocess.run(command, cwd=traps, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    note = json.loads((tmp_path / "note").read_text())
    assert note["path"] == str(tmp_path / "project")
    assert "WARNING: programs" not in done.stdout + done.stderr
    assert note["sibling"] == note["child"] == "a module of the program"
    assert str(traps) not in note["yaml"]


# A program with a job of its own, whose functions run in other processes.
SERVICE = """
import os, sys
from karvan.compat.persia.helper import ensure_persia_service
from karvan.discovery.directory import Directory
from karvan.wire import Security

def work():
    import sibling
    with open(os.environ["NOTE"], "w") as file:
        file.write(sibling.name())

if __name__ == "__main__":
    slots = os.environ["PERSIA_EMBEDDING_CONFIG"]
    with ensure_persia_service(nn_worker_func=work, embedding_config_path=slots):
        assert os.stat(os.environ["KARVAN_TOKEN_FILE"]).st_mode & 0o777 == 0o600
        registry = os.environ["KARVAN_REGISTRY"]
        Directory(registry, Security.from_environment()).members()
        try:
            Directory(registry, Security()).members()
        except Exception as error:
            print("refused:", error)
    assert "KARVAN_TOKEN_FILE" not in os.environ
"""


def test_the_processes_of_ensure_persia_service_import_what_its_program_does_and_ask_for_a_token(
    tmp_path, traps, environment
):
    pytest.importorskip("cloudpickle")
    write_program(tmp_path / "project", SERVICE)
    done = subprocess.run(
        [sys.executable, tmp_path / "project" / "train.py"],
        cwd=traps,
        env={**environment, "NOTE": str(tmp_path / "note")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused: " in done.stdout
    assert "token" in done.stdout
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    assert (tmp_path / "note").read_text() == "a module of the program"


def test_a_program_in_an_open_folder_and_an_empty_entry_of_pythonpath_are_warned_of(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    closed = JobSpec.model_validate({"name": "a", "entry": "t.py"})
    assert open_import_folders(closed) == []
    assert open_import_folders(closed.model_copy(update={"loader_entry": Path("open/l.py")})) == [
        tmp_path / "open"
    ]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:")
    assert open_import_folders(closed) == []
    monkeypatch.chdir(tmp_path / "open")
    assert open_import_folders(JobSpec.model_validate({"name": "a", "entry": "../t.py"})) == [
        tmp_path / "open"
    ]


def test_ray_is_refused_in_an_open_folder_because_it_imports_from_there(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.model_validate({"name": "a", "entry": "t.py"})
    check_engine("ray", spec)
    tmp_path.chmod(0o1777)
    with pytest.raises(ValueError, match="other users cannot write to"):
        check_engine("ray", spec)


# What a program sees of Python's search path; the same text, started by Python and by a job.
SHOW = "import json, sys; print(json.dumps([sys.path[0], sys.argv, [p for p in sys.path if not p]]))"


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_program_of_a_job_imports_from_the_folders_of_python_program_py(tmp_path, safe):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "program.py").write_text(SHOW)
    (tmp_path / "link").symlink_to(tmp_path / "project")
    for program in ("project/program.py", "link/program.py", str(tmp_path / "project" / "program.py")):
        shown = [
            subprocess.check_output(
                [sys.executable, *flags, program, "7"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONSAFEPATH": safe},
            )
            for flags in ([], ["-P", "-m", "karvan.launch.program"])
        ]
        assert shown[0] == shown[1]


@pytest.mark.parametrize("system", [None, "persia"])
def test_the_commands_of_all_roles_leave_out_the_current_folder(system):
    roles = {"loaders": {"replicas": 1}, "embedding_workers": {"replicas": 1}}
    spec = JobSpec.model_validate({"name": "a", "entry": "t.py", "system": system, "roles": roles})
    commands = commands_of(spec)
    assert len(commands) == 4
    assert all(command[:3] == (sys.executable, "-P", "-m") for command in commands.values())
