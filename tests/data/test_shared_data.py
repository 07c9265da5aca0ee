"""How data that the trainers of a job share is cut into tasks."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from karvan.data.columns.declarations import infer
from karvan.data.columns.decoder import Decoder
from karvan.data.formats.open_files import open_files
from karvan.data.leased_data import SharedData
from karvan.data.loading.settings import ReadSettings


def shared_data(folder, group, records, seed, batch_size=32):
    path = folder / "one.parquet"
    pq.write_table(pa.table({"id": range(records)}), path, row_group_size=group)
    source = open_files(path)
    decode = Decoder(infer(source.schema))
    shuffle = {} if seed is None else {"shuffle": 1, "seed": seed}
    return SharedData(ReadSettings(source, decode, batch_size, workers=1, prefetch=1, **shuffle))


@pytest.mark.parametrize(
    ("group", "records", "expected"),
    [(600, 14_400, 200), (600, 600 * 64, 600), (600, 600 * 500, 600), (100, 1000, 50), (601, 6010, 93)],
)
def test_tasks_in_a_random_order_are_groups_or_equal_parts_of_them(tmp_path, group, records, expected):
    data = shared_data(tmp_path, group, records, seed=1)
    assert data.records_per_task == expected


def test_tasks_in_order_are_small_whatever_the_groups(tmp_path):
    assert shared_data(tmp_path, 6000, 12_000, seed=None).records_per_task == 46
    assert shared_data(tmp_path, 6000, 12_000, seed=None, batch_size=512).records_per_task == 512
