"""One thread for models so small."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread): ...
