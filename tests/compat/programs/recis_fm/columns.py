"""The data of a factorization machine: numbers and ids, of which each has a vector and a bias."""

import os
from dataclasses import dataclass

import torch
from recis.features.feature import Feature
from recis.features.op import SelectField
from recis.io.orc_dataset import OrcDataset
from recis.nn.initializers import TruncNormalInitializer
from recis.nn.modules.embedding import EmbeddingOption

NUMBERS = ["age", "price"]
IDS = ["user", "item", "shop"]
DIM = 4
PARTS = {"_vector": DIM, "_bias": 1}


@dataclass
class DataArguments:
    data_paths: str
    batch_size: int
    thread_num: int
    prefetch: int
    drop_remainder: bool


def split_ids(tables):
    """Each id column twice, for two tables."""
    (columns,) = tables
    made = {name: columns[name] for name in ["clicked", *NUMBERS]}
    made.update({name + part: columns[name] for name in IDS for part in PARTS})
    return made


def read(arguments):
    data = OrcDataset(
        arguments.batch_size,
        worker_idx=int(os.environ.get("RANK", 0)),
        worker_num=int(os.environ.get("WORLD_SIZE", 1)),
        read_threads_num=arguments.thread_num,
        prefetch=arguments.prefetch,
        is_compressed=False,
        drop_remainder=arguments.drop_remainder,
        transform_fn=split_ids,
        dtype=torch.float32,
        device="cuda",
        save_interval=1000,
    )
    data.add_paths(arguments.data_paths.split(","))
    data.fixedlen_feature("clicked", [0.0])
    for name in NUMBERS + IDS:
        data.varlen_feature(name)
    return data


def features():
    made = [Feature(name).add_op(SelectField(name, dim=1)) for name in NUMBERS]
    made += [Feature(name + part).add_op(SelectField(name + part)) for name in IDS for part in PARTS]
    return made


def embeddings():
    return {
        name + part: EmbeddingOption(
            embedding_dim=dim,
            shared_name=name + part,
            combiner="sum",
            initializer=TruncNormalInitializer(std=0.001),
            device=torch.device("cuda"),
        )
        for name in IDS
        for part, dim in PARTS.items()
    }
