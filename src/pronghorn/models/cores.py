"""Recurrent cores that forget at episode starts inside an unroll. They encode nothing and decide nothing.

The state is one tensor [B, S], float32, all layers side by side (an LSTM's layer: h, then c), so that the store
keeps it as one more array. Weights are named as in torch.nn.GRU and torch.nn.LSTM.
"""

from __future__ import annotations

from typing import Any, Literal

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


class RecurrentCore(Core):
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
        return self._run(inputs, state, resets, weight_hh, bias_hh)

    def _run(
        self, inputs: Tensor, state: Tensor, resets: tuple[Tensor, ...], weight_hh: Tensor, bias_hh: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All steps of one layer from the input's gates [T, B, gates * H] and T resets [B, 1]: [T, B, H], the state."""
        outputs = []
        for gates, reset in zip(inputs.unbind(), resets, strict=True):
            # masked_fill, not a product: what stands in a state before its first use may be nan
            state = self._step(gates, state.masked_fill(reset, 0.0), weight_hh, bias_hh)
            outputs.append(state[:, : self.output_size])
        return outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs), state

    def _step(self, gates: Tensor, state: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        """One step of one layer: the input's gates [B, gates * H] and the state before -> the state after."""
        raise NotImplementedError


class GRUCore(RecurrentCore):
    """Cho et al. 2014 in cuDNN's form (reset gate after the product), as torch.nn.GRU. State: h."""

    def __init__(self, input_size: int, size: int, num_layers: int = 1) -> None:
        super().__init__(nn.GRU(input_size, size, num_layers), states_per_layer=1)

    def _run(
        self, inputs: Tensor, state: Tensor, resets: tuple[Tensor, ...], weight_hh: Tensor, bias_hh: Tensor
    ) -> tuple[Tensor, Tensor]:
        if len(inputs) == 1 or not torch.is_grad_enabled():
            return super()._run(inputs, state, resets, weight_hh, bias_hh)
        weight = weight_hh.to(_compute_dtype(weight_hh))
        outputs: Tensor = _GRUSteps.apply(inputs, state, torch.stack(resets), weight, bias_hh)  # type: ignore[no-untyped-call]
        return outputs, outputs[-1]

    def _step(self, gates: Tensor, state: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        size = self.output_size
        hidden = linear(state.to(weight_hh.dtype), weight_hh, bias_hh).float()
        # r, z = sigmoid(W_i x + W_h h);  n = tanh(W_i x + r * (W_h h));  h' = n + z * (h - n)
        reset, update = (gates[:, : 2 * size] + hidden[:, : 2 * size]).sigmoid().chunk(2, -1)
        new = torch.addcmul(gates[:, 2 * size :], reset, hidden[:, 2 * size :]).tanh()
        return torch.lerp(new, state, update)


class _GRUSteps(torch.autograd.Function):
    """The steps of `GRUCore` with a backward pass of their own, which does in one product for all steps what autograd
    does step by step: the gradient of the weights, and the gates' derivatives.

    inputs: [T, B, 3H] float32.  state: [B, H].  resets: bool [T, B, 1].  weight: [3H, H], in the dtype to compute in.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, state: Tensor, resets: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        size, steps = state.shape[1], inputs.shape[:2]
        outputs, before = inputs.new_empty(*steps, size), inputs.new_empty(*steps, size)
        gates, hidden_new = inputs.new_empty(*steps, 2 * size), inputs.new_empty(*steps, size)
        new = inputs.new_empty(*steps, size)
        turned = weight.t()
        with torch.autocast(inputs.device.type, enabled=False):
            for t in range(len(inputs)):
                before[t] = state.masked_fill(resets[t], 0.0)
                hidden = torch.addmm(bias.to(weight.dtype), before[t].to(weight.dtype), turned).float()
                # r, z = sigmoid(W_i x + W_h h);  n = tanh(W_i x + r * (W_h h));  h' = n + z * (h - n)
                torch.add(inputs[t, :, : 2 * size], hidden[:, : 2 * size], out=gates[t]).sigmoid_()
                hidden_new[t] = hidden[:, 2 * size :]
                reset, update = gates[t].chunk(2, -1)
                torch.addcmul(inputs[t, :, 2 * size :], reset, hidden_new[t], out=new[t]).tanh_()
                state = torch.lerp(new[t], before[t], update, out=outputs[t])
        ctx.save_for_backward(resets, weight, before, gates, hidden_new, new)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> Any:
        resets, weight, before, gates, hidden_new, new = ctx.saved_tensors
        size = before.shape[2]
        reset, update = gates.chunk(2, -1)
        # dn~ = dh (1 - z) (1 - n^2);  dz~ = dh (h - n) z (1 - z);  dr~ = dn~ (W_h h) r (1 - r);  n~, z~, r~: sums
        slope_new = (1.0 - update) * (1.0 - new.square())
        slope_update = (before - new) * update * (1.0 - update)
        slope_reset = hidden_new * reset * (1.0 - reset)
        to_inputs, to_hidden = grad_outputs.new_empty(2, *before.shape[:2], 3 * size)
        carry = torch.zeros_like(before[0])
        for t in reversed(range(len(before))):
            carry = carry + grad_outputs[t]
            by_new = torch.mul(carry, slope_new[t], out=to_inputs[t, :, 2 * size :])
            torch.mul(carry, slope_update[t], out=to_hidden[t, :, size : 2 * size])
            torch.mul(by_new, slope_reset[t], out=to_hidden[t, :, :size])
            torch.mul(by_new, reset[t], out=to_hidden[t, :, 2 * size :])
            # dh_{t-1} = dh z + W_h' d(W_h h), nothing where the state was zeroed
            carry = torch.mm(to_hidden[t].to(weight.dtype), weight).float().addcmul_(carry, update[t])
            carry.masked_fill_(resets[t], 0.0)
        to_inputs[:, :, : 2 * size] = to_hidden[:, :, : 2 * size]
        flat = to_hidden.flatten(0, 1)
        grad_weight = flat.to(weight.dtype).t() @ before.flatten(0, 1).to(weight.dtype)
        return to_inputs, carry, None, grad_weight, flat.sum(0)


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


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """What a product with `weight` is computed in here."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def make_core(kind: CoreKind, input_size: int, size: int, num_layers: int = 1) -> Core:
    """The core of that kind. size: H of each layer (ignored by "none")."""
    if kind == "none":
        return NoCore(input_size)
    return {"gru": GRUCore, "lstm": LSTMCore}[kind](input_size, size, num_layers)
