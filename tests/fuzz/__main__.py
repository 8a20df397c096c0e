"""``python -m tests.fuzz [PART]``: see `tests.fuzz.driver`."""

import sys

from tests.fuzz.driver import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
