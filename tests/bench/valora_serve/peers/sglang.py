"""SGLang's offline engine (`sglang.Engine`), with the settings of its documentation on LoRA."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from tests.bench.valora_serve.peers.base import Ask, Job, Peer, picture_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class Sglang(Peer):
    """SGLang."""

    title = "SGLang"
    package = "sglang"
    requirement = "sglang>=0.5.10"
    text_only = True

    @staticmethod
    def variants(adapters: int, modules: Sequence[str]) -> list[dict[str, Any]]:
        if not adapters:
            return [{}]
        lora = {
            "enable_lora": True, "max_loras_per_batch": adapters,
            "lora_target_modules": [*modules],
        }  # fmt: skip
        return [
            # "Choosing a larger value might improve performance" (its documentation).
            lora | {"lora_backend": "csgmv", "max_lora_chunk_size": 128},
            lora | {"lora_backend": "csgmv"},
            lora | {"lora_backend": "triton"},
        ]

    def __init__(self, job: Job) -> None:
        from sglang import Engine
        from sglang.srt.server_args import ServerArgs

        if job.adapters:
            job.options["max_lora_rank"] = job.rank
        # Renamed in 0.5.16; without it, larger batches than its default run without CUDA graphs.
        old = "cuda_graph_max_bs" in inspect.signature(ServerArgs).parameters
        graphs = "cuda_graph_max_bs" if old else "cuda_graph_max_bs_decode"
        self.flags = job.options | {
            "max_running_requests": job.most_requests, "chunked_prefill_size": job.most_tokens,
            "max_prefill_tokens": job.most_tokens, "context_length": job.context,
            "disable_radix_cache": True, "dtype": "bfloat16", graphs: job.most_requests,
            "skip_tokenizer_init": not job.pictures,
        }  # fmt: skip
        self._engine = Engine(
            model_path=job.base, random_seed=0, log_level="warning",
            **self.flags, **({"lora_paths": job.adapters} if job.adapters else {}),
        )  # fmt: skip

    def prepare(self, asks: Sequence[Ask]) -> Any:
        given: dict[str, Any] = {
            "sampling_params": [
                {"temperature": 0.0, "max_new_tokens": ask.tokens, "ignore_eos": True}
                for ask in asks
            ]
        }
        if isinstance(asks[0].prompt, str):
            given["prompt"] = [ask.prompt for ask in asks]
        else:
            given["input_ids"] = [ask.prompt for ask in asks]
        if asks[0].picture is not None:
            given["image_data"] = [picture_of(ask.picture or 0) for ask in asks]
        if any(ask.adapter for ask in asks):
            given["lora_path"] = [ask.adapter for ask in asks]
        return given

    def run(self, prepared: Any) -> list[int]:
        found = self._engine.generate(**prepared)
        return [each["meta_info"]["completion_tokens"] for each in found]

    def close(self) -> None:
        self._engine.shutdown()
