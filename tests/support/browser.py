"""A headless Chromium, where there is one."""

import shutil

import pytest


def chromium_path():
    """The browser that the system has; skips the test if there is none."""
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium runs this test")
    return path
