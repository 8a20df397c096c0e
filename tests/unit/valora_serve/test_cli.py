"""The command valora-serve."""

import subprocess
import sys

import pytest

from valora_serve import cli


def test_serving_imports_no_training_library():
    code = (
        "import sys, valora_serve.cli, valora_serve.server.app, "
        "valora_serve.server.loading.startup, valora_serve.engine.async_engine, "
        "valora_serve.workloads.bench\n"
        "print(sorted({'mlflow', 'hydra', 'ultralytics', 'valora_train'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_make_a_key(tmp_path, capsys):
    from valora_serve.server.access.keys import hashed, read_keys

    file = tmp_path / "keys"
    assert cli.main(["key", "app", "--file", str(file)]) == 0
    assert cli.main(["key", "ops", "--role", "admin", "--file", str(file)]) == 0
    secrets = [line.split()[-1] for line in capsys.readouterr().err.splitlines()]
    keys = read_keys(file)
    assert [(key.name, key.role) for key in keys] == [("app", "user"), ("ops", "admin")]
    assert [key.sha256 for key in keys] == [hashed(secret) for secret in secrets]
    assert file.stat().st_mode & 0o077 == 0
    assert cli.main(["key", "print"]) == 0
    assert capsys.readouterr().out.startswith("print user ")
    with pytest.raises(SystemExit):
        cli.main(["key", "a b"])
