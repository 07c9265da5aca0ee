"""What a config can say of its data: types of cells, labels, and what stands for a missing value."""

import pytest

CONFIG = """
data:
  train: {folder}/train.csv
  eval: {folder}/eval.csv
  batch_size: 4
  options:
    schema: {{history: list<int64>, price: float32}}
    separators: [" ", ";", ":"]
    nulls: ["", NA]
{more}
model: {{name: DLRM, numbers: [price], ids: [user, history], dim: 4, bottom: [4], top: [4]}}
loss: {{name: BinaryCrossEntropy, label: click}}
train: {{epochs: 1}}
metrics: []
"""
LINES = ["click,user,price,history", *(f"{i % 2},{i},0.5,{i} {i + 1}" for i in range(8))]


@pytest.fixture
def config(tmp_path):
    def make(lines=LINES, more="", evaluated=LINES):
        (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
        (tmp_path / "eval.csv").write_text("\n".join(evaluated) + "\n")
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.format(folder=tmp_path, more=more))
        return path

    return make


def test_cells_of_lists_are_declared_in_yaml(run, config):
    ran = run("train", config([*LINES, "1,NA,0.5,"]), "--quiet")
    assert ran.code == 0, ran.err


def test_a_missing_label_is_told_with_file_record_and_line(run, config):
    ran = run("train", config([*LINES, ",9,0.5,1"]), "--quiet")
    assert ran.code == 3
    assert "train.csv, record 8, line 10, column 'click': The label is missing" in ran.err


def test_labels_named_in_yaml_must_be_there(run, config):
    ran = run("train", config([*LINES, "1,,0.5,1"], "  labels: [click, user]"), "--quiet")
    assert ran.code == 3
    assert "train.csv, record 8, line 10, column 'user': The label is missing" in ran.err
    ran = run("train", config(more="  labels: [clicks]"), "--quiet")
    assert ran.code == 3
    assert "column 'clicks': Labels must be columns that are read" in ran.err


def test_a_default_and_a_dtype_are_declared_in_yaml(run, config):
    columns = "  columns: [{name: click, default: 0}, {name: user, dtype: int64}, price, history]"
    assert run("train", config([*LINES, ",9,0.5,1"], columns), "--quiet").code == 0
    wrong = "  columns: [{name: click, default: none}, user, price, history]"
    ran = run("train", config(more=wrong), "--quiet")
    assert ran.code == 2
    assert "Fixed 'click' needs numbers as default, but has 'none'" in ran.err


def test_a_missing_number_that_the_model_uses_is_told_with_what_to_do(run, config):
    whole = [line.replace("0.5", "1") for line in LINES]
    path = config([*whole, "1,9,,1"], evaluated=whole)
    path.write_text(path.read_text().replace("price: float32", "price: int64"))
    ran = run("train", path, "--quiet")
    assert ran.code != 0
    assert "Number 'price' has missing values: 0 in the 4 samples of this batch" in ran.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("list<int64>", "list<int65>", "data: The type of column 'history' must be one such as int64"),
        ("nulls:", "nuls:", "data: There is no option 'nuls' for csv; there are: schema, delimiter, header"),
        ('" ", ";", ":"', '" ", " ", ":"', "data: The three separators must differ"),
    ],
)
def test_wrong_options_of_csv_are_told(run, config, old, new, message):
    path = config()
    path.write_text(path.read_text().replace(old, new))
    ran = run("train", path, "--quiet")
    assert ran.code == 2
    assert message in ran.err


def test_predictions_need_no_labels_and_show_what_is_missing(run, config, tmp_path):
    more = "  labels: [click]\n  batch_size: 1"
    path = config(evaluated=[LINES[0], ",1,0.5,1 2", ",,0.5,"], more=more)
    path.write_text(path.read_text().replace("  batch_size: 4\n", ""))
    path.write_text(path.read_text() + f"checkpoints: {{folder: {tmp_path}/run}}\n")
    text = path.read_text()
    path.write_text(text.replace(f"  eval: {tmp_path}/eval.csv\n", ""))
    assert run("train", path, "--quiet").code == 0
    path.write_text(text)
    ran = run("predict", path, "--columns", "user", "--out", "-")
    assert ran.code == 0, ran.err
    assert [line.split(",")[0] for line in ran.out.splitlines()[1:]] == ["1", ""]
