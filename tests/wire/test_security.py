"""Tokens and TLS: who gets in, who does not, and whether it is told why."""

import hmac
import inspect
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import trustme
from wire_helpers import Counting

from karvan.wire import Client, RefusedError, Security, Server, WireError
from karvan.wire import server as module

DEADLINE = 0.4  # seconds, of calls that are to fail for want of an answer


class Authority:
    def __init__(self):
        self._ca = trustme.CA()
        self.pem = self._ca.cert_pem.bytes()

    def certificate(self, *names):
        made = self._ca.issue_cert(*names)
        chain = b"".join(each.bytes() for each in made.cert_chain_pems)
        return {"cert": chain, "key": made.private_key_pem.bytes()}


OURS, OTHER = Authority(), Authority()
NAMED = OURS.certificate("localhost", "127.0.0.1")


def ask(server_security, caller_security, deadline=DEADLINE):
    with (
        Server(Counting(), security=server_security) as server,
        Client("counting", server.address, caller_security, deadline=deadline) as peer,
    ):
        return peer.call("ping").head["service"]


def test_the_right_token_gets_in():
    assert ask(Security(token="secret"), Security(token="secret"), 10) == "counting"


@pytest.mark.parametrize("shown", ["", "other", "secret2", "secre", "Secret"])
def test_no_token_or_a_wrong_one_is_refused_at_once(shown):
    with pytest.raises(RefusedError, match="counting refused: expected the job's token"):
        ask(Security(token="secret"), Security(token=shown), 60)


def test_tokens_are_compared_in_constant_time():
    assert hmac.compare_digest.__name__ in inspect.getsource(module._CheckToken.start_call)


def test_tls_with_the_right_authority():
    assert ask(Security(**NAMED, ca=OURS.pem), Security(ca=OURS.pem), 10) == "counting"
    both = Security(**NAMED, ca=OURS.pem, token="secret")
    assert ask(both, Security(ca=OURS.pem, token="secret"), 10) == "counting"
    with pytest.raises(RefusedError, match="token"):
        ask(both, Security(ca=OURS.pem), 60)


def test_a_certificate_of_another_authority_is_not_trusted():
    with pytest.raises(RefusedError, match="expected a certificate of the authority"):
        ask(Security(**NAMED, ca=OURS.pem), Security(ca=OTHER.pem), 60)


def test_a_certificate_with_another_name_is_not_trusted():
    with pytest.raises(RefusedError, match="expected a certificate with the service's name"):
        ask(Security(**OURS.certificate("elsewhere.example"), ca=OURS.pem), Security(ca=OURS.pem), 60)


def test_a_caller_with_tls_and_a_service_without():
    with pytest.raises(RefusedError, match="expected a service with TLS, got one without"):
        ask(Security(), Security(ca=OURS.pem), 60)


def test_a_caller_without_tls_and_a_service_with():
    with pytest.raises(WireError, match="perhaps it expects TLS"):
        ask(Security(**NAMED), Security())


def test_mutual_tls():
    mutual = Security(**NAMED, ca=OURS.pem, mutual=True)
    caller = Security(**OURS.certificate("caller"), ca=OURS.pem, mutual=True)
    assert ask(mutual, caller, 10) == "counting"
    with pytest.raises(WireError, match="perhaps it expects a certificate"):
        ask(mutual, Security(ca=OURS.pem))
    with pytest.raises(WireError, match="expected to answer 'ping' within"):
        ask(mutual, Security(**OTHER.certificate("caller"), ca=OURS.pem, mutual=True))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
@pytest.mark.parametrize("security", [Security(), Security(token="secret"), Security(**NAMED)])
def test_a_service_for_other_machines_needs_tls_and_a_token(host, security):
    with pytest.raises(ValueError, match=f"expects a loopback address .* got {host}"):
        Server(Counting(), host, security=security)


def test_a_service_with_tls_and_a_token_may_be_for_all():
    security = Security(**NAMED, ca=OURS.pem, token="secret")
    with Server(Counting(), "0.0.0.0", security=security) as server:
        port = server.address.rpartition(":")[2]
        with Client("counting", f"127.0.0.1:{port}", security) as peer:
            assert peer.call("ping").head["service"] == "counting"


def test_a_token_is_not_shown_to_another_machine_without_tls():
    with (
        Client("far", "10.0.0.1:80", Security(token="secret")) as peer,
        pytest.raises(ValueError, match="TLS"),
    ):
        peer.call("ping")


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_loopback_has_several_names(host):
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with Server(Counting(), host) as server, Client("counting", server.address) as peer:
        assert peer.call("ping").head["service"] == "counting"


def test_security_from_files(tmp_path):
    for name, content in {
        "token": b"secret\n",
        "cert": NAMED["cert"],
        "key": NAMED["key"],
        "ca": OURS.pem,
    }.items():
        (tmp_path / name).write_bytes(content)
    environment = {
        "KARVAN_TOKEN_FILE": str(tmp_path / "token"),
        "KARVAN_TLS_CERT": str(tmp_path / "cert"),
        "KARVAN_TLS_KEY": str(tmp_path / "key"),
        "KARVAN_TLS_CA": str(tmp_path / "ca"),
        "KARVAN_TLS_MUTUAL": "1",
    }
    security = Security.from_environment(environment)
    assert security == Security("secret", **NAMED, ca=OURS.pem, mutual=True)
    assert ask(security, security, 10) == "counting"
    assert Security.from_environment({}) == Security()


def test_what_would_open_a_service_by_mistake_is_an_error(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="KARVAN_TOKEN_FILE expects a file that is not empty"):
        Security.from_environment({"KARVAN_TOKEN_FILE": str(tmp_path / "empty")})
    with pytest.raises(FileNotFoundError):
        Security.from_environment({"KARVAN_TOKEN_FILE": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="KARVAN_TLS_MUTUAL expects 0 or 1"):
        Security.from_environment({"KARVAN_TLS_MUTUAL": "yes"})
    with pytest.raises(ValueError, match="certificate and its key"):
        Security(cert=b"x")
    with pytest.raises(ValueError, match="Mutual TLS"):
        Security(ca=OURS.pem, mutual=True)
    with pytest.raises(ValueError, match="got an authority alone"):
        Server(Counting(), security=Security(ca=OURS.pem))


def test_secrets_do_not_show_when_printed():
    shown = repr(Security("secret", **NAMED, ca=OURS.pem))
    assert "secret" not in shown
    assert "PRIVATE" not in shown


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_recipe_for_certificates_works(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    recipe = text.partition("## Creating a token and certificates")[2].split("```sh\n")[1].split("```")[0]
    subprocess.run(["sh", "-e", "-c", recipe], cwd=tmp_path, check=True, capture_output=True)
    files = {"TOKEN_FILE": "token", "TLS_CERT": "role.pem", "TLS_KEY": "role.key", "TLS_CA": "ca.pem"}
    environment = {f"KARVAN_{name}": str(tmp_path / file) for name, file in files.items()}
    security = Security.from_environment({**environment, "KARVAN_TLS_MUTUAL": "1"})
    assert ask(security, security, 10) == "counting"
