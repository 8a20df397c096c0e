"""vLLM's offline engine (`vllm.LLM`), with the settings of its documentation on LoRA."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tests.bench.valora_serve.peers.base import Ask, Job, Peer, picture_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKED = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}
"""Linears that vLLM packs, and one of those inside."""


class Vllm(Peer):
    """vLLM."""

    title = "vLLM"
    package = "vllm"
    requirement = "vllm>=0.20"
    # transformers 5.17 has no PixtralRotaryEmbedding, which vLLM 0.25 and 0.26 import for LLaVA.
    pins = ("transformers<5.17",)

    @staticmethod
    def variants(adapters: int, modules: Sequence[str]) -> list[dict[str, Any]]:
        if not adapters:
            return [{}]
        packed = [whole for whole, part in PACKED.items() if part in modules]
        lora = {
            "enable_lora": True, "max_loras": adapters, "max_cpu_loras": adapters,
            # It computes LoRA for every linear that the model has otherwise.
            "lora_target_modules": [*modules, *packed],
        }  # fmt: skip
        streams = {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}  # LoRA beside the layer that it belongs to
        return [lora, lora | {"specialize_active_lora": True}, lora | streams]

    def __init__(self, job: Job) -> None:
        # Settings in capitals are environment variables, which vLLM reads when it is imported.
        os.environ.update({key: one for key, one in job.options.items() if key.isupper()})
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        if job.adapters:
            job.options["max_lora_rank"] = job.rank
        pictures = {"limit_mm_per_prompt": {"image": 1 if job.pictures else 0}}
        self.flags = job.options | pictures | {
            "max_num_seqs": job.most_requests, "max_num_batched_tokens": job.most_tokens,
            "max_model_len": job.context, "enable_prefix_caching": False, "dtype": "bfloat16",
            "mm_processor_cache_gb": 0,
        }  # fmt: skip
        given = {key: one for key, one in self.flags.items() if not key.isupper()}
        self._llm = LLM(job.base, seed=0, **given)
        self._adapters = {
            name: LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(job.adapters.items(), 1)
        }

    def prepare(self, asks: Sequence[Ask]) -> Any:
        from vllm import SamplingParams

        prompts: list[dict[str, Any]] = []
        for ask in asks:
            if isinstance(ask.prompt, str):
                prompts.append({"prompt": ask.prompt})
            else:
                prompts.append({"prompt_token_ids": ask.prompt})
            if ask.picture is not None:
                prompts[-1]["multi_modal_data"] = {"image": picture_of(ask.picture)}
        sampling = [
            SamplingParams(
                temperature=0.0, max_tokens=ask.tokens, ignore_eos=True, detokenize=False
            )
            for ask in asks
        ]
        return prompts, sampling, [ask.adapter and self._adapters[ask.adapter] for ask in asks]

    def run(self, prepared: Any) -> list[int]:
        prompts, sampling, adapters = prepared
        lora = adapters if any(adapters) else None
        found = self._llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        return [len(each.outputs[0].token_ids) for each in found]

    def close(self) -> None:
        del self._llm  # ends the engine's process
