"""What the sections of `bench_serve` share: engines on one model, requests, latencies, tables."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time

import numpy as np
import torch

from tests.bench.valora_serve.peers.valora import left_gb
from tests.bench.valora_serve.serve_models import BASES, PROCESSOR, TARGETS, add_adapters
from valora_serve.engine.engine import Engine
from valora_serve.engine.profile import ensure_costs
from valora_serve.engine.sequence import Prepared
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import make_policy
from valora_serve.pauses import short_pauses
from valora_serve.types import Mode, Request, SamplingParams

FEW = {"max_requests": 64, "image_cache_bytes": 0}
"""Settings of an engine with few graphs, which several sections share."""

POLICIES = ("merge_only", "unmerge_only", "dlora", "slora", "valora", "cost")

found: dict[str, object] = {}


def table(title, head, rows):
    print(f"\n## {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        cells = [f"{c:.3g}" if isinstance(c, float) else "–" if c is None else str(c) for c in row]
        print("| " + " | ".join(cells) + " |", flush=True)
    found[title] = {"head": head, "rows": rows}


class Bench:
    """The model, and engines on it one after the other."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.base = getattr(arguments, "base", "llava-7b")
        given = {"context": getattr(arguments, "context", 4096)}
        for name in ("layers", "width", "vision"):
            if getattr(arguments, name, None) is not None:
                given[name] = getattr(arguments, name)
        self.model = BASES[self.base](self.device, **given)
        self.quantize = quantize = getattr(arguments, "quantize", "none")
        self.lmm = Lmm(
            self.base, self.model, PROCESSOR, self.device,
            fp8=quantize == "fp8", packed=quantize == "nf4_packed",
        )  # fmt: skip
        self.targets = getattr(arguments, "targets", "attention")
        self.engine = None
        self.started = None
        self.ready = 0.0  # seconds that the last engine took to start, without drawing adapters
        self.pauses = contextlib.ExitStack()
        self.firsts, self.lasts = {}, {}

    @property
    def adapted(self):
        """The linears that adapters change, for titles of tables."""
        return TARGETS[self.targets]

    def start(self, policy="slora", adapters=0, ranks=(64,), **options):
        """An engine with so many adapters, warmed up; one that is there takes the other policy."""
        wanted = (adapters, tuple(ranks), options)
        if self.engine is not None and wanted == self.started:
            settings = self.engine.settings.policy_settings
            self.engine.policy = make_policy(policy, self.engine.cost, settings)
            return self.names
        self.stop()
        small = self.device.type == "cpu"
        defaults = {
            "max_requests": 512, "max_tokens": 8192, "chunk": 8192, "max_adapters": 128,
            "slots": min(max(adapters, 1), 256), "max_rank": max(ranks), "host_bytes": 1 << 50,
            "profile": not small, "memory": 0.85, "capture": "eager", "prefix_cache": False,
            "attention": self.arguments.attention,
            "cost_folder": f"{self.arguments.costs}/{options.get('operator', 'atmm')}",
            "pages": 2000 if small else None,
            "prompt_graphs": None if self.arguments.prompt_graphs else False,
            "quantize": self.quantize,
        }  # fmt: skip
        # `cost` goes into every mode, so all that any policy needs is captured, before the clock
        # runs: a lazy start leaves kernels for later, and requests wait for them.
        began = time.monotonic()
        self.engine = Engine(EngineSettings(policy="cost", **(defaults | options)), self.lmm)
        made = time.monotonic()
        names = add_adapters(self.engine, adapters, ranks, targets=self.targets) if adapters else []
        start = time.monotonic()
        self.engine.warm_up()
        ensure_costs(self.engine)
        self.pauses.enter_context(short_pauses())  # as the server does
        end = time.monotonic()
        self.ready = made - began + end - start
        print(f"[{adapters} adapters, drawn in {start - made:.1f} s: warm after "
              f"{end - start:.1f} s, {self.engine.memory.pages} pages, "
              f"{left_gb():.1f} GB left]", flush=True)  # fmt: skip
        settings = self.engine.settings.policy_settings
        self.engine.policy = make_policy(policy, self.engine.cost, settings)
        self.started, self.names = wanted, names
        return names

    def stop(self):
        """Let the engine go, and put the model back as it was."""
        if self.engine is None:
            return
        self.pauses.close()
        self.engine.merge_state.switch(self.engine.merge_state.mode, None)
        self.engine.close()
        self.lmm.linears.release()
        self.engine = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def trace(self, name):
        """File for an engine's decisions, beside the other results."""
        out = self.arguments.out
        return str(out.with_name(f"trace-{name}.txt")) if out else None

    def request(self, number, tokens, output, name, **options):
        ids = np.random.default_rng(number).integers(3, 32000, tokens).tolist()
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        return Request(str(number), name, token_ids=ids, sampling=sampling, **options)

    def policy(self, name, **settings):
        """Decide by another policy from now on, with pristine weights."""
        self.engine.merge_state.switch(Mode.UNMERGED, None)
        self.engine.policy = make_policy(name, self.engine.cost, PolicySettings(**settings))

    def drive(self, requests, arrivals=None, most=600.0, within=None):
        """Run requests, arriving at the given seconds.

        Args:
            requests: The requests, or what `Engine.prepare` made of them.
            arrivals: Seconds at which each arrives; all at once if None.
            most: Seconds after which it is an error that they have not ended.
            within: Seconds after which what is left is cancelled, and requests that a policy gives
                up are left out; None to run all to their ends.

        Returns:
            Their last outputs, and the seconds that passed. `firsts` and `lasts` hold the seconds
            from when a request was due to its first and last output, by request.
        """
        engine = self.engine
        prepared = [
            request if isinstance(request, Prepared) else engine.prepare(request)
            for request in requests
        ]
        self.firsts, self.lasts = {}, {}
        order = range(len(requests)) if arrivals is None else np.argsort(arrivals)
        queue = iter([(0.0 if arrivals is None else arrivals[i], prepared[i]) for i in order])
        due = next(queue, None)
        done, came = [], {}
        start = time.monotonic()
        while due is not None or engine.busy:
            now = time.monotonic() - start
            while due is not None and due[0] <= now:
                engine.add(due[1])
                came[due[1].request.id] = due[0]
                due = next(queue, None)
            if engine.busy:
                for output in engine.step():
                    if output.error:
                        if within is None:
                            raise output.error
                        continue
                    since = time.monotonic() - start - came[output.id]
                    self.firsts.setdefault(output.id, since)
                    if output.finish is not None:
                        self.lasts[output.id] = since
                        done.append(output)
                if engine.stalled:
                    time.sleep(2e-4)
            elif due is not None:
                time.sleep(max(0.0, min(due[0] - (time.monotonic() - start), 0.001)))
            if within is not None and now > within:
                break
            if now > most:
                raise TimeoutError("the requests did not end in time")
        wall = time.monotonic() - start
        for one in prepared:
            if engine.busy:
                engine.cancel(one.request.id)
        while engine.busy:
            engine.step()
        return done, wall

    def warm(self, names, count=24):
        """Let compilers see the shapes before the clock runs; on a CPU there are none."""
        few = self.device.type == "cpu"
        requests = [
            self.request(10**6 + i, 20 + 37 * i, 8, names[i % len(names)] if names else None)
            for i in range(2 if few else count)
        ]
        self.drive(requests)
        big = [self.request(2 * 10**6 + i, 400, 4, names[i % len(names)] if names else None)
               for i in range(2 if few else 30)]  # fmt: skip
        self.drive(big)


def metrics(done, wall, slo=6.0):
    """Latencies in milliseconds, requests and output tokens a second.

    `slo` is the share of requests whose first token came within so many seconds (S-LoRA §7: 6 s).
    """
    latency = [o.times.finished - o.times.arrival for o in done]
    first = [o.times.first_token - o.times.arrival for o in done]
    tokens = sum(o.usage.prompt + o.usage.completion for o in done)
    out = sum(o.usage.completion for o in done)
    between = [
        (o.times.finished - o.times.first_token) / max(o.usage.completion - 1, 1) for o in done
    ]
    return {
        "atl": 1e3 * sum(latency) / tokens,
        "per_output": 1e3 * sum(latency) / out if out else None,  # heads write none
        "ttft": 1e3 * statistics.mean(first),
        "between": 1e3 * statistics.mean(between),
        "requests": len(done) / wall,
        "output": out / wall,
        "p99": 1e3 * float(np.quantile(latency, 0.99)),
        "slo": statistics.mean(seconds <= slo for seconds in first),
    }


def poisson(rate, seconds, seed):
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(4 * rate * seconds) + 10)
    times = np.cumsum(gaps)
    return times[times < seconds]


def skewed(count, adapters, share, seed):
    """Adapter of each request: the first with exactly this probability, else any other."""
    g = np.random.default_rng(seed)
    other = g.integers(1, adapters, count) if adapters > 1 else np.zeros(count, int)
    return np.where(g.random(count) < share, 0, other)
