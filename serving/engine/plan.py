"""What the scheduler asks of the ranks in one step (`StepPlan`) and what comes back (`StepResult`). Arrays, not objects per request.

A *slot* is a running sequence's place in every per-sequence array of scheduler and runner, kept from admission to its end; slots of
ended sequences are used again. A *row* is a sequence's part in one step. The token sampled for a slot stays on the device and is the
next step's input there, so that step n + 1 can be planned before step n has answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagoda.models.encoding import EncoderFacts
from pagoda.models.media import MediaFacts, MediaPositions, Numbers
from pagoda.serving.engine.messages import EncoderPrompt
from pagoda.serving.engine.params import LogprobsMode, SamplingParams
from pagoda.serving.engine.pooling import PoolingFacts, PoolingParams

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]

ON_DEVICE = -1
"""In `StepPlan.token_ids`: the token is the last one sampled for the row's slot, which only the device knows."""


class Admission(NamedTuple):
    """A sequence that begins to run in this step, or runs again after preemption: the runner sets up the slot.

    Attributes:
        slot: its slot.
        params: its settings; `seed` is always set (the scheduler draws one where the request brought none).
        prompt: prompt token ids; output: tokens generated before (after preemption, and forks).
        sequence: index among the request's `n` sequences, mixed into the seed.
        eos_ids: end tokens; with `params.stop_token_ids` they are held back until `params.min_tokens` are out.
        pooling: of a request that is pooled.
        positions: of a prompt with media, for models with several a token.
        spoken: the prompt's ids are tokens, rather than places of embeddings.
    """

    slot: int
    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    sequence: int = 0
    eos_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    positions: MediaPositions | None = None
    spoken: bool = True


class PageCopies(NamedTuple):
    """Whole pages to copy before the step (forks): `source[i] → target[i]`, int64."""

    source: LongArray
    target: LongArray


class Placement(NamedTuple):
    """Before the step, adapter number `adapter` goes into device slot `slot`, in place of what is there."""

    slot: int
    adapter: int


class Unseen(NamedTuple):
    """Why an item could not be encoded, and whether that is the item's own fault rather than the device's."""

    why: str
    refused: bool


class EncodeJob(NamedTuple):
    """Before the step, an item is encoded into `rows` `[n]` of the embedding store.

    Attributes:
        tokens: ids that the item stands for `[n]`. tensors, digest: see `MediaItem`.
    """

    rows: LongArray
    tokens: tuple[int, ...]
    tensors: dict[str, Numbers]
    digest: bytes


class MediaPlan(NamedTuple):
    """What a step does with media.

    Attributes:
        jobs: items to encode first.
        rows, sources: `[E]` int64, tokens of the step and the rows of the embedding store that replace them.
        spans: `[2, E]` int64, of each such token where its item begins and ends in the prompt.
    """

    jobs: tuple[EncodeJob, ...]
    rows: LongArray
    sources: LongArray
    spans: LongArray


class Encode(NamedTuple):
    """Before the step, an encoder reads `given`; the K and V of its `tokens` tokens go into `pages` of each cross-attention group."""

    given: EncoderPrompt
    tokens: int
    pages: tuple[IntArray, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step, the same for all ranks of a replica. R rows, T tokens, G cache groups; rows with one query token come last.

    Attributes:
        step: counts from 0.
        slots: `[R]` int32.
        starts: `[R]` int32, tokens of the sequence already in the cache (an upper bound where drafts are in flight).
        lengths: `[R]` int32, query tokens of the row, ≥ 1; T is their sum.
        token_ids: `[T]` int32, or `ON_DEVICE`.
        block_tables: per cache group `[R, P_g]` int32 page ids, 0 past the end and for pages that left a window.
        sampled: `[R]` bool: the row's last query token yields a token (false for all but the last chunk of a prompt).
        bound: `[R]` bool: the host needs the row's value before the row's next step.
        admissions: slots to set up before the step. copies: pages to copy before the step, per pool.
        masks: optional grammar bitmasks, `[M, ceil(V/32)]` int32; `mask_rows`, the row of each; `mask_nodes`, which of the row's samples
            it is for: 0 is the one after its known tokens, 1 + j the one after draft j (None: all 0), less the row's `certain` ones.
        drafts: optional `[R, k]` int32 draft tokens, −1 past a row's last one; they are the last of its tokens in `token_ids`.
        parents: `[R, k]` int32, the draft that each one follows, −1 for the row's known tokens: a tree, parents before children, siblings
            differ. A chain is −1, 0, 1, …
        certain: optional `[R]` int32, of a chain's drafts how many come without a choice: nothing is sampled before them.
        draws: `[R]` int32, index of the token to be sampled within the sequence's output (counter of its random stream); with drafts,
            that of the one after the known tokens.
        adapters: optional `[R]` int32 device slot of each row's adapter, −1 for none; None where no row has one.
        placements: adapters to put into device slots before the step.
        taps: layers whose hidden states the step gives. tapped: `[R]` bool, of whose tokens; None where `taps` is empty.
        routed: `[R]` bool, the rows whose tokens' experts the step gives; None: no row's.
        runs: optional `[R]` int32, a burst: so many tokens each row is to sample, one after the other, in as many steps of one token a row
            that the host does not look at in between. What the other fields say is the first of them; block tables hold all.
        media: what is encoded and replaced; None where no row has media.
        encodes: what the encoder reads before the step. cross_lengths: `[R]` int32, tokens that the encoder gave for each row; None for
            models without one.
        capture: the ranks capture the step where it is not captured yet; otherwise it runs through a larger captured one or as it is.
    """

    step: int
    slots: IntArray
    starts: IntArray
    lengths: IntArray
    token_ids: IntArray
    block_tables: tuple[IntArray, ...]
    sampled: BoolArray
    bound: BoolArray
    draws: IntArray
    admissions: tuple[Admission, ...] = ()
    copies: PageCopies | None = None
    masks: IntArray | None = None
    mask_rows: IntArray | None = None
    mask_nodes: IntArray | None = None
    drafts: IntArray | None = None
    parents: IntArray | None = None
    certain: IntArray | None = None
    adapters: IntArray | None = None
    placements: tuple[Placement, ...] = ()
    taps: tuple[int, ...] = ()
    tapped: BoolArray | None = None
    routed: BoolArray | None = None
    runs: IntArray | None = None
    media: MediaPlan | None = None
    encodes: tuple[Encode, ...] = ()
    cross_lengths: IntArray | None = None
    capture: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_steps(self) -> int:
        """How many steps of the device it is: 1, or the longest of `runs`."""
        return 1 if self.runs is None else int(self.runs.max())


class Captures(NamedTuple):
    """How many steps a rank has captured, and how many it would still capture ahead of need."""

    captured: int = 0
    left: int = 0


class CaptureReport(NamedTuple):
    """What a rank did when it was to capture the next step: which (None: none was left), and why that failed."""

    counts: Captures
    job: str | None = None
    error: str | None = None


class RowLogprobs(NamedTuple):
    """Of one row's sampled token (or of a prompt chunk's tokens, leading axis N): own logprob and rank, top-k ids and logprobs."""

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True)
class StepResult:
    """What a step gave. S = number of sampled rows, in row order.

    Attributes:
        step: the plan's.
        tokens: `[S, k]` int32; `counts` `[S]` int32 says how many of each row are valid (1 without drafts and runs).
        logprobs: sampled-row index → `RowLogprobs` with N = count, for rows that asked.
        prompt_logprobs: row index → `RowLogprobs` over this chunk's *next* tokens, for rows that asked.
        hidden: row index → `[L, N, width]` float32, what the plan's `taps` gave after the layer, of the row's tokens: all but rejected
            drafts, accepted ones along their path. experts: likewise `[L, N, k]` int32, what each layer with
            experts chose, of the plan's `routed` rows.
        bad_rows: sampled rows whose logits held NaN; they are failed, not served.
        in_place: `[S]` int32, of a step with drafts: accepted ones whose K and V lie where the sequence's own would; those of another
            branch of a tree are computed again. None: all of them.
        pooled: sampled-row index → answer, of pooling models, whose tokens mean nothing.
        unseen: digest → why, of items that could not be encoded; requests that bring one are failed.
        captures: of ranks that capture ahead of need (`RunnerFacts.captures`), when it has changed.
    """

    step: int
    tokens: IntArray
    counts: IntArray
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    hidden: dict[int, FloatArray] = field(default_factory=dict)
    experts: dict[int, IntArray] = field(default_factory=dict)
    bad_rows: tuple[int, ...] = ()
    in_place: IntArray | None = None
    pooled: dict[int, FloatArray] = field(default_factory=dict)
    unseen: dict[bytes, Unseen] = field(default_factory=dict)
    captures: Captures | None = None


@dataclass(frozen=True)
class RunnerFacts:
    """What the scheduler must know of the ranks after they loaded.

    Attributes:
        groups: `hal.kv.CacheGroup`s, all with one `page_bytes`.
        num_pages: pages of the pool, page 0 (never handed out) included.
        max_model_len, vocab_size, device: see `EngineFacts`.
        overlap: how many steps may be in flight (≥ 1).
        burst_steps, burst_rows: the longest of a plan's `runs`, and for how many rows at most; 1 step: plans have none.
        weight_bytes, kv_bytes: in use on rank 0. kernels: op → kernel names.
        adapters: `adapters.LoadedAdapter`s that the ranks have read.
        adapter_slots: adapters that the device holds at a time; 0 where they are not enabled.
        trees: its attention takes drafts that branch (`ops.attention.TreeMask`).
        load_seconds: see `EngineFacts`.
        pooling: see `EngineFacts`. whole_prompts: a step takes no parts of prompts.
        media: see `models.media.MediaFacts`; media_rows: embeddings that the ranks keep. embeds_width: see `EngineFacts`.
        encoder: of a model whose decoder attends to one, or None.
        in_calls: a step has ended when the call that starts it returns (`hal.info.Feature.IN_CALLS`): none is begun beside another.
        length_epochs: a `models.model.LengthEpochs` where a sequence that grows must be computed anew, or None.
        logprobs: see `EngineFacts`.
        captures: of ranks that capture steps ahead of need, and otherwise where a plan says so alone: how many they have.
    """

    groups: tuple[Any, ...]
    num_pages: int
    max_model_len: int
    vocab_size: int
    device: str
    overlap: int = 2
    burst_steps: int = 1
    burst_rows: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    kernels: dict[str, str] = field(default_factory=dict)
    adapters: tuple[Any, ...] = ()
    adapter_slots: int = 0
    in_calls: bool = False
    length_epochs: Any = None
    load_seconds: dict[str, float] = field(default_factory=dict)
    trees: bool = False
    pooling: PoolingFacts | None = None
    whole_prompts: bool = False
    media: MediaFacts | None = None
    media_rows: int = 0
    embeds_width: int = 0
    encoder: EncoderFacts | None = None
    logprobs: LogprobsMode = "raw_logprobs"
    captures: Captures | None = None
