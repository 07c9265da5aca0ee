"""The digits of scikit-learn as RecordIO: 28 x 28 pixels and the label as text, in each record."""

import numpy as np

import karvan as kv


def write_digits(folder, first, last, files=1):
    """Write digits into files of a folder, in turns; returns the folder as text."""
    from sklearn.datasets import load_digits  # slow, and most tests need no digits

    digits = load_digits()
    images = np.pad(np.kron(digits.images[first:last] / 16, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    rows = np.concatenate([images.reshape(len(images), -1), digits.target[first:last, None]], axis=1)
    folder.mkdir(parents=True)
    for number in range(files):
        with kv.data.RecordIOWriter(folder / f"digits-{number}") as writer:
            for row in rows[number::files]:
                writer.write(" ".join(f"{value:g}" for value in row).encode())
    return str(folder)
