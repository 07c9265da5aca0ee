"""What a notebook shows: a bar that changes in place, tables of objects, and the charts of a run."""

import html
import os
import re
import sys

import nbformat
import pytest
import torch
from jupyter_client import KernelManager
from nbclient import NotebookClient
from train_helpers import batches, trainer

import karvan as kv
from karvan.display import html_table, in_notebook

SETUP = """
import sys
sys.path[:0] = {path!r}
import karvan as kv
from train_helpers import batches, trainer
fit = trainer(metrics={{"auc": kv.metrics.AUC()}}, log_every=1, {options})
"""


def executed(folder, *cells, options=""):
    """The outputs of each cell, by a real kernel."""
    sources = [SETUP.format(path=sys.path, options=options), *cells]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    kernel = KernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/socket")
    client = NotebookClient(notebook, km=kernel, timeout=120, resources={"metadata": {"path": folder}})
    try:
        client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    finally:
        kernel.shutdown_kernel(now=True)
    return [cell.outputs for cell in notebook.cells[1:]]


def test_a_notebook_shows_one_bar_tables_and_the_charts(tmp_path):
    fitted, object_, engine, charts, resumed = executed(
        tmp_path,
        "result = fit.fit(batches(30), eval_data=batches(1), eval_every=12)",
        "fit",
        "fit.model.embeddings",
        "fit.plot()",
        "fit.fit(batches(30), epochs=2)",
        options='checkpoints="run", progress="auto"',
    )
    (bar,) = fitted  # however many steps and reports there were
    assert bar.output_type == "display_data"
    shown = bar.data["text/html"]
    assert 'aria-valuenow="100"' in shown
    assert "<div>step 30/30 · 0:00:" in shown
    assert re.findall(r"<tr><td[^>]*>(\d+)</td>", shown) == ["12", "24", "30"]
    assert "<div>Trained 30 steps in " in shown
    assert ">model</td>" in object_[0].data["text/html"]
    assert ">user</td>" in engine[0].data["text/html"]
    (frame,) = charts
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', frame.data["text/html"])[1])
    assert page.startswith("<!doctype html>")
    assert "Learning rate" in page
    assert not (tmp_path / "run" / "plot.html").exists()
    assert [output.output_type for output in resumed] == ["display_data", "execute_result"]
    assert "step 60/60" in resumed[0].data["text/html"]
    assert "<div>Resuming from run/step-000000000030.</div>" in resumed[0].data["text/html"]


def test_outside_of_a_notebook_plot_says_which_file_it_has_written(tmp_path, monkeypatch, capsys):
    assert not in_notebook()
    monkeypatch.chdir(tmp_path)
    fit = trainer(log_every=2)
    with pytest.raises(ValueError, match="call fit before"):
        fit.plot()
    fit.fit(batches(4))
    fit.plot()
    assert capsys.readouterr().out == "plot.html: 1 run, 2 reports.\n"
    assert '"loss"' in (tmp_path / "plot.html").read_text()
    fit.plot(tmp_path / "other.html")
    assert (tmp_path / "other.html").read_text() == (tmp_path / "plot.html").read_text()


def test_plot_writes_into_the_run_folder_also_before_the_first_fit_of_a_new_trainer(tmp_path, capsys):
    trainer(log_every=2, checkpoints=tmp_path / "run").fit(batches(4))
    trainer(checkpoints=tmp_path / "run").plot()
    assert capsys.readouterr().out == f"{tmp_path}/run/plot.html: 1 run, 2 reports.\n"
    assert "<h1>run</h1>" in (tmp_path / "run" / "plot.html").read_text()


def cells(shown):
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    return [[html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_tables_are_escaped_shortened_and_take_over_colours():
    rows = [("<script>", "a" * 500, 1234567, 0.123456789)] * 100
    shown = html_table("<b>", ("&",), rows)
    assert "<script>" not in shown
    assert "<strong>&lt;b&gt;</strong>" in shown
    head, first, *_, last = cells(shown)
    assert (head, last) == (["&"], ["… and 70 more"])
    assert first == ["<script>", "a" * 99 + "…", "1,234,567", "0.12346"]
    assert not re.search("color|background|font", shown)


def test_a_batch_shows_the_type_and_the_first_samples_of_each_feature():
    batch = kv.Batch(
        {
            "user": torch.arange(6),
            "vector": torch.full((6, 9), 2.0),
            "tags": kv.Ragged.from_lists([[1], [], [2, 3], [1, 2, 3, 4, 5], [6], [7]]),
            "name": kv.Ragged.from_lists([list(b"<i>"), [], *[[97]] * 4], dtype=torch.uint8),
        }
    )
    assert cells(batch._repr_html_()) == [
        ["feature", "type", "first samples"],
        ["user", "int64 [6]", "0, 1, 2, 3, …"],
        ["vector", "float32 [6, 9]", "[2, 2, 2, 2, …], " * 4 + "…"],
        ["tags", "Ragged int64", "[1], [], [2, 3], [1, 2, 3, 4, …], …"],
        ["name", "Ragged uint8", "'<i>', '', 'a', 'a', …"],
    ]
    assert cells(batch["tags"]._repr_html_())[1:4] == [["0", "[1]"], ["1", "[]"], ["2", "[2, 3]"]]
    assert "Batch of 0 samples" in kv.Batch({})._repr_html_()


def test_a_trainer_its_result_and_its_tables_show_what_their_texts_say(tmp_path):
    fit = trainer(metrics={"auc": kv.metrics.AUC()}, checkpoints=tmp_path)
    result = fit.fit(batches(3), eval_data=batches(1))
    assert [f"  {name}: {text}" for name, text in cells(fit._repr_html_())] == repr(fit).splitlines()[1:-1]
    first, *others = str(result).splitlines()
    assert first in result._repr_html_()
    assert [line.split(maxsplit=1)[0] for line in others] == [name for name, _ in cells(result._repr_html_())]
    engine = fit.model.embeddings
    assert [row[:3] for row in cells(engine._repr_html_())[1:]] == [
        [table.name, str(table.dim), str(table.rows)] for table in engine.tables()
    ]
    assert ["rows", str(engine.table("user").rows)] in cells(engine.table("user")._repr_html_())
