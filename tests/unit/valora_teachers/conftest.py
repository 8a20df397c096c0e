"""So small models gain nothing from a second thread, and lose much on a busy machine."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread):
    pass
