"""Recurrent cores that forget at episode starts inside an unroll. They encode nothing and decide nothing.

The state is one tensor [B, S], float32, all layers side by side (an LSTM's layer: h, then c), so that the store
keeps it as one more array. Weights are named as in torch.nn.GRU and torch.nn.LSTM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

CoreKind = Literal["none", "gru", "lstm"]


class Core(nn.Module):
    """What every core has: `output_size` O, `state_size` S, and `forward(x, state, first) -> (y, state)`.

    x: [T, B, F].  state: [B, S] before the first step.
    first: bool [T, B], true where x[t] is the first observation of an episode: the state is zeroed before it.
    Returns y [T, B, O] and the state after the last step [B, S].
    """

    def __init__(self, output_size: int, state_size: int) -> None:
        super().__init__()
        self.output_size, self.state_size = output_size, state_size


class NoCore(Core):
    """Feed-forward: y is x, and the state is empty."""

    def __init__(self, input_size: int) -> None:
        super().__init__(input_size, 0)

    def forward(self, x: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return x, state


class RecurrentCore(Core, ABC):
    """The loop that GRU and LSTM share. T = 1, when acting, is the same code with one turn of the loop."""

    def __init__(self, rnn: nn.GRU | nn.LSTM, states_per_layer: int) -> None:
        super().__init__(rnn.hidden_size, states_per_layer * rnn.hidden_size * rnn.num_layers)
        self.rnn = rnn  # holds the parameters; its own forward cannot reset inside a sequence
        self.layer_state_size = states_per_layer * rnn.hidden_size

    def forward(self, x: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        resets = first.unsqueeze(-1).unbind()
        states = []
        for layer, before in enumerate(torch.split(state.float(), self.layer_state_size, -1)):
            x, after = self._layer(layer, x, before, resets)
            states.append(after)
        return x, states[0] if len(states) == 1 else torch.cat(states, -1)

    def _layer(self, layer: int, x: Tensor, state: Tensor, resets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One layer over all steps: [T, B, F], [B, S / layers] -> [T, B, H], [B, S / layers]."""
        weight_ih, weight_hh, bias_ih, bias_hh = (
            getattr(self.rnn, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        # the input's share of the gates needs no state: one product for all T
        inputs = linear(x.to(weight_ih.dtype), weight_ih, bias_ih).float()  # [T, B, gates * H]
        outputs = []
        for gates, reset in zip(inputs.unbind(), resets, strict=True):
            # masked_fill, not a product: what stands in a state before its first use may be nan
            state = self._step(gates, state.masked_fill(reset, 0.0), weight_hh, bias_hh)
            outputs.append(state[:, : self.output_size])
        return outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs), state

    @abstractmethod
    def _step(self, gates: Tensor, state: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        """One step of one layer: the input's gates [B, gates * H] and the state before -> the state after."""


class GRUCore(RecurrentCore):
    """Cho et al. 2014 in cuDNN's form (reset gate after the product), as torch.nn.GRU. State: h."""

    def __init__(self, input_size: int, size: int, num_layers: int = 1) -> None:
        super().__init__(nn.GRU(input_size, size, num_layers), states_per_layer=1)

    def _step(self, gates: Tensor, state: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        size = self.output_size
        hidden = linear(state.to(weight_hh.dtype), weight_hh, bias_hh).float()
        # r, z = sigmoid(W_i x + W_h h);  n = tanh(W_i x + r * (W_h h));  h' = n + z * (h - n)
        reset, update = (gates[:, : 2 * size] + hidden[:, : 2 * size]).sigmoid().chunk(2, -1)
        new = torch.addcmul(gates[:, 2 * size :], reset, hidden[:, 2 * size :]).tanh()
        return torch.lerp(new, state, update)


class LSTMCore(RecurrentCore):
    """Hochreiter and Schmidhuber 1997 with a forget gate, as torch.nn.LSTM. State: h, then c."""

    def __init__(self, input_size: int, size: int, num_layers: int = 1) -> None:
        super().__init__(nn.LSTM(input_size, size, num_layers), states_per_layer=2)

    def _step(self, gates: Tensor, state: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        output, cell = state.chunk(2, -1)
        total = gates + linear(output.to(weight_hh.dtype), weight_hh, bias_hh).float()
        enter, forget, new, leave = total.chunk(4, -1)
        # c' = sigmoid(f) * c + sigmoid(i) * tanh(g);  h' = sigmoid(o) * tanh(c')
        cell = torch.addcmul(forget.sigmoid() * cell, enter.sigmoid(), new.tanh())
        return torch.cat((leave.sigmoid() * cell.tanh(), cell), -1)


def make_core(kind: CoreKind, input_size: int, size: int, num_layers: int = 1) -> Core:
    """The core of that kind. size: H of each layer (ignored by "none")."""
    if kind == "none":
        return NoCore(input_size)
    return {"gru": GRUCore, "lstm": LSTMCore}[kind](input_size, size, num_layers)
