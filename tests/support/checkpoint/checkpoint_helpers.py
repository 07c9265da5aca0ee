"""Small pieces that the tests of this folder share."""

import numpy as np
import torch

import karvan as kv

OPTIMIZERS = {
    "SGD": lambda: kv.optim.SGD(lr=0.1),
    "momentum": lambda: kv.optim.SGD(lr=0.1, momentum=0.9),
    "Adagrad": lambda: kv.optim.Adagrad(lr=0.1),
    "Adagrad by row": lambda: kv.optim.Adagrad(lr=0.1, row_wise=True),
    "Adam": lambda: kv.optim.Adam(lr=0.1),
    "AdamW": lambda: kv.optim.AdamW(lr=0.1),
    "AdamWTF": lambda: kv.optim.AdamWTF(lr=0.1),
    "AMSGrad": lambda: kv.optim.Adam(lr=0.1, amsgrad=True),
    "Nesterov": lambda: kv.optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "FTRL": lambda: kv.optim.FTRL(lr=0.1),
}


class Model(torch.nn.Module):
    """Two tables and a linear layer."""

    def __init__(self, dim=4, optimizer="Adagrad", seed=0, **options):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(dim, **options), "item": kv.Table(3)}, seed=seed, shards=4
        )
        torch.manual_seed(seed)
        self.net = torch.nn.Linear(dim + 3, 1)
        self.optimizer = OPTIMIZERS[optimizer]() if optimizer else None
        if self.optimizer:
            self.optimizer.attach(self)
        self.dense_optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def step(self, users, items=None):
        """One training step, whose gradients differ by key."""
        users = torch.as_tensor(users)
        out = self.embeddings({"user": users, "item": users if items is None else torch.as_tensor(items)})
        both = torch.cat([out["user"], out["item"]], 1)
        (self.net(both).square() + both.sum(1, keepdim=True)).sum().backward()
        self.optimizer.step()
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad()

    def train_on(self, steps, seed=0, keys=200, size=32):
        random = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.step(torch.randint(-keys, keys, (size,), generator=random))
        return self

    def state(self):
        """What a trainer would save."""
        return {
            "model": self.state_dict(),
            "dense_optimizer": self.dense_optimizer.state_dict(),
            "sparse_optimizer": self.optimizer.state_dict() if self.optimizer else None,
        }

    def restore(self, state):
        self.load_state_dict(state["model"])
        self.dense_optimizer.load_state_dict(state["dense_optimizer"])
        if self.optimizer:
            self.optimizer.load_state_dict(state["sparse_optimizer"])

    def rows(self):
        return {handle.name: handle.snapshot() for handle in self.embeddings.tables()}


def same_rows(a, b):
    """Bit for bit, NaN included."""
    return a.keys() == b.keys() and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for name in a
        for x, y in zip(a[name], b[name], strict=True)
    )


def same_tree(a, b):
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().reshape(-1).view(torch.uint8).tolist()
            == b.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(a) == list(b)
            and [type(k) for k in a] == [type(k) for k in b]
            and all(same_tree(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_tree, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and np.float64(a).tobytes() == np.float64(b).tobytes()
    return type(a) is type(b) and a == b


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def contents(folder):
    """Every file's bytes, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in files_of(folder)}
