"""Jobs and configs that are wrong: which exit code, and what is said."""

import pytest

CONFIGS = {
    "an unknown section": ("nonsense: 1", "unknown key 'nonsense'; there are: connect, data, features"),
    "a key of another section": (
        "train: {log_every: 10}",
        "train: unknown key 'log_every'. Did you mean 'loggers.every'?",
    ),
    "an unknown key": ("train: {epoch: 1}", "train: unknown key 'epoch'; there are: epochs, max_steps"),
    "a misspelled key": (
        "train: {max_step: 2}",
        "prefetch, early_stopping, warm_start. Did you mean 'max_steps'?",
    ),
    "a misspelled metric": ("metrics: [Auc]", "NDCG. Did you mean 'AUC'?"),
    "a wrong value": ("train: {epochs: many}", "train.epochs: input should be a valid integer"),
    "a value out of range": (
        "train: {gradient_accumulation_steps: 0}",
        "train.gradient_accumulation_steps: input should be greater than or equal to 1",
    ),
    "an unknown precision": (
        "train: {precision: fp8}",
        "train.precision: input should be 'fp32', 'bf16', 'fp16' or 'auto'",
    ),
    "a precision that does not fit": (
        "train: {precision: fp16}",
        "train: precision 'fp16' needs a CUDA device",
    ),
    "a column's key": (
        "data: {train: a, columns: [{name: a, kindd: raw}]}",
        "unknown key 'kindd'; there are: name, kind",
    ),
    "a column's option": (
        "data: {train: train.parquet, columns: [label, {name: user, kind: raw, length: 3}]}",
        "column 'user' of kind raw has no 'length'; it has: name",
    ),
    "an unknown model": ("model: {name: BERT}", "There is no model 'BERT'; there are: DCN, DIN, DLRM"),
    "a model without a name": ("model: {dim: 4}", "'model.name' is missing"),
    "an unknown argument": (
        "model: {name: DLRM, depth: 4}",
        "model: unknown key 'depth'; there are: numbers, ids",
    ),
    "a missing argument": (
        "model: {name: DLRM, ids: [user]}",
        "model: missing a required argument: 'numbers'",
    ),
    "an unknown step": (
        "features: {price: [lgo1p]}",
        "features.price: there is no step 'lgo1p'; there are: select",
    ),
    "a step's unknown argument": (
        "features: {price: [{clip: {min: 0}}]}",
        "features.price.clip: unknown key 'min'; there are: low, high",
    ),
    "a step's wrong value": ("features: {user: [{mod: 0}]}", "features.user"),
    "an unknown optimizer": (
        "optimizers: {sparse: RMSprop}",
        "There is no sparse optimizer 'RMSprop'; there are: Adagrad",
    ),
    "an optimizer's argument": (
        "optimizers: {dense: {name: Adam, rate: 1}}",
        "optimizers.dense: unknown key 'rate'; there are: lr",
    ),
    "an optimizer's value": (
        "optimizers: {dense: {name: Adam, lr: -1}}",
        "optimizers.dense: Invalid learning rate",
    ),
    "an unknown metric": ("metrics: [F1]", "There is no metric 'F1'; there are: AUC"),
    "a metric twice": ("metrics: [AUC, {name: AUC, bins: 4}]", "metrics: the list contains AUC twice"),
    "a metric's argument": (
        "metrics: [{name: AUC, bin: 4}]",
        "metrics.auc: unknown key 'bin'; there are: bins",
    ),
    "a metric that is none": ("metrics: [3]", "metrics.0: input should be a valid dictionary"),
    "a loss that is none": ("loss: 5", "loss: input should be a valid dictionary"),
    "an unknown loss": ("loss: Hinge", "There is no loss 'Hinge'; there are: BinaryCrossEntropy"),
    "a table's key": (
        "model: {name: DLRM, table: {size: 4}}",
        "model.table: unknown key 'size'; there are: name, combiner",
    ),
    "a table's policy": (
        "model: {name: DLRM, numbers: [], ids: [a, b], table: {evict: MRU}}",
        "There is no eviction 'MRU'; there are: Age",
    ),
    "a key twice": ("train: {epochs: 1, epochs: 2}", "the key 'epochs' appears twice"),
    "no YAML": ("train: {epochs: 1", "is not YAML: line"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_wrong_config_is_told_by_key_and_exits_with_2(run, place, case):
    text, said = CONFIGS[case]
    lines = (place / "config.yaml").read_text()
    section = text.partition(":")[0]
    kept, inside = [], False
    for line in lines.splitlines():
        if not line.startswith(" "):
            inside = line.startswith(f"{section}:")
        if not inside:
            kept.append(line)
    (place / "config.yaml").write_text("\n".join([*kept, text]))
    ran = run("train", place / "config.yaml")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "?." not in ran.err
    assert not (place / "run").exists()


def test_a_config_without_what_it_must_have_is_told_so(run, tmp_path):
    (tmp_path / "a.yaml").write_text("model: {name: DLRM}")
    ran = run("train", tmp_path / "a.yaml")
    assert ran.code == 2
    assert "'data' is missing" in ran.err
    (tmp_path / "a.yaml").write_text("- just\n- a list\n")
    assert run("train", tmp_path / "a.yaml").code == 2
    (tmp_path / "a.txt").write_text("")
    assert "got '.txt'" in run("train", tmp_path / "a.txt").err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("lr", "--set expects name=value, got 'lr'"),
        ("rate=1", "job.py has no such parameter; it has: folder: str"),
        ("lr=much", "Parameter 'lr' of job() must be float, got 'much'"),
        ("widths=3", "must be list[int]"),
    ],
)
def test_settings_that_a_job_does_not_take_exit_with_2(run, place, setting, said):
    ran = run("train", place / "job.py", "--set", setting)
    assert ran.code == 2
    assert said in ran.err.replace("\n", " ")


def test_an_option_that_a_job_has_no_parameter_for_says_so(run, place):
    ran = run("train", place / "job.py", "--precision", "bf16")
    assert ran.code == 2
    assert "--precision sets the parameter 'precision' of job()" in ran.err


def test_a_setting_below_a_value_says_so(run, place):
    ran = run("train", place / "config.yaml", "--set", "metrics.auc.bins=3")
    assert ran.code == 2
    assert "'metrics' holds no keys" in ran.err


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("def job(:\n", 1, "bad.py, line 1"),
        ("x = 1\n", 2, "must define a function job()"),
        ("def job():\n    return 3\n", 2, "must return a kv.TrainingJob, got int"),
        ("def job(size: int):\n    pass\n", 2, "needs 'size'"),
        ("import nonsense_that_is_not_there\n", 1, "nonsense_that_is_not_there"),
        ("def job():\n    raise ValueError('no luck')\n", 1, "no luck\n(ValueError in"),
        ("def job():\n    open('none-such')\n", 3, "none-such: No such file"),
    ],
)
def test_a_file_that_is_wrong_says_where(run, tmp_path, text, code, said):
    (tmp_path / "bad.py").write_text(text)
    ran = run("train", tmp_path / "bad.py")
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err


def test_data_that_is_damaged_exits_with_3(run, place):
    (place / "train.parquet").unlink()
    (place / "train.parquet").write_bytes(b"PAR1 and nothing else")
    ran = run("train", place / "config.yaml", "--quiet")
    assert ran.code == 3
    assert "train.parquet" in ran.err


def test_a_column_that_is_not_there_is_told(run, place):
    ran = run(
        "train",
        place / "config.yaml",
        "--quiet",
        "--set",
        "model.ids=[user, nonsense]",
        "--set",
        "model.tables={}",
    )
    assert ran.code == 1
    assert "nonsense" in ran.err


def test_a_checkpoint_of_another_model_is_told(run, trained):
    for setting in ("model.dim=6", "model.top=[3]"):
        ran = run("evaluate", trained / "config.yaml", "--set", setting)
        assert ran.code == 3
        assert "step-000000000048" in ran.err
    assert run("evaluate", trained / "config.yaml", "--checkpoint", trained).code == 3  # no checkpoint at all


def test_without_a_folder_nothing_can_be_evaluated(run, place):
    ran = run("evaluate", place / "config.yaml", "--set", "checkpoints.folder=null")
    assert ran.code == 2
    assert "--checkpoint" in ran.err
    ran = run("evaluate", place / "config.yaml", "--set", "data.eval=null")
    assert ran.code == 2
    assert "--data" in ran.err
