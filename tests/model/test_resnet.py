from typing import Any

import pytest
import torch
from conftest import assert_learns

from boltcutter.model.resnet import DEPTHS, Block, ResNet


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_parameter_count_matches_torchvision(depth: Any, count: int) -> None:
    with torch.device("meta"):
        model = ResNet((3, 224, 224), 1000, depth=depth, stem="large")
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("depth", "entries"), [(18, 122), (34, 218), (50, 320)])
def test_parameter_names_match_torchvision(depth: Any, entries: int) -> None:
    with torch.device("meta"):
        model = ResNet((3, 224, 224), 1000, depth=depth, stem="large")
    norm = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    convolutions = 3 if depth == 50 else 2
    expected = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{entry}" for entry in norm}
    for stage, count in enumerate(DEPTHS[depth][1], start=1):
        for block in range(count):
            for number in range(1, convolutions + 1):
                expected.add(f"layer{stage}.{block}.conv{number}.weight")
                expected |= {f"layer{stage}.{block}.bn{number}.{entry}" for entry in norm}
        if stage > 1 or depth == 50:
            expected.add(f"layer{stage}.0.downsample.0.weight")
            expected |= {f"layer{stage}.0.downsample.1.{entry}" for entry in norm}
    assert set(model.state_dict()) == expected
    assert len(expected) == entries


def test_bottleneck_stride_is_in_the_3x3_convolution() -> None:
    with torch.device("meta"):
        block = ResNet((3, 224, 224), 1000, depth=50, stem="large").layer2[0]
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("stem", "size", "maps"), [("small", 32, (32, 16, 8, 4)), ("large", 64, (16, 8, 4, 2)), ("small", 8, (8, 4, 2, 1))]
)
def test_feature_map_sizes(stem: Any, size: int, maps: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model, seen = ResNet((1, size, size), 10, stem=stem), []
        for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
            layer.register_forward_hook(lambda _module, _inputs, output: seen.append(tuple(output.shape)))
        assert model(torch.rand(2, 1, size, size)).shape == (2, 10)
    assert seen == [(2, width, side, side) for width, side in zip((64, 128, 256, 512), maps, strict=True)]


def test_small_stem_has_fewer_parameters() -> None:
    with torch.device("meta"):
        small = ResNet((3, 32, 32), 10)
    assert tuple(small.conv1.weight.shape) == (64, 3, 3, 3)
    assert sum(p.numel() for p in small.parameters()) == 11_173_962


def test_blocks_begin_as_identities() -> None:
    x = torch.rand(2, 64, 4, 4)
    block = ResNet((1, 8, 8), 10).layer1[0]
    assert isinstance(block, Block)
    torch.testing.assert_close(block(x), x)


def test_bottlenecks_begin_as_identities() -> None:
    model = ResNet((1, 8, 8), 10, depth=50)
    block = model.layer4[0]
    assert not block.bn3.weight.any()
    assert (block.bn2.weight == 1).all()
    assert (block.downsample[1].weight == 1).all()
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_bytes_and_floats_agree() -> None:
    model, x = ResNet((3, 8, 8), 10).eval(), torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model(x), model(x / 255))


def test_bfloat16() -> None:
    assert ResNet((1, 8, 8), 10).bfloat16()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "stem"), [(18, "small"), (50, "large")])
def test_export_with_any_batch_size(depth: Any, stem: Any) -> None:
    model, x = ResNet((3, 32, 32), 10, depth=depth, stem=stem).eval(), torch.ones(3, 3, 32, 32, dtype=torch.uint8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(torch.cat([x, x])), model(torch.cat([x, x])))


@pytest.mark.slow
def test_it_learns_a_small_batch_and_every_parameter_has_a_gradient() -> None:
    torch.manual_seed(0)
    assert_learns(ResNet((1, 8, 8), 3), lr=0.001, steps=80)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_shape": (10,)},
            r"model\.input_shape=\(10,\): ResNet needs \(channels, height, width\); try model=mlp",
        ),
        ({"input_shape": (0, 8, 8)}, r"model\.input_shape=\(0, 8, 8\) must be positive sizes; .*"),
        ({"num_classes": 0}, r"model\.num_classes=0 must be positive; .*"),
        ({"depth": 20}, r"model\.depth=20 is unknown; try one of 18, 34, 50"),
        ({"stem": "tiny"}, r"model\.stem=tiny is unknown; try small or large"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        ResNet(**{"input_shape": (3, 8, 8), "num_classes": 2} | arguments)
