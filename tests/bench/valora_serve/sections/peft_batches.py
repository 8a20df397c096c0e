"""PEFT beside the engine, on requests that arrive over time: mixed batches in `generate`.

As soon as a batch has ended, all requests that have arrived meanwhile are the next one. Answers of
a batch end together, so that only the time to the end of an answer is measured.
"""

from __future__ import annotations

import gc
import time

import numpy as np
import torch

from tests.bench.valora_serve.serve_models import BASES, modules_of
from valora_data.models.base import IMAGE, PIXELS

MOST = 32
"""Most requests of a batch."""


class PeftBatches:
    """The bench's model once more, with as many adapters of PEFT; engines must be stopped.

    Args:
        bench: The bench.
        names: Names of the adapters.
        rank: Their rank.
    """

    def __init__(self, bench, names, rank=64):
        from peft import LoraConfig, get_peft_model

        arguments = bench.arguments
        given = {"context": getattr(arguments, "context", 4096)}
        for name in ("layers", "width", "vision"):
            if getattr(arguments, name, None) is not None:
                given[name] = getattr(arguments, name)
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=modules_of(bench.lmm.targets, bench.targets)[0]
        )
        model = get_peft_model(BASES[bench.base](bench.device, **given), config, names[0])
        for name in names[1:]:
            model.add_adapter(name, config)
        self.bench, self.model = bench, model.to(bench.device, bench.lmm.dtype).eval()

    def close(self):
        """Free the model."""
        del self.model
        gc.collect()
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()

    def answer(self, batch, tokens):
        """Generate as many tokens for each request of a batch; returns [batch, tokens] ids."""
        lmm, device = self.bench.lmm, self.bench.device
        prompts = [one.prompt.ids for one in batch]
        longest = max(map(len, prompts))
        ids = torch.full((len(batch), longest), 2)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        visuals = [visual for one in batch for visual in one.prompt.visuals]
        seen = {
            name: torch.cat([visual.tensors[name] for visual in visuals]).to(device)
            for name in visuals[0].tensors
        }
        seen[PIXELS[IMAGE]] = seen[PIXELS[IMAGE]].to(self.bench.lmm.dtype)
        if lmm.three_positions:  # positions in time, height and width follow from it
            seen["mm_token_type_ids"] = (ids == lmm.image_token).int().to(device)
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), do_sample=False,
                min_new_tokens=tokens, max_new_tokens=tokens,
                adapter_names=[one.request.model for one in batch], **seen,
            )  # fmt: skip
        return found[:, longest:].tolist()  # waits for the device

    def drive(self, asked, times, within=None):
        """Answer requests that arrive at the given seconds.

        Args:
            asked: What `Pictures.prepared` made, all with the same number of tokens to generate.
            times: Seconds at which each arrives, ascending.
            within: Seconds after which no further batch begins; None to answer all.

        Returns:
            Seconds from when a request was due to the end of its answer, by its number.
        """
        tokens = asked[0].request.sampling.max_tokens
        latency, begun, start = {}, 0, time.monotonic()
        while begun < len(asked):
            now = time.monotonic() - start
            if within is not None and now > within:
                break
            come = int(np.searchsorted(times, now, side="right"))
            batch = range(begun, min(come, begun + MOST))
            if not batch:
                time.sleep(max(0.0, min(times[begun] - now, 0.001)))
                continue
            self.answer([asked[i] for i in batch], tokens)
            ended = time.monotonic() - start
            latency |= {i: ended - times[i] for i in batch}
            begun = batch.stop
        return latency
