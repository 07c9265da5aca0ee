import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import decode

from karvan.data.loading.loader import Loader
from karvan.data.synthetic import ClickLog, expected_auc

SMALL = {"users": 500, "items": 1000, "categories": 20, "history": 4}


@pytest.fixture(scope="module")
def log():
    return ClickLog(seed=3, **SMALL)


def read(path):
    module = pyarrow.orc if path.endswith("orc") else pyarrow.parquet
    return module.read_table(path)


@given(first=st.integers(0, 20_000), count=st.integers(0, 20_000))
def test_a_record_is_the_same_wherever_a_reading_begins(log, first, count):
    assert log.table(first, count).equals(log.table(0, 40_000).slice(first, count).combine_chunks())


@pytest.mark.parametrize("format", ["parquet", "orc"])
@pytest.mark.parametrize("files", [1, 3])
def test_files_of_any_number_and_format_hold_the_same_log(log, tmp_path, format, files):
    written = log.write(tmp_path / "log", 30_001, format, files)
    assert len(written.paths) == files
    table = pa.concat_tables(read(path) for path in written.paths)
    assert table.equals(log.table(0, 30_001))
    assert written.rows == 30_001
    assert written.best_auc == log.best_auc
    assert written.click_rate == pytest.approx(np.mean(table["label"].to_numpy()))


@pytest.mark.parametrize("format", ["parquet", "orc"])
def test_more_files_than_records_leave_some_empty(log, tmp_path, format):
    written = log.write(tmp_path, 2, format, 3)
    tables = [read(path) for path in written.paths]
    assert sorted(len(table) for table in tables) == [0, 1, 1]
    assert all(table.schema.equals(log.schema) for table in tables)


def test_seeds_give_different_logs_and_the_same_seed_the_same(log):
    assert log.table(0, 100).equals(ClickLog(seed=3, **SMALL).table(0, 100))
    assert not log.table(0, 100).equals(ClickLog(seed=4, **SMALL).table(0, 100))


def test_the_planted_probabilities_reach_the_reported_auc_and_the_asked_click_rate(log):
    probabilities = log.probabilities(0, 100_000)
    labels = log.table(0, 100_000)["label"].to_numpy()
    assert set(labels) == {0.0, 1.0}
    assert auc_of(labels, probabilities) == pytest.approx(log.best_auc, abs=0.006)
    assert labels.mean() == pytest.approx(0.2, abs=0.01)
    # Calibrated: among records of about the same probability, that share is clicked.
    for low in (0.1, 0.3, 0.6):
        near = (probabilities > low) & (probabilities < low + 0.05)
        assert labels[near].mean() == pytest.approx(probabilities[near].mean(), abs=0.03)
    assert 0.75 < log.best_auc < 0.95


def auc_of(labels, scores):
    ranks = np.argsort(np.argsort(scores)) + 1
    clicks = labels.sum()
    return (ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks))


@given(st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.8]), min_size=2, max_size=12))
def test_the_expected_auc_is_that_of_all_pairs_weighted_by_their_probability(probabilities):
    right = total = 0.0
    for p in probabilities:
        for q in probabilities:
            total += p * (1 - q)
            right += p * (1 - q) * (1.0 if p > q else 0.5 if p == q else 0.0)
    assert expected_auc(probabilities) == pytest.approx(right / total)


@pytest.mark.parametrize("zipf", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("users", [1000, 2_000_000])
def test_ids_are_zipf_distributed_and_reach_the_rare_ones(zipf, users):
    log = ClickLog(users=users, items=50, history=0, zipf=zipf)
    ids = log.table(0, 200_000)["user"].to_numpy()
    assert ids.min() == 0
    assert users * 0.99 < ids.max() < users
    # Over a band of ids, a sum of k ** -zipf is close to its integral, whichever way it is drawn.
    weights = np.arange(1, users + 1) ** -zipf
    for low, high in ((10, 100), (100, 500)):
        expected = weights[low:high].sum() / _integral(users, zipf)
        assert np.mean((ids >= low) & (ids < high)) == pytest.approx(expected, rel=0.1)


def _integral(ids, zipf):
    return np.log(ids + 1) if zipf == 1 else ((ids + 1) ** (1 - zipf) - 1) / (1 - zipf)


def test_columns_lie_in_their_ranges_and_belong_together(log):
    table = log.table(0, 20_000)
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "history"}
    assert (columns["category"] == columns["item"] % 20).all()
    for name, end in (("user", 500), ("item", 1000), ("city", 300), ("device", 5), ("hour", 24)):
        assert columns[name].min() >= 0
        assert columns[name].max() < end
    assert (columns["price"] > 0).all()
    of_user = {}
    for user, city, age in zip(columns["user"], columns["city"], columns["age"], strict=True):
        assert of_user.setdefault(user, (city, age)) == (city, age)
    lengths = table["history"].combine_chunks().value_lengths().to_numpy()
    assert lengths.min() == 0
    assert lengths.max() == 8
    assert lengths.mean() == pytest.approx(4, abs=0.1)


def test_a_log_is_a_source_for_a_loader(log):
    def user(records):
        return decode(pa.record_batch({"record": records.column("user")}))

    source = log.source(20_000, parts=3)
    batches = list(Loader(source, user, 999))
    users = np.concatenate([batch["record"].numpy() for batch in batches])
    assert np.array_equal(users, log.table(0, 20_000)["user"].to_numpy())
    assert source.schema.equals(log.schema)


def test_impossible_settings_are_refused(log, tmp_path):
    with pytest.raises(ValueError, match=r"users must be from 1 to 2 \*\* 31 - 1, but is 0"):
        ClickLog(users=0)
    with pytest.raises(ValueError, match=r"click_rate must be between 0 and 1, but are 10, 1\.0 and 1\.5"):
        ClickLog(click_rate=1.5)
    with pytest.raises(ValueError, match="format must be 'parquet' or 'orc', but is 'csv'"):
        log.write(tmp_path, 10, "csv")
    with pytest.raises(ValueError, match="files at least 1, but are 10 and 0"):
        log.write(tmp_path, 10, files=0)
