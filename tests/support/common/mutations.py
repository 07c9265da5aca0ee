"""Random changes to trees of plain values: heads of calls, settings, manifests."""

import json

POWERS = [sign * 2**bits + more for bits in (16, 31, 32, 53, 63, 64) for more in (-1, 0) for sign in (1, -1)]
NUMBERS = [-1, 0, 1, 2, 3, 7, 255, 10**40, 0.5, -0.0, 1e38, 1e39, 1e300, *map(float, ("nan", "inf", "-inf"))]
TEXTS = ["", "x", "t", "u", "w", "k", "..", "/", "a\0b", "uint16", "bfloat16", "x" * 5000, "1", "\ud800"]
LISTS = [[], [[]], [None], [0], [-1], [1, 2, 3], [["w", [1]]], [["w", [-1]]], [["w", [2**40, 2**40]]]]
LISTS += [["t", "t"], ["u", "t"], ["t"], [0, 0], [2**53], [["f", 2**53]], [["f", 2**53]] * 1025]
JUNK = [None, True, False, *POWERS, *NUMBERS, *TEXTS, *LISTS, {}, {"t": 1}, {"t": {}}, {"t": []}]


def mutated(pick, head):
    """A tree of dicts and lists with one change somewhere inside of it."""
    spots = list(places(head))
    if not spots or pick.random() < 0.05:
        extra = pick.choice(("extra", "table", "store", "mine", "lost"))
        return {**head, extra: copied(pick.choice(JUNK))}
    holder, key = pick.choice(spots)
    how, value = pick.random(), holder[key]
    if isinstance(value, str) and value.startswith("{") and how < 0.8:
        inside = mutated(pick, json.loads(value))
        holder[key] = json.dumps(inside) if how < 0.7 else "[" * 100_000
    elif how < 0.1:
        del holder[key]
    elif how < 0.2 and isinstance(holder, list):
        holder.insert(key, copied(value))
    elif how < 0.4 and type(value) in (int, float):
        holder[key] = value + pick.choice((-1, 1, 0.5, 2**31, -(2**31)))
    elif how < 0.55:
        holder[key] = copied(pick.choice([other[place] for other, place in spots]))
    else:
        holder[key] = copied(pick.choice(JUNK))
    return head


def copied(value):
    """A tree of its own."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list | tuple) else value


def places(value):
    """Everything inside of dicts and lists, by what holds it."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])
