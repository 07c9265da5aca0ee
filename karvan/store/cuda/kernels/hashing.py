"""The key mix and the random draws of csrc/hash/mix.h and csrc/table/init.h, bit for bit."""

import triton
import triton.language as tl

_MIX = tl.constexpr(0xD6E8FEB86659FD93)
_UNMIX = tl.constexpr(0xCFEE444D8B59A89B)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(key):
    """The hash of keys, both int64: a bijection."""
    h = key.to(tl.uint64, bitcast=True)
    h = h ^ (h >> 32)
    h = h * _MIX
    h = h ^ (h >> 32)
    h = h * _MIX
    h = h ^ (h >> 32)
    return h.to(tl.int64, bitcast=True)


@triton.jit
def unmix(hashes):
    """The keys of hashes."""
    h = hashes.to(tl.uint64, bitcast=True)
    h = h ^ (h >> 32)
    h = h * _UNMIX
    h = h ^ (h >> 32)
    h = h * _UNMIX
    h = h ^ (h >> 32)
    return h.to(tl.int64, bitcast=True)


@triton.jit
def draw(state, number):
    """Output `number` of SplitMix64 that starts at `state`, both int64; as uint64."""
    z = state.to(tl.uint64, bitcast=True) + (number.to(tl.uint64) + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit
def rounding_noise(hashes, step, column):
    """16 random bits for each (row, column) of an update: csrc/kernels/simd.inc, noise_bits."""
    seed = (hashes ^ step).to(tl.uint64, bitcast=True) * _GOLDEN
    seed = seed ^ (seed >> 29)
    x = (seed & 0xFFFFFFFF).to(tl.uint32) + column.to(tl.uint32) * 0x9E3779B9
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (seed >> 32).to(tl.uint32)
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return (x ^ (x >> 15)) & 0xFFFF
