"""Commands with URLs in the place of folders."""

import json
from pathlib import Path

import pytest
from cli_helpers import Runner, write_clicks, write_jobs
from object_stores import KEYS, object_store


@pytest.fixture
def store(monkeypatch, tmp_path):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with object_store(tmp_path / "store") as made:
        yield made


def test_a_run_at_a_url_is_trained_inspected_plotted_and_evaluated(store, tmp_path, monkeypatch, capfd):
    write_clicks(tmp_path)
    write_jobs(tmp_path)
    run, url = Runner(capfd), store.url("run")
    trained = run("train", "config.yaml", "--folder", url, "--epochs", 1, "--quiet", "--json", "-")
    assert trained.code == 0, trained.err
    assert trained.json["checkpoint"].startswith("s3://bucket/run/step-")
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "another"))
    seen = run("inspect", url, "--json", "-").json
    assert seen["path"] == trained.json["checkpoint"]
    assert run("inspect", url, "--verify").out.startswith("s3://bucket/run: ")
    assert run("evaluate", "config.yaml", "--checkpoint", url, "--json", "-").code == 0
    assert run("plot", url, "-o", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").exists()
    again = run("train", "config.yaml", "--folder", url, "--epochs", 2, "--quiet", "--json", "-")
    assert again.json["step"] > trained.json["step"]
    assert not Path("s3:").exists()
    missing = run("inspect", store.url("missing"))
    assert missing.code == 3
    assert "there is no such folder" in missing.err
    assert run("plot", store.url("missing")).code == 3
    assert json.loads(run("inspect", url, "--key", "user", "1", "--json", "-").out)["table"] == "user"
