"""What the processes of a job run: their command lines, and their environments.

The environment is what `JobEnvironment` has, and what torch needs. Trainers have RANK, WORLD_SIZE, LOCAL_RANK
and LOCAL_WORLD_SIZE as well; not MASTER_ADDR and MASTER_PORT, since they find each other through the
registry. If that is at a socket file, roles listen at files beside it. GLOO_SOCKET_IFNAME and
NCCL_SOCKET_IFNAME name the interface of KARVAN_HOST, unless it means all of them, or the job sets them
itself.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import json
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karvan.job.address import socket_beside
from karvan.job.checkpoint_url import shown, url_of
from karvan.job.environment import TORCH_NAMES, JobEnvironment
from karvan.job.roles import Role, start_order
from karvan.launch.engines.base import name_of

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec


Commands = dict[Role, tuple[str, ...]]


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of Karvan, and imports nothing from the current folder (`-P`)."""
    return sys.executable, "-P", "-m", module, *arguments


def commands_of(spec: JobSpec) -> Commands:
    """The job's programs for trainers, and for loaders if it has one; Karvan's own for all others."""
    commands: Commands = {}
    for role in start_order():
        section = spec.of_role(role)
        program: Path | None = getattr(spec, role.program) if role.program else None
        words = ("karvan", "role", role) if program is None else _program(spec, program)
        if section.replicas:
            commands[role] = module_command(*words, *section.args)
    return commands


def open_import_folders(spec: JobSpec) -> list[Path]:
    """Folders that every user may write to, and from which the job's programs import: their own, and those of
    PYTHONPATH, in which an empty entry is the current folder.
    """
    programs = [path for path in (spec.entry, spec.loader_entry) if path is not None and path.suffix == ".py"]
    folders = [path.resolve().parent for path in programs]
    if variable := os.environ.get("PYTHONPATH"):
        folders += [Path(entry).resolve() for entry in variable.split(os.pathsep)]
    return [folder for folder in dict.fromkeys(folders) if is_open_to_all(folder)]


def is_open_to_all(folder: Path) -> bool:
    """Whether every user of the machine may add files to a folder."""
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_IWOTH)


def _program(spec: JobSpec, program: Path) -> tuple[str, ...]:
    if spec.system is not None:
        return "karvan", "run", "--as", spec.system, str(program)
    if program.suffix != ".py":  # a config, whose folder is that of the job
        folder = () if spec.checkpoints is None else ("--folder", shown(spec.checkpoints))
        return "karvan", "train", str(program), *folder
    return "karvan.launch.program", str(program)


# Finds the network interface of a host, so that torch's ports listen only there.
#
# gloo and NCCL choose an interface by themselves, such as that of the machine's name, regardless of the job's
# host. Two variables override this. A host that means all interfaces (0.0.0.0), or that is not an address of
# this machine, names none: gloo then listens at the address of the machine's name.


_SIOCGIFCONF = 0x8912  # Linux: all interfaces with an IPv4 address
_ENTRY = struct.Struct("16s16s8x")  # name and address, in 64-bit Linux
_MOST = 1024  # entries


def interface_settings(host: str) -> dict[str, str]:
    """Environment variables that keep gloo and NCCL on the interface of a host."""
    name = interface_of(host)
    # "=" asks NCCL for exactly this name; otherwise "eth1" would match "eth10" as well.
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def interface_of(host: str) -> str | None:
    """The interface of this machine that has an address of this host; None if there is no single one."""
    addresses = _addresses(host)
    if any(address.is_unspecified for address in addresses):
        return None
    interfaces = [*_ipv4(), *_ipv6()]
    for address in addresses:
        for name, has in interfaces:
            if address == has or (address.is_loopback and has.is_loopback):
                return name
    return None


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _addresses(host: str) -> list[_Address]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]


def _ipv4() -> list[tuple[str, _Address]]:
    space = array.array("B", bytes(_MOST * _ENTRY.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        try:
            size, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
        except OSError:  # not Linux
            return []
    addresses: list[tuple[str, _Address]] = []
    for label, address in _ENTRY.iter_unpack(bytes(space[:size])):
        name = label.partition(b"\0")[0].decode().partition(":")[0]  # "eth0:1" is another address of eth0
        addresses.append((name, ipaddress.IPv4Address(address[4:8])))
    return addresses


def _ipv6() -> list[tuple[str, _Address]]:
    addresses: list[tuple[str, _Address]] = []
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            addresses.append((name, ipaddress.IPv6Address(int(digits, 16))))
    return addresses


# Keys of a job that its processes have as variables of the same name.
_SAME_KEYS = {
    *("mode", "staleness", "wire", "global_batches", "max_task_tries", "skip_bad_records", "on_server_loss")
}


def environment_of(
    spec: JobSpec,
    role: Role,
    index: int,
    *,
    registry: str,
    generation: int,
    owner: str = "",
    process: str = "",
) -> dict[str, str]:
    """The environment of one process; owner: the id of the master's lease, process: a random id."""
    section, dense = spec.of_role(role), spec.dense
    port = getattr(section, "port", 0)
    host = socket_beside(registry, f"{name_of(role, index)}.sock") if role.listens else None
    variables = JobEnvironment(
        job=spec.name,
        role=role,
        index=index,
        count=section.most,
        registry=registry,
        generation=generation,
        process=process,
        sharding="" if spec.sharding == "static" else spec.sharding,
        **spec.model_dump(include=_SAME_KEYS),
        **({} if dense is None else dense.model_dump()),
        counts={role: spec.of_role(role).replicas for role in start_order()},
        host=host or spec.host,
        port=port + index if port else 0,
        checkpoints="" if spec.checkpoints is None else url_of(spec.checkpoints) or str(spec.checkpoints),
        owner=owner,
        data="" if spec.data is None else json.dumps(spec.data, default=str),
        threads=section.threads,
        capacity=getattr(section, "capacity", None),
        **_security(spec),
    ).variables()
    if section.threads is not None:
        variables["OMP_NUM_THREADS"] = str(section.threads)
    if role.is_rank:
        numbers = (index, section.replicas, index, section.replicas)
        variables |= {name: str(value) for name, value in zip(TORCH_NAMES, numbers, strict=True)}
        return {**interface_settings(spec.host), **section.env, **variables}
    return {**section.env, **variables}


def security_of(spec: JobSpec) -> dict[str, str]:
    """The variables of the token and TLS, for all processes of a job; see `karvan.wire.Security`."""
    return JobEnvironment(**_security(spec)).variables()


def _security(spec: JobSpec) -> dict[str, Any]:
    tls = {} if spec.tls is None else {f"tls_{name}": value for name, value in spec.tls}
    return {"token_file": spec.token_file or "", **tls}
