"""``python -m tests.fuzz [PART]``: see `tests.fuzz.driver`."""

from tests.fuzz.driver import main

raise SystemExit(main())
