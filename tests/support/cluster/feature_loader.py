"""A loader's program with fitted features: `python feature_loader.py MODE FILES`."""

import os
import sys

import karvan as kv

BATCH = 10


def features():
    """Words that are numbered by how often they occur, and a scaled number."""
    return kv.FeatureEngine([kv.Feature("city").vocabulary(max_words=4), kv.Feature("price").normalise()])


def fitted(files):
    return features().fit(kv.data.read(os.environ.get("FIT_TO") or files, BATCH))


def run(data, mode, files):
    """What the program does with its LoaderContext."""
    with data:
        match mode:
            case "serve":
                data.serve(data.read(files, BATCH, transform=fitted(files)))
            case "after":  # the engine is fitted once it is known that no checkpoint has its statistics
                engine = features()
                source = data.read(files, BATCH, transform=engine)
                if engine.unfitted:
                    engine.fit(kv.data.read(files, BATCH))
                data.serve(source)
            case "share":  # each loader fits to its own share
                engine = features().fit(data.read(files, BATCH))
                data.serve(data.read(files, BATCH, transform=engine))
            case "unfitted":
                data.serve(data.read(files, BATCH, transform=features()))
            case "epochs":
                source = data.read(files, BATCH, transform=fitted(files))
                for _ in data.epochs():
                    for batch in source.single_pass():
                        data.send(batch)
            case "late":
                for _ in data.epochs():
                    for batch in data.read(files, BATCH, transform=fitted(files)):
                        data.send(batch)


if __name__ == "__main__":
    run(kv.LoaderContext(), *sys.argv[1:])
