"""`karvan plot`: what is read of runs, and what is in the page."""

import csv
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.cli.main import main
from karvan.monitor.plot_page import plot_page, read_runs


class Page(HTMLParser):
    """The elements of a page: its JSON, the cells of its table, and all tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.scripts = [], [], []
        self._inside = None
        self.feed(text)
        self.close()
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, text):
        if self._inside in ("td", "th"):
            self.cells[-1][-1] += text
        elif self._inside == "script":
            self.scripts[-1] += text

    @property
    def table(self):
        return {label: cells for label, *cells in self.cells}


def write_history(folder, entries):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def entry(kind, step, **values):
    return {"kind": kind, "step": step, "epoch": 0, "samples": step * 10, "time": 1e9 + step, **values}


def page_of(*paths):
    return Page(plot_page(read_runs(paths)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two real runs with logs."""
    import torch

    place = tmp_path_factory.mktemp("runs")
    log = kv.data.synthetic.ClickLog(seed=1, users=50, items=30)
    for name, lr in (("slow", 0.01), ("quick", 0.1)):
        trainer = kv.Trainer(
            kv.models.DLRM(["price"], ["user", "item"], dim=4, bottom=(8,), top=(8,)),
            kv.losses.BinaryCrossEntropy(),
            dense_optimizer=torch.optim.Adam,
            sparse_optimizer=kv.optim.Adagrad(lr=lr),
            metrics={"auc": kv.metrics.AUC(), "calibration": kv.metrics.Calibration()},
            checkpoints=place / name,
            loggers=[
                kv.loggers.CSVLogger(place / f"{name}.csv"),
                kv.loggers.JSONLinesLogger(place / f"{name}.log"),
            ],
            log_every=2,
            progress="none",
        )
        data = kv.data.read(log.table(0, 640), 64)
        trainer.fit(data, eval_data=kv.data.read(log.table(700, 128), 64), eval_every=5)
    return place


def test_the_page_has_every_number_of_the_logs(trained):
    page = page_of(trained / "slow", trained / "quick")
    assert [run["name"] for run in page.data["runs"]] == ["slow", "quick"]
    for run in page.data["runs"]:
        rows = list(csv.DictReader((trained / f"{run['name']}.csv").open()))
        for kind in ("train", "eval"):
            logged = [row for row in rows if row["kind"] == kind]
            assert run[kind]["step"] == [int(row["step"]) for row in logged]
            assert run[kind]["samples"] == [int(row["samples"]) for row in logged]
            for name, values in run[kind]["values"].items():
                assert values == [float(row[name]) for row in logged]
    assert page.data["runs"][0]["train"]["step"] == [2, 4, 6, 8, 10]
    assert page.data["runs"][0]["eval"]["step"] == [5, 10]


def test_the_charts_show_loss_metrics_rates_speed_and_table_growth(trained):
    charts = page_of(trained / "slow", trained / "quick").data["charts"]
    assert [chart["title"] for chart in charts] == [
        *("Loss", "AUC", "Calibration", "Learning rate"),
        *("Throughput", "Table rows", "Memory"),
    ]
    by_title = {chart["title"]: chart for chart in charts}
    assert [line["label"] for line in by_title["AUC"]["views"][0]["lines"]] == ["training", "evaluation"]
    assert by_title["Calibration"]["reference"] == 1
    assert [line["label"] for line in by_title["Learning rate"]["views"][0]["lines"]] == ["dense", "sparse"]
    assert [chart["title"] for chart in charts if chart["noisy"]] == ["Loss", "Throughput"]
    assert [view["label"] for view in by_title["Table rows"]["views"]] == [
        *("all tables together", "each table", "user", "item"),
    ]
    # Every number in the history is drawn by some line.
    drawn = {(line["kind"], line["name"]) for c in charts for view in c["views"] for line in view["lines"]}
    for run in page_of(trained / "slow").data["runs"]:
        assert {(kind, name) for kind in ("train", "eval") for name in run[kind]["values"]} == drawn


def test_the_table_has_the_last_numbers_of_each_run(trained):
    table = page_of(trained / "slow", trained / "quick").table
    assert table[""] == ["slow", "quick"]
    assert table["Step"] == ["10", "10"]
    assert table["Samples"] == ["640", "640"]
    for column, name in enumerate(("slow", "quick")):
        last = [json.loads(line) for line in (trained / name / "history.jsonl").read_text().splitlines()][-1]
        assert last["kind"] == "eval"
        assert table["AUC (evaluation)"][column] == f"{last['auc']:.5g}"


def test_a_checkpoint_a_csv_and_json_lines_show_the_same_run(trained):
    expected = page_of(trained / "slow").data
    checkpoint = next((trained / "slow").glob("step-*"))
    for path in (checkpoint, trained / "slow.csv", trained / "slow.log"):
        data = page_of(path).data
        assert data["charts"] == expected["charts"]
        for kind in ("train", "eval"):
            assert data["runs"][0][kind] == expected["runs"][0][kind]


def test_the_page_asks_for_nothing_outside_of_it(trained):
    text = plot_page(read_runs([trained / "slow", trained / "quick"]))
    assert not re.search(r"https?://|//[a-z]|@import|url\(", re.sub(r"(?m)^\s*//.*$| // .*$", "", text))
    page = Page(text)
    assert [tag for tag, attributes in page.tags if {"src", "href", "srcset"} & set(attributes)] == []
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_names_with_markup_are_text(tmp_path):
    name = "<script>alert(1)</script>".replace("/", "")
    metric = "</script><img src=x onerror=alert(1)>&amp;"
    folder = write_history(tmp_path / name, [entry("eval", 1, **{metric: 0.5})])
    text = plot_page(read_runs([folder, write_history(tmp_path / "b", [entry("eval", 1, loss=0.5)])]))
    assert "<img" not in text
    assert "<script>alert" not in text
    page = Page(text)
    assert len(page.scripts) == 2
    assert page.data["runs"][0]["name"] == name
    assert page.data["charts"][1]["title"] == metric
    assert page.table[""] == [name, "b"]
    assert page.table[metric] == ["0.5", ""]


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(
    losses=st.lists(st.one_of(st.none(), numbers), min_size=1, max_size=8),
    damage=st.sampled_from(["", '{"kind": "tra', "\0\0\n", "[]\n", '{"kind": "other", "step": 1}\n']),
)
def test_any_numbers_become_a_page_without_nan(tmp_path_factory, losses, damage):
    entries = [entry("train", step, loss=loss) for step, loss in enumerate(losses)]
    folder = write_history(tmp_path_factory.mktemp("run"), entries)
    with (folder / "history.jsonl").open("a") as file:
        file.write(damage)
    found = page_of(folder).data["runs"][0]["train"]["values"]["loss"]
    assert found == [loss if loss is not None and math.isfinite(loss) else None for loss in losses]


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    paths = [
        write_history(tmp_path / day / "run", [entry("train", 1, loss=1.0)]) for day in ("monday", "tuesday")
    ]
    assert [run.name for run in read_runs(paths[:1])] == ["run"]
    assert [run.name for run in read_runs([*paths, paths[0]])] == ["monday/run", "tuesday/run"]


def test_the_command_writes_the_page_beside_the_run_or_where_it_is_told(trained, tmp_path, capsys):
    assert main(["plot", str(trained / "slow")]) == 0
    assert "1 run, 7 reports" in capsys.readouterr().out
    page = (trained / "slow" / "plot.html").read_text()
    assert main(["plot", str(trained / "slow"), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text() == page
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


def test_what_cannot_be_plotted_is_an_error_without_a_traceback(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.csv").write_text("kind,step,epoch\n")
    (tmp_path / "log.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("dear diary\n")
    write_history(tmp_path / "group" / "inside", [entry("train", 1, loss=1.0)])
    for name, code, words in (
        ("none", 3, "there is no such run folder or log file"),
        ("empty", 3, "has no history.jsonl. A Trainer with checkpoints writes"),
        ("log.csv", 3, "has no reports"),
        ("log.jsonl", 3, "has no reports"),
        ("notes.txt", 3, "has no reports"),
        ("group", 3, "These folders inside have one:"),
    ):
        assert main(["plot", str(tmp_path / name)]) == code
        told = capsys.readouterr().err
        assert words in told
        assert "Traceback" not in told
    assert main(["plot", str(tmp_path / "group" / "inside"), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "x.html cannot be written: No such file or directory" in capsys.readouterr().err


def test_plotting_does_not_wait_for_torch(tmp_path):
    folder = write_history(tmp_path / "run", [entry("train", 1, loss=1.0)])
    script = (
        "import sys; from karvan.cli.main import main\n"
        "assert main(['plot', sys.argv[1]]) == 0\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, stdout=subprocess.DEVNULL)
