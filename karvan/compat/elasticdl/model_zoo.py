"""`zoo init` and `zoo build`: a Dockerfile for a folder of models, and its image.

Commands run models of a folder as it is; an image is for those who run jobs in containers.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path

from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl.flags import FlagParser
from karvan.exit_codes import OK


def run(words: Sequence[str]) -> int:
    """Run `zoo` with these words."""
    command, *flags = words or [""]
    if command not in ("init", "build"):
        push = " An image is pushed by docker push IMAGE." if command == "push" else ""
        raise ContractError(f"zoo expects init or build, got '{command}'.{push}")
    parser = FlagParser(f"elasticdl zoo {command}", allow_abbrev=False)
    if command == "init":
        parser.add_argument("--model_zoo", default=".", help="the folder of models")
        parser.add_argument("--base_image", default="python:3.11", help="the image to begin with")
        parser.add_argument("--local_pkg_dir", default="", help="a folder of wheels, in it, to install")
        parser.add_argument("--extra_pypi_index", default="", help="where pip finds more packages")
        parser.add_argument("--cluster_spec", default="", help=argparse.SUPPRESS)
        given = parser.parse_args(flags)
        if given.cluster_spec:
            warnings.warn(
                "--cluster_spec has no meaning here: there is no cluster to describe.", stacklevel=2
            )
        return _init(given)
    parser.add_argument("path", help="the folder of models, with its Dockerfile")
    parser.add_argument("--image", required=True, help="the name of the image")
    return _build(parser.parse_args(flags))


def _init(flags: argparse.Namespace) -> int:
    zoo = Path(flags.model_zoo)
    if not zoo.is_dir():
        raise ContractError(f"--model_zoo expects a folder of models, but '{zoo}' is none.")
    index = f" --extra-index-url {flags.extra_pypi_index}" if flags.extra_pypi_index else ""
    lines = [f"FROM {flags.base_image}", "COPY . /model_zoo"]
    if flags.local_pkg_dir:
        if not any(zoo.joinpath(flags.local_pkg_dir).glob("*.whl")):
            raise ContractError(f"--local_pkg_dir expects a folder in {zoo} with wheels, got none.")
        lines.append(f"RUN pip install{index} /model_zoo/{flags.local_pkg_dir}/*.whl")
    else:
        lines.append(f"RUN pip install{index} karvan")
    if (zoo / "requirements.txt").exists():
        lines.append(f"RUN pip install{index} -r /model_zoo/requirements.txt")
    file = zoo / "Dockerfile"
    if file.exists():
        raise ContractError(f"{file} exists already: remove it, or build with it.")
    file.write_text("\n".join(lines) + "\n")
    print(f"Wrote {file}. Build its image: karvan run --as elasticdl zoo build {zoo} --image NAME")
    return OK


def _build(flags: argparse.Namespace) -> int:
    if not Path(flags.path, "Dockerfile").is_file():
        raise ContractError(
            f"zoo build expects a folder with a Dockerfile, as zoo init writes, got {flags.path}."
        )
    docker = shutil.which("docker")
    if docker is None:
        raise ContractError(
            "zoo build needs docker, which is not installed. Without an image, train, evaluate and predict "
            "take the folder of models itself: --model_zoo."
        )
    return subprocess.run([docker, "build", "-t", flags.image, flags.path]).returncode
