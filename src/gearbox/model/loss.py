"""Compute the token-exact loss inside the model's forward, so that every engine's hooks still run.

Shapes: B rows of a micro-batch, T tokens of a row, N tokens of all rows, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import is_flash_attention_requested

from gearbox.config.recipe_values import Preference
from gearbox.kernels import distillation, preference
from gearbox.kernels import head as heads
from gearbox.kernels.preference import Answers
from gearbox.model.router_loss import count_loads, is_balanced, load_balance_loss, resolve_router_weight
from gearbox.rows.units import GOOD, IGNORE_INDEX
from gearbox.sharding.unwrap import decoder_of, without_adapter

if TYPE_CHECKING:
    from peft import PeftModel

PLACES = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The arguments of a decoder that place tokens in documents."""
JUDGED_INPUTS = ("answers", "reference")
"""The inputs of an objective that compares answers."""
TEACHER_INPUTS = ("teacher_ids", "teacher_log_probs")
"""The inputs of distillation: [B, T, k], and the bits of [B, T, k + 1] in fp32 as int32 (see `rows.teacher`)."""
PairOfTensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LossPath:
    """The way to compute a model's loss. `probes.check_loss` chooses one that gives the model's own loss."""

    own_logits: bool = False
    """Use the logits of the model's own forward, all at once, because more than a head follows the decoder."""
    own_positions: bool = False
    """Let the model number the positions. Packed documents are then not isolated."""

    def describe(self) -> str:
        """Return the text of the plan's line about the loss, or "" for the usual path."""
        parts = ["full logits of the model's own forward, which take more memory"] if self.own_logits else []
        return ", ".join([*parts, "the model's own positions"] if self.own_positions else parts)


@dataclass(frozen=True)
class Distilling:
    """Give the head what it needs to learn from a teacher's probabilities, or to return them."""

    known: tuple[torch.Tensor, ...] = ()
    """Those of a teacher, as in TEACHER_INPUTS, for all tokens [N, ...]."""
    top: tuple[int, int] | None = None
    """Number of the most likely tokens to return without gradients, and of all tokens."""


@dataclass
class Comparison:
    """Compare the answers of a step. The loop sets its numbers, which are those of the complete step, before it."""

    objective: str
    settings: Preference
    sharing: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums
    """Return the sum of a tensor over the ranks that share rows. Its backward pass multiplies by their number."""
    num_sharing: int = 1
    """Number of ranks that share each row, and so compute the loss of each unit."""
    units_per_target: float = 0.0
    """Units per target token, for a loss that is a sum over tokens."""
    units_per_good_target: float = 0.0
    """Units per target token of a good answer."""
    moved: float = 0.0
    """The distance to the reference that KTO measures for the step, in log-probability."""
    figures: torch.Tensor | None = None
    """Sums of `preference.figures` on this rank since the last call of `pop_figures`."""

    def loss(self, log_probs: torch.Tensor, labels: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum of the losses of the units of a micro-batch, [] in fp32: this rank's part of it.

        log_probs: [N] of the tokens, 0 without a target. labels: [B, T]. `inputs` has `answers`, and `reference` if the
        objective has one, as `rows.units.ComparedAnswers.mark` makes them.
        """
        numbers, is_target = inputs["answers"].flatten(), labels.flatten() != IGNORE_INDEX
        size = 2 * -(-len(numbers) * self.num_sharing // 2)  # more than there can be answers of at least a token
        bits = inputs.get("reference")
        reference = torch.zeros_like(log_probs) if bits is None else bits.flatten().view(torch.float32)
        columns = [column.double() for column in (log_probs, reference, is_target)]  # as the reference is summed
        slots = torch.where(numbers < 0, size, numbers)  # the last slot is for tokens of no answer
        sums = self.sharing(torch.stack([_sums(column, slots, size + 1)[:size] for column in columns]))
        log_prob, reference, lengths = sums.float().view(3, -1, 2)
        answers = Answers(log_prob, reference + self.moved * (lengths > 0), lengths)
        figures = preference.figures(self.objective, answers, self.settings) / self.num_sharing
        self.figures = figures if self.figures is None else self.figures + figures
        total = preference.losses(self.objective, answers, self.settings).sum() / self.num_sharing
        if weight := self.settings.sft_weight_of(self.objective):
            is_good = (numbers >= 0) & (numbers % 2 == GOOD)
            total = total - weight * self.units_per_good_target * (log_probs * is_good).sum()
        return total

    def pop_figures(self) -> torch.Tensor:
        """Return and reset the sums of this rank's figures, [F]; zeros on a pipeline stage without a loss."""
        figures, self.figures = self.figures, None
        return torch.zeros(len(preference.FIGURES)) if figures is None else figures


def _sums(values: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sum of the values, [N], of each slot, [size], in the same order of additions each time."""
    empty = values.new_zeros(size)
    if values.device.type == "cpu":
        return empty.index_add(0, slots, values)
    return empty.index_put((slots,), values, accumulate=True)  # sorts, where index_add adds in any order


def install_loss(model: PreTrainedModel | PeftModel, router_loss: float | None = None) -> None:
    """Make `model(input_ids, position_ids, labels)` return the sum of the target tokens' losses, a scalar in fp32.

    Labels are already shifted: labels[t] follows position t. Without position_ids each row is one document. Without
    labels the model is unchanged.

    If `comparison` is set and the inputs have `answers`, it is the sum of the losses of the units instead.

    Without gradients the model returns a pair of [B, T] tensors. The first has each token's loss, 0 for tokens that are
    not targets. The second is True if the most likely token is the target. With `top`, which is k and the number of
    tokens, it returns the k most likely tokens at each target, as `distillation.most_likely` does.

    With a teacher's probabilities among the inputs, each token's loss is the divergence from the teacher.

    For a mixture of experts the sum includes `load_balance_loss`, times `router_loss` or else the weight in its config.
    The model accumulates the unweighted loss in `router_sum` until `pop_router_loss`.

    A pipeline stage before the last has no head and returns its hidden states [B, T, H].
    """
    causal_lm = without_adapter(model)
    head = causal_lm.get_output_embeddings()
    uses_flash = is_flash_attention_requested(causal_lm.config)  # also by kernels from the Hub
    causal_lm.router_weight = resolve_router_weight(causal_lm, router_loss)
    causal_lm.router_sum, causal_lm.balanced = 0.0, None
    count_loads(causal_lm)
    causal_lm.loss_path, causal_lm.comparison = LossPath(), None
    decoder = decoder_of(causal_lm)
    forward = _forward_with_loss(causal_lm.forward, decoder, head, uses_flash)
    causal_lm.forward = types.MethodType(forward, causal_lm)
    if head is not None:
        scale, cap = _logit_shape(causal_lm.config.get_text_config())
        chunked = ChunkedLoss(head, head.forward, causal_lm.config.get_text_config().vocab_size, scale, cap)
        head.forward = types.MethodType(_head_forward_with_loss(chunked), head)


def _forward_with_loss(
    usual_forward: Callable[..., ModelOutput], decoder: nn.Module, head: nn.Module | None, uses_flash: bool
) -> Callable[..., ModelOutput | torch.Tensor | PairOfTensors]:
    """Return a causal language model's forward that returns the loss instead of logits if labels are given."""

    def forward(
        self: PreTrainedModel,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_targets: int | None = None,
        top: tuple[int, int] | None = None,
        **inputs: object,
    ) -> ModelOutput | torch.Tensor | PairOfTensors:
        if self.loss_path.own_positions:
            inputs.pop("position_ids", None)
        judged = {name: cast(torch.Tensor, inputs.pop(name)) for name in JUDGED_INPUTS if name in inputs}
        by_token = "answers" in judged and torch.is_grad_enabled()
        known = [cast(torch.Tensor, inputs.pop(name)).flatten(0, 1) for name in TEACHER_INPUTS if name in inputs]
        distilling = Distilling(tuple(known), top)
        if labels is None and head is not None:
            return usual_forward(input_ids=input_ids, **inputs)
        shape = input_ids.shape
        positions = cast("torch.Tensor | None", inputs.get("position_ids"))
        if uses_flash and positions is not None:  # with flash, transformers detects packed rows only at batch size 1
            input_ids, inputs["position_ids"] = input_ids.view(1, -1), positions.view(1, -1)
        options: dict[str, Any] = {name: inputs[name] for name in PLACES if inputs.get(name) is not None}
        balances = self.router_weight and torch.is_grad_enabled()
        self.balanced = None if labels is None else is_balanced(labels)
        options |= {"output_router_logits": True} if balances else {}
        if self.loss_path.own_logits and labels is not None:
            decoded = usual_forward(input_ids=input_ids, **options)
            logits = decoded.logits.flatten(0, 1)
            result = _loss_of_logits(logits, labels.flatten(), num_targets, by_token, distilling)
        else:
            decoded = decoder(input_ids=input_ids, use_cache=False, **options)
            if head is None or labels is None:
                return cast(torch.Tensor, decoded.last_hidden_state.view(*shape, -1))
            result = head(decoded.last_hidden_state.flatten(0, 1), labels.flatten(), num_targets, by_token, distilling)
        if not torch.is_grad_enabled():
            first, second = result
            return first.view(*shape, *first.shape[1:]), second.view(*shape, *second.shape[1:])
        loss = cast(torch.Tensor, result)
        per_token = 1.0
        if by_token:
            loss = self.comparison.loss(loss, labels, judged)
            per_token = self.comparison.units_per_target
        if balances and len(decoded.router_logits):
            num_chosen = self.config.get_text_config().num_experts_per_tok
            imbalance = load_balance_loss(decoded.router_logits, labels, num_chosen)
            self.router_sum = self.router_sum + imbalance.detach()
            loss = loss + self.router_weight * per_token * imbalance
        return loss

    return forward


def _head_forward_with_loss(
    chunked: ChunkedLoss,
) -> Callable[..., torch.Tensor | PairOfTensors]:
    """Return an output head's forward that returns the loss instead of logits if labels are given.

    `by_token` makes it return each token's log-probability, [N], 0 for tokens that are not targets.

    The head is called once for all chunks, so ZeRO-3 and FSDP gather its weight once. An adapted head contains further
    modules. ZeRO-3 gathers them for each chunk unless stage3_max_reuse_distance keeps them.
    """

    def forward(
        self: nn.Module,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_targets: int | None = None,
        by_token: bool = False,
        distilling: Distilling = Distilling(),
    ) -> torch.Tensor | PairOfTensors:
        if labels is None:
            return chunked.usual_forward(hidden)
        if num_targets is None:
            (chosen,) = (labels != IGNORE_INDEX).nonzero(as_tuple=True)  # waits for a GPU
        else:
            chosen = (labels != IGNORE_INDEX).nonzero_static(size=num_targets)[:, 0]
        targets = hidden.index_select(0, chosen), labels.index_select(0, chosen)
        if by_token:
            log_probs = chunked.log_probs(*targets)
            return log_probs.new_zeros(len(labels)).index_copy(0, chosen, log_probs)
        if torch.is_grad_enabled():
            known = [one.index_select(0, chosen) for one in distilling.known]
            return chunked.distilled(targets[0], *known) if known else chunked.total(*targets)
        top = distilling.top
        found = chunked.by_token(*targets) if top is None else chunked.most_likely(targets[0], *top)
        first, second = (one.new_zeros(len(labels), *one.shape[1:]).index_copy(0, chosen, one) for one in found)
        return first, second

    return forward


@dataclass(frozen=True)
class ChunkedLoss:
    """A cross entropy that computes an output head's logits for one chunk of targets at a time."""

    head: nn.Module
    usual_forward: Callable[[torch.Tensor], torch.Tensor]
    """The head's original forward: hidden states [N, H] to logits [N, V]."""
    num_rows: int
    """V. Under ZeRO-3 a weight has no shape until its module gathers it."""
    scale: float
    """Factor of the logits."""
    cap: float | None
    """Bound that tanh sets on the logits; None for no bound."""

    def total(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the targets' losses, []. hidden: [N, H]. labels: [N].

        A plain head computes its gradients together with the logits, also where FSDP2 has derived a class from it. With
        an adapter, a bias or tensor parallelism, the backward pass recomputes the logits.
        """
        if (weight := self._plain_weight) is not None:
            return heads.cross_entropy_sum(hidden, weight, labels, self.scale, self.cap)
        return torch.stack([losses.sum() for losses in self._recomputed(self._losses_of_chunk, hidden, labels)]).sum()

    def log_probs(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of each target, [N] in fp32, whose gradients `total` describes.

        hidden: [N, H]. labels: [N].
        """
        if (weight := self._plain_weight) is not None:
            return heads.log_probs(hidden, weight, labels, self.scale, self.cap)
        return -torch.cat(self._recomputed(self._losses_of_chunk, hidden, labels))

    def by_token(self, hidden: torch.Tensor, labels: torch.Tensor) -> PairOfTensors:
        """Return each token's loss and whether the most likely token is the target, both [N]."""
        losses, hits = [], []
        for h, y in self._chunks(hidden, labels):
            logits = self._logits(h)
            hits.append(logits.argmax(-1) == y)
            # As training computes them: 6e-6 a token, by which torch differs, move a long answer by 1e-3.
            is_plain = self._plain_weight is not None and not torch.is_grad_enabled()
            losses.append(heads.losses_of(logits, y) if is_plain else F.cross_entropy(logits, y, reduction="none"))
        return torch.cat(losses), torch.cat(hits)

    def distilled(self, hidden: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Return the sum of the targets' divergences from a teacher, []. hidden: [N, H]. ids: [N, k].

        `bits` are those of the teacher's log-probabilities, [N, k + 1].
        """
        return torch.stack(self._recomputed(self._divergence_of_chunk, hidden, ids, bits)).sum()

    def most_likely(self, hidden: torch.Tensor, top: int, num_tokens: int) -> PairOfTensors:
        """Return ids [N, k] and log-probabilities [N, k + 1] of the most likely tokens (distillation.most_likely)."""
        parts = [distillation.most_likely(self._logits(h), top, num_tokens) for (h,) in self._chunks(hidden)]
        return torch.cat([ids for ids, _ in parts]), torch.cat([log_probs for _, log_probs in parts])

    def _divergence_of_chunk(self, hidden: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        return distillation.divergence(self._logits(hidden), ids, bits.view(torch.float32)).sum()

    @property
    def _plain_weight(self) -> torch.Tensor | None:
        """The weight of a head that is nothing but a product with a tensor that is not divided, else None."""
        head = self.head
        if isinstance(head, nn.Linear) and head.bias is None and type(head.weight) is nn.Parameter:
            return head.weight
        return None

    def _recomputed(self, of_chunk: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return a function's result for each chunk of tensors, [N, ...] each; the backward pass computes it again."""
        # Only an adapter uses random numbers here, for dropout. The recomputation must draw the same ones.
        keeps_rng = hasattr(self.head, "base_layer")
        return [
            checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=keeps_rng)
            for chunk in self._chunks(*tensors)
        ]

    def _losses_of_chunk(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._logits(hidden), labels, reduction="none")

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.usual_forward(hidden).float()
        logits = logits if self.scale == 1 else logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def _chunks(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return the chunks of hidden states, [N, H], and what belongs to them, at least one.

        An engine may wait for the head's hooks.
        """
        size = heads.chunk_tokens(self.num_rows, tensors[0].device)
        return list(zip(*(torch.split(one, size) for one in tensors), strict=True))


def _logit_shape(config: PretrainedConfig) -> tuple[float, float | None]:
    """Return the factor and the cap of the logits. Cohere multiplies them, Granite divides them, Gemma caps them."""
    scale = getattr(config, "logit_scale", None) or 1.0
    return scale / (getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)


def _loss_of_logits(logits: torch.Tensor, *wanted: object) -> torch.Tensor | PairOfTensors:
    """Return what the head's forward returns, given all logits [N, V] of the model's own forward."""
    identity = nn.Identity()
    forward = _head_forward_with_loss(ChunkedLoss(identity, identity, logits.shape[1], 1.0, None))
    return forward(identity, logits, *wanted)
