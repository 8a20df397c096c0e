"""What quantizing the base model's weights changes: a bundle's answers beside unquantized ones.

`python -m tests.bench.valora_serve.bench_quantized [BUNDLE]` serves a bundle's adapters and heads
on the base model as it is, with weights and activations of 8 bits (`fp8`), and with weights of 4
bits (`nf4`, and `nf4_packed`, which keeps them in 4 bits; without the bundle's heads, which are
refused on other weights than they were trained on).
Prompts are the golden images of the bundle with a question.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from tests.bench.valora_serve.harness import table
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.types import Request, SamplingParams

QUESTIONS = ("describe the image.", "what color is the star?", "how many things are there?")
SAMPLING = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=20)


def answers(engine, requests):
    """Last outputs, tokens and log probabilities of requests."""
    for request in requests:
        engine.add(engine.prepare(request))
    found = {request.id: ([], [], None) for request in requests}
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens, logprobs, _ = found[output.id]
            tokens += output.token_ids
            logprobs += output.logprobs
            found[output.id] = tokens, logprobs, output
    return found


def of_words(engine, names, images):
    """Answers of the language model, for each adapter, image and question."""
    asked = []
    for name in names:
        for number, image in enumerate(images):
            parts = [{"type": "image"}, {"type": "text", "text": QUESTIONS[number % 3]}]
            asked.append(
                Request(f"{name}-{number}", name, messages=[{"role": "user", "content": parts}],
                        images=[image], sampling=SAMPLING)
            )  # fmt: skip
    return answers(engine, asked)


def compare_words(found, wanted):
    """Share of first tokens that agree, and the mean difference of their log probabilities."""
    same, differences = [], []
    for name, (tokens, logprobs, _) in found.items():
        other, scores, _ = wanted[name]
        same.append(tokens[0] == other[0])
        known = {one.token: one.logprob for one in logprobs[0].top}
        differences += [
            abs(known[one.token] - one.logprob) for one in scores[0].top if one.token in known
        ]
    return float(np.mean(same)), float(np.mean(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", nargs="?", type=Path,
                        default=Path("valora_serve/demo/bundles/detection"))  # fmt: skip
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--quantizations", nargs="+", default=["none", "fp8", "nf4", "nf4_packed"])
    given = parser.parse_args()
    images = [Image.open(path).convert("RGB")
              for path in sorted((given.bundle / "golden").glob("*.png"))]  # fmt: skip
    adapters = {place.name: place for place in sorted((given.bundle / "adapters").iterdir())}
    rows, words, heads = [], None, None
    for quantize in given.quantizations:
        engine = Engine(EngineSettings(base=given.base, quantize=quantize, profile=False))
        served = not quantize.startswith("nf4")
        domains = []
        if served:
            engine.load("bundle", given.bundle)
            domains = [model.name for model in engine.store.models() if model.head]
        for name, folder in adapters.items():
            engine.load("adapter", folder, f"as-{name}")
        found = of_words(engine, [None, *(f"as-{name}" for name in adapters)], images)
        asked = [Request(f"{d}-{n}", d, images=[image], head=True)
                 for d in domains for n, image in enumerate(images)]  # fmt: skip
        logits = {name: last.head.logits for name, (_, _, last) in answers(engine, asked).items()}
        engine.close()
        words, heads = words or found, heads or logits
        agree, difference = compare_words(found, words)
        errors = [np.linalg.norm(logits[name] - heads[name]) / np.linalg.norm(heads[name])
                  for name in logits]  # fmt: skip
        rows.append([quantize, agree, difference, float(np.mean(errors)) if errors else None])
    table(f"{given.bundle.name} on {given.base}: {len(images)} images",
          ["weights", "first tokens that agree", "mean difference of log probabilities",
           "mean relative error of heads' logits"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
