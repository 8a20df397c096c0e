"""Settings of the engine."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from valora_data.contract.quantized import NF4
from valora_kernels.operators import ATMM, OPERATORS
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.parallel import LORA_PARALLEL, REPLICATE_A

FP8, NF4_PACKED = "fp8", "nf4_packed"
QUANTIZATIONS = ("auto", "none", NF4, NF4_PACKED, FP8)
UNMERGEABLE = (NF4_PACKED, FP8)  # ways to store weights, into which no adapter is merged
LAZY, EAGER = CAPTURES = ("lazy", "eager")
SWIFT, BY_MATRIX = SWITCHES = ("swift", "by_matrix")
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Largest rank, and most requests, that room may be kept for: buffers grow with both.
MAX_RANK, MAX_REQUESTS = 1024, 1 << 16
SHARED = ("none", "key", "adapter")  # what shares of the machine can be kept for


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine runs; the defaults suit one GPU, or a CPU for tests and small models.

    Attributes:
        base: Base model: ``tiny`` or ``photo``, whichever a bundle needs, a folder or a hub name.
        device: ``cuda``, ``cpu``, or ``auto`` for the GPU if there is one.
        dtype: Data type of the weights; ``auto`` is bfloat16 on a GPU, and on a CPU that multiplies
            it where the accuracy of every bundle was measured so, else float32.
        quantize: ``nf4`` to round the language model to 4 bits, as bundles need that were trained
            with ``model.quantize=nf4`` (weights are unpacked again, so that memory stays the same);
            ``nf4_packed`` for the same weights in less than a third of the memory, into which no
            adapter is merged; ``fp8`` to compute with weights and activations of 8 bits, into which
            none is merged either; ``none`` to keep its weights; ``auto`` for what the first bundle
            was trained on.
        context_length: Longest prompt and answer together, in tokens; None for the model's own.
        block_size: Tokens of the KV cache per page.
        pages: Pages of the unified memory; None for as many as `memory` leaves room for.
        memory: Share of the GPU's memory that the engine uses, in (0, 1].
        max_requests: Most requests that run at a time.
        max_tokens: Most tokens computed in a step.
        chunk: Most prompt tokens of one request computed in a step (chunked prefill).
        max_adapters: Most distinct adapters in a step.
        slots: Most adapters resident on the device at a time.
        max_rank: Largest rank of an adapter.
        host_bytes: Most bytes of host memory for adapters.
        attention: Name of the attention backend; ``auto`` takes the fastest that works here.
        graphs: Capture decode steps in CUDA graphs.
        prompt_graphs: Also capture the layers of prefill steps with up to 2,048 rows, and the
            encoding of images, which are limited by the host otherwise; None to do so wherever
            decode steps are captured.
        capture: When graphs are captured and kernels compiled: ``lazy`` serves as soon as the
            likeliest graphs are captured, and prepares the others while nothing runs or when steps
            miss them; ``eager`` prepares all of them before it serves.
        compile: Fuse the small operations of a layer; None to do so on a GPU.
        overlap: Plan a step while the step before it runs; None to do so on a GPU.
        prefix_cache: Keep the KV cache of prompts for later requests with the same prefix.
        image_cache_bytes: Most bytes of encoded images that are cached for later requests.
        policy: Policy that chooses batches and inference modes, e.g. ``cost``, ``valora`` or
            ``slora``.
        policy_settings: Settings of the policy.
        share_by: Whether shares of the machine are kept under overload: ``key`` for each API key,
            ``adapter`` for each adapter (the base model is ``base``), ``none`` for no shares.
        shares: Share of each key or adapter, e.g. gold=3,free=1; 1 for those that are not named.
        cost_folder: Folder of the costs measured on this machine; None for the user's cache.
        tiling_folder: Folder of the kernel tilings measured on GPUs for which none are shipped;
            None for the user's cache.
        profile: Measure the costs, and tilings where none are shipped for the GPU, at the first
            start on this machine.
        decision_trace: File for the decision trace, one line per decision; None for none.
        tensor_parallel: GPUs that share the model, each with a part of every layer
            (docs/explanation/parallel.md); 1 to serve it on one.
        lora_parallel: How the GPUs share LoRA matrices: ``replicate_a`` needs no communication,
            ``slora`` splits both, for less memory.
        operator: LoRA operator, to compare others with ``atmm`` (docs/explanation/engine.md).
        switch: How adapters are merged: ``swift`` in one launch, or ``by_matrix`` to compare it
            with systems that merge each matrix for itself.
        adapter_share: Share of the pages that is kept for adapters alone, to compare the unified
            memory with a fixed pool; 0 for the unified memory.
    """

    base: str = "tiny"
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "auto"
    context_length: int | None = None
    block_size: int = 16
    pages: int | None = None
    memory: float = 0.9
    max_requests: int = 256
    max_tokens: int = 4096
    chunk: int = 2048
    max_adapters: int = 64
    slots: int = 128
    max_rank: int = 64
    host_bytes: int = 32 << 30
    attention: str = "auto"
    graphs: bool = True
    prompt_graphs: bool | None = None
    capture: str = LAZY
    compile: bool | None = None
    overlap: bool | None = None
    prefix_cache: bool = True
    image_cache_bytes: int = 1 << 30
    policy: str = "cost"
    policy_settings: PolicySettings = field(default_factory=PolicySettings)
    share_by: str = "none"
    shares: dict[str, float] = field(default_factory=dict)
    cost_folder: str | None = None
    tiling_folder: str | None = None
    profile: bool = True
    decision_trace: str | None = None
    tensor_parallel: int = 1
    lora_parallel: str = REPLICATE_A
    operator: str = ATMM
    switch: str = SWIFT
    adapter_share: float = 0.0

    def __post_init__(self) -> None:
        lowest = {
            "block_size": 1, "max_requests": 1, "max_tokens": 1, "chunk": 1, "max_adapters": 1,
            "slots": 1, "max_rank": 1, "tensor_parallel": 1, "pages": 2, "context_length": 1,
            "host_bytes": 0, "image_cache_bytes": 0,
        }  # fmt: skip
        for name, low in lowest.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"{name}: expected at least {low}, got {value}")
        for name, most in {"max_rank": MAX_RANK, "max_requests": MAX_REQUESTS}.items():
            if (value := getattr(self, name)) > most:
                raise ValueError(f"{name}: expected at most {most}, got {value}")
        choices = {
            "dtype": DTYPES, "quantize": QUANTIZATIONS, "capture": CAPTURES, "operator": OPERATORS,
            "lora_parallel": LORA_PARALLEL, "share_by": SHARED, "switch": SWITCHES,
        }  # fmt: skip
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value}")
        keeps_shares = POLICIES[self.policy].shares  # refuses an unknown policy
        _ = self.deciding  # refuses shares that are none
        split, sharing = self.tensor_parallel > 1, self.share_by != "none"
        given = self.policy_settings
        for wrong, said in (
            (not 0 < self.memory <= 1, f"memory: expected a share in (0, 1], got {self.memory}"),
            (not 0 <= self.adapter_share < 1,
             f"adapter_share: expected a share in [0, 1), got {self.adapter_share}"),
            (split and self.quantize in UNMERGEABLE,
             f"quantize: {self.quantize} is for a model on one GPU: use tensor_parallel=1, or "
             f"quantize={NF4 if self.quantize == NF4_PACKED else 'none'}"),
            (split and (self.operator, self.switch) != (ATMM, SWIFT),
             "tensor_parallel: other operators and switches are compared on one GPU: use "
             f"operator={ATMM} and switch={SWIFT}, or tensor_parallel=1"),
            (self.shares and not sharing, "shares goes with share_by: name key or adapter"),
            (given.fair or given.shares,
             "policy_settings: shares and fair are set with share_by and shares"),
            (sharing and not keeps_shares,
             f"share_by: the policy {self.policy} keeps no shares: choose cost, valora, slora "
             "or unmerge_only"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(said)

    def folder(self, what: str) -> Path:
        """Folder of ``cost`` or ``tiling`` measurements; without a home, in the working folder."""
        if named := getattr(self, f"{what}_folder"):
            return Path(named)
        try:
            home = Path.home()
        except RuntimeError:
            home = Path()
        return home / f".cache/valora/{what}s"

    @property
    def deciding(self) -> PolicySettings:
        """Settings of the policy, with the shares."""
        if self.share_by == "none":
            return self.policy_settings
        return replace(self.policy_settings, fair=True, shares=self.shares)
