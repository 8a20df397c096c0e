"""Trains adapters with their heads, evaluates them, and saves and restores them exactly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from valora_data.checkpoint import Checkpoint
from valora_data.cpu import usable_cores
from valora_data.schema import Sample, Split
from valora_train.fusion.samples import DomainData, evenly
from valora_train.model import memory
from valora_train.model.distributed import agree
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, HeadInputs
from valora_train.settings import TrainSettings
from valora_train.tasks.base import DomainTask, Evaluation, HeadTask

# Called for every step with its number, that of all, the loss and further figures.
OnStep = Callable[[int, int, float, Mapping[str, float]], None]
FROZEN_BATCH = 64  # samples per forward pass of the frozen base, and per step of a head alone
LENGTH_RATIO = 1.3  # domains whose longest samples differ by more are not padded to one length
PASS_FLOP = 1e12  # that a GPU could do while one more pass, forward and backward, is launched
OVERSAMPLING = 8  # samples drawn for each one used, where samples are grouped by length
UNEVEN = 1.1  # most samples of a part of whole domains, as a multiple of what equal parts have
MIN_LOOK = 4  # samples of a domain, fewer of which say nothing about its accuracy


@dataclass
class _OpenAdapter:
    optimizer: torch.optim.AdamW
    generator: torch.Generator
    heads: dict[str, nn.Module] = field(default_factory=dict)


@dataclass
class _Best:
    """The best step of an attempt so far, of those that were compared."""

    step: int = 0
    reached: float = -math.inf  # mean of the domains on validation, in shares of the largest value
    worse: int = 0  # steps compared since, none of which was better
    tensors: dict[str, Tensor] = field(default_factory=dict)  # snapshot after that step


class DivergedError(Exception):
    """Training made the loss or the weights infinite or NaN."""


class Trainer:
    """Trains and evaluates the adapters of one LMM, with other processes of the accelerator."""

    def __init__(
        self,
        lmm: Lmm,
        data: Mapping[str, DomainData],
        settings: TrainSettings,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._lmm, self._data, self._settings = lmm, data, settings
        self._accelerator = accelerator or Accelerator()
        self._open: dict[str, _OpenAdapter] = {}
        on_cpu = lmm.device.type == "cpu"
        # A pass of a small model takes a GPU as long as the host takes to launch its kernels.
        weights = sum(one.numel() for one in lmm.language_model.parameters())
        self._pass_tokens = 0.0 if on_cpu else PASS_FLOP / (6.0 * weights)
        # Sharded layers and adapters that act at decoding only keep a state of the batch.
        apart = on_cpu and not (lmm.sharded or settings.lora.decode_only)
        self._lanes = (settings.threads or usable_cores()) if apart else 1
        self._pool = ThreadPoolExecutor(self._lanes, initializer=partial(torch.set_num_threads, 1))

    def open(self, adapter: str, seed: int) -> None:
        """Add a fresh adapter, whose weights and training batches depend on `seed` alone."""
        self._lmm.adapters.add(adapter, seed)
        params, given = list(self._lmm.adapters.parameters(adapter).values()), self._settings
        weights = {"params": params, "peak": given.lr, "weight_decay": given.weight_decay}
        generator = torch.Generator().manual_seed(seed)
        self._open[adapter] = _OpenAdapter(torch.optim.AdamW([weights]), generator)

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

    def task(self, domain: str) -> DomainTask:
        """Task of a domain."""
        return self._data[domain].task

    def samples(self, domain: str, split: Split) -> list[Sample]:
        """Samples of a split, with their true answers."""
        return self._data[domain].splits[split].samples

    def _new_head(self, domain: str, seed: int) -> nn.Module | None:
        data = self._data[domain]
        return data.task.new_head(self._lmm, data.inputs[0], seed)

    def _head_group(self, head: nn.Module) -> dict[str, Any]:
        peak = self._settings.head_lr
        return {"params": list(head.parameters()), "peak": peak, "weight_decay": 0.0}

    def _add_head(self, adapter: str, domain: str, seed: int) -> None:
        if (head := self._new_head(domain, seed)) is not None:
            self._open[adapter].heads[domain] = head
            self._open[adapter].optimizer.add_param_group(self._head_group(head))

    def train(
        self,
        adapter: str,
        new: Sequence[str],
        *,
        held: Sequence[str],
        rehearse: bool,
        seed: int,
        on_step: OnStep = lambda *_: None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Train an open adapter on domains that are new to it, several of them jointly.

        Those `held` are rehearsed, or their heads frozen. A killed training continues from its
        checkpoint, to the bit.
        """
        settings, main = self._settings, self._accelerator.is_main_process
        rehearsed = list(held) if rehearse else []
        names = f"{', '.join(new)} after {', '.join(held)}"
        training = f"{adapter}: {names} with {rehearsed}, seed {seed}"
        losses: list[float] = []
        curve: dict[str, dict[str, float]] = {}
        best = _Best()
        saved = agree(checkpoint.load(training) if checkpoint is not None and main else None)
        if saved is None:
            for name in new:
                self._add_head(adapter, name, seed)
        else:
            self.restore(adapter, saved["tensors"])
            losses, curve = saved["losses"], saved.get("curve", {})
            best = _Best(**saved.get("best", {}))
        opened = self._open[adapter]
        for name, head in opened.heads.items():
            head.requires_grad_(name in new or name in rehearsed)
        self._lmm.adapters.activate(adapter)
        steps = settings.steps_for(len(new), len(rehearsed))
        domains = [*held, *new]
        points, samples = self._looks(steps, domains, opened.heads)
        candidates = settings.candidates(steps)
        weights = [p for group in opened.optimizer.param_groups for p in group["params"]]

        def tell(step: int, loss: float) -> None:
            factor = self._lr_factor((step - 1) / steps)
            rates = {"lr": settings.lr * factor, "head_lr": settings.head_lr * factor}
            on_step(step, steps, loss, rates | curve.get(str(step), {}))

        for step, loss in enumerate(losses, 1):
            tell(step, loss)
        for step in range(len(losses) + 1, steps + 1):
            batch = self._draw(opened.generator, new, rehearsed)
            learn = partial(self._learn, opened.heads, batch, weights)
            losses.append(self._step(opened.optimizer, (step - 1) / steps, learn))
            ended = step == steps
            if step in points | candidates and all(w.isfinite().all() for w in weights):
                if step in points:
                    found = self._look(adapter, domains, opened.heads, samples)
                    curve[str(step)] = {f"validation/{name}": v for name, v in found.items()}
                if step in candidates:
                    ended |= self._compare(best, adapter, domains, step)
            if checkpoint is not None and main and not ended:
                checkpoint.save(
                    training,
                    lambda: {
                        "tensors": self.snapshot(adapter), "losses": losses, "curve": curve,
                        "best": dict(vars(best)),
                    },
                )  # fmt: skip
            tell(step, losses[-1])
            if ended:
                break
        if best.step not in (0, len(losses)):
            self.restore(adapter, best.tensors)
        _check_finite(self.snapshot(adapter).values())

    def train_head_only(
        self, domain: str, seed: int, on_step: OnStep = lambda *_: None
    ) -> nn.Module | None:
        """A head or memory trained on the frozen base model; None where the model writes."""
        if (head := self._new_head(domain, seed)) is None:
            return None
        self._lmm.adapters.activate(None)
        settings, data, weights = self._settings, self._data[domain], list(head.parameters())
        generator = torch.Generator().manual_seed(seed)
        if not data.task.remembers:  # the base model is frozen, so that one pass is enough
            kept = evenly(len(data.inputs), settings.probe_samples)
            read = self._read([data.inputs[row] for row in kept])
            targets = data.targets[torch.tensor(kept)]

        def learn() -> float:
            if data.task.remembers:
                rows = self._rows(data.inputs, settings.batch_size, generator)
                return self._learn({domain: head}, {domain: rows}, weights)
            rows = torch.randint(len(kept), (FROZEN_BATCH,), generator=generator)
            loss = data.task.head_loss(head, read[rows].to(self._lmm.device), targets[rows])
            loss.backward()
            return float(loss.detach())

        optimizer = torch.optim.AdamW([self._head_group(head)])
        steps = settings.probe_steps
        points, samples = self._looks(steps, [domain], {domain: head})
        for step in range(1, steps + 1):
            loss = self._step(optimizer, (step - 1) / steps, learn, clips=data.task.remembers)
            figures = {"lr": settings.head_lr * self._lr_factor((step - 1) / steps)}
            if step in points:
                found = self._look(None, [domain], {domain: head}, samples)
                figures[f"validation/{domain}"] = found[domain]
            on_step(step, steps, loss, figures)
        _check_finite(weights)
        return head

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        progress: float,
        learn: Callable[[], float],
        clips: bool = True,
    ) -> float:
        """Set the learning rates for a share of the steps, learn, and return the loss."""
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * self._lr_factor(progress)
        optimizer.zero_grad(set_to_none=True)
        loss = learn()
        if not math.isfinite(loss):
            raise DivergedError
        if clips:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(weights, self._settings.clip)
        optimizer.step()
        return loss

    def _lr_factor(self, progress: float) -> float:
        """Share of the peak learning rate after a share of the steps."""
        warmup = self._settings.warmup
        if progress < warmup:
            return (progress + 1e-3) / warmup
        return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2

    def _looks(
        self, steps: int, domains: Sequence[str], heads: Mapping[str, nn.Module]
    ) -> tuple[set[int], int]:
        """Steps after which validation is looked at, for a share of the time, and samples each."""
        settings, slowness = self._settings, 1
        for name in domains:
            task = self.task(name)
            if name not in heads or task.remembers:
                slowness = max(slowness, task.settings.max_tokens // 8)
        looks, passes = settings.validations, 3 * settings.validation_share * steps
        most = int(passes * settings.batch_size / (max(looks, 1) * len(domains) * slowness))
        most = min(settings.validation_samples, most)
        points = {round(steps * n / (looks + 1)) for n in range(1, looks + 1)} - {0, steps}
        return points if most >= MIN_LOOK else set(), most

    def _look(
        self,
        adapter: str | None,
        domains: Sequence[str],
        heads: Mapping[str, nn.Module],
        most: int | None = None,
    ) -> dict[str, float]:
        """Accuracy on at most `most` samples of validation; calibration gets copies of heads."""
        found = {}
        with torch.random.fork_rng(devices=[]):
            for name in domains:
                head = copy.deepcopy(heads.get(name))
                found[name] = self.evaluate(adapter, name, Split.VAL, head, most).accuracy
        return found

    def _compare(self, best: _Best, adapter: str, domains: Sequence[str], step: int) -> bool:
        """Remember the best step so far; return whether no better one is awaited."""
        # Requirements do not matter, so that another fusion can take the attempt over.
        found = self._look(adapter, domains, self._open[adapter].heads)
        parts = [found[name] / self.task(name).spec.largest for name in domains]
        reached = agree(sum(parts) / len(domains))
        if best.step and not reached > best.reached:
            best.worse += 1
            return 0 < self._settings.patience <= best.worse
        best.reached, best.step, best.worse = reached, step, 0
        best.tensors = self.snapshot(adapter)
        return False

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
        counts = _shares(size - old, new, first) | _shares(old, rehearsed, start)
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

    def _parts(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Split a batch into micro-batches of similar length; apart are those with memories."""
        most = self._settings.micro_batch or sum(map(len, batch.values()))
        lengths = {
            name: max(self._data[name].inputs[row].length for row in rows.tolist())
            for name, rows in batch.items()
        }
        groups: list[list[str]] = []
        for name in sorted(batch, key=lambda one: (self.task(one).remembers, lengths[one], one)):
            group = groups[-1] if groups else [name]  # the shortest samples first
            padding = (lengths[name] - lengths[group[-1]]) * sum(len(batch[one]) for one in group)
            alike = (
                lengths[name] <= LENGTH_RATIO * lengths[group[0]] or padding <= self._pass_tokens
            )
            if groups and alike and self.task(name).remembers is self.task(group[0]).remembers:
                group.append(name)
            else:
                groups.append([name])
        inside = [{name: batch[name] for name in batch if name in group} for group in groups]
        return [part for group in inside for part in _pieces(group, most)]

    def _learn(
        self,
        heads: Mapping[str, nn.Module],
        batch: Mapping[str, Tensor],
        weights: Sequence[nn.Parameter],
    ) -> float:
        """Set the gradients of a batch, a share in each process, and return its loss."""
        rank, processes = self._accelerator.process_index, self._accelerator.num_processes
        size = sum(map(len, batch.values()))
        learning = [weight for weight in weights if weight.requires_grad]
        losses: list[Tensor] = []

        def learn(part: Mapping[str, Tensor], factor: float) -> tuple[Tensor, Sequence[Any]]:
            loss = self._loss(heads, part, size) * factor
            return loss.detach(), torch.autograd.grad(loss, learning, allow_unused=True)

        for part in self._parts(batch):
            mine = {n: some for n, rows in part.items() if len(some := rows[rank::processes])}
            factor = 1.0 if mine else 0.0  # sharded layers need as many passes on every process
            mine = mine or {name: rows[:1] for name, rows in list(part.items())[:1]}
            apart = self._lanes > 1 and not any(self.task(name).remembers for name in mine)
            cut = side_by_side(mine, self._lanes) if apart else [mine]
            for loss, gradients in self._side_by_side([partial(learn, one, factor) for one in cut]):
                losses.append(loss)
                for weight, gradient in zip(learning, gradients, strict=True):
                    if gradient is not None:
                        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        total = sum(map(float, losses))  # at last, so that a GPU is not waited for in between
        return total if processes == 1 else self._add_up(learning, total)

    def _add_up(self, learning: Sequence[nn.Parameter], loss: float) -> float:
        """Replace gradients by their sums over the processes; return the sum of their losses."""
        for weight in learning:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        gradients = [weight.grad for weight in learning if weight.grad is not None]
        flat = parameters_to_vector([*gradients, torch.tensor([loss], device=self._lmm.device)])
        flat = self._accelerator.reduce(flat)  # one call: each tensor alone takes as long
        vector_to_parameters(flat[:-1], gradients)
        return float(flat[-1])

    def _loss(
        self, heads: Mapping[str, nn.Module], batch: Mapping[str, Tensor], size: int
    ) -> Tensor:
        """Loss of some samples of a batch of `size` samples, as their part of its mean."""
        encoded = [
            self._data[name].inputs[row] for name, rows in batch.items() for row in rows.tolist()
        ]
        if any(self.task(name).remembers for name in batch):
            memories: list[Any] = [heads.get(name) for name, rows in batch.items() for _ in rows]
            states = memory.states(self._lmm, encoded, memories)
        else:
            states = self._lmm.states(encoded)
        total = torch.zeros((), device=self._lmm.device)
        parts = states.split([len(rows) for rows in batch.values()])
        for (name, rows), part in zip(batch.items(), parts, strict=True):
            data = self._data[name]
            targets = None if data.targets is None else data.targets[rows]
            loss = data.task.loss(heads.get(name), part, targets, self._lmm)
            total = total + loss * (len(rows) / size)
        return total

    def _side_by_side(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call functions on a CPU core each, faster than torch's threads for a small model."""
        if self._lanes == 1 or len(calls) == 1:
            return [call() for call in calls]
        threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()

        def run(call: Callable[[], Any]) -> Any:
            with torch.set_grad_enabled(gradients):  # each thread has a mode of its own
                return call()

        torch.set_num_threads(1)  # MKL has one number for all threads
        try:
            return list(self._pool.map(run, calls))
        finally:
            torch.set_num_threads(threads)

    def evaluate(
        self,
        adapter: str | None,
        domain: str,
        split: Split,
        head: nn.Module | None = None,
        most: int | None = None,
    ) -> Evaluation:
        """Measure a domain (on validation, calibrate its head first) on at most `most` samples."""
        self._lmm.adapters.activate(adapter)
        if head is None and adapter in self._open:
            head = self._open[adapter].heads.get(domain)
        data = self._data[domain]
        inputs, samples = data.splits[split]
        if most is not None:
            rows = evenly(len(samples), most)
            inputs, samples = [inputs[row] for row in rows], [samples[row] for row in rows]
        with torch.no_grad():
            raw = self._outputs(data.task, head, inputs)
            if split is Split.VAL:
                data.task.calibrate(head, raw, samples)
            predictions = data.task.predictions(head, raw, samples)
        return data.task.evaluate(head, predictions, samples)

    def _outputs(self, task: DomainTask, head: nn.Module | None, inputs: Sequence[Encoded]) -> Any:
        """Raw outputs for encoded samples, computed by all processes together where possible."""
        processes = self._accelerator.num_processes
        if self._lmm.sharded or len(inputs) < processes:  # every process computes everything
            return task.outputs(head, self._lmm, inputs)
        with self._accelerator.split_between_processes(list(inputs)) as mine:
            apart = isinstance(task, HeadTask) and not task.remembers
            batches = self._frozen_batches(mine) if apart else [mine]
            outputs = [partial(task.outputs, head, self._lmm, one) for one in batches]
            raw = torch.cat(self._side_by_side(outputs)) if apart else outputs[0]()
        if processes == 1:
            return raw
        rows = self._accelerator.gather_for_metrics(list(raw), use_gather_object=True)
        return torch.stack(rows) if torch.is_tensor(raw) else rows

    @torch.no_grad()
    def _read(self, inputs: Sequence[Encoded]) -> HeadInputs:
        """What a head reads of samples, on the host: it might fill much of a GPU."""

        def read(batch: Sequence[Encoded]) -> HeadInputs:
            return self._lmm.states(batch, training=True).head_inputs().to("cpu")

        batches = self._frozen_batches(inputs)
        return HeadInputs.cat(self._side_by_side([partial(read, one) for one in batches]))

    def _frozen_batches(self, inputs: Sequence[Encoded]) -> list[Sequence[Encoded]]:
        """Batches of the frozen base, as many on each core and of equal size."""
        size = FROZEN_BATCH
        if self._lanes > 1 and inputs:
            rounds = math.ceil(len(inputs) / (FROZEN_BATCH * self._lanes))
            size = math.ceil(len(inputs) / (rounds * self._lanes))
        return [inputs[start : start + size] for start in range(0, len(inputs), size)]

    def snapshot(self, adapter: str) -> dict[str, Tensor]:
        """Copy all that later training depends on, by the names that fusions have on disk."""
        # accelerate's `save_state` and `load_state` of these weights take 28 and 54 ms of `tiny`,
        # this and `restore`, in which PEFT adds the adapter anew, 5 and 75; but they know whole
        # folders only: no domain leaves an adapter (`of_domains`), and none is moved to another.
        opened = self._open[adapter]
        state = {f"lora/{key}": p for key, p in self._lmm.adapters.parameters(adapter).items()}
        for domain, head in opened.heads.items():
            state |= {f"head/{domain}/{key}": value for key, value in head.state_dict().items()}
        found: dict[str, Tensor] = dict(state)
        for key, weight in self._named(adapter).items():
            moments = opened.optimizer.state.get(weight, {})
            found |= {f"optimizer/{item}/{key}": value for item, value in moments.items()}
        found |= {"random/adapter": opened.generator.get_state()}
        found |= {"random/torch": torch.get_rng_state()}
        if self._lmm.device.type == "cuda":
            found |= {"random/cuda": torch.cuda.get_rng_state(self._lmm.device)}
        return {key: value.detach().clone().contiguous().cpu() for key, value in found.items()}

    @torch.no_grad()
    def restore(self, adapter: str, state: Mapping[str, Tensor]) -> None:
        """Restore an adapter from a snapshot exactly, opening it if necessary."""
        if adapter in self._open:
            self.close(adapter)
        self.open(adapter, 0)
        opened, device = self._open[adapter], self._lmm.device
        heads = {key: value for key, value in state.items() if key.startswith("head/")}
        for domain in dict.fromkeys(key.split("/")[1] for key in heads):
            with torch.enable_grad():
                self._add_head(adapter, domain, seed=0)
            mine, prefix = opened.heads[domain], f"head/{domain}/"
            mine.load_state_dict({key: heads[prefix + key] for key in mine.state_dict()})
        for key, weight in self._lmm.adapters.parameters(adapter).items():
            weight.copy_(state[f"lora/{key}"])
        for key, weight in self._named(adapter).items():
            if f"optimizer/step/{key}" in state:
                # As in `Optimizer.load_state_dict`: the number of steps stays on the CPU.
                places: dict[str, Any] = {"step": "cpu", "exp_avg": device, "exp_avg_sq": device}
                opened.optimizer.state[weight] = {
                    item: state[f"optimizer/{item}/{key}"].to(place, copy=True)
                    for item, place in places.items()
                }
        opened.generator.set_state(state["random/adapter"].clone())
        torch.set_rng_state(state["random/torch"].clone())
        if device.type == "cuda" and "random/cuda" in state:
            torch.cuda.set_rng_state(state["random/cuda"].clone(), device)

    def _named(self, adapter: str) -> dict[str, nn.Parameter]:
        """The weights that an adapter's optimiser has, by name."""
        named = self._lmm.adapters.parameters(adapter)
        for domain, head in self._open[adapter].heads.items():
            named |= {f"{domain}/{key}": weight for key, weight in head.named_parameters()}
        return named


def _check_finite(tensors: Iterable[Tensor]) -> None:
    if not all(one.isfinite().all() for one in tensors if one.is_floating_point()):
        raise DivergedError


def _shares(size: int, names: Sequence[str], first: int) -> dict[str, int]:
    """Equal shares of a number of samples; those from `first` on get what is left over."""
    each, more = divmod(size, max(len(names), 1))
    turned = [*names[first:], *names[:first]]
    return {name: each + (offset < more) for offset, name in enumerate(turned)}


def side_by_side(batch: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Cut a batch into at most some parts of equal size: of whole domains, where that works out."""
    size = sum(map(len, batch.values()))
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, rows in sorted(batch.items(), key=lambda item: -len(item[1])):
        smallest = sizes.index(min(sizes))
        parts[smallest][name] = rows
        sizes[smallest] += len(rows)
    if max(sizes) <= UNEVEN * size / count:
        return [part for part in parts if part]
    return _pieces(batch, math.ceil(size / count))


def _pieces(batch: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Cut a batch into pieces of at most `most` samples."""
    rows = [(name, row) for name, some in batch.items() for row in some]
    pieces = []
    for start in range(0, len(rows), most):
        piece: dict[str, list[Tensor]] = {}
        for name, row in rows[start : start + most]:
            piece.setdefault(name, []).append(row)
        pieces.append({name: torch.stack(some) for name, some in piece.items()})
    return pieces
