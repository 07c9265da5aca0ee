"""The behaviours of other systems that the references state with numbers."""

import torch
from feature_helpers import chain, ragged_text, run

from karvan.features import Feature, FeatureEngine
from karvan.ragged import Ragged

STRINGS = ragged_text([bytes([0, 1, 2]), bytes([1, 2, 3])])


def test_recis_1_hash_farm():
    assert run(chain().hash("farm"), STRINGS).tolist() == [-7736835464683084646, -5546720800891377920]


def test_recis_2_hash_murmur():
    assert run(chain().hash("murmur"), STRINGS).tolist() == [-4003751876240412087, -1042754718167355375]


def test_recis_3_buckets_of_hashes():
    raw = run(chain().hash("farm"), STRINGS).tolist()
    assert run(chain().hash("farm", bucket=0), STRINGS).tolist() == [h & (1 << 63) - 1 for h in raw]
    assert run(chain().hash("farm63"), STRINGS).tolist() == [h & (1 << 63) - 1 for h in raw]
    assert run(chain().hash("farm", bucket=1000), STRINGS).tolist() == [h % (1 << 64) % 1000 for h in raw]


def test_recis_4_mod_is_unsigned():
    assert run(chain().mod(10), torch.tensor([-1])).tolist() == [5]
    assert run(chain().mod(1000), torch.tensor([1001])).tolist() == [1]


def test_recis_5_bucketize_takes_the_upper_bound():
    assert run(chain().bucketize([0, 0.5, 1]), torch.tensor([0.5, -1, 1])).tolist() == [2, 0, 3]


def test_recis_6_cross_is_the_murmur_hash_of_the_pair():
    expected = [-7808879811642834040, -4967483181219983279, 1752425377096056168]
    batch = {"user": torch.tensor([1001, 1002, 1003]), "item": torch.tensor([1, 2, 3])}
    assert FeatureEngine([Feature("x").cross("user", "item")])(batch)["x"].tolist() == expected
    batch["item"] = Ragged.from_lists([[1], [2], [3]])
    crossed = FeatureEngine([Feature("x").cross("user", "item")])(batch)["x"]
    assert crossed.to_lists() == [[h] for h in expected]


def test_recis_7_multi_hash():
    made = FeatureEngine([Feature("x").multi_hash([1000] * 4)])({"x": torch.tensor([1001, 1002, 1003])})
    assert [made[f"x_{i}"].tolist() for i in range(4)] == [[1, 2, 3], [3, 6, 9], [5, 10, 15], [7, 14, 21]]


def test_recis_8_left_truncation_keeps_the_tails():
    made = run(chain().truncate(128), Ragged.from_lists([list(range(256)), list(range(1000, 1256))]))
    assert made.offsets.tolist() == [0, 128, 256]
    assert made.to_lists() == [list(range(128, 256)), list(range(1128, 1256))]


def test_persia_6_prefix():
    assert run(chain().prefix(99, 12), torch.tensor([16000000000000000])).tolist() == [452849163854938115]


def test_persia_7_hash_stack():
    stacked = [[2, 18], [5, 10], [0, 11], [6, 17], [7, 12], [8, 16]]
    keys = [12, 23, 34, 56, 78, 90]
    assert run(chain().hash_stack(2, 10), torch.tensor(keys)).tolist() == stacked
    assert run(chain().hash_stack(2, 10), Ragged.from_lists([[k] for k in keys])).to_lists() == stacked
