"""CPU kernels: worker pool, packed weights, experts, attention, linear."""

from collections.abc import Sequence

LAYOUT_VERSION: int = 2

PANEL: int = 16

BLOCK: int = 32

class PackedFormat:
    """
    How a panel of PANEL (16) output rows lies in memory: | scales, padded to 64 bytes | quants |.
    """

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> int:
        """k of a unit of scales; the inner size is a multiple of it."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of a unit: d f16 [16] comes first (f8: d f32 [16])."""

    @property
    def quant_bytes(self) -> int:
        """Bytes of quants of a block of BLOCK (32) k."""

    @property
    def bias(self) -> int:
        """Subtracted from the unsigned quants, unless they are codes."""

    @property
    def group(self) -> int:
        """k that share a scale; 0: no scales."""

    @property
    def low_bits(self) -> int:
        """
        Bits of a quant (2, 4 or 8) in the first plane of a block, 64 bytes for each.
        """

    @property
    def codes(self) -> list[int]:
        """What the 16 quants stand for; empty: themselves, less the bias."""

    @property
    def exponents(self) -> bool:
        """Whether d is a byte e [16] instead: 2^(e - 128)."""

    @property
    def upper_bits(self) -> int:
        """Bits above the low ones, in planes behind theirs."""

    @property
    def minimum_offset(self) -> int:
        """Offset in a unit's scales of m or dmin, f16 [16]; 0: none."""

    @property
    def grid_values(self) -> int:
        """
        Values of an entry of the table that the quants are indices of (8 or 4), whose bytes of signs and steps of scales are format.hpp's; 0: no such table.
        """

    @property
    def grid(self) -> list[int]:
        """That table's values, entry by entry."""

    @property
    def grid_index_bits(self) -> int:
        """Bits of an index; eight of them are a byte of the quants."""

    @property
    def grid_parity(self) -> bool:
        """
        Whether a word holds 4 x 7 signs, whose parity is the eighth, and 4 bits above them.
        """

    @property
    def grid_high_offset(self) -> int:
        """
        Offset in a unit's scales of the upper bits of indices, u8 [8][16]; 0: none, or above a word's signs.
        """

    @property
    def grid_step(self) -> float:
        """
        Of a factor s: the scale is d (2 s + 1) grid_step. Factors are nibbles at step_offset, [groups / 2][16], or lie above a word's signs.
        """

    @property
    def step_offset(self) -> int:
        """
        Offset in a unit's scales of the 8-bit factors of d, [unit / group][16] (of grids in nibbles); 0: none.
        """

    @property
    def zero_offset(self) -> int:
        """
        Offset in a unit's scales of zero points, u8 [16], subtracted from the quants; 0: none.
        """

    @property
    def minimum_step_offset(self) -> int:
        """
        Offset in a unit's scales of the 8-bit factors of dmin, [unit / group][16]; 0: none. Where it is that of d's factors, those are the low nibbles and these the high ones.
        """

    def scales_size(self, k: int) -> int:
        """Bytes of a panel's scales, padded: where its quants begin."""

    def panel_size(self, k: int) -> int:
        """Bytes of a panel whose rows hold k values."""

def packed_formats() -> dict[str, PackedFormat]:
    """Every packed format by name."""

def has_source_type(type: str) -> bool:
    """Whether a GGML type has a packed format."""

def format_of(type: str) -> str:
    """The packed format that holds a GGML type without loss (F32: bf16)."""

def packed_size(format: str, n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k]."""

def check_pack(type: str, format: str, n: int, k: int) -> None:
    """ValueError unless a [n, k] of the type can be packed so."""

def pack(pool: WorkerPool, type: str, format: str, data: int, n: int, k: int, out: int) -> None:
    """
    Packs a matrix [n, k] of a GGML type from address `data` to address `out` (64-byte aligned).
    """

def pack_panels(
    pool: WorkerPool,
    type: str,
    format: str,
    data: Sequence[int],
    n: int,
    k: int,
    first: int,
    last: int,
    out: int,
    file: int = -1,
) -> None:
    """
    Packs panels [first, last) of matrices [n, k] of a GGML type from addresses, or, with `file`, from where they begin there, to address `out` (64-byte aligned), one matrix's behind the other's.
    """

def unpack(format: str, packed: int, k: int, first: int, last: int, out: int) -> None:
    """Float32 values of rows [first, last) of a packed matrix."""

def dot(isa: str, format: str, w: int, n: int, k: int, x: int, rows: int, out: int) -> None:
    """
    out [rows, n padded to 16] float32 = x [rows, k] float32 times packed [n, k]; one thread.
    """

def best_isa() -> str:
    """Newest instruction set of this machine, or 'none'."""

def choose_isa(name: str = "") -> str:
    """
    The instruction set a name or KTSERVE_ISA selects. ValueError if unknown or newer than the machine.
    """

class WorkerPool:
    """Threads that share out numbered work items; the caller is worker 0."""

    def __init__(
        self, groups: Sequence[Sequence[int]], pin: bool = False, spin_us: int = 2000, nodes: Sequence[int] = []
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def nodes(self) -> list[int]:
        """The memory node of each group; -1: not known."""

    def group_of(self, worker: int) -> int: ...
    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...
    def trace(self, items: int, work_us: float = 0.0, fail: int = -1) -> list[int]:
        """The worker that ran each work item; work item `fail` raises."""

    def latencies(self, calls: int, gap_us: float = 0.0) -> list[float]:
        """Seconds of each of `calls` empty jobs, after `gap_us` without work."""

    def record(self, on: bool) -> None:
        """Whether jobs are recorded from here on; for benchmarks."""

    def take_recorded(self) -> list[tuple[int, float, float]]:
        """
        Of each job that was recorded since the last call: work items, seconds, and seconds of all workers.
        """

class MappedFile:
    """A file in memory without a copy, which nobody may change meanwhile."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def wanted(self) -> bool:
        """Whether another program waits to write to it."""

    def copy(self) -> None:
        """
        Into memory of its own, at the same addresses; others may write to the file then.
        """

class MappedFiles:
    """Mapped files; those that others want to write to are copied."""

    def __init__(self) -> None: ...
    def map(self, file: int) -> MappedFile:
        """
        All of an open file, read-only. RuntimeError where its changes could not be held up: no lease is to be had.
        """

    def read_ahead(self, paths: Sequence[str], offset: int, threads: int) -> None:
        """
        Maps files and sums them up from `offset` on, on threads of its own, for `map`. Once; `drop` must follow.
        """

    def drop(self) -> None:
        """Ends reading ahead; files that nobody has mapped by then are given up."""

    def own(self) -> None:
        """Copies all files to huge pages, one after the other, on a thread."""

def futex_wakes(calls: int, gap_us: float = 0.0) -> list[float]:
    """
    Seconds of each of `calls` wakes of one sleeping thread, answer included: the floor of a parked pool.
    """

class Task:
    """Work that a bridge replays."""

class IdleTask(Task):
    """Sleeps, then fails if `error` is not empty."""

    def __init__(self, seconds: float = 0.0, error: str = "") -> None: ...

class Bridge:
    """Runs tasks whenever a stream posts a number in their channel's word."""

    def __init__(self, pool: WorkerPool, words: int, capacity: int, spin_us: int = 5000, nap_us: int = 2000) -> None:
        """
        `words`: address of int64 [3][capacity], zero: posted, done (2 n + failed), expired.
        """

    def add(self, task: Task) -> int:
        """The channel of a task."""

    @property
    def channels(self) -> int: ...
    @property
    def parked(self) -> bool: ...
    def wake(self) -> None:
        """Announces posts, so that the poller is awake for the first of them."""

    def post(self, channel: int) -> int:
        """A stream's part on the CPU: the number posted."""

    def wait(self, channel: int, timeout_s: float) -> int:
        """For what was posted last: 0 done, 1 failed, 2 expired."""

    def take_failures(self) -> list[tuple[int, int, str]]:
        """
        (channel, number, message) of what failed or expired since the last call.
        """

    def drive(self, channels: Sequence[int], rounds: int, timeout_s: float = 10.0) -> list[float]:
        """
        A thread in a stream's place: seconds of each round of post and wait over the channels.
        """

    def close(self) -> None:
        """Ends the poller."""

class ExpertLayer:
    """One layer's routed experts, packed, and their adapters."""

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        formats: Sequence[str],
        shards: int = 1,
        nodes: Sequence[int] = [],
        *,
        biased: bool = False,
        limit: float = 0.0,
        alpha: float = 1.0,
    ) -> None:
        """
        `nodes`: the memory node of each shard, or none. `biased`: projections have biases. `limit` and `alpha`: of the clamped activation; 0: silu(gate) up.
        """

    def load(
        self, pool: WorkerPool, projection: int, type: str, first: int, data: Sequence[int], file: int = -1
    ) -> None:
        """
        Packs experts first.. of projection 0 (gate), 1 (up) or 2 (down) from the addresses of their rows, or, with `file`, from where they begin in it.
        """

    def load_bias(self, projection: int, values: int) -> None:
        """Copies a projection's biases: float32 [experts, out]."""

    def set_lora(
        self,
        pool: WorkerPool,
        slot: int,
        rank: int,
        bf16: bool,
        a: Sequence[int],
        b: Sequence[int],
        scales: Sequence[float],
    ) -> None:
        """
        Copies an adapter into a slot: addresses of A [E, r, in] and B [E, out, r] of gate, up, down.
        """

    def clear_lora(self, slot: int) -> None: ...
    def dequantise(self, projection: int, expert: int, out: int) -> None:
        """Float32 [out, in] of one expert."""

    def shard(self, shard: int) -> tuple[int, int]:
        """Address and bytes of a NUMA shard's memory."""

    def write(self, pool: WorkerPool, file: int, offset: int) -> int:
        """Writes the packed memory to a file descriptor; its checksum."""

    def read(self, pool: WorkerPool, file: int, offset: int) -> int:
        """Fills the packed memory from a file; the checksum of what came."""

    def adopt(self, pool: WorkerPool, file: MappedFile, offset: int) -> int:
        """
        Takes the packed memory from a mapped file, without a copy; the checksum of what is there.
        """

    @property
    def shards(self) -> int: ...
    @property
    def formats(self) -> list[str]:
        """Packed formats of gate, up, down."""

    @property
    def choices(self) -> list[int]:
        """How often rows have chosen each expert in all tasks so far."""

    @property
    def num_bytes(self) -> int: ...

def expert_scratch_bytes(
    isa: str,
    deterministic: bool,
    pool: Sequence[int],
    hidden: int,
    intermediate: int,
    formats: Sequence[str],
    rows: int,
    top_k: int,
    rank: int,
) -> int:
    """
    The most scratch memory that a MoeRunner takes for calls of up to `rows` rows. pool: workers of each node; rank: the largest of the adapters, 0: none.
    """

class MoeRunner:
    """Computes expert tasks on a pool, one at a time."""

    def __init__(self, pool: WorkerPool, isa: str = "", deterministic: bool = False) -> None: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def weight_bytes_read(self) -> int:
        """
        Bytes of base weights that all calls so far have gone through: an expert's once for all rows of a work item, whatever adapters they have.
        """

    @property
    def isa(self) -> str: ...

class MoeTask(Task):
    """A layer over a set of buffers; replayed with whatever bsz says."""

    def __init__(
        self,
        runner: MoeRunner,
        layer: ExpertLayer,
        *,
        bsz: int,
        ids: int,
        weights: int,
        slots: int,
        hidden: int,
        out: int,
        max_rows: int,
        top_k: int,
        bf16: bool,
        touched: int = 0,
    ) -> None:
        """
        Addresses of bsz int32 [1], ids int64 [max_rows, top_k] (-1: skipped), weights float32 [max_rows, top_k], slots int32 [max_rows] (0: base), hidden and out [max_rows, hidden] in bf16 or float32. touched: int64 [1], to which each call adds how many distinct experts its rows have chosen; 0: nobody asks.
        """

    def run(self) -> None:
        """Computes `out`. ValueError for a bsz, id or slot out of range."""

class PagedAttention:
    """Paged causal attention; owns the KV blocks of all layers."""

    def __init__(
        self,
        pool: WorkerPool,
        *,
        layers: int,
        num_blocks: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv: str,
        isa: str = "",
        float_rows: bool = False,
        products: str = "",
        latent: int = 0,
        scale: float = 0.0,
        window: int = 0,
    ) -> None:
        """
        kv: the cache, float32, bfloat16 or int8. q, k, v and out are bfloat16, but float32 with float_rows or a float32 cache. products: int16 or bfloat16 forces what a bfloat16 or int8 cache is multiplied as. latent: of a key, how many values are the value, which is then not kept again; 0: values are apart. scale: of scores, 0: 1 / sqrt(head_dim). window: how many of the last positions a token sees, its own included; 0: all. ValueError for a shape that the kernels do not take.
        """

    @property
    def cache_bytes(self) -> int: ...
    @property
    def cache_address(self) -> int:
        """
        Of [layers, num_blocks, bytes of a block], as long as the object lives.
        """

    @property
    def tokens(self) -> int: ...
    @property
    def products(self) -> str:
        """What keys and values are multiplied as."""

    def set_sinks(self, layer: int, sinks: int) -> None:
        """
        The layer's sinks, float32 [heads], which are copied: of each query head a score that takes part in the softmax and has no value. ValueError for a layer that is not there.
        """

    def plan(
        self, row_starts: Sequence[int], context_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> None:
        """
        Lay out a step. ValueError if a table is short or names a block that is not there.
        """

    def forward(
        self,
        layer: int,
        tokens: int,
        *,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        out: int,
        out_stride: int,
    ) -> None:
        """
        Of the planned tokens: k, v into their blocks, then out = softmax(q k / sqrt(head_dim)) v. Addresses of rows [tokens, heads, head_dim] (k, v: kv_heads); strides from token to token in elements.
        """

def linear_format(source: str) -> str:
    """
    The packed format that holds a GGML type without loss (F32 and F16: rounded to bf16), or ''.
    """

class PackedLinear:
    """One projection's packed weights and its adapters by slot."""

    def __init__(self, format: str, n: int, k: int, shards: int = 1, bias: int = 0, nodes: Sequence[int] = []) -> None:
        """`nodes`: the memory node of each shard, or none."""

    def load(self, pool: WorkerPool, source: str, data: int, data_bytes: int, file: int = -1) -> None:
        """
        Packs [n, k] of a GGML type from an address, or, with `file`, from where it begins there.
        """

    def write(self, pool: WorkerPool, file: int, offset: int) -> int:
        """Writes the packed memory to a file descriptor; its checksum."""

    def read(self, pool: WorkerPool, file: int, offset: int) -> int:
        """Fills the packed memory from a file; the checksum of what came."""

    def adopt(self, pool: WorkerPool, file: MappedFile, offset: int) -> int:
        """
        Takes the packed memory from a mapped file, without a copy; the checksum of what is there.
        """

    @property
    def format(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def shards(self) -> int: ...
    def first_panel(self, shard: int) -> int: ...
    def rows(self, pool: WorkerPool, ids: int, count: int, out: int) -> None:
        """
        Float32 [count, k] at `out`: the weights of the outputs listed as int64.
        """

    def set_adapter(self, slot: int, a: int, b: int, is_bf16: bool, rank: int, scale: float) -> None:
        """
        A [rank, k] and B [n, rank], both bf16 or both float32, copied into a slot (1 or more) that no call in flight uses.
        """

    def clear_adapter(self, slot: int) -> None: ...
    @property
    def has_adapters(self) -> bool: ...

class LinearRunner:
    """Runs projections that share an input."""

    def __init__(self, pool: WorkerPool, isa: str = "", deterministic: bool = False) -> None: ...
    @property
    def deterministic(self) -> bool: ...
    def run(
        self,
        linear: PackedLinear,
        *,
        x: int,
        stride: int,
        rows: int,
        is_bf16: bool,
        slots: int,
        out: int,
        out_stride: int,
    ) -> None:
        """
        out [rows, n] = x [rows, k] W^T (+ bias) (+ adapters), bf16 or float32 as x; strides in elements. slots: int32 [rows], 0 = base; address 0: base rows only.
        """

    def run_many(
        self,
        linears: Sequence[PackedLinear],
        *,
        x: int,
        stride: int,
        rows: int,
        is_bf16: bool,
        slots: int,
        outs: Sequence[int],
        out_strides: Sequence[int],
    ) -> None:
        """
        The same for projections that share x; each has its own out and stride.
        """

class LatentUp:
    """The projection from latents to keys and values, by heads."""

    def __init__(
        self,
        pool: WorkerPool,
        keys: PackedLinear,
        values: PackedLinear,
        heads: int,
        isa: str = "",
        deterministic: bool = False,
    ) -> None:
        """
        keys [heads * latent, nope], of each head transposed; values [heads * value, latent]; each in a format of its own. ValueError for sizes that do not go together.
        """

    def absorb(
        self,
        *,
        x: int,
        x_stride: int,
        x_head_stride: int,
        out: int,
        out_stride: int,
        out_head_stride: int,
        tokens: int,
        is_bf16: bool,
        slots: int,
    ) -> None:
        """
        Queries [tokens, heads, nope] -> [tokens, heads, latent], which meet latents. slots: int32 [tokens] or 0.
        """

    def values(
        self,
        *,
        x: int,
        x_stride: int,
        x_head_stride: int,
        out: int,
        out_stride: int,
        out_head_stride: int,
        tokens: int,
        is_bf16: bool,
        slots: int,
    ) -> None:
        """Sums of latents [tokens, heads, latent] -> [tokens, heads, value]."""

    def set_adapter(self, slot: int, a: int, keys: int, values: int, is_bf16: bool, rank: int, scale: float) -> None:
        """
        A [rank, latent], and B's rows of keys [heads, nope, rank] and of values [heads, value, rank], all bf16 or all float32, copied into a slot (1 or more) that no call in flight uses.
        """

    def clear_adapter(self, slot: int) -> None: ...

def read_bandwidth(pool: WorkerPool, bytes: int, repeats: int = 5, isa: str = "") -> float:
    """Bytes per second that all workers read."""

def peak_operations(pool: WorkerPool, type: str, repeats: int = 5, isa: str = "") -> float:
    """
    Operations per second of all workers on registers: 'f32', 'bf16' or 'int8'.
    """

class Router:
    """How rows choose and weight their experts, from logits."""

    def __init__(
        self,
        top_k: int,
        *,
        score: str = "softmax",
        bias: int = 0,
        groups: int = 1,
        top_groups: int = 1,
        group_score: str = "max",
        normalise: float | None = None,
        scale: float = 1.0,
    ) -> None:
        """
        s = softmax or sigmoid of the logits; the top_k largest of s + bias are chosen. bias: float32 [experts], which must outlive what uses it, or 0. Of several groups of experts only the top_groups best take part, by the largest (max) or the sum of the two largest (top2) of s + bias. Weights are s, divided by their sum + normalise unless that is None, times scale.
        """

class Ops:
    """
    Row operations over a pool. Addresses and strides (in elements); bf16 or float32.
    """

    def __init__(self, pool: WorkerPool, isa: str = "") -> None: ...
    def norm(
        self,
        *,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        weight_bf16: bool,
        out: int,
        out_stride: int,
        rows: int,
        dim: int,
        eps: float,
        is_bf16: bool,
    ) -> None:
        """
        out [rows, dim] = RMS norm of x, or (residual given) of residual += x. weight: [dim], bf16 or float32.
        """

    def rotate(
        self,
        *,
        x: int,
        x_stride: int,
        x_head_stride: int,
        out: int,
        out_stride: int,
        out_head_stride: int,
        cos: int,
        sin: int,
        positions: int,
        table_rows: int,
        tokens: int,
        heads: int,
        dim: int,
        interleaved: bool,
        is_bf16: bool,
    ) -> None:
        """
        out [tokens, heads, dim] = x rotated to its positions, int64 [tokens]; cos, sin float32 [table_rows, dim / 2]. interleaved: neighbours are rotated together and come out as halves.
        """

    def qk_norm_rope(
        self,
        *,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        q_weight: int,
        k_weight: int,
        weight_bf16: bool,
        cos: int,
        sin: int,
        positions: int,
        table_rows: int,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        eps: float,
        is_bf16: bool,
    ) -> None:
        """
        In place: QK-norm and rotation of q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim], of whose heads the first rotary_dim values are rotated. Weights [head_dim], or 0: no norm; cos, sin float32 [table_rows, rotary_dim / 2]; positions int64 [tokens].
        """

    def silu_mul(
        self,
        *,
        gate: int,
        gate_stride: int,
        up: int,
        up_stride: int,
        out: int,
        out_stride: int,
        rows: int,
        dim: int,
        is_bf16: bool,
    ) -> None:
        """out [rows, dim] = silu(gate) * up."""

    def add_gated(
        self,
        *,
        base: int,
        base_stride: int,
        x: int,
        x_stride: int,
        gate: int,
        out: int,
        out_stride: int,
        rows: int,
        dim: int,
        is_bf16: bool,
    ) -> None:
        """out = base + sigmoid(gate) x, by row; gate 0: base + x."""

    def gate_heads(
        self,
        *,
        gate: int,
        gate_stride: int,
        gate_head_stride: int,
        x: int,
        x_stride: int,
        tokens: int,
        heads: int,
        dim: int,
        is_bf16: bool,
    ) -> None:
        """
        In place: x [tokens, heads, dim] *= sigmoid(gate), heads of x contiguous.
        """

    def router_topk(
        self,
        *,
        logits: int,
        stride: int,
        rows: int,
        experts: int,
        router: Router,
        ids: int,
        weights: int,
        is_bf16: bool,
    ) -> None:
        """
        From logits [rows, experts]: ids int64 and weights float32 [rows, top_k], by falling s + bias.
        """

    def embed(
        self, *, ids: int, rows: int, table: int, vocab: int, dim: int, out: int, out_stride: int, element_bytes: int
    ) -> None:
        """
        out [rows, dim] = table[ids], ids int64 [rows]. ValueError for an id out of range.
        """

    def argmax(self, *, logits: int, stride: int, rows: int, n: int, out: int, is_bf16: bool) -> None:
        """
        out int64 [rows]: the place of each largest of logits [rows, n], as torch.argmax finds it.
        """

class DeltaVectors:
    """A layer's own weights, which must outlive what uses them."""

    def __init__(self, *, conv: int, decay: int, dt_bias: int, norm: int, norm_eps: float) -> None:
        """
        Addresses of float32: conv [kernel, channels], decay (-exp(A_log)) and dt_bias [value_heads], norm [value_dim].
        """

class DeltaNet:
    """Gated delta nets; owns the states of sequences of all layers."""

    def __init__(
        self,
        pool: WorkerPool,
        *,
        layers: int,
        slots: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        fused: bool,
        fused_gates: bool,
        tiled: bool = False,
        one_by_one: bool = False,
        keeping: int = 0,
        kept: int = 0,
        isa: str = "",
    ) -> None:
        """
        fused: qkv has q, k, v, z by head of keys, fused_gates: b has b, a by head of keys. tiled: value head h has the keys of head h % key_heads. one_by_one: a position's bits do not depend on how its sequence is cut. Slots below `keeping` keep the inputs of up to `kept` positions. ValueError for a shape that the kernels do not take.
        """

    @property
    def slot_bytes(self) -> int: ...
    @property
    def state_address(self) -> int:
        """Of [layers, slots, slot_bytes], as long as the object lives."""

    def plan(
        self,
        row_starts: Sequence[int],
        context_lens: Sequence[int],
        states: Sequence[tuple[int, int, Sequence[tuple[int, int]], int, bool]],
    ) -> None:
        """
        Lay out a step. states: of each row (slot, source, [(position, slot of a copy), ..], positions to replay, whether the slot keeps the row's inputs rather than its state). ValueError for what does not go together.
        """

    def forward(
        self,
        layer: int,
        tokens: int,
        vectors: DeltaVectors,
        *,
        qkv: int,
        qkv_stride: int,
        z: int,
        z_stride: int,
        b: int,
        a: int,
        gate_stride: int,
        out: int,
        out_stride: int,
        is_bf16: bool,
    ) -> None:
        """
        Of the planned tokens: convolution, delta rule, and norm(.) silu(z) into out [tokens, value_heads * value_dim]. qkv, z and out are bf16 or float32, b and a float32; strides from token to token. With fused projections z is qkv, or a is b.
        """

class ExpertsFailed(RuntimeError):
    pass

class AttentionPart:
    """An attention of a layer, from normalised rows on."""

class MlpPart:
    """An MLP of a layer, from normalised rows on."""

class Rotation:
    """
    Tables of cosines and sines, float32 [rows, dim / 2], which must outlive what uses them. The first dim values of a head are rotated.
    """

    def __init__(self, cos: int, sin: int, *, rows: int, dim: int) -> None: ...

class GroupedQueryPart(AttentionPart):
    """Grouped-query attention with the heads of its PagedAttention."""

    def __init__(
        self,
        attention: PagedAttention,
        layer: int,
        rotation: Rotation,
        *,
        q: PackedLinear,
        k: PackedLinear,
        v: PackedLinear,
        o: PackedLinear,
        qk_norm: str = "none",
        q_norm: int = 0,
        k_norm: int = 0,
        gated: bool = False,
    ) -> None:
        """
        layer: of the attention's. qk_norm: none, head (weights [head_dim]) or whole (of all heads at once: [heads * head_dim] and [kv_heads * head_dim]); addresses of weights, which must outlive the part. gated: q gives of each head [query | gate], and what comes out is multiplied by the gate's sigmoid. ValueError for sizes that do not fit.
        """

class LatentPart(AttentionPart):
    """Latent attention, absorbed."""

    def __init__(
        self,
        attention: PagedAttention,
        layer: int,
        rotation: Rotation,
        q_a: PackedLinear | None,
        q_a_norm: int,
        q: PackedLinear,
        kv_a: PackedLinear,
        kv_a_norm: int,
        up: LatentUp,
        o: PackedLinear,
        norm_eps: float,
        interleaved: bool,
    ) -> None:
        """
        layer: of the attention's. q_a: None where queries have one projection, with 0 for its norm. Addresses of norm weights, which must outlive the part. ValueError for sizes that do not fit.
        """

class DeltaPart(AttentionPart):
    """A gated delta net with the states of its DeltaNet."""

    def __init__(
        self,
        delta: DeltaNet,
        layer: int,
        *,
        wide: Sequence[PackedLinear],
        gates: Sequence[PackedLinear],
        out: PackedLinear,
        vectors: DeltaVectors,
    ) -> None:
        """
        layer: of the delta net's. wide: to q, k, v, z by head of keys, or to [q | k | v] and to z; gates: to b, a by head of keys, or to b and to a. ValueError for sizes that do not fit.
        """

class DensePart(MlpPart):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None:
        """ValueError for sizes that do not fit."""

class ExpertMemory:
    """What experts read and write; it must outlive what uses it."""

    def __init__(self, *, bsz: int, ids: int, weights: int, slots: int, hidden: int, out: int, max_rows: int) -> None:
        """
        Addresses: bsz int32 [1], ids int64 [max_rows, top_k], weights float32 [max_rows, top_k], slots int32 [max_rows], hidden and out [max_rows, hidden].
        """

class SparsePart(MlpPart):
    """A router, its experts, and perhaps a shared expert."""

    def __init__(
        self,
        gate: PackedLinear,
        router: Router,
        memory: ExpertMemory,
        experts: Task | None,
        *,
        shared: DensePart | None = None,
        shared_gate: PackedLinear | None = None,
    ) -> None:
        """
        experts: bound to the memory; None: they are computed elsewhere, and only Decoder.attend can be called. shared: an expert for every row, times sigmoid(shared_gate x) unless that is None. ValueError for sizes that do not fit.
        """

class Decoder:
    """
    A model's layers: the attention half of one, or all of them in one call.
    """

    def __init__(
        self, ops: Ops, linear: LinearRunner, *, hidden: int, eps: float, is_bf16: bool, weight_bf16: bool
    ) -> None:
        """is_bf16: activations, weight_bf16: norm weights; float32 otherwise."""

    def add_layer(self, input_norm: int, attention: AttentionPart, post_norm: int, mlp: MlpPart | None) -> None:
        """
        The next layer. Addresses of norm weights [hidden], which must outlive the decoder. mlp: None where it is computed elsewhere, and only attend can be called. ValueError for a part that does not fit.
        """

    def set_head(self, final_norm: int, lm_head: PackedLinear) -> None:
        """What follows the layers."""

    def attend(
        self,
        layer: int,
        *,
        tokens: int,
        residual: int,
        delta: int,
        delta_stride: int,
        positions: int,
        slots: int,
        hidden: int,
    ) -> None:
        """
        The attention half of a layer: residual [tokens, hidden] += delta (0: nothing), then the attention; hidden [tokens, hidden], normalised. Experts' ids and weights go into their memory. positions: int64 [tokens]; slots: int32 [tokens], 0: base rows only. delta_stride in elements.
        """

    def run(
        self,
        *,
        tokens: int,
        residual: int,
        positions: int,
        slots: int,
        keep: int,
        kept: int,
        hidden: int,
        greedy: int,
        seen: int,
    ) -> float:
        """
        All layers over residual [tokens, hidden], which is overwritten, and the final norm: hidden [kept, hidden] of the rows keep (int64 [kept], rising; 0: all). greedy: int64 [kept], each row's greedy token, or 0. seen: int64, the chosen experts [rows, top_k] of each layer that has some, or 0. Returns the seconds spent in experts. ExpertsFailed for what experts throw, ValueError for all else.
        """

class TrainLora:
    """Addresses of an adapter's float32 matrices of one layer."""

    def __init__(
        self,
        slot: int,
        rank: int,
        scale: float,
        a: Sequence[int],
        b: Sequence[int],
        grad_a: Sequence[int] = [0, 0, 0],
        grad_b: Sequence[int] = [0, 0, 0],
    ) -> None:
        """
        A [E, r, in] and B [E, out, r] of gate, up, down; their gradients, written by `backward` (0: not wanted).
        """

class TrainBatch:
    """Addresses of the rows of a training step."""

    def __init__(self, *, ids: int, weights: int, slots: int, hidden: int, rows: int, top_k: int, bf16: bool) -> None:
        """
        ids int64 [rows, top_k] (-1: skipped), weights float32 [rows, top_k], slots int32 [rows] (0: no LoRA), hidden [rows, hidden] in bf16 or float32.
        """

class ExpertTrainer:
    """
    Forward and backward of a layer's experts with LoRA on a pool, one call at a time.
    """

    def __init__(self, pool: WorkerPool, isa: str = "") -> None: ...
    @property
    def isa(self) -> str: ...
    def forward(
        self, layer: ExpertLayer, loras: Sequence[TrainLora], batch: TrainBatch, *, out: int, kept: int = 0
    ) -> None:
        """
        out [rows, hidden]; kept [rows * top_k, 2 (intermediate + the largest rank)] or 0: memory for `backward`, gate and up of each choice, then A x of both; both in hidden's type. ValueError for an id or slot out of range.
        """

    def backward(
        self,
        layer: ExpertLayer,
        loras: Sequence[TrainLora],
        batch: TrainBatch,
        *,
        kept: int,
        grad_out: int,
        grad_hidden: int,
        grad_weights: int,
    ) -> None:
        """
        From grad_out: grad_hidden [rows, hidden] (0: not wanted), both in hidden's type, grad_weights float32 [rows, top_k]; writes the gradients of `loras`. kept: what forward kept of the same batch, or 0: computed again. ValueError for an id or slot out of range.
        """
