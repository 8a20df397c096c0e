"""Our engine as the server runs it: requests are prepared in a thread beside the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.valora_serve.peers.base import Ask, Job, Peer, picture_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_serve.engine.sequence import Prepared
    from valora_serve.types import Request


def left_gb() -> float:
    """GB of the GPU's memory that no process has taken; 0 without a GPU."""
    import torch

    return torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else 0.0


class Valora(Peer):
    """Ours."""

    title = "ours"
    package = "valora"
    requirement = None

    @staticmethod
    def variants(adapters: int, modules: Sequence[str]) -> list[dict[str, Any]]:
        from valora_serve.engine.settings import EngineSettings

        return [{"policy": EngineSettings().policy}]

    def __init__(self, job: Job) -> None:
        from valora_serve.engine.async_engine import AsyncEngine
        from valora_serve.engine.engine import Engine
        from valora_serve.engine.settings import EngineSettings
        from valora_serve.pauses import short_pauses

        count = max(len(job.adapters), 1)
        self.flags = {
            "max_requests": job.most_requests, "max_tokens": job.most_tokens,
            "chunk": job.most_tokens, "max_adapters": count, "slots": count, "max_rank": job.rank,
            "context_length": job.context, "prefix_cache": False, "image_cache_bytes": 0,
            "profile": False, "capture": "eager",
        } | job.options  # fmt: skip
        cpu = {"pages": 2000} if job.device == "cpu" else {}
        settings = EngineSettings(
            base=job.base, device=job.device, host_bytes=1 << 50, **cpu, **self.flags
        )
        engine = Engine(settings)
        for name, folder in job.adapters.items():
            engine.load("adapter", Path(folder), name)
        engine.warm_up()
        self._engine, self._preparing = engine, 0.0
        engine.prepare = self._timed(engine.prepare)  # type: ignore[method-assign]
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._client = AsyncEngine(engine)
        self._pauses = contextlib.ExitStack()
        self._pauses.enter_context(short_pauses())  # as the server does

    def prepare(self, asks: Sequence[Ask]) -> Any:
        from valora_serve.types import Request, SamplingParams

        made = []
        for ask in asks:
            text = isinstance(ask.prompt, str)
            request = Request(
                "", ask.adapter, text=ask.prompt if text else None,
                token_ids=None if text else ask.prompt,
                images=() if ask.picture is None else (picture_of(ask.picture),),
                sampling=SamplingParams(max_tokens=ask.tokens, ignore_eos=True), stream=False,
            )  # fmt: skip
            made.append(request)
        return made

    def run(self, prepared: list[Request]) -> list[int]:
        from dataclasses import replace

        async def answer(request: Request) -> int:
            async for output in self._client.generate(request):
                if output.error:
                    raise output.error
                last = output
            return last.usage.completion

        async def all_of_them() -> list[int]:
            named = [replace(request, id=str(next(self._ids))) for request in prepared]
            return await asyncio.gather(*map(answer, named))

        return self._loop.run_until_complete(all_of_them())

    def _timed(self, prepare: Callable[[Request], Prepared]) -> Callable[[Request], Prepared]:
        """Requests are prepared by one thread, beside the engine's: for how long."""

        def timed(request: Request) -> Prepared:
            start = time.perf_counter()
            try:
                return prepare(request)
            finally:
                self._preparing += time.perf_counter() - start

        return timed

    def counters(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {
            "steps": stats.steps, "preemptions": stats.preemptions,
            "prompt tokens": stats.prompt_tokens, "images looked up": stats.image_queries,
            "seconds of preparing": self._preparing,
            "pages": stats.pages_total, "GB of memory left": left_gb(),
        }  # fmt: skip

    def close(self) -> None:
        self._pauses.close()
        self._loop.run_until_complete(self._client.close())
