"""`make soak`, shorter: every answer is right, whatever happens, and nothing is left."""

import pytest

from tests.fuzz import soak

pytestmark = pytest.mark.slow


def test_soak_with_faults(capsys: pytest.CaptureFixture[str]) -> None:
    status = soak.main(["--minutes", "0.4", "--seed", "1"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "SIGTERM under load" in said
    assert "diverged" in said
