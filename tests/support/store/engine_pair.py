"""`Pair`: an engine on some store, and the slow reference of its tables, moved together and compared."""

import random

import reference as ref
import torch

import karvan as kv
from karvan.embedding import HashStack
from karvan.ragged import IndexedRows

KEYS = [*range(6), -1, -2, 2**63 - 1, -(2**63), 2**53 + 1, -(2**62)]
WEIGHTS = [0.25, 0.5, 1.0, 1.5, 2.5]


def combiners(dim):
    """Features of every combiner."""
    return {
        "sum": ref.Feature(dim, "sum"),
        "mean": ref.Feature(dim, "mean"),
        "mean-by-count": ref.Feature(dim, "mean_by_count"),
        "sqrtn": ref.Feature(dim, "sqrtn"),
        "sequence": ref.Feature(dim, "sequence"),
        "sequence-2": ref.Feature(dim, "sequence", length=2),
        "tile": ref.Feature(dim, "tile", length=2),
        "ragged": ref.Feature(dim, "ragged"),
        "index": ref.Feature(dim, "index"),
        "index-2": ref.Feature(dim, "index", length=2),
        "stack-sum": ref.Feature(dim, "sum", stack=(2, 5)),
        "stack-mean": ref.Feature(dim, "mean", stack=(3, 4)),
        "stack-sequence": ref.Feature(dim, "sequence", length=3, stack=(2, 5)),
        "stack-index": ref.Feature(dim, "index", stack=(3, 4)),
    }


def table_of(feature, name=None, dtype=torch.float32, **options):
    stack = None if feature.stack is None else HashStack(rounds=feature.stack[0], size=feature.stack[1])
    return kv.Table(
        feature.dim,
        name=name,
        combiner=feature.combiner,
        length=feature.length,
        dtype=dtype,
        init=kv.init.Uniform(-0.3, 0.3),
        hash_stack=stack,
        use_weights=feature.use_weights,
        **options,
    )


def tensor_of(output):
    """The tensor of an output, which may be a Tensor, a Padded, a Ragged or IndexedRows."""
    if isinstance(output, IndexedRows):
        return output.to_sequence().values
    return output if isinstance(output, torch.Tensor) else output.values


def weigh(rows, seed):
    source = random.Random(seed)
    return [[source.choice(WEIGHTS) for _ in row] for row in rows]


def random_rows(source, samples=4, longest=4, keys=KEYS):
    """Samples of ids, with at least one id."""
    rows = [[source.choice(keys) for _ in range(source.randint(0, longest))] for _ in range(samples)]
    return rows if any(rows) else [[0], *([] for _ in range(samples - 1))]


class RowSkippingTable(ref.ReferenceTable):
    """A gradient that is not finite skips its row, and the others are updated."""

    def apply(self, gradients, gone=()):
        gone = set(gone)
        bad = {key for key, g in gradients.items() if not g.isfinite().all()}
        self.skipped += len(bad - gone)
        self.dropped += len(bad & gone)
        before = self.t
        super().apply({key: g for key, g in gradients.items() if key not in bad}, gone)
        self.t = before + bool(gradients)


class Pair:
    """A real engine and its reference, moved together; features of one table name share rows."""

    def __init__(
        self,
        features,
        optimizer,
        tables=None,
        dtypes=None,
        make_store=lambda: None,
        skips_rows=False,
        **options,
    ):
        self.features, self.optimizer_name = features, optimizer
        self.table_names = {name: (tables or {}).get(name, name) for name in features}
        self.dtypes = dtypes or dict.fromkeys(features, torch.float32)
        self.make_store, self.options = make_store, options
        self.engine, self.opt = self.fresh()
        self.first = {}  # (table, key) -> the vector it first had: an initialiser depends on nothing else
        self.tables = {}
        kind = RowSkippingTable if skips_rows else ref.ReferenceTable
        for name, table in self.table_names.items():
            init = lambda key, table=table: self.first[table, key]  # noqa: E731
            self.tables[table] = kind(features[name].dim, ref.make_rule(optimizer), init, self.dtypes[name])

    def fresh(self):
        tables = {
            n: table_of(f, self.table_names[n], self.dtypes[n], **self.options)
            for n, f in self.features.items()
        }
        engine = kv.EmbeddingEngine(tables, seed=7, store=self.make_store())
        cls, options = ref.OPTIMIZERS[self.optimizer_name]
        return engine, getattr(kv.optim, cls)(engine, **options)

    def note_initial(self, table, keys):
        """The vectors of new keys: every time the same."""
        for key, vector in zip(keys, self.engine.table(table).vectors(keys), strict=True):
            assert torch.equal(self.first.setdefault((table, key), vector), vector)

    def look_up(self, batch):
        return {n: ref.look_up(f, *batch[n]) for n, f in self.features.items()}

    def call(self, batch):
        device = self.engine.store.device
        return self.engine(
            {
                n: kv.Ragged.from_lists(rows, weights=weights).to(device)
                for n, (rows, weights) in batch.items()
            }
        )

    def check_outputs(self, lookups, outputs):
        assert list(outputs) == list(self.features)
        for name, lookup in lookups.items():
            received = tensor_of(outputs[name])
            assert received.dtype == torch.float32
            assert tuple(received.shape) == lookup.shape
            expected = lookup.forward(self.tables[self.table_names[name]].vector).float()
            torch.testing.assert_close(received.detach().cpu(), expected, rtol=ref.RTOL, atol=ref.ATOL)
            if lookup.mask is not None:
                assert torch.equal(outputs[name].mask.cpu(), lookup.mask)

    def forward(self, batch):
        """A training lookup."""
        lookups, before = self.look_up(batch), self.engine.step
        outputs = self.call(batch)
        assert self.engine.step == before + 1
        for name, lookup in lookups.items():
            table = self.tables[self.table_names[name]]
            new = sorted(set(lookup.occurrences) - set(table.rows))
            if new:
                self.note_initial(self.table_names[name], new)
            table.see(lookup.occurrences, self.engine.step)
        self.check_outputs(lookups, outputs)
        return lookups, outputs

    def backward(self, lookups, outputs, seed, nan_in=None, nan_key=None, without=()):
        """Random gradients: one sign per column, so that no sum of them cancels down to rounding errors.

        nan_in: the table whose gradients are all NaN. nan_key: the key whose gradient is. without: features
        that get no gradient.
        """
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros(())
        parts = {table: [] for table in self.tables}
        for name, lookup in lookups.items():
            g = 0.25 + torch.rand(lookup.shape, generator=generator).reshape(-1, self.features[name].dim)
            sign = torch.randint(
                0, 2, (self.features[name].dim,), generator=torch.Generator().manual_seed(seed)
            )
            g = g * (2 * sign - 1)
            if name in without:
                continue
            if self.table_names[name] == nan_in:
                g = g * float("nan")
            for slot, key, _ in lookup.terms:
                if key == nan_key:
                    g[slot, 0] = float("inf")
            g = g.reshape(lookup.shape)
            received = tensor_of(outputs[name])
            loss = loss.to(received.device) + (received * g.to(received.device)).sum()
            parts[self.table_names[name]].append(lookup.backward(g))
        loss.backward()
        return {table: ref.add_gradients(*p) for table, p in parts.items()}

    def update(self, gradients, gone=None):
        self.opt.step()
        self.opt.zero_grad()
        for name, table in self.tables.items():
            if gradients[name]:
                table.apply(gradients[name], (gone or {}).get(name, ()))

    def check(self):
        for name, table in self.tables.items():
            handle = self.engine.table(name)
            ref.check_table(handle, table)
            stats = handle.stats()
            assert stats["dropped_gradients"] == table.dropped
            assert stats["skipped_updates"] == table.skipped

    def train(self, batch, seed, **options):
        lookups, outputs = self.forward(batch)
        self.update(self.backward(lookups, outputs, seed, **options))
        self.check()
