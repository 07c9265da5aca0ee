"""`karvan role`: one process of a job, as an engine starts it."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from typer import Argument, Option

from karvan.cli.output import DAMAGED, OK, TEMPORARY, USAGE, CommandError, code_of
from karvan.job.environment import set_variables, variable
from karvan.system_limits import require_limits


def role(
    context: typer.Context,
    name: str = Argument(..., metavar="NAME", help="parameter-server, embedding-worker, loader or master."),
    index: int | None = Option(None, help="The index of this process, from 0."),
    count: int | None = Option(None, help="How many processes of this role the job has."),
    host: str | None = Option(
        None,
        help="The address to listen on, by default 127.0.0.1; unix:/PATH is a socket file in a private "
        "folder; others need TLS and a token.",
    ),
    port: int | None = Option(None, help="The port; 0, the default, is any."),
    advertise: str | None = Option(
        None, metavar="HOST", help="The host name under which other processes reach it."
    ),
    registry: str | None = Option(
        None, metavar="ADDRESS", help="The job's registry, host:port or unix:/PATH."
    ),
    threads: int | None = Option(None, help="Threads for lookups and updates; by default all cores."),
    generation: int | None = Option(None, help="The generation of the job; by default 0."),
    checkpoints: str | None = Option(
        None, metavar="FOLDER", help="Where a parameter server may save; where a master has its ledger."
    ),
    capacity: int | None = Option(
        None,
        metavar="ROWS",
        help=(
            "How many rows a parameter server holds over all tables; beyond that, the least recently "
            "used rows are evicted."
        ),
    ),
    token_file: Path | None = Option(None, help="A file with the token that callers must present."),
    tls_cert: Path | None = Option(None, help="The certificate, in PEM."),
    tls_key: Path | None = Option(None, help="Its key."),
    tls_ca: Path | None = Option(None, help="The authority that signed it."),
    tls_mutual: bool | None = Option(None, "--tls-mutual", help="Callers need a certificate as well."),
    tls_name: str | None = Option(
        None, metavar="HOST", help="The name in certificates, if it is not the address."
    ),
) -> int:
    """Run one process of a job until SIGTERM or Ctrl-C.

    Engines start roles with environment variables (KARVAN_INDEX, KARVAN_REGISTRY, …); an option takes
    precedence over the variable of its name.

    \b
    Examples:
      karvan role parameter-server
      karvan role parameter-server --index 0 --count 2 --port 7000
      karvan role parameter-server --registry 127.0.0.1:6000
      karvan role master --port 6000 --checkpoints out/run
    """
    options = {option: value for option, value in context.params.items() if option != "name"}
    if registry is not None:
        os.environ.pop(variable("master_address_file"), None)  # of another registry
    set_variables(os.environ, options)  # so that all parts of the role see the same settings
    require_limits(2)  # the number of its peers is not known yet
    return _run(name)


def _run(name: str) -> int:
    import logging

    from karvan.cluster.role_process import RoleSettings, end, factory_of, serve
    from karvan.job.roles import Role, role_of
    from karvan.wire import ListenError, RefusedError, WireError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        if name == Role.MASTER:
            from karvan.cluster.master import serve_master

            serve_master(RoleSettings.from_environment(Role.MASTER))
        else:
            serve(factory_of(name), RoleSettings.from_environment(role_of(name)))
    except ValueError as error:
        code = code_of(error)
        raise CommandError(str(error), code if code in (DAMAGED, TEMPORARY) else USAGE) from error
    except (WireError, RefusedError, ListenError) as error:
        raise CommandError(str(error), code_of(error)) from error
    end(OK)
    return OK
