"""FarmHash and MurmurHash in plain Python, from their descriptions: slow and obvious."""

MASK = (1 << 64) - 1


def signed(x):
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def rotate(x, by):
    x &= MASK
    return (x >> by | x << (64 - by)) & MASK


def fold(x):
    x &= MASK
    return x ^ x >> 47


def slow_farm(data):
    """FarmHash Fingerprint64, from its description: unsigned."""
    k0, k1, k2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
    size = len(data)

    def word(at):
        return int.from_bytes(data[at : at + 8], "little")

    def join(u, v, by):
        return fold((v ^ fold(((u ^ v) & MASK) * by)) * by) * by & MASK

    def thirty_two(at, a, b):
        a += word(at)
        total = a + word(at + 8) + word(at + 16)
        return [total + word(at + 24), rotate(b + a + word(at + 24), 21) + rotate(total, 44) + a]

    if size == 0:
        return k2
    by = k2 + 2 * size
    if size < 4:
        y = data[0] + (data[size // 2] << 8)
        return fold(y * k2 ^ (size + (data[-1] << 2)) * k0) * k2 & MASK
    if size < 8:
        first, last = (int.from_bytes(part, "little") for part in (data[:4], data[-4:]))
        return join(size + (first << 3), last, by)
    if size <= 16:
        a, b = word(0) + k2, word(size - 8)
        return join(rotate(b, 37) * by + a, (rotate(a, 25) + b) * by, by)
    if size <= 64:
        a, b = word(0) * (k1 if size <= 32 else k2), word(8)
        c, d = word(size - 8) * by, word(size - 16) * k2
        y = rotate(a + b, 43) + rotate(c, 30) + d
        z = join(y, a + rotate(b + k2, 18) + c, by)
        if size <= 32:
            return z
        e, f = word(16) * by, word(24)
        g, h = (y + word(size - 32)) * by, (z + word(size - 24)) * by
        return join(rotate(e + f, 43) + rotate(g, 30) + h, e + rotate(f + a, 18) + g, by)
    y = 81 * k1 + 113
    x, z, v, w = 81 * k2 + word(0), fold(y * k2 + 113) * k2, [0, 0], [0, 0]
    last = (size - 1) // 64
    by, nine = k1, 1
    for block in range(last + 1):
        at = 64 * block
        if block == last:
            at, by, nine = size - 64, k1 + ((z & 0xFF) << 1), 9
            w[0] += (size - 1) % 64
            v[0] += w[0]
            w[0] += v[0]
        x = rotate(x + y + v[0] + word(at + 8), 37) * by ^ w[1] * nine
        y = rotate(y + v[1] + word(at + 48), 42) * by + v[0] * nine + word(at + 40)
        z = rotate(z + w[0], 33) * by
        v = thirty_two(at, v[1] * by, x + w[0])
        w = thirty_two(at + 32, z + w[1], y + word(at + 16))
        x, z = z, x
    return join(join(v[0], w[0], by) + fold(y) * k0 + z, join(v[1], w[1], by) + x, by)


def slow_murmur(data, seed=0):
    """MurmurHash64A, from its description: unsigned."""
    by = 0xC6A4A7935BD1E995
    hashed = seed ^ len(data) * by & MASK
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8], "little")
        if at + 8 <= len(data):
            word = fold(word * by) * by
        hashed = (hashed ^ word) * by & MASK
    return fold(fold(hashed) * by)
