"""A token is checked where it is read: what a header cannot carry is an error, no secret is a warning."""

import logging

import pytest
from wire_helpers import Counting

from karvan.wire import Client, Security, Server

GOOD = "0123456789abcdef" * 4


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "job token"
    path.touch(0o600)
    return path


def load(path):
    return Security.from_environment({"KARVAN_TOKEN_FILE": str(path)}).token


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_token_with_or_without_a_line_end_gets_in(token_file, end, caplog):
    token_file.write_bytes(f"{GOOD}{end}".encode())
    security = Security(token=load(token_file))
    assert security.token == GOOD
    with (
        Server(Counting(), security=security) as server,
        Client("counting", server.address, security) as peer,
    ):
        assert peer.call("ping").head["service"] == "counting"
    assert not caplog.records


WRONG = {
    "a newline inside": (b"first-line-of-it\nsecond-line", "several lines"),
    "a carriage return inside": (b"first-line-of-it\rsecond", "several lines"),
    "letters that are not ASCII": ("geheimnisträger-12345".encode(), "not ASCII at position 12"),
    "bytes that are no text": (b"\xff\xfe0123456789abcdef", "not ASCII at position 1"),
    "a space inside": (b"correct horse battery staple", "a space or control character at position 8"),
    "a zero byte": (b"0123456789abcdef\0x", "a space or control character at position 17"),
    "20 kB": (b"x" * 20_000, "more than 4096"),
    "nothing": (b"\n", "is empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_token_that_cannot_be_shown_is_refused_where_it_is_read(token_file, name):
    content, problem = WRONG[name]
    token_file.write_bytes(content)
    with pytest.raises(ValueError, match="KARVAN_TOKEN_FILE expects") as raised:
        load(token_file)
    said = str(raised.value)
    assert problem in said
    assert str(token_file) in said
    for part in content.decode("latin-1").split():
        assert part not in said
    assert name == "nothing" or "openssl rand -hex 32" in said


@pytest.mark.parametrize("token", ["a b" * 8, "x" * 5000, "ä" * 20, "line\nline", GOOD + "\n"])
def test_a_token_given_in_a_program_is_checked_as_well(token):
    with pytest.raises(ValueError, match="A token expects") as raised:
        Security(token=token)
    assert token not in str(raised.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
def test_a_token_file_that_others_may_read_is_a_warning_with_the_command_to_run(token_file, mode, caplog):
    token_file.write_text(GOOD)
    token_file.chmod(mode)
    with caplog.at_level(logging.WARNING, "karvan.wire"):
        assert load(token_file) == GOOD
    [record] = caplog.records
    assert f"mode {mode:03o}" in record.getMessage()
    assert f"chmod 600 '{token_file}'" in record.getMessage()
    assert GOOD not in record.getMessage()


def test_a_token_that_can_be_guessed_is_a_warning(token_file, caplog):
    token_file.write_text("secret")
    with caplog.at_level(logging.WARNING, "karvan.wire"):
        load(token_file)
    assert "has 6 characters; fewer than 16 can be guessed" in caplog.text
    assert "secret" not in caplog.text


def test_a_token_file_without_an_end_is_not_read_to_its_end():
    with pytest.raises(ValueError, match="more than 4096"):
        load("/dev/zero")
