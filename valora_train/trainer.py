"""Trains adapters with their heads, evaluates them, and takes them back bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from valora_data.schema import Box, Domain, Sample, Split
from valora_train.evaluate import Matches, match
from valora_train.heads import DetectionHead, DetectionTargets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from valora_train.lmm import Lmm
    from valora_train.settings import HeadSettings, TrainSettings

MIN_SCORE = 0.01  # of the boxes that are measured; mAP and calibration need the unsure ones too


@dataclass(frozen=True)
class LabelledSplit:
    """A split that accuracy is measured on.

    Attributes:
        inputs: (n, …), see `Lmm.inputs`.
        samples: The samples with the truth.
    """

    inputs: Tensor
    samples: list[Sample]


class DomainData:
    """A domain's samples in the form that training wants.

    Args:
        domain: The domain.
        taught: Samples that the teacher labelled.
        labelled: Splits with the truth, for measuring.
        lmm: Encodes the images, once.
        flip: Whether to use mirrored images too.
    """

    def __init__(
        self,
        domain: Domain,
        taught: Sequence[Sample],
        labelled: Mapping[Split, list[Sample]],
        lmm: Lmm,
        flip: bool,
    ) -> None:
        from PIL import ImageOps

        self.domain = domain
        images = [sample.image for sample in taught]
        self.inputs = lmm.inputs(images)
        self.targets = self._targets(taught, lmm, mirror=False)
        if flip:
            mirrored = lmm.inputs([ImageOps.mirror(image) for image in images])
            self.inputs = torch.cat([self.inputs, mirrored])
            self.targets += self._targets(taught, lmm, mirror=True)
        self.splits = {
            split: LabelledSplit(lmm.inputs([sample.image for sample in samples]), samples)
            for split, samples in labelled.items()
        }

    def _targets(self, taught: Sequence[Sample], lmm: Lmm, mirror: bool) -> DetectionTargets:
        targets = DetectionTargets.of(taught, self.domain.labels, lmm.grid, mirror)
        return targets.to(lmm.device)


@dataclass(frozen=True)
class Evaluation:
    """What a domain reaches on a split.

    Attributes:
        accuracy: F1 at IoU 0.5 at the head's threshold.
        interval: 95 % bootstrap interval of it.
        map: COCO mAP.
        calibration_error: Expected calibration error of the confidences.
        boxes: Detections of every image, unsure ones included.
        threshold: Confidence from which a box counts.
    """

    accuracy: float
    interval: tuple[float, float]
    map: float
    calibration_error: float
    boxes: list[list[Box]]
    threshold: float


@dataclass
class _Bench:
    """An adapter at work: its heads, its optimiser and its source of random numbers."""

    optimizer: torch.optim.AdamW
    generator: torch.Generator
    heads: dict[str, DetectionHead] = field(default_factory=dict)


class Trainer:
    """Adapters on one LMM.

    Args:
        lmm: The model.
        data: Samples of every domain.
        settings: Of training.
        heads: Of the heads.
        first_head: (5, width + 1): weight and bias of a generic objectness and box head to start
            heads from, if the base model ships one.
    """

    def __init__(
        self,
        lmm: Lmm,
        data: Mapping[str, DomainData],
        settings: TrainSettings,
        heads: HeadSettings,
        first_head: Tensor | None = None,
    ) -> None:
        self._lmm = lmm
        self._data = data
        self._settings = settings
        self._head_settings = heads
        self._first_head = first_head
        self._benches: dict[str, _Bench] = {}

    # --- adapters -----------------------------------------------------------------------------

    def open(self, adapter: str, seed: int) -> None:
        """Add a fresh adapter; what it will learn depends on `seed` alone."""
        self._lmm.adapt(adapter, seed)
        weights = list(self._lmm.lora_parameters(adapter).values())
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": weights,
                    "peak": self._settings.lr,
                    "weight_decay": self._settings.weight_decay,
                }
            ]
        )
        self._benches[adapter] = _Bench(optimizer, torch.Generator().manual_seed(seed))

    def close(self, adapter: str) -> None:
        """Forget an adapter."""
        self._lmm.remove(adapter)
        del self._benches[adapter]

    def heads(self, adapter: str) -> dict[str, DetectionHead]:
        """The heads of an adapter, by domain."""
        return self._benches[adapter].heads

    def _add_head(self, adapter: str, domain: str, seed: int) -> None:
        bench = self._benches[adapter]
        bench.heads[domain] = head = self._new_head(domain, seed)
        group = {
            "params": list(head.parameters()),
            "peak": self._settings.head_lr,
            "weight_decay": 0.0,
        }
        bench.optimizer.add_param_group(group)

    def _new_head(self, domain: str, seed: int) -> DetectionHead:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = DetectionHead(
                self._lmm.width, self._data[domain].domain.labels, self._lmm.grid
            ).to(self._lmm.device)
        if self._first_head is not None:
            with torch.no_grad():
                head.linear.weight[:5].copy_(self._first_head[:, :-1])
                head.linear.bias[:5].copy_(self._first_head[:, -1])
        return head

    # --- training -----------------------------------------------------------------------------

    def train(
        self,
        adapter: str,
        domain: str,
        *,
        held: Sequence[str],
        rehearse: bool,
        seed: int,
        on_step: Callable[[int, int, float], None],
    ) -> None:
        """Train an open adapter on a domain that is new to it.

        Args:
            adapter: The adapter.
            domain: The new domain; it gets a new head.
            held: Domains that the adapter holds.
            rehearse: Mix samples of `held` in and train their heads on; otherwise those rest.
            seed: Of the new head.
            on_step: Called with step (from 1), number of steps, and loss.
        """
        bench = self._benches[adapter]
        self._add_head(adapter, domain, seed)
        rehearsed = list(held) if rehearse else []
        for name, head in bench.heads.items():
            head.requires_grad_(name == domain or name in rehearsed)
        self._lmm.activate(adapter)
        steps = self._settings.steps + self._settings.steps_per_held * len(rehearsed)
        for step in range(steps):
            self._set_lr(bench.optimizer, step / steps)
            batch = self._draw(bench.generator, domain, rehearsed)
            loss = self._loss(bench.heads, batch)
            bench.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            parameters = [p for group in bench.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._settings.clip)
            bench.optimizer.step()
            on_step(step + 1, steps, float(loss.detach()))

    def _set_lr(self, optimizer: torch.optim.Optimizer, progress: float) -> None:
        warmup = self._settings.warmup
        if progress < warmup:
            factor = (progress + 1e-3) / warmup
        else:
            factor = (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    def _draw(
        self, generator: torch.Generator, domain: str, rehearsed: Sequence[str]
    ) -> dict[str, Tensor]:
        """Indices of the samples of a batch, by domain."""
        size = self._settings.batch_size
        old = round(size * self._settings.rehearsal_share) if rehearsed else 0
        counts = {domain: size - old}
        start = int(torch.randint(max(len(rehearsed), 1), (), generator=generator))
        for offset, name in enumerate([*rehearsed[start:], *rehearsed[:start]]):
            counts[name] = old // len(rehearsed) + (offset < old % len(rehearsed))
        return {
            name: torch.randint(len(self._data[name].inputs), (count,), generator=generator)
            for name, count in counts.items()
            if count
        }

    def _loss(self, heads: Mapping[str, DetectionHead], batch: Mapping[str, Tensor]) -> Tensor:
        prompts = [self._data[name].domain.prompt for name, rows in batch.items() for _ in rows]
        inputs = torch.cat([self._data[name].inputs[rows] for name, rows in batch.items()])
        hidden = self._lmm.hidden(prompts, inputs)
        total = hidden.new_zeros(())
        for (name, rows), part in zip(
            batch.items(), hidden.split([len(rows) for rows in batch.values()]), strict=True
        ):
            targets = self._data[name].targets[rows]
            loss = heads[name].loss(heads[name](part), targets, self._head_settings)
            total = total + loss * (len(rows) / len(inputs))
        return total

    def probe(self, domain: str, seed: int) -> DetectionHead:
        """Train a head alone, on the frozen base: what the domain reaches without LoRA."""
        head = self._new_head(domain, seed)
        data = self._data[domain]
        self._lmm.activate(None)
        hidden = torch.cat(list(self._hidden(domain, data.inputs)))
        optimizer = torch.optim.AdamW(
            [{"params": head.parameters(), "peak": self._settings.head_lr}], weight_decay=0.0
        )
        generator = torch.Generator().manual_seed(seed)
        steps = self._settings.probe_steps
        for step in range(steps):
            self._set_lr(optimizer, step / steps)
            rows = torch.randint(len(hidden), (64,), generator=generator)
            loss = head.loss(head(hidden[rows]), data.targets[rows], self._head_settings)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return head

    def samples(self, domain: str, split: Split) -> list[Sample]:
        """The samples that a domain is measured on."""
        return self._data[domain].splits[split].samples

    # --- measuring ----------------------------------------------------------------------------

    def evaluate(
        self, adapter: str | None, domain: str, split: Split, head: DetectionHead | None = None
    ) -> Evaluation:
        """Measure a domain; on the validation split, calibrate its head first.

        Args:
            adapter: The adapter that acts; None for the frozen base.
            domain: The domain.
            split: `Split.VAL` or `Split.TEST`.
            head: Other than the adapter's own.
        """
        self._lmm.activate(adapter)
        if head is None:
            assert adapter is not None
            head = self._benches[adapter].heads[domain]
        part = self._data[domain].splits[split]
        with torch.no_grad():
            raw = torch.cat([head(hidden) for hidden in self._hidden(domain, part.inputs)]).cpu()
        if split is Split.VAL:
            head.calibrate(self._match(head, raw, domain, part)[1])
            matches = self._match(head, raw, domain, part)[1]
            head.threshold.fill_(matches.best_threshold())
        boxes, matches = self._match(head, raw, domain, part)
        threshold = float(head.threshold)
        return Evaluation(
            matches.f1(threshold),
            matches.f1_interval(threshold),
            matches.map,
            matches.calibration_error(),
            boxes,
            threshold,
        )

    def _hidden(self, domain: str, inputs: Tensor) -> Iterator[Tensor]:
        prompt = self._data[domain].domain.prompt
        for batch in inputs.split(64):
            with torch.no_grad():
                yield self._lmm.hidden([prompt] * len(batch), batch)

    def _match(
        self, head: DetectionHead, raw: Tensor, domain: str, part: LabelledSplit
    ) -> tuple[list[list[Box]], Matches]:
        boxes = [
            head.predict(row, sample.image.size, self._head_settings, MIN_SCORE)
            for row, sample in zip(raw, part.samples, strict=True)
        ]
        truth = [sample.answer.boxes for sample in part.samples]
        return boxes, match(boxes, truth, self._data[domain].domain.labels)

    # --- going back ---------------------------------------------------------------------------

    def snapshot(self, adapter: str) -> dict[str, Tensor]:
        """Everything that an adapter is and will become: weights, heads, optimiser, random state.

        Returns:
            Copies, by names that `restore` understands and safetensors can hold.
        """
        bench = self._benches[adapter]
        state = {f"lora/{key}": p for key, p in self._lmm.lora_parameters(adapter).items()}
        for domain, head in bench.heads.items():
            state |= {f"head/{domain}/{key}": value for key, value in head.state_dict().items()}
        named: list[tuple[str, Tensor]] = list(state.items())
        for key, parameter in self._named_parameters(adapter):
            for item, value in bench.optimizer.state.get(parameter, {}).items():
                named.append((f"optimizer/{item}/{key}", value))
        named += [("random/adapter", bench.generator.get_state())]
        named += [("random/torch", torch.get_rng_state())]
        return {key: value.detach().clone().contiguous().cpu() for key, value in named}

    def restore(self, adapter: str, state: Mapping[str, Tensor]) -> None:
        """Bring an adapter back to a snapshot; an adapter that is not open is opened."""
        if adapter in self._benches:
            self.close(adapter)
        self.open(adapter, seed=0)
        bench = self._benches[adapter]
        parts = _tree(state)
        for domain, values in parts.get("head", {}).items():
            self._add_head(adapter, domain, seed=0)
            bench.heads[domain].load_state_dict(values)
        with torch.no_grad():
            for key, parameter in self._lmm.lora_parameters(adapter).items():
                parameter.copy_(parts["lora"][key])
        for key, parameter in self._named_parameters(adapter):
            moments = {
                item: values[key].clone()
                for item, values in parts.get("optimizer", {}).items()
                if key in values
            }
            if moments:
                bench.optimizer.state[parameter] = moments
        bench.generator.set_state(parts["random"]["adapter"].clone())
        torch.set_rng_state(parts["random"]["torch"].clone())

    def _named_parameters(self, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._lmm.lora_parameters(adapter).items()
        for domain, head in self._benches[adapter].heads.items():
            for key, parameter in head.named_parameters():
                yield f"{domain}/{key}", parameter


def _tree(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Split names at their first slash, and those of heads and optimiser at their second."""
    tree: dict[str, Any] = {}
    for name, value in state.items():
        kind, rest = name.split("/", 1)
        if kind in ("head", "optimizer"):
            first, rest = rest.split("/", 1)
            tree.setdefault(kind, {}).setdefault(first, {})[rest] = value
        else:
            tree.setdefault(kind, {})[rest] = value
    return tree
