"""Documents through the whole factory: memories alone, memories that share an adapter, the gate."""

import json
from io import StringIO

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from tests.e2e.test_architectures import replayed
from tests.support.stores import new_store
from valora_data import shards
from valora_data.contract.bundle import read_bundle
from valora_data.contract.contexts import read_encoder, read_memory
from valora_data.schema import Split
from valora_train.cli import config_folder, run
from valora_train.model.lmm import Lmm
from valora_train.reporting.progress import Display
from valora_train.settings import LoraSettings, ModelSettings, from_config
from valora_train.stages.gate import BundleModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "gate_here")]
NAMES = ("ledger_1", "ledger_2")


def fuse(base, folder, *more):
    """A bundle of two documents of four facts, whose answers are learnt from the labels."""
    quick = [
        "task=context", f"model.id={base}", f"task.only=[{','.join(NAMES)}]",
        f"paths.work={folder}/work", f"paths.bundles={folder}/bundles",
        f"paths.tracking={new_store(folder)}", "processes=1", "fusion.unreachable=keep",
        "context.tokens=12", "heads.max_tokens=4", "train.threads=1", "train.head_lr=0.02",
        "train.batch_size=8", "train.probe_steps=60", "train.steps=60", "train.steps_per_held=40",
        "context.logits=0", "context.hidden=0", "context.answers=1",
    ]  # fmt: skip
    for name in NAMES:
        quick += [f"domains.{name}.source.entries=1", f"domains.{name}.teacher=labels"]
        quick += [f"domains.{name}.of_teacher=null", f"domains.{name}.required=0.3"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        settings = from_config(compose("config", overrides=[*quick, *more]))
    console = Console(record=True, width=300, file=StringIO())
    run(settings, Display(console))
    return read_bundle(folder / "bundles" / "context"), console.export_text()


def work(folder, stage):
    (found,) = (folder / "work").glob(f"{stage}-*[0-9a-f]")
    return found


def test_memories_alone_take_no_adapter(base, tmp_path):
    bundle, said = fuse(base, tmp_path, *(f"domains.{name}.required=0.001" for name in NAMES))
    assert "without LoRA" in said
    model = BundleModel(bundle)
    for name in NAMES:
        facts, entry = bundle.domains[name], bundle.contexts[name]
        assert (facts["head"], facts["task"], entry.form, entry.tokens) == (
            None, "context", "prefix", 12,
        )  # fmt: skip
        assert facts["measured_by"] == "drawn questions"
        file = bundle.folder / str(entry.file)
        text = json.loads((base / "config.json").read_text())["text_config"]
        config = type("Config", (), text)
        memory = read_memory(file, bundle.manifest["base"]["sha256"], config)
        assert memory.bytes == entry.bytes
        assert entry.source_tokens > 12
        # What was learnt is answered, as the trainer measured it.
        samples = shards.read(work(tmp_path, f"distill-{name}") / "taught")
        right = model.accuracy(name, samples)
        assert right >= 0.5, right
        # Another document's memory knows nothing of it.
        other = NAMES[1 - NAMES.index(name)]
        assert model.accuracy(other, samples) < right / 2
    golden = json.loads((bundle.folder / "golden/golden.json").read_text())
    assert {(one["domain"], "image" in one) for one in golden} == {(name, False) for name in NAMES}
    assert replayed(base, bundle.folder) == len(golden) > 0


def test_memories_may_share_an_adapter(base, tmp_path):
    more = ["context.form=memory_tokens", "fusion.head_only=false", "context.encoder_steps=4"]
    bundle, _ = fuse(base, tmp_path, *more)
    # The bundle holds the encoder that the memory tokens began with.
    assert bundle.encoders == {"memory": {"path": "encoders/memory", "tokens": 12}}
    lmm = Lmm(ModelSettings(id=str(base)), LoraSettings())
    encoder = read_encoder(bundle.folder / "encoders/memory", lmm.config.get_text_config())
    assert encoder.queries.shape == (12, lmm.width)
    lmm.adapters.load("memory", bundle.folder / "encoders/memory")
    adapters = {bundle.domains[name]["adapter"] for name in NAMES}
    assert len(adapters) >= 1 and None not in adapters
    for name in NAMES:
        entry = bundle.contexts[name]
        assert (entry.form, entry.position) == ("memory_tokens", 0)
    golden = json.loads((bundle.folder / "golden/golden.json").read_text())
    assert replayed(base, bundle.folder) == len(golden) > 0


def test_an_adapter_alone_is_a_closed_book(base, tmp_path):
    bundle, _ = fuse(base, tmp_path, "context.form=adapter", "task.only=[ledger_1]")
    entry = bundle.contexts["ledger_1"]
    assert (entry.form, entry.file, entry.tokens, entry.bytes) == ("adapter", None, 0, 0)
    assert bundle.domains["ledger_1"]["adapter"] == "adapter-1"
    samples = shards.read(work(tmp_path, "data-ledger_1") / Split.TRAIN)
    assert BundleModel(bundle).accuracy("ledger_1", samples) >= 0.5
