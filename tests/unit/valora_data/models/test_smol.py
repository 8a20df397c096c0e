"""The halves of valora-smol: what is missing is named, and a connector is merged as PEFT merges."""

import sys

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from valora_data.errors import BundleError
from valora_data.models import smol


def install(folder, module, name, content, monkeypatch):
    """A package on the path that holds one file."""
    file = folder / module / name
    file.parent.mkdir(parents=True)
    (folder / module / "__init__.py").touch()
    file.write_bytes(content)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("there", [False, True])
def test_packages_that_lack_or_are_of_another_version(there, tmp_path, monkeypatch):
    for module, *_ in smol.HALVES.values():
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    (package, (module, name, _)), *_ = smol.HALVES.items()
    monkeypatch.setattr(smol, "find_spec", lambda _: None)
    said = f"needs the package {package}: `make base-smol`"
    if there:
        install(tmp_path, module, name, b"other weights", monkeypatch)
        monkeypatch.undo()
        monkeypatch.syspath_prepend(tmp_path)
        said = f"is not the file of {package}.*--force-reinstall"
    with pytest.raises(BundleError, match=said):
        smol.halves()


def test_a_connector_is_merged_as_by_peft():
    torch.manual_seed(0)
    plain = nn.ModuleDict({"layer": nn.Linear(6, 5), "projector": nn.Linear(4, 6)})
    tuned = nn.ModuleDict({"layer": nn.Linear(6, 5), "projector": nn.Linear(4, 6)})
    tuned.load_state_dict(plain.state_dict())
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["layer"], init_lora_weights=False)
    inject_adapter_in_model(config, tuned)
    nn.init.normal_(tuned["projector"].weight)
    weights = {
        name.replace(".default.weight", ""): value
        for name, value in tuned.state_dict().items()
        if "lora" in name or name.startswith("projector")
    }
    smol.merge(plain, weights)
    x = torch.randn(3, 4)
    expected = tuned["layer"](tuned["projector"](x))
    torch.testing.assert_close(plain["layer"](plain["projector"](x)), expected)
