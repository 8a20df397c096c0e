"""How LoRA matrices are split: what was measured counts, nearest ranks and rows first."""

from dataclasses import replace
from pathlib import Path

import pytest

from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.parallel.choice import LoraChoice, Measured, read_table, save_table, table_file
from valora_serve.parallel.partition import LoraParallel

SLORA, REPLICATE_A = LoraParallel.SLORA, LoraParallel.REPLICATE_A
FAST = Measured(2, False, 4096, 6144, 64, 64, slora=3.0, replicate_a=5.0)


def test_a_named_way_is_taken() -> None:
    for way in LoraParallel:
        assert LoraChoice(str(way), 2, 64, (FAST,)).choose(False, 4096, (2048,) * 3) is way


def test_what_was_measured_counts() -> None:
    other = replace(FAST, rank=8, slora=5.0, replicate_a=3.0)
    many = replace(FAST, rows=2048, slora=9.0, replicate_a=1.0)
    auto = LoraChoice("auto", 2, 64, (many, other, FAST))
    assert auto.choose(False, 4096, (2048,) * 3) is SLORA
    assert replace(auto, rank=16).choose(False, 4096, (2048,) * 3) is REPLICATE_A
    # Another number of GPUs, kind of layer or width is another shape.
    assert replace(auto, size=4).choose(False, 4096, (2048,) * 3) is REPLICATE_A
    assert auto.choose(True, 4096, (6144,)) is REPLICATE_A
    assert auto.choose(False, 5120, (2048,) * 3) is REPLICATE_A


def test_where_nothing_was_measured_only_huge_matrices_are_split() -> None:
    auto = LoraChoice("auto", 2, 64)
    assert auto.choose(False, 4096, (2048,) * 3) is REPLICATE_A
    assert replace(auto, rank=256).choose(False, 1 << 17, (2048,) * 3) is SLORA


def test_tables_are_kept_by_machine(tmp_path: Path) -> None:
    file = table_file(tmp_path / "costs", "NVIDIA H200 x2")
    assert read_table(file) == ()
    save_table(file, [FAST])
    assert read_table(file) == (FAST,)
    assert table_file(tmp_path / "costs", "NVIDIA H200 x4") != file
    for damaged in ("{", '[{"size": 2}]', "[1]"):
        file.write_text(damaged)
        with pytest.raises(SettingsError, match="measure again"):
            read_table(file)


def test_settings_name_known_ways() -> None:
    assert EngineSettings(lora_parallel="slora", tensor_parallel=2).tensor_parallel == 2
    with pytest.raises(ValueError, match="lora_parallel: expected one of auto, slora, replicate_a"):
        EngineSettings(lora_parallel="vllm")
    with pytest.raises(ValueError, match="tensor_parallel: expected at least 1, got 0"):
        EngineSettings(tensor_parallel=0)
