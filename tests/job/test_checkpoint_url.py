"""URLs of checkpoints: no entry point makes a local folder of one."""

from pathlib import Path

import pytest
import torch
from cli_helpers import Runner, write_clicks, write_jobs

import karvan as kv
from karvan.job import checkpoint_url
from karvan.job.checkpoint_url import address_of, local_path, shown, split_query, url_of

URL = "nowhere://bucket/run"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, batch):
        return self.net(batch)


def _mean(output, batch):
    return output.mean()


ENTRIES = {
    "Checkpoints": lambda: kv.Checkpoints(URL).save(1, {}, None, block=True),
    "Trainer": lambda: kv.Trainer(
        Model(), _mean, dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.1), checkpoints=URL
    ).fit([torch.ones(1, 1)]),
    "save": lambda: kv.checkpoint.save(URL, {}),
    "find": lambda: kv.checkpoint.find(URL),
    "resume_at": lambda: kv.checkpoint.resume_at(URL, lambda one: one),
    "summary": lambda: kv.checkpoint.summary(URL),
    "row": lambda: kv.checkpoint.row(URL, "user", 1),
    "verify": lambda: kv.checkpoint.verify(URL),
    "survey": lambda: kv.checkpoint.survey(URL),
    "warm_start": lambda: kv.checkpoint.warm_start(Model(), URL),
    "Checkpoint": lambda: kv.checkpoint.Checkpoint(URL),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_url_that_cannot_be_used_is_an_error_and_no_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "cache"))
    with pytest.raises((ValueError, kv.checkpoint.CheckpointError), match="nowhere://bucket/run"):
        ENTRIES[name]()
    assert not (tmp_path / "nowhere:").exists()


def test_a_url_in_a_path_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="pass it as text, 's3://bucket/run'"):
        kv.Checkpoints(Path("s3://bucket/run"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", URL],
        ["plot", URL],
        ["evaluate", "config.yaml", "--checkpoint", URL],
        ["train", "config.yaml", "--folder", URL],
        ["demo", "--folder", URL],
        ["bench", "--quick", "--folder", URL],
        ["launch", "launch.yaml", "--set", "checkpoints=out", "--set", "logs=nowhere://bucket/logs"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_commands_make_no_folder_of_a_url(arguments, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KARVAN_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("KARVAN_CHECKPOINTS", "")  # which `karvan role` sets
    (tmp_path / "train.py").write_text("")
    (tmp_path / "launch.yaml").write_text(f"name: url-job\nentry: train.py\ncheckpoints: {URL}\n")
    write_clicks(tmp_path)
    write_jobs(tmp_path)
    done = Runner(capfd)(*arguments)
    assert done.code != 0
    assert "nowhere:" in done.out + done.err
    assert not (tmp_path / "nowhere:").exists()


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/a b/run",
        "s3://bucket/run?region=here&endpoint_override=127.0.0.1:9000",
        "s3://key:secret@bucket/run?region=here",
        "hdfs:///user/run",
        "hdfs://host:9000/user/run",
        "memory://run",
    ],
)
def test_a_path_gives_its_url_back(url, tmp_path, monkeypatch):
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path))
    path = local_path(url)
    plain, options = split_query(url)
    assert path.is_relative_to(tmp_path)
    assert url_of(path) == address_of(path) == url
    assert url_of(str(path / "step-1")) == f"{plain}/step-1{options}"
    assert local_path(f"{plain}/step-1/{options}") == path / "step-1"
    assert "secret" not in str(path) + shown(path)
    assert shown(path) == plain.replace("key:secret@", "")
    checkpoint_url._credentials.clear()  # as in another process
    assert url_of(path) == url
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.rglob("*.json"))


def test_a_path_keeps_its_meaning_if_the_cache_is_another(tmp_path, monkeypatch):
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "a"))
    path = local_path("s3://bucket/run")
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "b"))
    assert url_of(path) == "s3://bucket/run"
    assert url_of(tmp_path / "run") is None
    assert address_of("run") == str(Path.cwd() / "run")


def test_loggers_refuse_urls():
    for logger in (kv.loggers.CSVLogger, kv.loggers.JSONLinesLogger):
        with pytest.raises(ValueError, match="s3://bucket/log"):
            logger("s3://bucket/log")


def test_a_file_url_is_its_path():
    assert local_path("file:///tmp/run") == Path("/tmp/run")
    assert local_path("out/run") == Path("out/run")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///", "://x", "s3://b/../c", "s3://b//c", "s3://b/*", "s3://b/a%20b"]
)
def test_a_url_that_is_none_is_an_error(url):
    with pytest.raises(ValueError, match="Expected"):
        local_path(url)
