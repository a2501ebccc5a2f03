"""Each kind of leaf becomes the features it should; architectures have the papers' numbers of parameters."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from pronghorn.errors import SpaceError
from pronghorn.models.encoders import (
    CODE_SIZE,
    LAST_ACTION_CONTINUOUS,
    ConvEncoder,
    GridEncoder,
    LastStepInput,
    MLPEncoder,
    ObservationEncoder,
    OneHot,
    VectorInput,
    split_leaves,
)
from pronghorn.types import LAST_ACTION, LAST_REWARD, ActionSpec, LeafSpec


def image(*shape: int, layout: str = "hwc", low: float = 0.0, high: float = 255.0) -> LeafSpec:
    return LeafSpec(shape, "uint8", "image", layout, low, high)


def pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_conv_scales_by_the_bounds_and_equals_the_plain_network() -> None:
    encoder = ConvEncoder(image(72, 64, 3), "nature", 16, "relu")
    x = pixels(2, 72, 64, 3)
    y = x.permute(0, 3, 1, 2).contiguous().float() / 255
    y = encoder.convs(nn.functional.conv2d(y, encoder.first.weight, encoder.first.bias, 4))
    expected = encoder.full(y.permute(0, 2, 3, 1).reshape(2, -1))
    torch.testing.assert_close(encoder(x), expected, rtol=1e-4, atol=1e-5)


def test_a_lower_bound_is_subtracted_and_no_bounds_mean_no_scale() -> None:
    encoder = ConvEncoder(image(40, 40, 1, low=-1.0, high=1.0), "nature", 8)
    shifted = ConvEncoder(image(40, 40, 1, low=0.0, high=2.0), "nature", 8)
    shifted.load_state_dict(encoder.state_dict())
    x = torch.rand(2, 40, 40, 1)
    torch.testing.assert_close(encoder(x), shifted(x + 1.0))
    free = ConvEncoder(LeafSpec((40, 40, 1), "float32", "image", "hwc"), "nature", 8)
    free.load_state_dict(encoder.state_dict())
    unit = ConvEncoder(image(40, 40, 1, high=1.0), "nature", 8)
    unit.load_state_dict(encoder.state_dict())
    assert torch.equal(free(x), unit(x))


def test_both_layouts_give_the_same_features() -> None:
    hwc = ConvEncoder(image(48, 40, 3), "convnet_simple", 32)
    chw = ConvEncoder(image(3, 48, 40, layout="chw"), "convnet_simple", 32)
    chw.load_state_dict(hwc.state_dict())
    x = pixels(3, 48, 40, 3)
    torch.testing.assert_close(hwc(x), chw(x.permute(0, 3, 1, 2).contiguous()), rtol=1e-4, atol=1e-5)


def test_the_input_is_not_changed_and_weights_are_channels_last() -> None:
    encoder = ConvEncoder(LeafSpec((40, 40, 4), "float32", "image", "hwc", 0.0, 2.0), "nature", 8)
    x = torch.rand(2, 40, 40, 4)
    before = x.clone()
    encoder(x)
    assert torch.equal(x, before)
    assert encoder.first.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("conv", "shape", "flat"),
    [
        ("nature", (84, 84, 4), 7 * 7 * 64),
        ("convnet_simple", (72, 128, 3), 3 * 6 * 128),
        ("impala_shallow", (72, 96, 3), 7 * 10 * 32),
        ("resnet_impala", (84, 84, 4), 3872),  # the paper's flat size for Atari
        ("resnet_impala", (72, 96, 3), 9 * 12 * 32),
        ("conv_tiny", (7, 7, 3), 2 * 2 * 64),
        ("conv_tiny", (1, 1, 1), 64),
    ],
)
def test_flat_sizes(conv: str, shape: tuple[int, ...], flat: int) -> None:
    encoder = ConvEncoder(image(*shape), conv, 0)  # type: ignore[arg-type]  # parametrised by name
    assert encoder.output_size == flat
    assert encoder(pixels(2, *shape)).shape == (2, flat)


def test_the_deep_net_has_fifteen_convolutions() -> None:
    encoder = ConvEncoder(image(72, 96, 3), "resnet_impala", 256, "relu")
    convs = [module for module in encoder.modules() if isinstance(module, nn.Conv2d)]
    assert len(convs) == 15
    assert [conv.out_channels for conv in convs] == [16] * 5 + [32] * 10
    assert encoder(pixels(2, 72, 96, 3)).shape == (2, 256)


def test_residual_blocks_keep_their_input() -> None:
    """With all convolutions of the blocks at 0, the blocks are the identity."""
    encoder = ConvEncoder(image(8, 8, 2), "resnet_impala", 0, "relu")
    for block in (module for module in encoder.convs if hasattr(module, "between")):
        for parameter in block.parameters():
            nn.init.zeros_(parameter)
        x = torch.randn(1, block.first.in_channels, 4, 4)
        before = x.clone()
        assert torch.equal(block(x), before)
        assert torch.equal(x, before)


def test_gradients_reach_every_parameter() -> None:
    for conv in ("nature", "convnet_simple", "impala_shallow", "resnet_impala", "conv_tiny"):
        encoder = ConvEncoder(image(36, 40, 3), conv, 8, "tanh")  # type: ignore[arg-type]
        encoder(pixels(2, 36, 40, 3)).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters()), conv


def codes(*shape: int, high: int = 9) -> torch.Tensor:
    return torch.randint(0, high + 1, shape, dtype=torch.uint8)


@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_a_cell_of_a_grid_is_the_sum_of_its_codes_vectors(layout: str) -> None:
    shape = (3, 5, 2) if layout == "hwc" else (2, 3, 5)
    # the declared range is not trusted: a byte outside it is one more code
    encoder = GridEncoder(LeafSpec(shape, "uint8", "image", layout, 0.0, 9.0), 0, "elu")  # type: ignore[arg-type]
    x = codes(4, 3, 5, 2, high=255)
    table = encoder.codes.weight.view(2, 256, CODE_SIZE)
    cells = sum(table[c, x[..., c].long()] for c in range(2))
    maps = encoder.convs(cells.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1)  # type: ignore[union-attr]
    given = x if layout == "hwc" else x.permute(0, 3, 1, 2)
    torch.testing.assert_close(encoder(given), maps)
    assert encoder.output_size == maps.shape[1]
    assert cells.var().item() == pytest.approx(1.0, abs=0.2)  # type: ignore[union-attr]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in encoder.parameters() if p.dim() == 4)


def test_a_grid_encoder_learns_everything_it_reads() -> None:
    encoder = GridEncoder(image(7, 7, 3), 8, "tanh")
    x = codes(64, 7, 7, 3)
    encoder(x).square().sum().backward()
    gradients = {name: p.grad for name, p in encoder.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for g in gradients.values())
    rows = gradients["codes.weight"].view(3, 256, CODE_SIZE).abs().sum((0, 2))  # type: ignore[union-attr]
    assert (rows > 0).nonzero().flatten().tolist() == list(range(10))  # the codes that occur, and no others


@pytest.mark.parametrize("leaf", [LeafSpec((7, 7, 3), "int32", "image", "hwc", 0.0, 9.0), image(72, 128, 3)])
def test_what_is_no_grid_of_codes_is_refused(leaf: LeafSpec) -> None:
    with pytest.raises(SpaceError, match=r"grid_codes reads images of uint8 .*leave --model\.conv out"):
        ObservationEncoder({"image": leaf}, 0, conv="grid_codes")


def test_small_images_are_normalised_by_all_their_cells() -> None:
    encoder = ConvEncoder(image(7, 7, 1), "conv_tiny", 8, normalize=True)
    x = torch.zeros(2, 7, 7, 1, dtype=torch.uint8)
    x[:, 1::2] = 255  # rows that steps of four would never meet
    encoder.update_norm(x)
    assert encoder.norm is not None
    torch.testing.assert_close(encoder.norm.mean, torch.tensor([3 / 7], dtype=torch.float64))


def test_one_hot_of_many_codes_and_of_none() -> None:
    result = OneHot((2, 3))(torch.tensor([[1, 0], [0, 2], [-1, -1]]))
    assert result.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


LEAVES = {
    "a.real": LeafSpec((2,), "float32", "vector"),
    "keys": LeafSpec((), "int64", "discrete", n=(3,)),
    "inventory/0": LeafSpec((2, 2), "int64", "discrete", n=(2, 2, 2, 2)),
    "flags": LeafSpec((3,), "int8", "binary", low=0.0, high=1.0),
    "ram": LeafSpec((2,), "uint8", "vector", low=0.0, high=255.0),
    "wide": LeafSpec((1,), "int64", "vector", low=-1e9, high=1e9),
    "angle": LeafSpec((1, 1), "int32", "vector", low=-2.0, high=2.0),
}
OBS = {
    "a.real": torch.tensor([[0.5, -7.0]]),
    "keys": torch.tensor([2]),
    "inventory/0": torch.tensor([[[0, 1], [1, 0]]]),
    "flags": torch.tensor([[1, 0, 1]], dtype=torch.int8),
    "ram": torch.tensor([[0, 51]], dtype=torch.uint8),
    "wide": torch.tensor([[123456]]),
    "angle": torch.tensor([[[1]]], dtype=torch.int32),
}


def test_every_kind_of_leaf_by_hand() -> None:
    part = VectorInput(LEAVES, normalize=False)
    result = part(OBS)
    assert result.dtype == torch.float32
    assert result.shape == (1, part.output_size)
    real = [0.5, -7.0, 123456.0]
    scaled = [0.75, 1, 0, 1, 0, 0.2]  # angle, flags, ram
    coded = [1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1]  # inventory/0, keys
    torch.testing.assert_close(result, torch.tensor([[*real, *scaled, *coded]]))


def test_only_real_valued_leaves_are_normalised() -> None:
    part = VectorInput(LEAVES, normalize=True)
    other = {name: tensor + 2 if name in ("a.real", "wide") else tensor for name, tensor in OBS.items()}
    both = {name: torch.cat([OBS[name], other[name]]) for name in OBS}
    before = part(both)
    part.update(both, None)
    after = part(both)
    # x and x + 2: one below and one above the mean, by one deviation
    signs = torch.tensor([[-1.0], [1.0]]).expand(2, 3)
    torch.testing.assert_close(after[:, :3], signs, rtol=0, atol=1e-4)
    torch.testing.assert_close(after[:, 3:], before[:, 3:])


def test_last_step_input() -> None:
    part = LastStepInput(ActionSpec((2, 3), (-1.0,), (1.0,)), last_action=True, last_reward=True)
    obs = {
        LAST_ACTION: torch.tensor([[1, 2], [-1, -1]]),
        LAST_ACTION_CONTINUOUS: torch.tensor([[0.3], [0.0]]),
        LAST_REWARD: torch.tensor([-9.0, 0.5]),
    }
    expected = [[0, 1, 0, 0, 1, 0.3, -1.0], [0, 0, 0, 0, 0, 0, 0.5]]
    torch.testing.assert_close(part(obs), torch.tensor(expected))
    assert part.output_size == 7
    assert LastStepInput(ActionSpec((2,)), False, True).output_size == 1


def test_several_images_of_several_sizes_and_a_vector() -> None:
    images = {"far": image(7, 7, 3), "near": image(4, 40, 50, layout="chw")}
    encoder = ObservationEncoder(images, 5, conv="nature", conv_features=16, mlp_layers=(8,))
    features = encoder({"far": pixels(2, 7, 7, 3), "near": pixels(2, 4, 40, 50)}, torch.randn(2, 5))
    assert features.shape == (2, 16 + 16 + 8)
    assert encoder.output_size == 40
    assert encoder.convs[0].first.kernel_size == (3, 3)  # too small for "nature"
    assert encoder.convs[1].first.kernel_size == (8, 8)


def test_split_leaves() -> None:
    leaves = {
        "screen": image(40, 40, 3),
        "health": LeafSpec((1,), "float32", "vector"),
        "allowed": LeafSpec((4,), "int8", "mask"),
        LAST_REWARD: LeafSpec((), "float32", "vector"),
    }
    images, vectors = split_leaves(leaves, "auto", (LAST_REWARD,))
    assert (list(images), list(vectors)) == (["screen"], ["health"])
    images, vectors = split_leaves(leaves, "mlp", (LAST_REWARD,))
    assert (list(images), list(vectors)) == ([], ["screen", "health"])
    assert VectorInput(vectors, normalize=True).num_real == 1  # a flattened image is scaled by its bounds
    with pytest.raises(SpaceError, match="no leaf to learn from"):
        split_leaves({"allowed": leaves["allowed"]}, "auto")


def test_mlp() -> None:
    encoder = MLPEncoder(3, (4, 5), "tanh")
    assert num_parameters(encoder) == 3 * 4 + 4 + 4 * 5 + 5
    assert encoder(torch.randn(2, 3)).abs().max() <= 1
    x = torch.randn(2, 3)
    assert MLPEncoder(3, ()).output_size == 3
    assert MLPEncoder(3, ())(x) is x


def test_bf16_autocast_and_bf16_weights_take_bytes() -> None:
    encoder = ConvEncoder(image(40, 40, 3), "nature", 8)
    x = pixels(2, 40, 40, 3)
    with torch.no_grad():
        expected = encoder(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert encoder(x).dtype == torch.bfloat16
            torch.testing.assert_close(encoder(x).float(), expected, rtol=0.1, atol=0.02)
        encoder.to(torch.bfloat16)
        torch.testing.assert_close(encoder(x).float(), expected, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("conv", ["convnet_simple", "resnet_impala"])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_normalising_in_the_first_layer_equals_normalising_the_pixels(
    conv: Literal["convnet_simple", "resnet_impala"], layout: str
) -> None:
    """With and without padding; the moments are those of the pixels per channel."""
    shape = (48, 64, 3) if layout == "hwc" else (3, 48, 64)
    leaf = LeafSpec(shape, "uint8", "image", layout, 0, 255)
    torch.manual_seed(0)
    images = torch.randint(0, 255, (8, *shape), dtype=torch.uint8)
    encoder = ConvEncoder(leaf, conv, 16, "relu", normalize=True)
    plain = ConvEncoder(LeafSpec(shape, "float32", "image", layout), conv, 16, "relu")
    plain.load_state_dict({k: v for k, v in encoder.state_dict().items() if not k.startswith("norm")})
    with torch.no_grad():
        assert torch.allclose(encoder(images), plain(images / 255.0), atol=1e-5)  # no statistics yet: only scaled
        encoder.update_norm(images)
        channels_last = images if layout == "hwc" else images.permute(0, 2, 3, 1)
        seen = channels_last[:, ::4, ::4].reshape(-1, 3) / 255.0
        mean, std = seen.mean(0), (seen.var(0, correction=0) + 1e-5).sqrt()
        pixels = ((channels_last / 255.0) - mean) / std
        expected = plain(pixels if layout == "hwc" else pixels.permute(0, 3, 1, 2).contiguous())
        assert torch.allclose(encoder(images), expected, atol=1e-4)
