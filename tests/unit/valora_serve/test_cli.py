"""The command valora-serve."""

import subprocess
import sys

import pytest

from tests.support.fake_engine import ADAPTER, BASE, PERSON
from valora_serve import cli


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


@pytest.mark.parametrize("there", ["app user 0\n", ""])
def test_a_key_that_does_not_fit_leaves_the_file_as_it_was(tmp_path, there):
    file = tmp_path / "keys"
    file.write_text(there)
    code = (
        "import resource, sys; from valora_serve.cli import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(there) + 20},) * 2); "
        f"sys.exit(main(['key', 'ops', '--file', {str(file)!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "could not be written" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "key (shown" not in ran.stderr
    assert file.read_text() == there


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--tensor-parallel", "3"], "3 GPUs cannot share base model tiny"),
        (["--device", "cuda", "--tensor-parallel", "99"], "99 GPUs are asked for, and this"),
        (["--tensor-parallel", "2", "--lora-parallel", "both"], "lora_parallel: expected one of"),
        (["--tensor-parallel", "0"], "tensor_parallel: expected at least 1, got 0"),
    ],
)
def test_gpus_that_cannot_share_a_model_are_refused_in_a_sentence(
    tmp_path, monkeypatch, capfd, arguments, said
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--port", "0", *arguments]) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_shares_of_adapters_that_are_not_there_are_said(caplog):
    shares = {"adapter-1": 2.0, "base": 2.0, "adaptor-1": 3.0, "person": 4.0}
    known = [model.adapter or "base" for model in (BASE, ADAPTER, PERSON)]
    cli._tell_of_shares(shares, "adapter", known)
    assert [record.message for record in caplog.records] == [
        f"shares: there is no adapter {name}, so its share goes to nobody"
        for name in ("adaptor-1", "person")  # a domain, which the shares of its adapter count for
    ]
