"""Graph sizes follow from the settings, and LoRA terms from the policy's modes."""

import pytest
import torch

from valora_serve.engine import sizing
from valora_serve.engine.settings import EngineSettings
from valora_serve.orchestrator.registry import modes_of
from valora_serve.types import Mode

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("policy", "terms"),
    [("unmerge_only", [0, 1]), ("slora", [0, 1]), ("cost", [0, 1, 2]), ("valora", [0, 1, 2])],
)
def test_terms_of_policies(policy: str, terms: list[int]) -> None:
    assert sizing.lora_terms(modes_of(policy)) == terms


def test_terms_of_modes() -> None:
    assert sizing.lora_terms({Mode.MERGED}) == [0]
    assert sizing.lora_terms({Mode.MIXTURE}) == [0, 1, 2]


def test_decode_sizes() -> None:
    assert sizing.decode_sizes(EngineSettings(max_requests=9)) == [1, 2, 4, 8]
    assert sizing.decode_sizes(EngineSettings(graphs=False)) == []


def test_prompt_sizes() -> None:
    assert sizing.prompt_sizes(EngineSettings(), CPU) == ()
    sizes = sizing.prompt_sizes(EngineSettings(prompt_graphs=True, max_tokens=300), CPU)
    assert sizes[-2] < 300 <= sizes[-1]
