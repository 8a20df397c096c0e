"""Trains adapters with their heads, evaluates them, and saves and restores them exactly."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from valora_data.cpu import usable_cores
from valora_data.schema import Sample, Split
from valora_train.fusion.batches import pieces, shares, side_by_side
from valora_train.fusion.samples import evenly
from valora_train.fusion.watch import Watch
from valora_train.model import memory
from valora_train.model.lanes import Lanes
from valora_train.model.prompts import Encoded, HeadInputs, HiddenStates
from valora_train.model.team import Team
from valora_train.tasks.base import HeadTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from valora_data.checkpoint import Checkpoint
    from valora_train.fusion.samples import DomainData, LabelledSplit
    from valora_train.model.lmm import Lmm
    from valora_train.settings import TrainSettings
    from valora_train.tasks.base import DomainTask, Evaluation

    OnFigures = Callable[[int, Mapping[str, float]], None]

FROZEN_BATCH = 64  # samples per forward pass of the frozen base, and per step of a head alone
LENGTH_RATIO = 1.3  # domains whose longest samples differ by more are not padded to one length
PASS_FLOP = 1e12  # that a GPU could do while one more pass, forward and backward, is launched
OVERSAMPLING = 8  # samples drawn for each one used, where samples are grouped by length


def head_inputs_bytes(device: torch.device) -> float:
    """Most bytes of what a head alone reads that stay on a device: a sixteenth of a GPU."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory / 16


def pass_tokens(lmm: Lmm) -> float:
    """Padding that costs less than another pass: tokens of a small model on a GPU, none on a CPU.

    There, a pass of a small model takes as long as the host takes to launch its kernels.
    """
    if lmm.device.type == "cpu":
        return 0.0
    weights: int = sum(one.numel() for one in lmm.language_model.parameters())
    return PASS_FLOP / (6.0 * weights)


@dataclass
class _OpenAdapter:
    """The optimiser, random generator and heads of an open adapter."""

    optimizer: torch.optim.AdamW
    generator: torch.Generator
    heads: dict[str, nn.Module] = field(default_factory=dict)


@dataclass
class _Best:
    """The best step of an attempt so far.

    Attributes:
        step: The step; 0 before the first that is compared.
        reached: Mean accuracy of the domains on validation, in shares of the largest value.
        worse: Number of steps compared since, none of which was better.
        tensors: Snapshot of the adapter after that step.
    """

    step: int = 0
    reached: float = -math.inf
    worse: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)


def _accuracy_of(task: HeadTask, head: nn.Module, read: HeadInputs, part: LabelledSplit) -> float:
    """Accuracy of a copy of a head that is being trained."""
    other = copy.deepcopy(head)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        raw = task.head_outputs(other, read).cpu()
        task.calibrate(other, raw, part.samples)
        predictions = task.predictions(other, raw, part.samples)
    return task.evaluate(other, predictions, part.samples).accuracy


class Trainer:
    """Trains and evaluates the adapters of one LMM.

    Args:
        lmm: The model.
        data: Samples of every domain.
        settings: Training settings.
        team: The processes that train together; None for this process alone.
    """

    def __init__(
        self,
        lmm: Lmm,
        data: Mapping[str, DomainData],
        settings: TrainSettings,
        team: Team | None = None,
    ) -> None:
        self._lmm = lmm
        self._data = data
        self._settings = settings
        self._team = team or Team()
        self._open: dict[str, _OpenAdapter] = {}
        self._pass_tokens = pass_tokens(lmm)
        # Sharded layers and adapters that act at decoding only keep a state of the batch.
        apart = lmm.device.type == "cpu" and not (lmm.sharded or settings.lora.decode_only)
        self._lanes = Lanes((settings.threads or usable_cores()) if apart else 1)

    # --- adapters -----------------------------------------------------------------------------

    def open(self, adapter: str, seed: int, rank: int | None = None) -> None:
        """Add a fresh adapter, whose weights and training batches depend on `seed` alone.

        Args:
            adapter: Name of the adapter.
            seed: Seed of its weights and of its batches.
            rank: Its rank; None for that of the settings.
        """
        self._lmm.adapters.add(adapter, seed, rank)
        weights = list(self._lmm.adapters.parameters(adapter).values())
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": weights,
                    "peak": self._settings.lr,
                    "weight_decay": self._settings.weight_decay,
                }
            ]
        )
        self._open[adapter] = _OpenAdapter(optimizer, torch.Generator().manual_seed(seed))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the open adapters."""
        return tuple(self._open)

    def close(self, adapter: str) -> None:
        """Remove an adapter with its heads and its optimiser."""
        self._lmm.adapters.remove(adapter)
        del self._open[adapter]

    def heads(self, adapter: str) -> dict[str, nn.Module]:
        """Heads of an adapter by domain; domains whose answers the model writes have none."""
        return self._open[adapter].heads

    def _add_head(self, adapter: str, domain: str, seed: int) -> None:
        opened = self._open[adapter]
        head = self._new_head(domain, seed)
        if head is None:
            return
        opened.heads[domain] = head
        group = {
            "params": list(head.parameters()),
            "peak": self._settings.head_lr,
            "weight_decay": 0.0,
        }
        opened.optimizer.add_param_group(group)

    def _new_head(self, domain: str, seed: int) -> nn.Module | None:
        data = self._data[domain]
        return data.task.new_head(self._lmm, data.inputs[0], seed)

    # --- training -----------------------------------------------------------------------------

    def train(
        self,
        adapter: str,
        new: Sequence[str],
        *,
        held: Sequence[str],
        rehearse: bool,
        seed: int,
        on_step: Callable[[int, int, float], None],
        on_figures: OnFigures = lambda *_: None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Train an open adapter on domains that are new to it, several of them jointly.

        A training that was killed continues from its checkpoint; what follows is what would have
        followed, to the bit.

        Args:
            adapter: Name of the adapter.
            new: The new domains; each gets a new head and an equal part of every batch.
            held: Domains that the adapter already holds.
            rehearse: Whether batches also hold samples of `held`, and their heads are trained too;
                otherwise those heads are frozen.
            seed: Seed of the new heads.
            on_step: Called with step (from 1), number of steps, and loss; also for the steps before
                the checkpoint.
            on_figures: Called with step and further figures by name, before `on_step`: learning
                rates, and at some steps the accuracy on a part of the validation split. They are
                for people; the training does not depend on them.
            checkpoint: Where the leading process writes checkpoints; None for none.
        """
        rehearsed = list(held) if rehearse else []
        names = f"{', '.join(new)} after {', '.join(held)}"
        training = f"{adapter}: {names} with {rehearsed}, seed {seed}"
        losses, curve, best = self._resume(adapter, training, checkpoint)
        if not losses:
            for name in new:
                self._add_head(adapter, name, seed)
        opened = self._open[adapter]
        for name, head in opened.heads.items():
            head.requires_grad_(name in new or name in rehearsed)
        self._lmm.adapters.activate(adapter)
        steps = self._settings.steps_for(len(new), len(rehearsed))
        slowness = max(self._slowness(name, opened.heads) for name in new)
        watch = Watch(self._settings, steps, len(losses), [*held, *new], slowness)
        candidates = self._settings.candidates(steps)
        for step, loss in enumerate(losses):
            on_figures(step + 1, self._rates(step / steps) | curve.get(str(step + 1), {}))
            on_step(step + 1, steps, loss)
        for step in range(len(losses), steps):
            self._set_lr(opened.optimizer, step / steps)
            batch = self._draw(opened.generator, new, rehearsed)
            opened.optimizer.zero_grad(set_to_none=True)
            parameters = [p for group in opened.optimizer.param_groups for p in group["params"]]
            loss = self._learn(opened.heads, batch, parameters)
            loss = self._team.add_up(parameters, loss)
            nn.utils.clip_grad_norm_(parameters, self._settings.clip)
            opened.optimizer.step()
            losses.append(loss)
            ended = step + 1 == steps
            looks = step + 1 in watch.points | candidates
            if looks and all(p.isfinite().all() for p in parameters):
                if step + 1 in watch.points and self._team.agree(watch.due(step + 1)):
                    with watch.measuring():
                        found = self._validated(adapter, watch.domains, watch.samples)
                    curve[str(step + 1)] = {f"validation/{name}": v for name, v in found.items()}
                if step + 1 in candidates:
                    ended |= self._compare(best, adapter, watch.domains, step + 1)
            if checkpoint is not None and self._team.leads and not ended:
                checkpoint.save(
                    training,
                    lambda: {
                        "tensors": self.snapshot(adapter), "losses": losses, "curve": curve,
                        "best": dict(vars(best)),
                    },
                )  # fmt: skip
            on_figures(step + 1, self._rates(step / steps) | curve.get(str(step + 1), {}))
            on_step(step + 1, steps, loss)
            if ended:
                break
        if best.step not in (0, len(losses)):
            self.restore(adapter, best.tensors)

    def _compare(self, best: _Best, adapter: str, domains: Sequence[str], step: int) -> bool:
        """Remember the best step so far; return whether no better one is awaited.

        Requirements do not matter, so that another fusion can take the attempt over.
        """
        found = self._validated(adapter, domains)
        largest = {name: self.task(name).spec.largest for name in domains}
        reached = sum(found[name] / largest[name] for name in domains) / len(domains)
        reached = self._team.agree(reached)
        if best.step and not reached > best.reached:
            best.worse += 1
            return 0 < self._settings.patience <= best.worse
        best.reached, best.step, best.worse = reached, step, 0
        best.tensors = self.snapshot(adapter)
        return False

    def _slowness(self, domain: str, heads: Mapping[str, nn.Module]) -> int:
        """Forward passes for each answer: a written one takes many, of one token each."""
        written = domain not in heads or self._data[domain].task.remembers
        return max(1, self._data[domain].task.settings.max_tokens // 8) if written else 1

    def _validated(
        self, adapter: str, domains: Sequence[str], most: int | None = None
    ) -> dict[str, float]:
        """Accuracy on at most `most` samples of the validation split.

        Nothing that training reads changes: calibration, which changes heads, gets copies.
        """
        found = {}
        with torch.random.fork_rng(devices=[]):
            for name in domains:
                head = copy.deepcopy(self._open[adapter].heads.get(name))
                found[name] = self.evaluate(adapter, name, Split.VAL, head, most).accuracy
        return found

    def _rates(self, progress: float) -> dict[str, float]:
        factor = self._lr_factor(progress)
        return {"lr": self._settings.lr * factor, "head_lr": self._settings.head_lr * factor}

    def _resume(
        self, adapter: str, training: str, checkpoint: Checkpoint | None
    ) -> tuple[list[float], dict[str, dict[str, float]], _Best]:
        """Restore the leader's checkpoint on every process.

        Returns:
            Losses and curve up to it, and the best step so far.
        """
        saved = checkpoint.load(training) if checkpoint is not None and self._team.leads else None
        saved = self._team.agree(saved)
        if saved is None:
            return [], {}, _Best()
        self.restore(adapter, saved["tensors"])
        return saved["losses"], saved.get("curve", {}), _Best(**saved.get("best", {}))

    def _set_lr(self, optimizer: torch.optim.Optimizer, progress: float) -> None:
        factor = self._lr_factor(progress)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    def _lr_factor(self, progress: float) -> float:
        """Share of the peak learning rate after a share of the steps."""
        warmup = self._settings.warmup
        if progress < warmup:
            return (progress + 1e-3) / warmup
        return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2

    def _draw(
        self, generator: torch.Generator, new: Sequence[str], rehearsed: Sequence[str]
    ) -> dict[str, Tensor]:
        """Draw a batch: indices of training samples, by domain."""
        size = self._settings.batch_size
        # A new domain gets no smaller share than a rehearsed one.
        most = len(rehearsed) / (len(rehearsed) + len(new))
        old = round(size * min(self._settings.rehearsal_share, most))
        start = int(torch.randint(max(len(rehearsed), 1), (), generator=generator))
        first = int(torch.randint(len(new), (), generator=generator)) if len(new) > 1 else 0
        counts = shares(size - old, new, first) | shares(old, rehearsed, start)
        return {
            name: self._rows(self._data[name].inputs, count, generator)
            for name, count in counts.items()
            if count
        }

    def _rows(self, inputs: Sequence[Encoded], count: int, generator: torch.Generator) -> Tensor:
        if not self._settings.group_by_length:
            return torch.randint(len(inputs), (count,), generator=generator)
        offered = torch.randint(len(inputs), (count * OVERSAMPLING,), generator=generator).tolist()
        offered.sort(key=lambda row: len(inputs[row].ids))
        start = count * int(torch.randint(OVERSAMPLING, (), generator=generator))
        return torch.tensor(offered[start : start + count])

    def _learn(
        self,
        heads: Mapping[str, nn.Module],
        batch: Mapping[str, Tensor],
        weights: Sequence[nn.Parameter] = (),
    ) -> float:
        """Add the gradients of this process's share of a batch and return its part of the loss.

        Args:
            heads: Heads by domain.
            batch: Indices of training samples, by domain.
            weights: All that learns, for parts of the batch that are computed side by side; empty
                to compute them one after the other.
        """
        size = sum(len(rows) for rows in batch.values())
        loss, total = 0.0, torch.zeros((), device=self._lmm.device)
        for part in self._parts(batch):
            mine = {name: self._team.share(rows) for name, rows in part.items()}
            mine = {name: rows for name, rows in mine.items() if len(rows)}
            if mine and weights and self._lanes.count > 1 and not self._remember(mine):
                loss += self._learn_side_by_side(heads, mine, size, weights)
                continue
            # Sharded layers need as many forward passes on every process.
            spare = {} if mine else {name: rows[:1] for name, rows in list(part.items())[:1]}
            loss_of_part = self._loss(heads, mine or spare, size) * (1.0 if mine else 0.0)
            loss_of_part.backward()
            total = total + loss_of_part.detach()
        return loss + float(total)  # once, so that a GPU is not waited for after each part

    def _remember(self, domains: Iterable[str]) -> bool:
        return any(self._data[name].task.remembers for name in domains)

    def _learn_side_by_side(
        self,
        heads: Mapping[str, nn.Module],
        batch: Mapping[str, Tensor],
        size: int,
        weights: Sequence[nn.Parameter],
    ) -> float:
        """As `_learn`; gradients are added up in the order of the parts, so as not to vary."""
        learning = [weight for weight in weights if weight.requires_grad]

        def learn(part: Mapping[str, Tensor]) -> tuple[float, Sequence[Tensor | None]]:
            loss = self._loss(heads, part, size)
            return float(loss.detach()), torch.autograd.grad(loss, learning, allow_unused=True)

        parts = side_by_side(batch, self._lanes.count)
        found = self._lanes.run([partial(learn, part) for part in parts])
        for _, gradients in found:
            for weight, gradient in zip(learning, gradients, strict=True):
                if gradient is not None:
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return sum(loss for loss, _ in found)

    def _parts(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Split a batch into micro-batches: bounded in size, and of similar length."""
        most = self._settings.micro_batch or sum(len(rows) for rows in batch.values())
        groups: list[dict[str, Tensor]] = []
        shortest = longest = rows_of_group = 0
        for length, name in sorted(
            (self._longest(name, rows), name) for name, rows in batch.items()
        ):
            padding = rows_of_group * (length - longest)
            if not groups or (length > LENGTH_RATIO * shortest and padding > self._pass_tokens):
                groups.append({})
                shortest, rows_of_group = length, 0
            groups[-1][name] = batch[name]
            longest, rows_of_group = length, rows_of_group + len(batch[name])
        parts: list[dict[str, Tensor]] = []
        for group in groups:
            inside = {name: group[name] for name in batch if name in group}  # in the batch's order
            parts += pieces(inside, most)
        return parts

    def _longest(self, name: str, rows: Tensor) -> int:
        inputs = self._data[name].inputs
        return max(len(inputs[row].ids) for row in rows.tolist())

    def _loss(
        self, heads: Mapping[str, nn.Module], batch: Mapping[str, Tensor], size: int
    ) -> Tensor:
        """Loss of some samples of a batch of `size` samples, as their part of its mean."""
        total = torch.zeros((), device=self._lmm.device)
        for remembers in (False, True):
            mine = {
                name: rows
                for name, rows in batch.items()
                if self._data[name].task.remembers is remembers
            }
            if not mine:
                continue
            states = self._batch_states(heads, mine, remembers)
            for (name, rows), part in zip(
                mine.items(), states.split([len(rows) for rows in mine.values()]), strict=True
            ):
                data = self._data[name]
                targets = None if data.targets is None else data.targets[rows]
                loss = data.task.loss(heads.get(name), part, targets, self._lmm)
                total = total + loss * (len(rows) / size)
        return total

    def _batch_states(
        self, heads: Mapping[str, nn.Module], batch: Mapping[str, Tensor], remembers: bool
    ) -> HiddenStates:
        """Hidden states of a batch, all of whose domains read a memory, or none."""
        encoded = [
            self._data[name].inputs[row] for name, rows in batch.items() for row in rows.tolist()
        ]
        if not remembers:
            return self._lmm.states(encoded)
        memories: list[Any] = [heads.get(name) for name, rows in batch.items() for _ in rows]
        return memory.states(self._lmm, encoded, memories)

    @contextmanager
    def before_each_step(self, adapter: str, call: Callable[[], None]) -> Iterator[None]:
        """Call a function before each optimiser step of an open adapter, to change gradients."""
        hook = self._open[adapter].optimizer.register_step_pre_hook(lambda *_: call())
        try:
            yield
        finally:
            hook.remove()

    def squared_gradients(self, adapter: str, domain: str, batches: int) -> dict[str, Tensor]:
        """Mean squares of the gradients of a domain's loss: an estimate of Fisher information.

        Args:
            adapter: The adapter.
            domain: A domain that it holds.
            batches: Number of batches.

        Returns:
            One tensor for each weight of the adapter, of its shape.
        """
        opened = self._open[adapter]
        self._lmm.adapters.activate(adapter)
        weights = self._lmm.adapters.parameters(adapter)
        found = {key: torch.zeros_like(weight) for key, weight in weights.items()}
        for _ in range(batches):
            opened.optimizer.zero_grad(set_to_none=True)
            self._learn(opened.heads, self._draw(opened.generator, (domain,), ()))
            for key, weight in weights.items():
                if weight.grad is not None:
                    found[key] += weight.grad**2 / batches
        opened.optimizer.zero_grad(set_to_none=True)
        return found

    def train_head_only(
        self,
        domain: str,
        seed: int,
        on_step: Callable[[int, int, float], None] = lambda *_: None,
        on_figures: OnFigures = lambda *_: None,
    ) -> nn.Module | None:
        """Train a new head on the frozen base model.

        Args:
            domain: The domain.
            seed: Seed of the head and of its batches.
            on_step: Called with step (from 1), number of steps, and loss.
            on_figures: Called with step and further figures by name, see `train`.

        Returns:
            The head; None where the model writes its answers.
        """
        head = self._new_head(domain, seed)
        if head is None:
            return None
        data = self._data[domain]
        self._lmm.adapters.activate(None)
        if data.task.remembers:
            self._train_memory(domain, head, seed, on_step, on_figures)
            return head
        kept = evenly(len(data.inputs), self._settings.probe_samples)
        read = self._read([data.inputs[row] for row in kept])
        targets = data.targets[torch.tensor(kept)]
        optimizer = torch.optim.AdamW(
            [{"params": head.parameters(), "peak": self._settings.head_lr}], weight_decay=0.0
        )
        generator = torch.Generator().manual_seed(seed)
        steps = self._settings.probe_steps
        watch = Watch(self._settings, steps, 0, [domain], 1)
        shown: HeadInputs | None = None
        for step in range(steps):
            self._set_lr(optimizer, step / steps)
            rows = torch.randint(len(kept), (FROZEN_BATCH,), generator=generator)
            seen = read[rows].to(self._lmm.device)
            loss = data.task.head_loss(head, seen, targets[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            figures = {"lr": self._settings.head_lr * self._lr_factor(step / steps)}
            # Without LoRA the hidden states are the same at every step, so that a look at the
            # validation split costs one forward pass of few samples.
            if isinstance(data.task, HeadTask) and step + 1 in watch.points:
                part = data.splits[Split.VAL].every(watch.samples)
                if shown is None:
                    states = self._states(part.inputs)
                    shown = HeadInputs.cat([one.head_inputs() for one in states])
                figures[f"validation/{domain}"] = _accuracy_of(data.task, head, shown, part)
            on_figures(step + 1, figures)
            on_step(step + 1, steps, float(loss.detach()))
        return head

    def _train_memory(
        self,
        domain: str,
        memory: nn.Module,
        seed: int,
        on_step: Callable[[int, int, float], None],
        on_figures: OnFigures,
    ) -> None:
        """Train the memory of a document on the frozen base model."""
        generator = torch.Generator().manual_seed(seed)
        steps, settings = self._settings.probe_steps, self._settings
        optimizer = torch.optim.AdamW(
            [{"params": memory.parameters(), "peak": settings.head_lr}], weight_decay=0.0
        )
        watch = Watch(settings, steps, 0, [domain], self._slowness(domain, {}))
        for step in range(steps):
            self._set_lr(optimizer, step / steps)
            rows = self._rows(self._data[domain].inputs, settings.batch_size, generator)
            optimizer.zero_grad(set_to_none=True)
            loss = self._learn({domain: memory}, {domain: rows})
            loss = self._team.add_up(list(memory.parameters()), loss)
            nn.utils.clip_grad_norm_(memory.parameters(), settings.clip)
            optimizer.step()
            figures = {"lr": settings.head_lr * self._lr_factor(step / steps)}
            if step + 1 in watch.points and self._team.agree(watch.due(step + 1)):
                with watch.measuring():
                    found = self.evaluate(None, domain, Split.VAL, memory, watch.samples)
                figures[f"validation/{domain}"] = found.accuracy
            on_figures(step + 1, figures)
            on_step(step + 1, steps, loss)

    def _read(self, inputs: Sequence[Encoded]) -> HeadInputs:
        """What a head reads of samples; on the host if it would fill much of the GPU."""
        parts: list[HeadInputs] = []
        for states in self._states(inputs, training=True):
            part = states.head_inputs()
            whole = part.bytes / len(part.last) * len(inputs)
            if whole > head_inputs_bytes(self._lmm.device):
                part = part.to("cpu")
            parts.append(part)
        return HeadInputs.cat(parts)

    def _states(self, inputs: Sequence[Encoded], training: bool = False) -> Iterator[HiddenStates]:
        batches = self._frozen_batches(inputs)
        for start in range(0, len(batches), self._lanes.count):
            some = batches[start : start + self._lanes.count]
            with torch.no_grad():
                found = self._lanes.run([partial(self._lmm.states, one, training) for one in some])
            yield from found

    def _frozen_batches(self, inputs: Sequence[Encoded]) -> list[Sequence[Encoded]]:
        """Batches of the frozen base, as many in each lane and of equal size."""
        lanes, size = self._lanes.count, FROZEN_BATCH
        if lanes > 1 and inputs:
            rounds = math.ceil(len(inputs) / (FROZEN_BATCH * lanes))
            size = math.ceil(len(inputs) / (rounds * lanes))
        return [inputs[start : start + size] for start in range(0, len(inputs), size)]

    def task(self, domain: str) -> DomainTask:
        """Task of a domain."""
        return self._data[domain].task

    def samples(self, domain: str, split: Split) -> list[Sample]:
        """Samples of a split, with their true answers."""
        return self._data[domain].splits[split].samples

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate(
        self,
        adapter: str | None,
        domain: str,
        split: Split,
        head: nn.Module | None = None,
        most: int | None = None,
    ) -> Evaluation:
        """Measure a domain's accuracy; on the validation split, its head is calibrated first.

        Args:
            adapter: The active adapter; None for the frozen base model.
            domain: The domain.
            split: `Split.VAL` or `Split.TEST`.
            head: The head to use instead of the adapter's own.
            most: Largest number of samples, evenly taken from the split; None for all.
        """
        self._lmm.adapters.activate(adapter)
        if head is None and adapter in self._open:
            head = self._open[adapter].heads.get(domain)
        data = self._data[domain]
        part = data.splits[split] if most is None else data.splits[split].every(most)
        with torch.no_grad():
            raw = self._outputs(data.task, head, part.inputs)
            if split is Split.VAL:
                data.task.calibrate(head, raw, part.samples)
            predictions = data.task.predictions(head, raw, part.samples)
        return data.task.evaluate(head, predictions, part.samples)

    def _outputs(self, task: DomainTask, head: nn.Module | None, inputs: Sequence[Encoded]) -> Any:
        """Raw outputs for encoded samples, computed by all processes together where possible."""
        if self._lmm.sharded or len(inputs) < self._team.size:  # every process computes everything
            return task.outputs(head, self._lmm, inputs)
        mine = self._team.share(inputs)
        if self._lanes.count == 1 or not isinstance(task, HeadTask) or task.remembers:
            return self._team.collect(task.outputs(head, self._lmm, mine))
        batches = self._frozen_batches(mine)
        raw = self._lanes.run([partial(task.outputs, head, self._lmm, one) for one in batches])
        return self._team.collect(torch.cat(raw))

    # --- snapshots ----------------------------------------------------------------------------

    def snapshot(self, adapter: str) -> dict[str, Tensor]:
        """Copy everything that later training depends on: weights, heads, optimiser, random state.

        Returns:
            Tensors on the CPU by name, for `restore` and for safetensors.
        """
        opened = self._open[adapter]
        state = {f"lora/{key}": p for key, p in self._lmm.adapters.parameters(adapter).items()}
        for domain, head in opened.heads.items():
            state |= {f"head/{domain}/{key}": value for key, value in head.state_dict().items()}
        named: list[tuple[str, Tensor]] = list(state.items())
        for key, parameter in self._named_parameters(adapter):
            for item, value in opened.optimizer.state.get(parameter, {}).items():
                named.append((f"optimizer/{item}/{key}", value))
        named += [("random/adapter", opened.generator.get_state())]
        named += [("random/torch", torch.get_rng_state())]
        if self._lmm.device.type == "cuda":
            named += [("random/cuda", torch.cuda.get_rng_state(self._lmm.device))]
        return {key: value.detach().clone().contiguous().cpu() for key, value in named}

    def restore(self, adapter: str, state: Mapping[str, Tensor]) -> None:
        """Restore an adapter from a snapshot exactly, opening it if necessary."""
        if adapter in self._open:
            self.close(adapter)
        parts = _tree(state)
        # Every A is (rank, inputs); one that grew has another rank than the settings say.
        ranks = (len(value) for key, value in parts["lora"].items() if key.endswith("lora_A"))
        self.open(adapter, 0, next(ranks, None))
        opened = self._open[adapter]
        for domain, values in parts.get("head", {}).items():
            self._add_head(adapter, domain, seed=0)
            opened.heads[domain].load_state_dict(values)
        with torch.no_grad():
            for key, parameter in self._lmm.adapters.parameters(adapter).items():
                parameter.copy_(parts["lora"][key])
        for key, parameter in self._named_parameters(adapter):
            moments = {
                # As in `Optimizer.load_state_dict`: the number of steps stays on the CPU.
                item: values[key].to("cpu" if item == "step" else parameter.device, copy=True)
                for item, values in parts.get("optimizer", {}).items()
                if key in values
            }
            if moments:
                opened.optimizer.state[parameter] = moments
        opened.generator.set_state(parts["random"]["adapter"].clone())
        torch.set_rng_state(parts["random"]["torch"].clone())
        if self._lmm.device.type == "cuda" and "cuda" in parts["random"]:
            torch.cuda.set_rng_state(parts["random"]["cuda"].clone(), self._lmm.device)

    def _named_parameters(self, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._lmm.adapters.parameters(adapter).items()
        for domain, head in self._open[adapter].heads.items():
            for key, parameter in head.named_parameters():
                yield f"{domain}/{key}", parameter


def _tree(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest tensors by the parts of their names: one level, two for heads and optimiser."""
    tree: dict[str, Any] = {}
    for name, value in state.items():
        kind, rest = name.split("/", 1)
        if kind in ("head", "optimizer"):
            first, rest = rest.split("/", 1)
            tree.setdefault(kind, {}).setdefault(first, {})[rest] = value
        else:
            tree.setdefault(kind, {})[rest] = value
    return tree
