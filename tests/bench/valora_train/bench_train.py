"""LoRA training throughput on LLaVA-1.5-7B's shape beside plain PEFT with transformers' Trainer.

Random weights, random images, written answers; the baseline learns the very batches that ours drew.
Tokens are those of prompts, images and answers without padding, FLOPs 4 for each of them and each
frozen weight of the language model. Needs a CUDA GPU; `--tiny` tries it anywhere.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from tests.bench.valora_serve.harness import table
from tests.bench.valora_serve.serve_models import llava_7b
from tests.support.lmm_checkpoints import save_llava
from valora_data.models.registry import architecture_of
from valora_data.schema import Answer, Domain, Sample, Split, Task
from valora_train.fusion.samples import DomainData
from valora_train.fusion.trainer import Trainer
from valora_train.model.adapters import target_pattern
from valora_train.model.lmm import Lmm
from valora_train.settings import HeadSettings, LoraSettings, ModelSettings, TrainSettings
from valora_train.tasks.registry import make_task

WORDS = tuple("red green blue star moon left right top small big the a of and one".split())  # noqa: SIM905


def samples(count: int, side: int) -> list[Sample]:
    """Questions of 8 to 60 words and answers of 4 to 40, each with an image."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        noise = rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        question = " ".join(rng.choice(WORDS, int(rng.integers(8, 61))))
        answer = " ".join(rng.choice(WORDS, int(rng.integers(4, 41))))
        image = Image.fromarray(noise).resize((side, side))
        found.append(
            Sample(f"s{number}", image, Answer(answers=(answer,)), prompt=question)
        )  # fmt: skip
    return found


def checkpoint(folder: Path, tiny: bool) -> Path:
    """A LLaVA with a processor; the true shape unless `tiny`."""
    save_llava(folder, side=32 if tiny else 336)
    if tiny:
        return folder
    from transformers import AutoProcessor, CLIPImageProcessor

    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = CLIPImageProcessor(
        size={"height": 336, "width": 336}, do_center_crop=False
    )
    processor.patch_size = 14
    model = llava_7b("cuda")
    model.config.image_token_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


class Recording(Trainer):
    """Ours, keeping what it drew."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.drawn: list[list[int]] = []

    def _draw(self, *args):
        batch = super()._draw(*args)
        self.drawn.append(batch["some"].tolist())
        return batch


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ours(
    folder: Path, model: ModelSettings, train: TrainSettings, given: list[Sample], compiled: bool
) -> tuple[float, list[list[int]], list[int], int]:
    """Seconds a step, the batches, tokens of each sample, frozen weights."""
    if model.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    lmm = Lmm(replace(model, id=str(folder)), train.lora)
    domain = Domain("some", Task.VQA, (), "{}", 0.5)
    data = DomainData(make_task(domain, HeadSettings(), lmm), given, {Split.VAL: given[:1]}, lmm,
                      mirror=False)  # fmt: skip
    trainer = Recording(lmm, {"some": data}, train)
    trainer.open("one", seed=0)
    if compiled:
        for layer in lmm.language_model.layers:
            layer.compile()
    times: list[float] = []
    trainer.train("one", ["some"], held=(), rehearse=False, seed=0,
                  on_step=lambda *_: times.append(now(model.device)))  # fmt: skip
    weights = sum(p.numel() for n, p in lmm.language_model.named_parameters()
                  if "lora" not in n and "embed" not in n)  # fmt: skip
    weights += lmm.model.lm_head.weight.numel()
    steps = np.diff(times[len(times) // 3 :])
    return float(np.median(steps)), trainer.drawn, [i.length for i in data.inputs], weights


def plain(
    folder: Path,
    model: ModelSettings,
    train: TrainSettings,
    given: list[Sample],
    drawn: list[list[int]],
    checkpointing: bool,
) -> float:
    """Seconds a step of PEFT with transformers' Trainer on the same batches."""
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForImageTextToText,
        AutoProcessor,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers import Trainer as PlainTrainer

    if model.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    processor = AutoProcessor.from_pretrained(folder)
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, model.dtype))
    base.requires_grad_(False)
    lora = train.lora
    targets = target_pattern(lora, architecture_of(base))
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    peft = get_peft_model(base, config)
    end = processor.tokenizer.eos_token_id
    rows = []
    for sample in given:
        parts = [{"type": "text", "text": sample.prompt}, {"type": "image"}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        inputs = processor(text=[text], images=[sample.image], return_tensors="pt",
                           add_special_tokens=False)  # fmt: skip
        answer = processor.tokenizer(sample.answer.answers[0], add_special_tokens=False)
        said = torch.tensor([*answer["input_ids"], end])
        ids = torch.cat([inputs["input_ids"][0], said])
        labels = torch.cat([torch.full_like(inputs["input_ids"][0], -100), said])
        rows.append({"ids": ids, "labels": labels, "pixels": inputs["pixel_values"][0]})
    order = [row for batch in drawn for row in batch]

    def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        pad = processor.tokenizer.pad_token_id or 0
        ids = pad_sequence([one["ids"] for one in batch], True, pad)
        lengths = torch.tensor([len(one["ids"]) for one in batch])
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
            "labels": pad_sequence([one["labels"] for one in batch], True, -100),
            "pixel_values": torch.stack([one["pixels"] for one in batch]),
        }

    class Clock(TrainerCallback):
        times: list[float] = []  # noqa: RUF012

        def on_step_end(self, *_, **__) -> None:
            self.times.append(now(model.device))

    class InOrder(PlainTrainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    clock = Clock()
    clock.times = []
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place, per_device_train_batch_size=train.micro_batch or train.batch_size,
            gradient_accumulation_steps=train.batch_size // (train.micro_batch or train.batch_size),
            bf16=model.dtype == "bfloat16" and model.device == "cuda", max_steps=len(drawn),
            learning_rate=train.lr, gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False}, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=model.device == "cpu", dataloader_num_workers=0,
        )  # fmt: skip
        InOrder(peft, arguments, train_dataset=[rows[row] for row in order], data_collator=collate,
                callbacks=[clock]).train()  # fmt: skip
    return float(np.median(np.diff(clock.times[len(clock.times) // 3 :])))


def matrix_rate(device: str, size: int) -> float:
    """FLOP/s of a bf16 product of size³, measured."""
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    for _ in range(3):
        a @ b
    start = now(device)
    for _ in range(10):
        a @ b
    return 10 * 2 * size**3 / (now(device) - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="compiled layers, too")
    given = parser.parse_args()
    device = "cpu" if given.tiny else "cuda"
    rate = matrix_rate(device, 512 if given.tiny else 8192)
    model = ModelSettings(
        device=device, dtype="float32" if given.tiny else "bfloat16", batch_size=8,
        attention="sdpa", keep_features=False,
    )  # fmt: skip
    train = TrainSettings(
        steps=given.steps, batch_size=16, micro_batch=4, group_by_length=True, lr=2e-4,
        lora=LoraSettings(rank=16, alpha=32),
    )  # fmt: skip
    rows: list[list[object]] = []

    def add(name: str, step: float, tokens: float, weights: int) -> None:
        memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
        rows.append([name, step, tokens / step, 4 * weights * tokens / step / rate, memory])
        print(rows[-1], flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()

    with tempfile.TemporaryDirectory() as place:
        folder = checkpoint(Path(place), given.tiny)
        data = samples(96, 32 if given.tiny else 336)
        for checkpointing, micro in ((True, 4), (False, 4), (False, 16)):
            run = replace(train, micro_batch=micro)
            shape = replace(model, gradient_checkpointing=checkpointing)
            label = f"{'checkpointed, ' if checkpointing else ''}{micro} at once"
            step, drawn, lengths, weights = ours(folder, shape, run, data, False)
            tokens = float(np.mean([sum(lengths[row] for row in batch) for batch in drawn]))
            add(f"ours; {label}", step, tokens, weights)
            step = plain(folder, shape, run, data, drawn, checkpointing)
            add(f"PEFT and Trainer; {label}", step, tokens, weights)
            if given.compiled and not checkpointing:
                step = ours(folder, shape, run, data, True)[0]
                add(f"ours, compiled; {label}", step, tokens, weights)
    print(f"matrix rate {rate / 1e12:.0f} TFLOP/s")
    table("Training LoRA of rank 16, 16 samples a step",
          ["way", "s per step", "tokens/s", "MFU", "GB"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
