"""From logits to tokens: `penalize`, `apply_token_bitmask`, `sample`, `masked_sample`, `top_logprobs`.

Random numbers are counter-based: one uniform per (seed, position), computed with integer arithmetic that is the same
on every vendor, so a seed gives the same tokens anywhere and a request's stream does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagoda.hal.kernel import PlainKernel


@dataclass(frozen=True)
class SamplingFacts:
    """Sampling over `vocab` logits held in `dtype` (computed in float32)."""

    dtype: str
    vocab: int


@dataclass(frozen=True)
class SamplingRows:
    """Per-row settings of `sample`, each `[S]` on the device.

    Attributes:
        temperature: float32; 0 means greedy.
        top_k: int32; 0 means all.
        top_p: float32 in (0, 1]; 1 means all.
        min_p: float32 in [0, 1): tokens below min_p · (highest probability) are dropped.
        seed: int64, one stream a request.
        position: int64, index of the token to be sampled within the request; the counter of the stream.
        all_greedy, any_filter: host facts that let a kernel skip work; conservative values are always right.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    all_greedy: bool = False
    any_filter: bool = True


class PenalizeReference(PlainKernel):
    """`run(logits, prompt_mask, counts, repetition, presence, frequency)` → penalised logits, float32 `[S, V]`.

    prompt_mask `[S, V]` bool: token is in the prompt; counts `[S, V]` int32: times generated; the rest `[S]` float32.
    Repetition divides positive and multiplies negative logits of seen tokens (arXiv:1909.05858); frequency and presence as in
    the OpenAI API, over generated tokens only.
    """

    facts: SamplingFacts

    def run(
        self,
        logits: torch.Tensor,
        prompt_mask: torch.Tensor,
        counts: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        wide = logits.float()
        generated = counts > 0
        factor = torch.where(prompt_mask | generated, repetition[:, None], torch.ones_like(repetition)[:, None])
        wide = torch.where(wide > 0, wide / factor, wide * factor)
        return wide - frequency[:, None] * counts - presence[:, None] * generated


class TokenBitmaskReference(PlainKernel):
    """`run(logits, bitmask)`: tokens whose bit is 0 become −inf. bitmask `[S, ceil(V/32)]` int32, bit i of word w is token 32w + i."""

    facts: SamplingFacts

    def run(self, logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
        bits = torch.arange(32, device=logits.device, dtype=torch.int32)
        allowed = ((bitmask.unsqueeze(-1) >> bits) & 1).flatten(-2)[:, : logits.shape[1]].bool()
        return logits.masked_fill(~allowed, float("-inf"))


class SampleReference(PlainKernel):
    """`run(logits, rows)`: logits `[S, V]` → (token ids `[S]` int64, whether the row holds NaN `[S]` bool: its token means nothing).

    Temperature, min-p, top-k, top-p in this order, then one draw by inverse cumulative probability of what is left, in token
    order: a row's token depends on no other row's filters. Of equal logits the lower token id ranks first, for greedy rows too.
    """

    facts: SamplingFacts

    def run(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        greedy, bad = logits.argmax(-1), logits.amax(-1).isnan()
        if rows.all_greedy:
            return greedy, bad
        scaled = logits.float() / rows.temperature.clamp(min=1e-5)[:, None]
        drawn = self._draw(logits, scaled, rows)
        return torch.where(rows.temperature > 0, drawn, greedy), bad

    def _draw(self, logits: torch.Tensor, scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        probs = scaled.softmax(-1)
        if rows.any_filter:
            order = logits.sort(stable=True, dim=-1, descending=True).indices
            kept = _filter(probs.gather(-1, order), rows)
            probs = probs * torch.zeros_like(kept).scatter(-1, order, kept)
        return _inverse_cdf(probs, uniform(rows.seed, rows.position))


class MaskedSampleReference(PlainKernel):
    """`run(logits, masks, rows)`: `sample` among the tokens that `masks` (as of `apply_token_bitmask`) allow → the same results.

    Logits of other tokens have no say, NaN among them neither, and nothing need be written over them. A row in which no allowed token is
    above −∞ gives token 0.
    """

    facts: SamplingFacts

    def run(self, logits: torch.Tensor, masks: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        return SampleReference(self.facts).run(TokenBitmaskReference(self.facts).run(logits, masks), rows)


def _filter(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Which of the descending `probs` survive min-p, top-k and top-p (over what the earlier ones left)."""
    kept = probs >= rows.min_p[:, None] * probs[:, :1]
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = kept & ((rows.top_k[:, None] <= 0) | (rank < rows.top_k[:, None]))
    left = probs * kept
    share = left / left.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share
    return kept & ((before < rows.top_p[:, None]) | (rank == 0))


def processed_logits(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits `[S, V]` whose probabilities are those that `sample` draws by: over the temperature, −inf where a filter drops a token;
    greedy rows as they are. float32."""
    wide = logits.float()
    scaled = wide / rows.temperature.clamp(min=1e-5)[:, None]
    if rows.any_filter:
        order = logits.sort(stable=True, dim=-1, descending=True).indices
        kept = _filter(scaled.softmax(-1).gather(-1, order), rows)
        scaled = scaled.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), float("-inf"))
    return torch.where(rows.temperature[:, None] > 0, scaled, wide)


def _inverse_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Index where the cumulative weight passes `u` of the total; never one of zero weight, and 0 where there is no other or any is NaN."""
    total = weights.cumsum(-1, dtype=torch.float64)
    target = u[:, None] * total[:, -1:]
    return ((total <= target) & (total[:, -1:] > 0)).sum(-1).clamp(max=weights.shape[1] - 1)


_MASK = 0xFFFFFFFF


def uniform(seed: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per (seed, counter), both int64; float64 with 32 random bits.

    Two rounds of the 32-bit finaliser of MurmurHash3 over the four halves, in int64 so that no vendor's overflow rule matters.
    """
    state = torch.full_like(seed, 0x9E3779B9)
    for word in (seed & _MASK, (seed >> 32) & _MASK, counter & _MASK, (counter >> 32) & _MASK):
        state = _mix(state ^ word)
    return _mix(state).double() / 2.0**32


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = _multiply(x ^ (x >> 16), 0x85EBCA6B)
    x = _multiply(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def _multiply(x: torch.Tensor, factor: int) -> torch.Tensor:
    """x · factor modulo 2³² without leaving 63 bits."""
    low = (x & 0xFFFF) * factor
    high = ((x >> 16) * factor & 0xFFFF) << 16
    return (low + high) & _MASK


class TopLogprobsReference(PlainKernel):
    """`run(logits, tokens, k)`: → (logprob of `tokens` `[S]`, its rank from 1 `[S]`, top-k logprobs `[S, k]`, their ids `[S, k]`)."""

    facts: SamplingFacts

    def run(self, logits: torch.Tensor, tokens: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        logprobs = logits.float().log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[:, None])
        # Compared before the normaliser is subtracted, which could make distinct logits equal.
        rank = (logits > logits.gather(-1, tokens[:, None])).sum(-1) + 1
        top = logprobs.topk(k, dim=-1)
        return chosen.squeeze(-1), rank, top.values, top.indices
