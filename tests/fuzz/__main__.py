"""``python -m tests.fuzz [PART]``: see `tests.fuzz.driver`."""

import sys

from tests.fuzz.driver import main

sys.exit(main(sys.argv[1:]))
