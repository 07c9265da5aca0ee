"""The token of a launched job: a random one for every start, unless the job sets `token_file`.

The token is 32 random bytes, in hex, in a file that only its owner may read (0600), in the job's run folder,
which only its owner may enter (0700). Processes of the job get the path in KARVAN_TOKEN_FILE; the token
itself is never an argument, an environment variable or a line of a log. The file is removed when the job
ends, or cannot start. Processes that hold the token leave no core dumps. A job that is killed leaves the file
behind, with a token that no later start accepts: its services died with it. `karvan stop` removes it, and the
next start makes another one.

Services of a job that listen at ports have a certificate as well, also a new one for every start, unless the
job sets `tls`. Its files lie beside the token, and live as long.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from karvan.system_limits import forbid_core_dumps

_BYTES = 32
_NAME = "karvan-job"
_CLOCKS = timedelta(days=1)  # by which the clocks of machines may differ
_VALID = timedelta(days=3650)  # longer than any job


def make_token(path: Path) -> None:
    """Write a new token to this path, instead of the last one."""
    forbid_core_dumps()
    _write(path, f"{secrets.token_hex(_BYTES)}\n".encode())


def make_certificate(folder: Path) -> dict[str, Any]:
    """Write a key and its certificate, which is its own authority: who has the key belongs to the job.

    Returns the job's settings of TLS. Nobody needs to know the addresses of the job beforehand: callers
    expect the one name in the certificate, wherever they reach a service.
    """
    from cryptography import x509  # rarely needed, and slow to import
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(who, who, secret.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, SHA256())
    )
    key, cert = folder / "tls-key.pem", folder / "tls-cert.pem"
    _write(key, secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    _write(cert, certificate.public_bytes(Encoding.PEM))
    return {"cert": cert, "key": key, "ca": cert, "mutual": True, "name": _NAME}


def _write(path: Path, content: bytes) -> None:
    """Write a file that only this user may read, instead of the last one."""
    with suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
