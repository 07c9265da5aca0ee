"""Loaders and trainers that are killed: nothing is lost, nothing comes twice, and the order stays."""

import os
import random
import subprocess
import sys
import threading

import pytest
from role_loaders import Loaders, close_all, ids_of, in_threads, take, take_all
from support_paths import support_path

from karvan.wire import RefusedError

ROWS, BATCH = 240, 4
TRAINER = support_path("cluster/trainer_program.py")


def expected(loaders, world, epochs=1):
    """What the trainers take of each epoch if nobody dies."""
    streams = loaders.streams(world)
    whole = [take_all(streams) for _ in range(epochs)]
    close_all(streams)
    return whole


def take_while_killing(loaders, streams, moments, epochs=1):
    """What trainers take while loaders are killed whenever the trainers together have so many batches."""
    count, changed, done = [0], threading.Condition(), []

    def trainer(one):
        taken = []
        for _ in range(epochs):
            taken.append([])
            for batch in one:
                taken[-1].append((batch.number, batch["id"].tolist()))
                with changed:
                    count[0] += 1
                    changed.notify_all()
        return taken

    def killer():
        for moment, victim in moments:
            with changed:
                changed.wait_for(lambda at=moment: count[0] >= at or done, 60)
            loaders.kill(victim)
            loaders.start(victim)

    thread = threading.Thread(target=killer, daemon=True)
    thread.start()
    taken = in_threads([lambda one=one: trainer(one) for one in streams])
    done.append(True)
    with changed:
        changed.notify_all()
    thread.join(60)
    return [[trainer[epoch] for trainer in taken] for epoch in range(epochs)]


@pytest.mark.parametrize("mode", ["serve", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_killed_loader_is_replaced_without_losing_a_batch(mode):
    with Loaders(2, mode, ROWS, BATCH) as loaders:
        whole = expected(loaders, 3, epochs=2)
        streams = loaders.streams(3, prefetch=2)
        taken = take_while_killing(loaders, streams, [(17, 0)], epochs=2)
        assert taken == whole
        assert [ids_of(epoch) for epoch in taken] == [list(range(ROWS))] * 2
        close_all(streams)


@pytest.mark.slow
def test_a_loader_that_is_killed_behind_the_end_of_an_epoch_gives_the_next_one():
    with Loaders(1, "serve", ROWS, BATCH) as loaders:
        first, second = expected(loaders, 2, epochs=2)
        streams = loaders.streams(2, prefetch=2)
        assert take_all(streams) == first
        loaders.kill(0)
        loaders.start(0)
        begun = take_all(streams, 1)
        # A trainer that has all that it asked for, and asks for nothing, holds nobody up.
        loaders.kill(0)
        loaders.start(0)
        others = take(streams[1], 4)
        rest = take_all(streams)
        assert [begun[0] + rest[0], begun[1] + others + rest[1]] == second
        close_all(streams)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_loaders_that_are_killed_at_random_lose_nothing(seed):
    chance = random.Random(seed)
    with Loaders(3, "serve", 600, 3) as loaders:
        whole = expected(loaders, 2, epochs=3)
        moments = sorted((chance.randrange(600), chance.randrange(3)) for _ in range(8))
        streams = loaders.streams(2, prefetch=chance.randint(1, 5))
        assert take_while_killing(loaders, streams, moments, epochs=3) == whole
        streams = loaders.streams(2, ordered=False)
        for epoch in take_while_killing(loaders, streams, moments, epochs=3):
            assert ids_of(epoch) == list(range(600))
        close_all(streams)


def run_trainer(loaders, path, generation):
    loaders.registry.begin_generation(generation)
    return subprocess.Popen(
        [sys.executable, str(TRAINER), str(path), str(loaders.count)],
        env={**os.environ, "KARVAN_REGISTRY": loaders.registry.address, "KARVAN_GENERATION": str(generation)},
    )


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_a_new_generation_of_trainers_goes_on_from_a_saved_state(tmp_path):
    path = tmp_path / "taken"
    with Loaders(1, "serve", ROWS, BATCH) as loaders:
        ((whole,),) = expected(loaders, 1)
        trainer = run_trainer(loaders, path, generation=1)
        while lines_of(path).count("saved") < 2:
            assert trainer.poll() is None
        trainer.kill()
        trainer.wait()
        kept = lines_of(path)
        kept = kept[: len(kept) - kept[::-1].index("saved")]  # what came behind it is not in the state
        path.write_text("".join(f"{line}\n" for line in kept))
        assert run_trainer(loaders, path, generation=2).wait(60) == 0
        assert lines_of(path)[-1] == "end"
        taken = [[int(word) for word in line.split()] for line in lines_of(path) if line[0].isdigit()]
        assert taken == [[number, *ids] for number, ids in whole]
        late = loaders.stream()
        with pytest.raises(RefusedError, match="generation 2, as the registry says, got 0"):
            take(late)


@pytest.mark.slow
def test_a_program_of_one_epoch_is_started_again_when_trainers_begin_anew():
    with Loaders(1, "once", 40, 4) as loaders:
        one = loaders.stream()
        first = take(one, 3)
        again = loaders.stream()  # as after a crash: nothing is known of what the first one had
        other = threading.Thread(target=lambda: first.extend(take(again)))
        other.start()
        code, said = loaders.wait(0)
        assert (code, "takes a new process of its program" in said) == (1, True)
        loaders.start(0)
        other.join(60)
        assert ids_of([first[3:]]) == list(range(40))
        close_all([again])
