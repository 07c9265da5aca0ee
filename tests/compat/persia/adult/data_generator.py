"""Batches of PERSIA's Adult example: 8 categories, 5 numbers and the label of each person, from one .npz."""

import numpy as np
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature


class AdultBatches:
    def __init__(self, path, batch_size=128):
        with np.load(path) as data:
            self.names = [str(name) for name in data["categorical_columns"]]
            self.categories = data["categorical_data"]
            self.numbers = data["continuous_data"]
            self.targets = data["target"]
        self.batch_size = batch_size

    def __len__(self):
        return -(-len(self.targets) // self.batch_size)

    def __iter__(self):
        for start in range(0, len(self.targets), self.batch_size):
            part = slice(start, start + self.batch_size)
            ids = self.categories[part]
            features = [
                IDTypeFeature(name, [row[column : column + 1] for row in ids])
                for column, name in enumerate(self.names)
            ]
            yield NonIDTypeFeature(self.numbers[part]), features, Label(self.targets[part].reshape(-1, 1))
