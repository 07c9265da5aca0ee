"""`python -m karvan` is `karvan`."""

from karvan.cli.main import program

if __name__ == "__main__":
    program()
