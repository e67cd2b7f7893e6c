"""transformers' hybrid models with layers of attention.nn in place of their recurrent ones. Other than linear_layers, which
replaces functions that the model's own layers call, this replaces the layers: projections are fewer and larger, and gates are
computed by kernels. In return the parameters have other names, until restore_layers.

| transformers' call                             | here                                                                  |
| ---------------------------------------------- | --------------------------------------------------------------------- |
| hidden_states                                  | x                                                                     |
| cache, a Cache of transformers                 | a RecurrentCache whose arrays are that cache's states of the layer    |
| attention_mask (B, S), of padding              | the other tokens, packed                                              |
| cu_seq_lens_q, seq_idx                         | cu_seqlens                                                            |
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import torch
from torch import nn

from ..nn import RecurrentCache, from_transformers, to_transformers
from ..nn.layers import count_sequences
from ..nn.transformers_layers import recognises
from ..plans.recurrent.packed_tokens import pack_batches
from .huggingface_linear import need_gradient, sequence_ends

CACHE_IN_TRAINING = (
    "use_cache=False, or model.config.use_cache = False, makes training faster: with a cache, each recurrent layer runs twice, "
    "the second time to fill it"
)


class ReplacedLayer(nn.Module):
    """A layer of attention.nn that a model of transformers calls as the one that it was made of. layer: that of attention.nn.
    layer_idx: its index in a cache. original: transformers' layer, whose parameters have no values."""

    layer: Any
    original: nn.Module

    def __init__(self, original: Any):
        super().__init__()
        self.layer, self.layer_idx = from_transformers(original), original.layer_idx
        without_values = {id(x): nn.Parameter(x.to("meta"), x.requires_grad) for x in original.parameters()}
        object.__setattr__(self, "original", copy.deepcopy(original, without_values))  # no submodule: it is not saved

    def forward(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None, **others: Any
    ) -> torch.Tensor:
        """The layer's output for hidden_states (B, S, hidden_size), of the same shape. Rows of padding are undefined."""
        ends, seq_idx = sequence_ends(others), others.get("seq_idx")
        if ends is None and seq_idx is not None:
            batches = pack_batches(seq_idx, hidden_states, None)
            return batches.split(self.mix(batches.join(hidden_states, "hidden_states"), batches.cu_seqlens, cache))
        if ends is None and attention_mask is not None:
            return self.mix_padded(hidden_states, attention_mask.bool(), cache)
        return self.mix(hidden_states, ends, cache)

    def mix_padded(self, x: torch.Tensor, is_token: torch.Tensor, cache: Any) -> torch.Tensor:
        """The layer's output for x, of which is_token (B, S) says what is no padding. Sequences are packed, and all padding is
        one more sequence behind them, so that no shape depends on the mask's values."""
        order = is_token.flatten().argsort(descending=True, stable=True)
        lengths = is_token.sum(1)
        lengths = torch.cat([lengths, is_token.numel() - lengths.sum(0, True)])
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        packed = self.mix(x.flatten(0, 1)[None, order], ends, cache, without_state=1)[0]
        return torch.empty_like(packed).index_copy(0, order, packed).view(x.shape)

    def mix(self, x: torch.Tensor, ends: torch.Tensor | None, cache: Any, without_state: int = 0) -> torch.Tensor:
        """The layer's output for x, from the cache's states on, which are updated. without_state: how many sequences at the end
        have no states in the cache."""
        if cache is None:
            return self.layer(x, cu_seqlens=ends)
        is_new = cache.get_recurrent_state(self.layer_idx) is None
        states = self.states(cache, count_sequences(x, ends) - without_state)
        if not (is_new and need_gradient(x, *self.parameters())):
            return self.update(x, ends, states, without_state)
        warnings.warn(CACHE_IN_TRAINING, stacklevel=2)
        with torch.no_grad():
            self.update(x, ends, states, without_state)
        return self.layer(x, cu_seqlens=ends)

    def update(self, x: torch.Tensor, ends: torch.Tensor | None, states: RecurrentCache, without_state: int) -> torch.Tensor:
        """The layer's output for x, from these states on, which are updated."""
        if not without_state:
            return self.layer(x, cu_seqlens=ends, cache=states)
        arrays = cast(tuple[torch.Tensor, torch.Tensor], states)  # all of transformers' layers have a convolution
        of_all = RecurrentCache(*(torch.cat([y, torch.zeros_like(y[:without_state])]) for y in arrays))
        out = self.layer(x, cu_seqlens=ends, cache=of_all)
        for y, y_of_all in zip(arrays, of_all):
            y.copy_(y_of_all[: len(y)])
        return out

    def states(self, cache: Any, sequences: int) -> RecurrentCache:
        """The cache's arrays for this layer, which begin with 0."""
        index = self.layer_idx
        if cache.get_recurrent_state(index) is None:
            zeros = self.layer.new_cache(sequences)
            cache.update_conv_state(zeros.window, index, conv_kernel_size=self.layer.conv1d.weight.shape[1] - 1)
            cache.update_recurrent_state(zeros.state, index)
        return RecurrentCache(cache.get_conv_state(index), cache.get_recurrent_state(index))

    def restore(self) -> nn.Module:
        """The layer of transformers that this one was made of, with this one's weights, on their device; in float32 if the
        model has become float32 since then."""
        weight, theirs = self.layer.out_proj.weight, copy.deepcopy(self.original)
        for module in theirs.modules():
            for name, x in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(x, device=weight.device), x.requires_grad))
        if weight.dtype == torch.float32:
            theirs.float()
        return to_transformers(self.layer, theirs.to(weight.device)).train(self.training)


def replace_layers(model: Any) -> Any:
    """Put layers of attention.nn, with copies of their weights, in the places of the model's recurrent layers
    (attention.nn.from_transformers has the table of those that there are). Returns the model, which is trained, compiled and
    generates as before. Only layers are replaced: attn_implementation="tiles" is for softmax attention.

    Names in its state_dict differ: load such a one after replace_layers, and call restore_layers before save_pretrained.
    ValueError: the model has no such layers."""
    places = [(parent, name, x) for parent in model.modules() for name, x in parent.named_children() if recognises(x)]
    if not places:
        raise ValueError(f"model: has no recurrent layers that attention.nn has: {type(model).__name__}")
    for parent, name, layer in places:
        setattr(parent, name, ReplacedLayer(layer))
    return model


def restore_layers(model: Any) -> Any:
    """The inverse of replace_layers, with the weights of today. Returns the model."""
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, ReplacedLayer):
                setattr(parent, name, layer.restore())
    return model
