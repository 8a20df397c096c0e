"""A short run of ``make fuzz ARGS=routes``, with a fixed seed."""

import pytest

from tests.fuzz import routes

pytestmark = pytest.mark.slow


def test_no_route_fails_on_hostile_requests(capsys):
    # The bound on /health is generous: the tests of the slow tier share the machine.
    # Each operation is asked more in `test_api_fuzz.py`.
    arguments = (
        "--cases 200 --rounds 1 --at-once 3 --mixtures 2 --processes 2 --health-seconds 5 "
        "--idle-seconds 1"
    )
    status = routes.main(arguments.split())
    said = capsys.readouterr().out
    assert status == 0, said
    assert "| unknown keys |" in said
    assert "| POST /v1/embeddings (negative) |" in said
