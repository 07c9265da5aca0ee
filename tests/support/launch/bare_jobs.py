"""What a supervisor needs of its job besides processes, for jobs that have none of it."""


class NoGroup:
    """The group of a job whose trainers cannot do without each other."""

    def has_begun(self):
        return True  # they cannot start without each other

    def remove(self, process):
        return False  # nobody continues

    def has_left(self, process):
        return False

    def is_member(self, process):
        return False

    def trains(self, process):
        return True

    def expect(self, trainers):
        """Nobody waits for others."""


class NoWork:
    """The work of a job that leases none."""

    def release_process(self, process_holder):
        return []

    def release_predictions(self, process_holder):
        return False

    def has_work(self):
        return False

    def is_complete(self):
        return True

    def overdue(self, spared):
        return []
