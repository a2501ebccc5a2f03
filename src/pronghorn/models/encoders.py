"""Turns the leaves of an observation into one feature vector a step. It knows no time, no memory and no action head.

Everything here works on [N, ...] with N = T * B: encoders see each observation alone. Images arrive as they are
stored (uint8, HWC or CHW) and are scaled while they are converted; convolutions run in channels-last memory
format, in which HWC storage is read in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, embedding_bag

from pronghorn.errors import SpaceError
from pronghorn.ops.losses import alone
from pronghorn.ops.normalization import RunningNorm
from pronghorn.types import LAST_ACTION, LAST_REWARD, ActionSpec, LeafSpec

Activation = Literal["elu", "relu", "tanh"]
ConvName = Literal["nature", "convnet_simple", "impala_shallow", "resnet_impala", "conv_tiny", "grid_codes"]
EncoderKind = Literal["auto", "mlp"]

LAST_ACTION_CONTINUOUS = LAST_ACTION + "_continuous"  # the leaf of the continuous part, float [..., C]
MIN_CONV_PIXELS = 36  # a side smaller than this is used up by three strided layers: "conv_tiny" instead
NUM_CODES = 256  # of each channel of a grid of codes: what a byte holds
CODE_SIZE = 16  # entries of the vector of a code
MAX_SCALED_RANGE = 65_535.0  # integers in a wider range are measurements, not levels: left as they are

# (channels, kernel, stride, padding) of each layer
PLAIN_CONVS: Mapping[str, tuple[tuple[int, int, int, int], ...]] = {
    "nature": ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)),  # Mnih et al. 2015
    "convnet_simple": ((32, 8, 4, 0), (64, 4, 2, 0), (128, 3, 2, 0)),  # Sample Factory
    "impala_shallow": ((16, 8, 4, 0), (32, 4, 2, 0)),  # Espeholt et al. 2018, left of fig. 3
    "conv_tiny": ((16, 3, 1, 1), (32, 3, 2, 1), (64, 3, 2, 1)),  # small images of any size
    "grid_codes": ((16, 3, 1, 1), (32, 3, 2, 1)),  # behind the vectors of the codes
}
RESNET_CHANNELS = (16, 32, 32)  # of the three sections of Espeholt et al. 2018, right of fig. 3


def make_activation(name: Activation) -> nn.Module:
    """In place where the gradient allows it: the layers before need only their inputs."""
    return {"elu": nn.ELU(inplace=True), "relu": nn.ReLU(inplace=True), "tanh": nn.Tanh()}[name]


class MLPEncoder(nn.Module):
    """Linear layers, an activation after each: [N, input_size] -> [N, output_size]. No layers: the identity."""

    def __init__(self, input_size: int, layers: Sequence[int], activation: Activation = "elu") -> None:
        super().__init__()
        sizes = (input_size, *layers)
        modules: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            modules += [nn.Linear(inputs, outputs), make_activation(activation)]
        self.layers = nn.Sequential(*modules)
        self.output_size = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        if len(self.layers) == 0:
            return x
        y: Tensor = self.layers(x.to(next(self.layers.parameters()).dtype))
        return y


class ConvEncoder(nn.Module):
    """An image to features: convolutions, then one fully connected layer, an activation after each.

    leaf: image of shape [H, W, C] ("hwc") or [C, H, W] ("chw"); values are scaled from [low, high] to [0, 1].
    conv: name of the architecture.  features: width of the fully connected layer; 0: none, the flat map.
    normalize: shift and scale each channel to mean 0 and deviation 1 by running moments.
    """

    def __init__(
        self,
        leaf: LeafSpec,
        conv: ConvName,
        features: int = 512,
        activation: Activation = "elu",
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.channels_at_end = leaf.layout == "hwc"
        shape = leaf.shape if self.channels_at_end else (*leaf.shape[1:], leaf.shape[0])
        height, width, channels = shape
        bounded = math.isfinite(leaf.low) and math.isfinite(leaf.high) and leaf.high > leaf.low
        self.low = leaf.low if bounded else 0.0
        self.scale = 1.0 / (leaf.high - leaf.low) if bounded else 1.0
        if conv == "resnet_impala":
            self.first, layers, flat = _resnet(height, width, channels, activation)
        else:
            self.first, layers, flat = _plain_convs(height, width, channels, conv, activation)
        self.convs = nn.Sequential(*layers)
        self.full = MLPEncoder(flat, (features,) if features else (), activation)
        self.output_size = self.full.output_size
        self.norm = RunningNorm((channels,)) if normalize else None
        _to_channels_last(self)

    def forward(self, image: Tensor) -> Tensor:
        """[N, *leaf.shape] -> [N, output_size]."""
        # a view: the memory of an HWC image is that of a channels-last NCHW one
        x = image.permute(0, 3, 1, 2) if self.channels_at_end else image  # [N, C, H, W]
        # CHW is laid out so as long as it is bytes, or the convolutions do it in floats, forward and backward
        x = x.contiguous(memory_format=torch.channels_last)
        x = x.to(_compute_dtype(self.first.weight))  # uint8 is exact in bfloat16
        first = self.first
        low, scale = self._input_map(x)
        # shift and scale go into the few weights of the first layer instead of over every pixel
        weight, bias = first.weight * scale, first.bias
        if first.padding[0]:
            x = x - low.to(x.dtype)  # but a shift cannot, where zeros are added around the image
        elif bias is not None:
            bias = bias - (weight * low).sum((1, 2, 3))
        weight, bias = weight.to(first.weight.dtype), None if bias is None else bias.to(first.weight.dtype)
        x = conv2d(x, weight, bias, (first.stride[0], first.stride[1]), int(first.padding[0]))
        x = self.convs(x)
        # [N, H', W', C'] flattened: again without a copy
        y: Tensor = self.full(x.permute(0, 2, 3, 1).flatten(1))
        return y

    @torch.no_grad()
    def update_norm(self, image: Tensor, over_all: Callable[[Tensor], Tensor] = alone) -> None:
        """Take images [N, *leaf.shape] into the running moments: at most 32 of them from each learner, of large ones
        every fourth row and column.
        """
        if self.norm is not None:
            x = image[:: max(1, len(image) // 32)]
            x = x if self.channels_at_end else x.permute(0, 2, 3, 1)
            stride = 4 if min(x.shape[1:3]) >= MIN_CONV_PIXELS else 1
            self.norm.update((x[:, ::stride, ::stride].double() - self.low) * self.scale, over_all=over_all)

    def _input_map(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(low, scale), each [1, C or 1, 1, 1]: the first layer sees (x - low) * scale."""
        # filled on the device: a number that is copied there would make it wait, and cannot be part of a graph
        low, scale = (torch.full((), value, device=x.device) for value in (self.low, self.scale))
        if self.norm is not None:
            # ((x - low) scale - mean) / std = (x - (low + mean / scale)) (scale / std)
            low = low + (self.norm.mean / scale).float()
            scale = scale * (self.norm.var + self.norm.eps).rsqrt().float()
        return low.view(1, -1, 1, 1), scale.view(1, -1, 1, 1)


class GridEncoder(nn.Module):
    """A small grid of codes (MiniGrid: object, colour, state) to features; codes are names, not levels of light.

    A learned vector for each byte that a channel may hold, summed over the channels of a cell (the "bag of words" of
    Hui et al. 2020, BabyAI 1.1), then convolutions and one fully connected layer, an activation after each.

    leaf, features, activation: as for `ConvEncoder`. Raises SpaceError for a leaf that is no grid of codes.
    """

    offsets: Tensor

    def __init__(self, leaf: LeafSpec, features: int = 128, activation: Activation = "relu") -> None:
        super().__init__()
        if not is_grid_of_codes(leaf):
            raise SpaceError(
                f"--model.conv grid_codes reads images of uint8 with a side of less than {MIN_CONV_PIXELS}; this one "
                f"is {leaf.dtype} of shape {leaf.shape}. Cast it in the environment, or leave --model.conv out."
            )
        self.channels_at_end = leaf.layout == "hwc"
        height, width, channels = leaf.shape if self.channels_at_end else (*leaf.shape[1:], leaf.shape[0])
        self.codes = nn.Embedding(channels * NUM_CODES, CODE_SIZE)
        nn.init.normal_(self.codes.weight, 0.0, channels**-0.5)  # so that a cell's sum has variance 1
        first, layers, flat = _plain_convs(height, width, CODE_SIZE, "grid_codes", activation)
        self.convs = nn.Sequential(first, *layers)
        self.full = MLPEncoder(flat, (features,) if features else (), activation)
        self.output_size = self.full.output_size
        _to_channels_last(self.convs)
        self.register_buffer("offsets", torch.arange(channels) * NUM_CODES, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """[N, *leaf.shape] -> [N, output_size]."""
        x = image if self.channels_at_end else image.permute(0, 2, 3, 1)
        rows = x.long() + self.offsets  # [N, H, W, C]
        # cell = sum_c table[c, code_c]
        cells = embedding_bag(rows.flatten(0, 2), self.codes.weight, mode="sum").view(*rows.shape[:3], CODE_SIZE)
        y: Tensor = self.full(self.convs(cells.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1))
        return y


class ResidualBlock(nn.Module):
    """x + conv(act(conv(act(x)))), 3x3, same size."""

    def __init__(self, channels: int, activation: Activation) -> None:
        super().__init__()
        self.before = _out_of_place(activation)  # x itself is needed again for the sum
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.between = make_activation(activation)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.between(self.first(self.before(x))))
        return x + y


class OneHot(nn.Module):
    """Integer codes [N, D] to concatenated one-hot vectors [N, sum(sizes)]; a negative code gives zeros."""

    offsets: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.output_size = sum(sizes)
        offsets = torch.tensor([0, *sizes[:-1]], dtype=torch.int64).cumsum(0)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        codes = codes.long()
        result = torch.zeros(len(codes), self.output_size, device=codes.device)
        return result.scatter_(1, codes.clamp(min=0) + self.offsets, (codes >= 0).float())


class VectorInput(nn.Module):
    """All leaves that are no images as one vector [N, output_size], float32, in the order of their names.

    Real-valued leaves come first and are normalised by running moments when `normalize`; integers with bounds
    are scaled to [0, 1]; discrete codes become one-hot; binaries 0 and 1. Masks and the last action and reward
    are not inputs of this part.
    """

    def __init__(self, leaves: Mapping[str, LeafSpec], normalize: bool) -> None:
        super().__init__()
        names = sorted(leaves)
        self.real = [name for name in names if _is_real(leaves[name])]
        self.coded = [name for name in names if leaves[name].kind == "discrete"]
        self.scaled = {name: _scale(leaves[name]) for name in names if name not in self.real and name not in self.coded}
        self.num_real = sum(_num_entries(leaves[name]) for name in self.real)
        # a list, not a dict: a leaf may have a name that a module cannot have ("a.b", "keys")
        self.one_hots = nn.ModuleList(OneHot(_code_sizes(leaves[name])) for name in self.coded)
        self.norm = RunningNorm((self.num_real,)) if normalize and self.real else None
        num_scaled = sum(_num_entries(leaves[name]) for name in self.scaled)
        num_coded = sum(_num_codes(leaves[name]) for name in self.coded)
        self.output_size = self.num_real + num_scaled + num_coded

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Leaves [N, ...] -> [N, output_size]."""
        parts = []
        if self.real:
            real = self.real_part(obs)
            parts.append(real.float() if self.norm is None else self.norm(real))
        for name, (low, scale) in self.scaled.items():
            parts.append((obs[name].flatten(1) - low) * scale if low else obs[name].flatten(1) * scale)
        for name, one_hot in zip(self.coded, self.one_hots, strict=True):
            parts.append(one_hot(obs[name].reshape(len(obs[name]), -1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def real_part(self, obs: Mapping[str, Tensor]) -> Tensor:
        """The real-valued leaves side by side, as they are: [N, num_real]."""
        parts = [obs[name].reshape(len(obs[name]), -1) for name in self.real]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def update(
        self, obs: Mapping[str, Tensor], weights: Tensor | None, over_all: Callable[[Tensor], Tensor] = alone
    ) -> None:
        """Take a batch of observations [N, ...] into the running moments."""
        if self.norm is not None:
            self.norm.update(self.real_part(obs), weights, over_all)


class LastStepInput(nn.Module):
    """The action and reward of the step before, as IMPALA feeds them to its core: [N, output_size].

    Leaves: LAST_ACTION int64 [N, D] (-1: none, at an episode's start), LAST_ACTION_CONTINUOUS float [N, C] (the
    Gaussian sample; 0: none), LAST_REWARD float [N], clipped to [-1, 1] here whatever the loss does with it.
    """

    def __init__(self, action: ActionSpec, last_action: bool, last_reward: bool) -> None:
        super().__init__()
        self.one_hot = OneHot(action.discrete) if last_action and action.discrete else None
        self.num_continuous = action.num_continuous if last_action else 0
        self.last_reward = last_reward
        num_coded = action.num_logits if self.one_hot is not None else 0
        self.output_size = num_coded + self.num_continuous + int(last_reward)

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        parts = []
        if self.one_hot is not None:
            parts.append(self.one_hot(obs[LAST_ACTION]))
        if self.num_continuous:
            parts.append(obs[LAST_ACTION_CONTINUOUS].float())
        if self.last_reward:
            parts.append(obs[LAST_REWARD].float().clamp(-1.0, 1.0).unsqueeze(-1))
        return torch.cat(parts, 1)


class ObservationEncoder(nn.Module):
    """Images through convolutions, the vector of the other leaves through an MLP, side by side: [N, output_size].

    images: the image leaves by name, each with its own convolutions.
    vector_size: width of what `VectorInput` gives; 0: there is none.
    normalize: images by the running moments of their channels.
    """

    def __init__(
        self,
        images: Mapping[str, LeafSpec],
        vector_size: int,
        *,
        conv: ConvName = "convnet_simple",
        conv_features: int = 512,
        mlp_layers: Sequence[int] = (64, 64),
        activation: Activation = "elu",
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.images = sorted(images)
        self.convs = nn.ModuleList(
            _image_encoder(images[name], conv, conv_features, activation, normalize) for name in self.images
        )
        self.mlp = MLPEncoder(vector_size, mlp_layers if vector_size else (), activation)
        self.output_size = sum(_output_size(module) for module in self.convs) + self.mlp.output_size

    def update_norm(self, obs: Mapping[str, Tensor], over_all: Callable[[Tensor], Tensor] = alone) -> None:
        """Take images [N, ...] into the running moments."""
        for name, conv in zip(self.images, self.convs, strict=True):
            if isinstance(conv, ConvEncoder):
                conv.update_norm(obs[name], over_all)

    def forward(self, obs: Mapping[str, Tensor], vector: Tensor | None) -> Tensor:
        parts = [conv(obs[name]) for name, conv in zip(self.images, self.convs, strict=True)]
        if vector is not None:
            parts.append(self.mlp(vector))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def split_leaves(
    observation: Mapping[str, LeafSpec], encoder: EncoderKind, others: Collection[str] = ()
) -> tuple[dict[str, LeafSpec], dict[str, LeafSpec]]:
    """(images, vectors) among the leaves; masks and the leaves named in `others` are neither.

    encoder: "auto" sends images through convolutions, "mlp" flattens them into the vector.
    Raises SpaceError when nothing is left to learn from.
    """
    inputs = {n: leaf for n, leaf in observation.items() if leaf.kind != "mask" and n not in others}
    if not any(_num_entries(leaf) for leaf in inputs.values()):
        raise SpaceError("The observation has no leaf to learn from (masks are none). Add one to the environment.")
    images = {n: leaf for n, leaf in inputs.items() if leaf.kind == "image" and encoder == "auto"}
    return images, {n: leaf for n, leaf in inputs.items() if n not in images}


def is_grid_of_codes(leaf: LeafSpec) -> bool:
    """Whether "grid_codes" can read the leaf: a small image of bytes."""
    return leaf.kind == "image" and leaf.dtype == "uint8" and _is_small(leaf)


def _is_small(leaf: LeafSpec) -> bool:
    return min(leaf.shape[:2] if leaf.layout == "hwc" else leaf.shape[1:]) < MIN_CONV_PIXELS


def _plain_convs(
    height: int, width: int, channels: int, conv: str, activation: Activation
) -> tuple[nn.Conv2d, list[nn.Module], int]:
    """The first convolution of a named stack, what follows, and the number of entries of its last map."""
    layers: list[nn.Module] = []
    first = nn.Conv2d(channels, *PLAIN_CONVS[conv][0])
    for outputs, kernel, stride, padding in PLAIN_CONVS[conv]:
        layers += [nn.Conv2d(channels, outputs, kernel, stride, padding)] if layers else []
        layers.append(make_activation(activation))
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
        channels = outputs
    return first, layers, height * width * channels


def _resnet(height: int, width: int, channels: int, activation: Activation) -> tuple[nn.Conv2d, list[nn.Module], int]:
    """IMPALA's deep net: 15 convolutions; pooling pads both sides by 1, so a side of n becomes ceil(n / 2)."""
    first = nn.Conv2d(channels, RESNET_CHANNELS[0], 3, padding=1)
    layers: list[nn.Module] = []
    for outputs in RESNET_CHANNELS:
        layers += [nn.Conv2d(channels, outputs, 3, padding=1)] if layers else []
        layers += [
            nn.MaxPool2d(3, 2, padding=1),
            ResidualBlock(outputs, activation),
            ResidualBlock(outputs, activation),
        ]
        height, width, channels = (height + 1) // 2, (width + 1) // 2, outputs
    layers.append(_out_of_place(activation))
    return first, layers, height * width * channels


def _to_channels_last(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)


def _out_of_place(name: Activation) -> nn.Module:
    return {"elu": nn.ELU(), "relu": nn.ReLU(), "tanh": nn.Tanh()}[name]


def _image_encoder(
    leaf: LeafSpec, conv: ConvName, features: int, activation: Activation, normalize: bool
) -> ConvEncoder | GridEncoder:
    """What `conv` means for this image; small ones take "conv_tiny" for the stacks that would use them up."""
    if conv == "grid_codes":
        return GridEncoder(leaf, features, activation)
    fitting: ConvName = "conv_tiny" if _is_small(leaf) else conv
    return ConvEncoder(leaf, fitting, features, activation, normalize)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """What a convolution will compute in, so that an image is converted once."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _output_size(module: nn.Module) -> int:
    return int(module.output_size)  # type: ignore[arg-type]  # nn.Module types every attribute as a tensor


def _num_entries(leaf: LeafSpec) -> int:
    return math.prod(leaf.shape)


def _code_sizes(leaf: LeafSpec) -> tuple[int, ...]:
    """The number of values of each entry; one number stands for all entries."""
    return leaf.n * _num_entries(leaf) if len(leaf.n) == 1 else leaf.n


def _num_codes(leaf: LeafSpec) -> int:
    return sum(_code_sizes(leaf))


def _is_real(leaf: LeafSpec) -> bool:
    """Whether the leaf's entries are measurements that running moments should scale."""
    if leaf.kind != "vector":
        return False
    return np.dtype(leaf.dtype).kind == "f" or not leaf.high - leaf.low <= MAX_SCALED_RANGE


def _scale(leaf: LeafSpec) -> tuple[float, float]:
    """(low, 1 / (high - low)) of a leaf whose bounds give its scale; (0, 1) without bounds."""
    if np.dtype(leaf.dtype).kind == "b" or leaf.kind == "binary" or not 0 < leaf.high - leaf.low < math.inf:
        return 0.0, 1.0
    return leaf.low, 1.0 / (leaf.high - leaf.low)
