"""URLs of checkpoints, such as `s3://bucket/run`, and the local paths that stand for them.

All code works with paths. A URL has a *working folder* in the user's cache, and a path in it stands for the
same name below the URL:

    s3://bucket/run/step-000000000010   CACHE/checkpoints/s3/bucket/run/step-000000000010

The path gives the URL back (`url_of`), so it may be passed on as text. A URL with options or credentials has
a folder of its own, `s3@HASH`, with a file that has them. CACHE is $KARVAN_CACHE, $XDG_CACHE_HOME/karvan or
~/.cache/karvan; it may differ between machines, so processes tell each other the URL (`address_of`).

The objects are at the URL. The working folder has only what belongs to this machine: locks, the lease of its
runs, and files on their way to the URL.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from karvan.files import replace_file
from karvan.job.environment import variable

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:/")  # what pathlib makes of a URL
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_QUERY = re.compile(r"\?\w+=[^/*?]*$")
_FILE = ".address.json"  # of the folder of a scheme
_NO_HOST = "_"  # stands for the missing host of hdfs:///user/run
_roots: set[str] = set()  # folders of URLs that this process has used
_credentials: dict[Path, tuple[str, str]] = {}  # credentials and options, by the folder of a scheme


def local_path(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder, or the one that stands for a URL; a ValueError for a URL that is not one."""
    text = os.fspath(folder)
    if not isinstance(folder, str) and _ONE_SLASH.match(text):
        raise ValueError(
            f"Expected a path, or a URL as text, got {text!r} as a path, which drops a slash of a URL: pass "
            f"it as text, {text.replace(':/', '://', 1)!r}."
        )
    if "://" not in text:
        return Path(text)
    scheme, user, names, query = _parts(text)
    if scheme == "file":
        return Path("/", *names[1:])
    _roots.add(str(_root()))  # paths keep their meaning if the variable changes
    return _base(scheme, user, query).joinpath(*names)


def url_of(path: str | os.PathLike[str]) -> str | None:
    """The URL that a path stands for; None for any other path."""
    return _url(path, complete=True)


def address_of(path: str | os.PathLike[str]) -> str:
    """A URL, or an absolute path: what other processes are told."""
    return url_of(path) or os.path.abspath(path)


def shown(path: str | os.PathLike[str] | None) -> str:
    """A path for messages; the URL that it stands for, without credentials and options."""
    if path is None:
        return "no folder"
    return _url(path, complete=False) or os.fspath(path)


def plain_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file of this machine; a ValueError for a URL."""
    if isinstance(path, str) and "://" in path and not path.startswith("file://"):
        raise ValueError(f"Expected the path of a file of this machine, got the URL {without_secrets(path)}.")
    return local_path(path)


def without_secrets(text: str) -> str:
    """A path, or a URL without credentials and options, for messages."""
    return _CREDENTIALS.sub("://", split_query(text)[0])


def split_query(url: str) -> tuple[str, str]:
    """A URL, and the options of its file system: `s3://logs/*.orc?region=us-east-1` ends in no glob."""
    query = _QUERY.search(url) if "://" in url else None
    return (url, "") if query is None else (url[: query.start()], query.group())


def _parts(text: str) -> tuple[str, str, list[str], str]:
    """Scheme, credentials, names (the first is the host) and options of a URL."""
    plain, query = split_query(text)
    scheme = _SCHEME.match(plain)
    authority, _, inside = plain[scheme.end() :].partition("/") if scheme else ("", "", "")
    user, at, host = authority.rpartition("@")
    safe = f"{scheme[1]}://{host}/{inside}" if scheme else text
    names = [host or _NO_HOST, *(inside.rstrip("/").split("/") if inside.strip("/") else ())]
    if scheme is None or not any((host, inside.strip("/"))):
        raise ValueError(f"Expected a path or a URL, such as s3://bucket/run, got {safe!r}.")
    for name in names:
        if name in ("", ".", "..") or any(mark in name for mark in "*?[]%#\0"):
            raise ValueError(
                f"Expected a URL with plain names, such as s3://bucket/run, got {safe!r}: {name!r} is empty, "
                "or has one of . .. * ? [ ] % #. These have a meaning of their own in URLs."
            )
    return scheme[1].lower(), user + at, names, query


def _root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    cache = os.environ.get(variable("cache")) or os.path.join(home, "karvan")
    return Path(os.path.realpath(cache), "checkpoints")


def _base(scheme: str, user: str, query: str) -> Path:
    """The folder of all URLs of a scheme, with these credentials and options."""
    if not user and not query:
        return _root() / scheme
    content = json.dumps([user, query])
    base = _root() / f"{scheme}@{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if base not in _credentials or not (base / _FILE).exists():
        base.mkdir(0o700, parents=True, exist_ok=True)
        replace_file(base / _FILE, content, 0o600)
        _credentials[base] = (user, query)
    return base


def host_of(path: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Of a path that stands for a URL: that of its host or bucket, and the names below it."""
    parts = _split(path)
    assert parts is not None
    root, kind, host, names = parts
    user, query = _options(Path(root, kind)) if "@" in kind else ("", "")
    return f"{kind.partition('@')[0]}://{user}{host}{query}", names


def _url(path: str | os.PathLike[str], *, complete: bool) -> str | None:
    parts = _split(path)
    if parts is None:
        return None
    root, kind, host, names = parts
    user, query = _options(Path(root, kind)) if "@" in kind and complete else ("", "")
    return f"{kind.partition('@')[0]}://{user}{'/'.join((host, *names))}{query}"


def _split(path: str | os.PathLike[str]) -> tuple[str, str, str, list[str]] | None:
    """The folder of all URLs, the name of the scheme's folder, the host and the names below it."""
    text = os.path.abspath(path)
    root = next((root for root in (str(_root()), *_roots) if text.startswith(f"{root}{os.sep}")), None)
    if root is None:
        return None
    kind, *names = text[len(root) + 1 :].split(os.sep)
    if not names:
        return None
    return root, kind, "" if names[0] == _NO_HOST else names[0], names[1:]


def _options(base: Path) -> tuple[str, str]:
    if base not in _credentials:
        user, query = json.loads((base / _FILE).read_text())
        _credentials[base] = (user, query)
    return _credentials[base]
