"""`python -m bequest.bench`: the same as `bequest bench`."""

import sys

from bequest.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
