"""A loader of an elastic job: FILES. Its transform is fitted, and gives `scaled` beside each record."""

import sys

import karvan as kv

engine = kv.FeatureEngine(
    [kv.Feature("record"), kv.Feature("scaled").select("record").normalise()], name="scale"
)
with kv.LoaderContext() as data:
    engine.fit(kv.data.read(sys.argv[1], 8))
    data.serve(data.read(sys.argv[1], 8, shuffle=64, split_records=24, transform=engine))
