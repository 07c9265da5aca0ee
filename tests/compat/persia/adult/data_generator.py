"""The Adult data as PERSIA's batches: 8 categories, 5 numbers, the label."""

import csv
from pathlib import Path

import numpy as np
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch

NAMES = [
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "gender",
    "country",
]
_CATEGORIES = [1, 3, 5, 6, 7, 8, 9, 13]
_NUMBERS = [0, 4, 10, 11, 12]


def read(folder, name):
    """Categories, numbers and labels of a file."""
    with open(Path(folder) / name) as file:
        lines = [[cell.strip() for cell in line] for line in csv.reader(file) if len(line) == 15]
    texts = np.array([[line[column] for column in _CATEGORIES] for line in lines])
    numbers = np.array([[float(line[column]) for column in _NUMBERS] for line in lines])
    labels = np.array([line[14].startswith(">") for line in lines], np.float32)
    return texts, numbers, labels


def make_batches(folder, name, batch_size=128, requires_grad=True, limit=None):
    """The batches of a file, with the numbers of categories and the statistics of the training file."""
    known, trained, _ = read(folder, "adult.data")
    texts, numbers, labels = read(folder, name)
    categories = [{text: number for number, text in enumerate(np.unique(column))} for column in known.T]
    ids = np.array(
        [[one.get(text, len(one)) for one, text in zip(categories, line, strict=True)] for line in texts],
        np.uint64,
    )
    scaled = ((numbers - trained.mean(0)) / trained.std(0)).astype(np.float32)
    for start in range(0, len(labels) if limit is None else limit * batch_size, batch_size):
        part = slice(start, start + batch_size)
        yield PersiaBatch(
            [
                IDTypeFeature(slot, [sample[number : number + 1] for sample in ids[part]])
                for number, slot in enumerate(NAMES)
            ],
            non_id_type_features=[NonIDTypeFeature(scaled[part])],
            labels=[Label(labels[part, None])],
            requires_grad=requires_grad,
        )
