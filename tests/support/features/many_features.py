"""Features of all kinds in one engine, and each by itself."""

import numpy as np
import torch
from feature_helpers import nested

from karvan.features import Feature, FeatureEngine
from karvan.ragged import Ragged


def many_features(seed):
    """Features of all kinds, several of each with other settings, and a batch for them."""
    random = np.random.default_rng(seed)
    rows = int(random.integers(0, 40))

    def lengths(most):
        return random.integers(0, most, rows) * random.integers(0, 2, rows)

    def ragged(make, most=6, weighted=False):
        counts = lengths(most)
        values = make(int(counts.sum()))
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        weights = torch.from_numpy(random.random(len(values), np.float32)) if weighted else None
        return Ragged(torch.from_numpy(values), offsets, weights)

    def keys(count):
        return random.integers(-(1 << 63), (1 << 63) - 1, count)

    def floats(count):
        made = random.normal(0, 100, count).astype(np.float32)
        made[random.random(count) < 0.1] = np.nan
        return made

    def text(count):
        return random.choice(np.frombuffer(b" aBc,D\t|", np.uint8), count)

    batch, features = {}, []
    for i in range(3):
        batch |= {
            f"n{i}": torch.from_numpy(floats(rows)) * 10**i,
            f"r{i}": ragged(floats, weighted=i == 2),
            f"i{i}": torch.from_numpy(keys(rows)),
            f"h{i}": ragged(keys, most=9, weighted=i == 1),
            f"t{i}": ragged(text, most=12),
            f"l{i}": nested([[keys(2).tolist(), []][: i + 1]] * rows),
        }
        for at in (f"n{i}", f"r{i}"):
            start = {name: Feature(f"{at}_{name}").select(at) for name in "abcdefgh"}
            features += [
                start["a"].log1p().fill_missing(i),
                start["b"].fill_missing(0.5 * i).clip(-i, 10 + i).round(1),
                start["c"].normalise(0.3 * i, 1.7 + i).to_ids(5 + i, default=i),
                start["d"].bucketize([j * (i + 1.5) for j in range(i + 2)]),
                start["e"].clip(low=0.1).log(2 + i),
            ]
        for at in (f"i{i}", f"h{i}"):
            start = {name: Feature(f"{at}_{name}").select(at) for name in "abcdefgh"}
            features += [
                start["a"].mod(10 + i).vocabulary(range(5), oov=2),
                start["b"].hash("farm", bucket=100 * i).prefix(i, 8),
                start["c"].multi_hash([10, 20 + i, 7]),
                start["d"].hash_stack(2, 50),
            ]
        features += [
            Feature(f"h{i}_t").select(f"h{i}").truncate(1 + i).fill_empty(7),
            Feature(f"l{i}_t").select(f"l{i}").truncate(1).mod(10),
            Feature(f"l{i}_u").select(f"l{i}").truncate(1, "right", "inner").flatten(),
            Feature(f"l{i}_d").select(f"l{i}").to_dense([2, 1 + i], -1, "left"),
            Feature(f"l{i}_x").cross(f"l{i}", f"l{i}_m").mod(100),
            Feature(f"l{i}_m").select(f"l{i}").mod(3),
            Feature(f"i{i}_t").select(f"i{i}").to_text().hash("farm"),
            Feature(f"x{i}").cross(f"h{i}", f"i{i}"),
            Feature(f"y{i}").cross(f"h{i}_t", f"h{i}", f"i{i}").mod(1000),
            Feature(f"z{i}").cross(f"i{i}", "i0").mod(50 + i),
            Feature(f"c{i}").concat(f"h{i}", f"i{i}", offsets=[0, i]),
            Feature(f"t{i}_a").select(f"t{i}").strip().lower().hash("murmur", bucket=0),
            Feature(f"t{i}_b")
            .select(f"t{i}")
            .split(",")
            .strip()
            .vocabulary(["a", "B"], oov=3)
            .to_dense(3, -1),
            Feature(f"t{i}_c").select(f"t{i}").substring(i).upper(),
            Feature(f"t{i}_d").select(f"t{i}").split(",", skip_empty=i > 0).hash("farm"),
            Feature(f"d{i}")
            .select(f"r{i}" if i < 2 else "r0")
            .to_dense(4, 0.5)
            .to_ragged(pad=0.5, trailing=i > 0),
        ]
    return features, batch


def alone(feature, features, batch):
    """The feature's results when it runs by itself, after those it starts from have."""
    by_name = {f.name: f for f in features}
    given = dict(batch)
    for column in feature.columns:
        if column in by_name and column != feature.name:
            given |= alone(by_name[column], features, batch)
    made = FeatureEngine([feature])(given)
    return {name: made[name] for name in feature.outputs()}
