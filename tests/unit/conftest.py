"""What unit tests share: one thread for models so small, and the command that trains."""

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread): ...


@pytest.fixture
def valora_train(tmp_path, monkeypatch, capfd):
    """Runs the command in an empty folder; gives exit status and stderr, keeps stdout in `out`."""
    from hydra._internal.hydra import Hydra

    from valora_train import cli

    monkeypatch.chdir(tmp_path)
    # Hydra composes all settings twice, first to learn whether a file of them says MULTIRUN.
    monkeypatch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["valora-train", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code
        run.out, said = capfd.readouterr()
        return status, said

    return run
