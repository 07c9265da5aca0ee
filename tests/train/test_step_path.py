"""How many files and functions of the package one step of training passes, with rows in memory."""

import sys
import threading
from pathlib import Path

import pytest
import torch

import karvan as kv

PACKAGE = str(Path(kv.__file__).parent)
TABLES = {"user": kv.Table(dim=16), "item": kv.Table(dim=16), "category": kv.Table(dim=8)}
IN_PLACE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # lines of their function


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(TABLES)
        self.net = torch.nn.Sequential(torch.nn.Linear(42, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.net(torch.cat([*(vectors[name] for name in TABLES), batch["price"]], 1)).squeeze(1)


class StepProfile(kv.callbacks.Callback):
    """The functions that the main thread and the feed call from the end of a step to that of the next."""

    def __init__(self, step):
        self.step = step
        self.on = False
        self.functions = set()

    def on_step_end(self, trainer, logs):
        self.on = logs.step == self.step - 1

    def __call__(self, frame, event, arg):
        code = frame.f_code
        of_package = code.co_filename.startswith(PACKAGE) and code.co_name not in IN_PLACE
        if event == "call" and self.on and of_package:
            self.functions.add((code.co_filename, code.co_qualname))


@pytest.fixture
def profile():
    seen = StepProfile(step=20)
    threading.setprofile(seen)
    sys.setprofile(seen)
    yield seen
    sys.setprofile(None)
    threading.setprofile(None)


def test_a_step_in_memory_is_read_in_few_places(profile):
    random = torch.Generator().manual_seed(0)
    batches = [
        {
            **{name: torch.randint(0, 1000, (64,), generator=random) for name in TABLES},
            "price": torch.rand(64, 2, generator=random),
            "label": torch.randint(0, 2, (64,), generator=random).float(),
        }
        for _ in range(25)
    ]
    kv.Trainer(
        Model(),
        kv.losses.BinaryCrossEntropy(label="label"),
        dense_optimizer=torch.optim.Adam,
        sparse_optimizer=kv.optim.Adagrad(lr=0.05),
        callbacks=[profile],
        log_every=1000,
    ).fit(batches)
    files = {file.removeprefix(PACKAGE) for file, _ in profile.functions}
    print(len(files), "files,", len(profile.functions), "functions")
    assert len(files) <= 30, sorted(files)
    assert len(profile.functions) <= 120, sorted(name for _, name in profile.functions)
