"""Rows as their definitions have them, in plain Python: what real servers are compared with."""

import numpy as np
import reference as ref

MASK = ref.MASK64
FACTOR = 0xD6E8FEB86659FD93


def mix(key):
    """Version 1 of the key mix (csrc/hash/mix.h)."""
    key &= MASK
    for _ in range(2):
        key = (key ^ key >> 32) * FACTOR & MASK
    return key ^ key >> 32


def owner_of(key, servers):
    """The server whose equal share of all hashes has the key's."""
    return (mix(key) >> 32) * servers >> 32


def first_vector(table, key, dim, seed=0, low=-0.01, high=0.01):
    """A new row of `Uniform` (csrc/table/init.h); a table's name has eight letters, as `ref.farm64` wants."""
    name = table.encode()
    assert len(name) == 8
    stream = mix(mix(seed) + ref.farm64(int.from_bytes(name, "little")))
    state = mix(mix(key) ^ stream)
    low, high = np.float32(low), np.float32(high)
    made = np.empty(dim, np.float32)
    for column in range(dim):
        z = state + (column // 2 + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        z ^= z >> 31
        bits = z >> 32 if column % 2 else z & 0xFFFF_FFFF
        made[column] = min(low + (high - low) * (np.float32(bits >> 8) * np.float32(2**-24)), high)
    return made
