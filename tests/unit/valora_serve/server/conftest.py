"""A server with the default settings, which no request changes."""

import pytest

from tests.support.http_helpers import serving


@pytest.fixture(scope="module")
def plain():
    with serving() as server:
        yield server
