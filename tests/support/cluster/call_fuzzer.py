"""Mutated calls to every service, in a process of its own: `python call_fuzzer.py NATIVE SEED CASES FOLDER`.

NATIVE is an extension module that was built with AddressSanitizer, whose library must be preloaded; "" takes
the installed one. A case is a valid call with one to three mutations of its head or arrays, or a hello. It
may succeed, or be refused with one of the errors that callers know; anything else is a finding. Every so
often all calls are made as they should be, and must succeed. KARVAN_FUZZ_UNCHECKED=1 switches the check of
the dtype of `push`'s gradients off, to show that a read beyond an array is found; it makes no other calls.
"""

import importlib.util
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path


def _use_native(path):
    spec = importlib.util.spec_from_file_location("karvan._native", path)
    sys.modules["karvan._native"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import karvan

    karvan._native = module


if __name__ == "__main__" and sys.argv[1]:
    _use_native(sys.argv[1])

import numpy as np  # noqa: E402
from malformed_calls import SUBJECTS  # noqa: E402
from mutations import copied, mutated  # noqa: E402

from karvan.checkpoint import CheckpointError  # noqa: E402
from karvan.cluster.loader.epoch_service import EpochService  # noqa: E402
from karvan.cluster.parameter_server import row_updates  # noqa: E402
from karvan.wire import RefusedError, WireError, schema  # noqa: E402
from karvan.wire.message import DTYPES  # noqa: E402

KNOWN = (RefusedError, ValueError, RuntimeError, WireError, CheckpointError, OSError, MemoryError)
MISTAKES = (NotImplementedError, RecursionError)  # kinds of RuntimeError that a check should have prevented
SHARES = {"server": 10, "elastic server": 5, "async server": 3, "registry": 5, "loader": 3, "worker": 2}
SHARES |= {"loader of tasks": 2, "work": 6, "trainer group": 2, "job": 1}
SLOW = {"save": 0.1, "fill": 0.1, "restore": 0.1, "capture": 0.3, "close_capture": 0.3}
UNCHECKED = "KARVAN_FUZZ_UNCHECKED" in os.environ
EVERY = 1000  # cases of a service between two checks that all of its calls still work


class Fuzz:
    """All services, and mutations of what is said to them."""

    def __init__(self, seed, folder):
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self.subjects = {}
        for name, kind in SUBJECTS.items():
            (folder / name).mkdir()
            self.subjects[name] = kind(folder / name)
        self.outcomes = Counter()
        self.findings = []
        self.done = Counter()

    def run(self, cases):
        shares = {"server": 1} if UNCHECKED else SHARES
        names = self._random.choices(list(shares), list(shares.values()), k=cases)
        for name in names:
            subject = self.subjects[name]
            self._case(subject)
            self.done[name] += 1
            if self.done[name] % EVERY == 0:
                self.check(subject)
            elif self.done[name] % 50 == 0:
                subject.renew()
        for subject in self.subjects.values():
            self.check(subject)

    def check(self, subject):
        """A service that has had much nonsense still does what it should."""
        subject.renew()
        for method in subject.makers:
            try:
                subject.call(method, *subject.make(method))
            except Exception:
                self._find(subject, method, "a valid call", traceback.format_exc())
            subject.renew()

    def _case(self, subject):
        pick = self._random
        if pick.random() < 0.03:
            return self._hello(subject)
        methods = ["push"] if UNCHECKED else list(subject.makers)
        method = pick.choices(methods, [SLOW.get(each, 1) for each in methods])[0]
        try:
            head, arrays = subject.make(method)
        except Exception:  # what it builds on was lost to an earlier mutation
            subject.renew()
            head, arrays = subject.make(method)
        head, arrays = copied(head), [array.copy() for array in arrays]
        for _ in range(pick.choice((0, 1, 1, 1, 2, 3))):
            if arrays and pick.random() < 0.5:
                self._mutate_arrays(subject, arrays)
            else:
                head = mutated(self._random, head)
        if pick.random() < 0.03:
            method = pick.choice(methods)  # with the head and arrays of another
        what = f"{_short(head)} {[(array.dtype, array.shape) for array in arrays]}"
        self._try(subject, method, what, lambda: subject.call(method, head, arrays))
        return None

    def _hello(self, subject):
        hello = mutated(self._random, copied(subject.hello()))
        self._try(subject, "hello", _short(hello), lambda: subject.meet(hello))
        subject.renew()

    def _try(self, subject, method, what, do):
        try:
            do()
            self.outcomes["answered"] += 1
        except MISTAKES:
            self._find(subject, method, what, traceback.format_exc())
        except KNOWN as error:
            self.outcomes[type(error).__name__] += 1
        except Exception:
            self._find(subject, method, what, traceback.format_exc())

    def _find(self, subject, method, what, text):
        self.outcomes["finding"] += 1
        self.findings.append(f"{subject.name}, {method}: {what}\n{text}")

    def _mutate_arrays(self, subject, arrays):
        pick = self._random
        place = pick.randrange(len(arrays)) if arrays else 0
        how = pick.randrange(11)
        if not arrays or how == 0:
            arrays.insert(place, self._any_array(subject))
            return
        array = arrays[place]
        if how == 1:
            del arrays[place]
        elif how == 2:
            arrays.append(array.copy())
        elif how == 3:
            pick.shuffle(arrays)
        elif how == 4:
            arrays[place] = array.astype(pick.choice(DTYPES))
        elif how == 5:
            arrays[place] = array.reshape(-1).view(np.uint8).copy()  # the same bytes
        elif how == 6:
            arrays[place] = array[: pick.randrange(len(array) + 1)].copy() if array.ndim else array
        elif how == 7:
            arrays[place] = np.concatenate([array, array]) if array.ndim else array
        elif how == 8:
            nothing = np.empty((0, *array.shape[1:]), array.dtype)
            arrays[place] = pick.choice((array.reshape(1, -1), array.reshape(-1, 1), nothing))
        elif how == 9:
            arrays[place] = self._noise(array)
        else:
            arrays[place] = self._any_array(subject)

    def _noise(self, array):
        raw = self._numbers.integers(0, 256, array.nbytes, dtype=np.uint8)
        if array.dtype == bool:
            raw &= 1
        elif self._random.random() < 0.7:  # a few bytes of it
            mask = self._numbers.random(array.nbytes) < 0.02
            raw = np.where(mask, raw, array.reshape(-1).view(np.uint8))
        return raw.view(array.dtype).reshape(array.shape)

    def _any_array(self, subject):
        pick = self._random
        if pick.random() < 0.5:
            try:
                _, arrays = subject.make(pick.choice([name for name in subject.makers if name not in SLOW]))
                if arrays:
                    return pick.choice(arrays).copy()
            except Exception:  # what it builds on was lost to an earlier mutation
                pass
        shape = [pick.choice((0, 1, 2, 5, 25, 300)) for _ in range(pick.randrange(3))]
        return np.zeros(shape, pick.choice(DTYPES))


def _short(head):
    return str(head)[:600]


def main(seed, cases, folder):
    logging.disable(logging.CRITICAL)
    EpochService.wait = EpochService.stay = 0.001
    if UNCHECKED:
        check = schema.ArrayKind.check
        schema.ArrayKind.check = lambda kind, *told: None if kind.name == "gradients" else check(kind, *told)
        row_updates._check_sizes = lambda answered, gradients: None
    begun = time.monotonic()
    fuzz = Fuzz(seed, folder)
    fuzz.run(cases)
    seconds = time.monotonic() - begun
    print(f"{cases} cases in {seconds:.0f} s: {dict(fuzz.outcomes)}, {dict(fuzz.done)}")
    for finding in fuzz.findings[:20]:
        print(f"FINDING {finding}")
    sys.stdout.flush()
    os._exit(1 if fuzz.findings else 0)  # threads of peers need not be waited for


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[4]) as made:
        main(int(sys.argv[2]), int(sys.argv[3]), Path(made))
