"""Contexts that the factory has fused, served: every golden answer and the promised accuracy."""

import asyncio

import pytest

from tests.e2e.valora_train.test_context import NAMES, fuse
from tests.support.engine_reference import make_engine
from valora_data.contract.bundle import GOLDEN
from valora_data.contract.files import read_json
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.server.loading import golden

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "gate_here")]


def test_a_fused_bundle_answers_as_it_did_when_it_was_exported(base, tmp_path):
    short = ("train.probe_steps=8", "train.steps=8", "train.steps_per_held=4")
    bundle, _ = fuse(base, tmp_path, "fusion.head_only=false", *short)
    engine = make_engine(str(base))
    assert set(NAMES) <= set(engine.load(bundle.folder))

    async def replay():
        client = AsyncEngine(engine)
        try:
            return await golden.replay(client, bundle.folder)
        finally:
            await client.close()

    assert asyncio.run(replay()) == len(read_json(bundle.folder / GOLDEN)) > 0
    assert engine.stats().contexts_known == len(NAMES)
