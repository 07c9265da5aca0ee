"""A release: the source distribution has what a wheel is built from, and a wheel has what a user needs."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The config settings are for a wheel without the extension, which takes a minute or two to compile.
PACK = """
import sys
from scikit_build_core.build import build_sdist, build_wheel
build_sdist(sys.argv[1])
build_wheel(sys.argv[1], {"wheel.cmake": "false", "wheel.py-api": ""})
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with the source distribution and a wheel without the extension."""
    folder = tmp_path_factory.mktemp("packed")
    subprocess.run([sys.executable, "-c", PACK, folder], cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(packed):
    with zipfile.ZipFile(next(packed.glob("*.whl"))) as archive:
        yield archive


def _sources(package):
    """All files of a package but what Python and compilers write."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }


def test_the_wheel_has_the_packages_and_nothing_else(wheel):
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == _sources("karvan") | _sources("persia")
    assert {"karvan/py.typed", "karvan/_native.pyi", "persia/__init__.py"} <= files


def test_the_source_distribution_has_what_a_wheel_is_built_from(packed):
    with tarfile.open(next(packed.glob("*.tar.gz"))) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    core = {name for name in _sources("csrc") if not name.startswith("csrc/tests/")}
    documents = {"README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    build = {"CMakeLists.txt", "pyproject.toml", "constraints.txt"}
    assert files == _sources("karvan") | _sources("persia") | core | documents | build


def test_the_metadata_tells_pip_and_an_index_what_the_package_is(wheel):
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(wheel.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert {"kafka", "odps", "monitor", "ray"} <= set(metadata.get_all("Provides-Extra"))


# The tests that follow compile the extension twice and download torch: minutes, and 10 GB until they end.
PROGRAM = """
import karvan as kv, torch
kv.data.synthetic.ClickLog(users=1000, items=500).write("clicks", rows=20_000, files=4)
features = kv.FeatureEngine([kv.Feature("price").log1p(), kv.Feature("recency").log1p()])
train = kv.data.read("clicks/part-0000[0-2].parquet", batch_size=512, shuffle=10_000, transform=features)
test = kv.data.read("clicks/part-00003.parquet", batch_size=4096, transform=features)
trainer = kv.Trainer(
    kv.models.DLRM(["price", "recency"], ids=["user", "item", "history"], dim=16, bottom=(64,), top=(64,)),
    kv.losses.BinaryCrossEntropy(label="label"),
    dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    sparse_optimizer=kv.optim.Adagrad(lr=0.05),
    metrics={"auc": kv.metrics.AUC()},
    checkpoints="run",
)
print(torch.__version__, trainer.fit(train, epochs=2, eval_data=test).evaluation["auc"])
"""


def _run(words, folder, **environment):
    """Run a program in a folder, with nothing of this process's environment; returns what it prints."""
    environment = {"HOME": os.environ["HOME"], "PIP_CONSTRAINT": str(ROOT / "constraints.txt")} | environment
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(words, cwd=folder, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _environment(python, folder, *packages, **environment):
    """A new virtual environment with these packages; returns its folder of programs."""
    _run([python, "-m", "venv", folder], folder.parent)
    _run([folder / "bin" / "pip", "install", "-q", *packages], folder.parent, **environment)
    return folder / "bin"


def _python_312():
    """Python 3.12, whose wheel is of the stable ABI, where there is one; else the Python of this process."""
    found = shutil.which("python3.12")
    if found is None:
        return sys.executable
    # A shim of a version manager may lead nowhere, or depend on the environment.
    shown = subprocess.run([found, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
    return shown.stdout.strip() or sys.executable


def _oldest_torch():
    """The constraints with the oldest torch that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = next(each for each in project["dependencies"] if each.startswith("torch>="))
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    others = [line for line in lines if not line.startswith("torch==")]
    return "\n".join([*others, f"{oldest.replace('>=', '==')}.*"])


@pytest.mark.slow
@pytest.mark.parametrize("newest", [True, False], ids=["the tested torch", "the oldest torch"])
def test_a_wheel_built_without_a_network_trains_without_a_compiler(newest, packed, tmp_path):
    python = sys.executable if newest else _python_312()
    source, constraints = next(packed.glob("*.tar.gz")), tmp_path / "constraints.txt"
    constraints.write_text((ROOT / "constraints.txt").read_text() if newest else _oldest_torch())
    try:
        builder = _environment(python, tmp_path / "build", "scikit-build-core", "nanobind", "cmake", "ninja")
        _run(
            [builder / "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", source],
            tmp_path,
            PATH=f"{builder}{os.pathsep}{os.environ['PATH']}",
        )
        wheel = next(tmp_path.glob("*.whl"))
        user = _environment(python, tmp_path / "user", wheel, PIP_CONSTRAINT=str(constraints), PATH="")
        version, auc = _run([user / "python", "-c", PROGRAM], tmp_path, PATH="").split()
        torch = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
        assert version.startswith(torch[0].removeprefix("torch==").removesuffix("*"))
        assert float(auc) > 0.6
        assert "user" in _run([user / "karvan", "inspect", "run"], tmp_path, PATH="")
    finally:
        for folder in ("build", "user"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
