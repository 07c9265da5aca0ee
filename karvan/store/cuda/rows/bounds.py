"""`Bound`: what the host knows of a number on the device without waiting for it.

The host must have memory for all rows that a lookup may insert, before it knows how many earlier lookups
have inserted. It therefore works with upper bounds: the last number it has read, and every position since.
"""


class Bound:
    """An upper bound of a number that kernels increase, by at most one for each position of a lookup.

    It is what was read last, and all positions of lookups that this did not include.
    """

    def __init__(self, known: int = 0) -> None:
        self.known = known
        self.time = 0  # when that was read: lookups until then are included
        self._valid_from = 0

    def learn(self, value: int, time: int) -> None:
        """The number was `value` at a time."""
        if time > self.time and time >= self._valid_from:
            self.known, self.time = value, time

    def restart(self, value: int, time: int, valid_from: int) -> None:
        """The number is at most `value` at a time; what is read before `valid_from` says nothing."""
        self.known, self.time, self._valid_from = value, time, valid_from
