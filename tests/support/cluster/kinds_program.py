"""A loader's program for tests: labels of all kinds, rows that do not fit, more rows than PERSIA takes."""

import numpy as np
import torch

import karvan as kv

EDGES = {
    "bool": [False, True, True],
    "int8": [-128, 0, 127],
    "int16": [-(2**15), 1, 2**15 - 1],
    "int32": [-(2**31), 1, 2**31 - 1],
    "int64": [-(2**63), 2**53 + 1, 2**63 - 1],
    "float32": [np.nan, -0.0, 1e-45],
    "float64": [np.inf, 0.1, 5e-324],
    "uint8": [0, 128, 255],
}
META = {"request": "Ünïcödé", "numbers": [2**53 + 1, -1, 0.1], "nested": {"none": None, "true": True}}
MANY = 65_537  # rows; PERSIA counts them in 16 bits


def labels():
    """One of each of PERSIA's dtypes, in a column and in a matrix."""
    made = {name: torch.from_numpy(np.array(values, name)) for name, values in EDGES.items()}
    return made | {f"{name} matrix": torch.stack([each, each.flip(0)], 1) for name, each in made.items()}


def dense():
    return {"price": torch.tensor([0.1, -2.5, 3e38]), "image": torch.linspace(-1, 1, 24).reshape(3, 2, 4)}


def main():
    with kv.LoaderContext() as data:
        for _ in data.epochs():
            data.send({**labels(), **dense(), "visitors": torch.tensor([7, 8, 9])}, meta=META)
            try:
                data.send({"visitors": torch.arange(2), "price": torch.arange(3)})
            except ValueError as error:
                data.send({"visitors": torch.arange(1)}, meta={"refused": str(error)})
            data.send({"visitors": torch.arange(MANY)})


if __name__ == "__main__":
    main()
