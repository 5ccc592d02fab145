"""The calibrator's maps, sizes, penalty and serialisation. K, V, D and H all differ, so a swapped axis shows."""

from __future__ import annotations

import itertools

import pytest
import torch

from statebridge.calibrate import Calibrator, ChannelAffine, LowRank, Residual, TwoSided, layer_norms
from statebridge.errors import ConfigError, StateFileError, StateMismatch
from statebridge.state import LayerSpec, LayerState

GDN = LayerSpec(recurrent_state=(3, 10, 6), conv_state=(14, 4))
ATTENTION = LayerSpec(key=(2, 12), value=(2, 8))
HYBRID = LayerSpec(key=(2, 12), value=(2, 12), recurrent_state=(3, 10, 6), conv_state=(14, 4))
LAYERS = (GDN, ATTENTION, GDN, HYBRID)

#: Geometry of Qwen3.5-4B and 9B: 24 Gated DeltaNet and 8 attention layers.
FULL_SIZE = tuple(
    LayerSpec(key=(4, 256), value=(4, 256))
    if index % 4 == 3
    else LayerSpec(recurrent_state=(32, 128, 128), conv_state=(8192, 4))
    for index in range(32)
)


def states(
    layers: tuple[LayerSpec, ...] = LAYERS,
    batch: int = 3,
    tokens: int = 5,
    dtype: torch.dtype = torch.float32,
) -> tuple[LayerState, ...]:
    """Random layer states; K and C in `dtype`, R in float32."""
    generator = torch.Generator().manual_seed(7)

    def draw(field: str, shape: tuple[int, ...]) -> torch.Tensor:
        full = (batch, shape[0], tokens, shape[1]) if field in ("key", "value") else (batch, *shape)
        x = torch.randn(full, generator=generator)
        return x if field == "recurrent_state" else x.to(dtype)

    fields = ("key", "value", "recurrent_state", "conv_state")
    return tuple(LayerState(**{f: draw(f, getattr(s, f)) for f in fields if getattr(s, f)}) for s in layers)


def trained(calibrator: Calibrator, size: float = 0.1) -> Calibrator:
    """The same calibrator with random values in place of every zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in calibrator.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return calibrator


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def test_published_sizes_follow_from_the_geometry_alone() -> None:
    calibrator = Calibrator.identity(FULL_SIZE, rank=4)
    counts = {c: Calibrator.identity(FULL_SIZE, 4, [c]).trainable_values for c in ("K", "R", "C")}
    assert counts == {"K": 16_384, "R": 24_576, "C": 393_216}
    assert calibrator.trainable_values == 434_176
    assert calibrator.values == 475_136
    nbytes = sum(x.numel() * x.element_size() for x in calibrator.tensors().values())
    assert nbytes == 4 * 475_136 == 1_900_544


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identity_to_the_last_bit_before_training(dtype: torch.dtype) -> None:
    layers = states(dtype=dtype)
    for layer in layers:
        for _, x in layer.tensors():
            x.view(-1)[:4] = torch.tensor([-0.0, 0.0, torch.finfo(x.dtype).max, torch.finfo(x.dtype).tiny])
            x.view(-1)[4] = -torch.finfo(x.dtype).smallest_normal / 2  # subnormal
    after = Calibrator.identity(LAYERS, rank=2)(layers)
    for before, now in zip(layers, after, strict=True):
        for (field, x), (same, y) in zip(before.tensors(), now.tensors(), strict=True):
            assert field == same
            assert y.dtype == x.dtype
            assert torch.equal(bits(x), bits(y))


def test_maps_are_those_of_the_method() -> None:
    layers = states(batch=2, tokens=3)
    calibrator = trained(Calibrator.identity(LAYERS, rank=2))
    after = calibrator(layers)
    named = calibrator.tensors()

    def part(index: int, field: str, name: str) -> torch.Tensor:
        return named[f"layers.{index}.{field}.{name}"].double()

    for index, field in ((1, "key"), (1, "value"), (3, "key"), (3, "value")):
        x, y = getattr(layers[index], field).double(), getattr(after[index], field)
        basis, update = part(index, field, "basis"), part(index, field, "update")
        for b, h, t in itertools.product(*(range(n) for n in x.shape[:3])):
            wanted = x[b, h, t] + update @ (basis.T @ x[b, h, t])
            torch.testing.assert_close(y[b, h, t].double(), wanted, rtol=0, atol=1e-5)  # float32
    for index in (0, 2, 3):
        s, moved = layers[index].recurrent_state, after[index].recurrent_state
        assert s is not None and moved is not None  # noqa: PT018
        left = part(index, "recurrent_state", "left_update") @ part(index, "recurrent_state", "left_basis").T
        right = (
            part(index, "recurrent_state", "right_basis") @ part(index, "recurrent_state", "right_update").T
        )
        for b, h in itertools.product(range(2), range(3)):
            wanted = s[b, h].double() + left @ s[b, h].double() + s[b, h].double() @ right
            torch.testing.assert_close(moved[b, h].double(), wanted, rtol=0, atol=1e-5)
        c, shifted = layers[index].conv_state, after[index].conv_state
        assert c is not None and shifted is not None  # noqa: PT018
        for j in range(14):
            a, b_j = part(index, "conv_state", "scale")[j], part(index, "conv_state", "shift")[j]
            torch.testing.assert_close(
                shifted[:, j].double(), c[:, j].double() * (1 + a) + b_j, rtol=0, atol=1e-5
            )


def test_rows_do_not_see_each_other() -> None:
    layers = states(batch=3)
    calibrator = trained(Calibrator.identity(LAYERS, rank=2))
    together = calibrator(layers)
    for row in range(3):
        alone = calibrator(tuple(layer.map(lambda _, x, r=row: x[r : r + 1]) for layer in layers))
        for one, all_rows in zip(alone, together, strict=True):
            for (_, x), (_, y) in zip(one.tensors(), all_rows.tensors(), strict=True):
                # another batch size is another matrix product, so equal within float32 rounding
                torch.testing.assert_close(x, y[row : row + 1], rtol=1e-5, atol=1e-6)


def test_gradients_reach_every_trained_tensor_and_no_basis() -> None:
    layers = states(dtype=torch.bfloat16)
    calibrator = Calibrator.identity(LAYERS, rank=2)
    loss = sum(x.float().pow(3).sum() for layer in calibrator(layers) for _, x in layer.tensors())
    loss.backward()  # type: ignore[union-attr]
    names = [name for name, parameter in calibrator.named_parameters() if parameter.grad is not None]
    assert len(names) == len(list(calibrator.parameters())) == 3 * 4 + 2 * 2
    assert all(bool(parameter.grad.ne(0).any()) for parameter in calibrator.parameters())
    assert not any(buffer.requires_grad for buffer in calibrator.buffers())


def test_bases_are_orthonormal_seeded_and_all_different() -> None:
    calibrator = Calibrator.identity(LAYERS, rank=4)
    bases = list(calibrator.buffers())
    assert len(bases) == 4 + 3 * 2
    for basis in bases:
        torch.testing.assert_close(basis.T @ basis, torch.eye(4), rtol=0, atol=1e-6)  # float32
    for one, other in itertools.combinations([b for b in bases if b.shape == (12, 4)], 2):
        assert not torch.allclose(one, other, atol=0.1)
    again, others = (list(Calibrator.identity(LAYERS, rank=4, seed=s).buffers()) for s in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(bases, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(bases, others, strict=True))


def test_components_can_be_switched_off() -> None:
    layers = states()
    full = trained(Calibrator.identity(LAYERS, rank=2))
    less = full.without("C")
    assert full.components == ("K", "R", "C")
    assert less.components == ("K", "R")
    for before, with_all, with_less in zip(layers, full(layers), less(layers), strict=True):
        for field, x in with_less.tensors():
            wanted = before if field == "conv_state" else with_all
            assert torch.equal(x, getattr(wanted, field))
    only = Calibrator.identity(LAYERS, rank=2, components=["R"])
    kept = {n: x for n, x in Calibrator.identity(LAYERS, rank=2).tensors().items() if "recurrent" in n}
    assert only.tensors().keys() == kept.keys()
    assert all(torch.equal(only.tensors()[name], x) for name, x in kept.items())


def test_movement_and_penalty_are_relative_squared_norms() -> None:
    layers = states(batch=3)
    calibrator = trained(Calibrator.identity(LAYERS, rank=2))
    after = calibrator(layers)
    movement = calibrator.movement(layers)
    ratios = []
    for (index, field), (moved, size) in movement.items():
        x, y = (getattr(group[index], field).double() for group in (layers, after))
        squares = ((y - x) ** 2).flatten(1).sum(1), (x**2).flatten(1).sum(1)
        torch.testing.assert_close(moved.double(), squares[0], rtol=1e-4, atol=0)  # float32 differences
        torch.testing.assert_close(size.double(), squares[1], rtol=1e-5, atol=0)
        ratios.append(squares[0] / squares[1])
    assert len(movement) == 3 * 2 + 2 * 2
    torch.testing.assert_close(
        calibrator.penalty(layers).double(), torch.stack(ratios).mean(0), rtol=1e-4, atol=0
    )
    norms = layer_norms(movement)
    hybrid = [pair for (index, _), pair in movement.items() if index == 3]
    wanted = (sum(p[0] for p in hybrid) / sum(p[1] for p in hybrid)).sqrt()  # type: ignore[union-attr]
    torch.testing.assert_close(norms[3], wanted)
    assert list(norms) == [0, 1, 2, 3]


def test_penalty_starts_at_zero_and_survives_an_empty_state() -> None:
    calibrator = Calibrator.identity(LAYERS, rank=2)
    assert calibrator.penalty(states()).tolist() == [0.0] * 3
    blank = tuple(layer.map(lambda _, x: torch.zeros_like(x)) for layer in states())
    assert bool(trained(calibrator).without("C").penalty(blank).isfinite().all())
    assert Calibrator({}).penalty(states()).tolist() == [0.0] * 3


def test_partial_layers_stay_partial() -> None:
    layers = tuple(layer.without(frozenset({"R"})) for layer in states())
    after = trained(Calibrator.identity(LAYERS, rank=2))(layers)
    assert [sorted(f for f, _ in layer.tensors()) for layer in after] == [
        sorted(f for f, _ in layer.tensors()) for layer in layers
    ]


def test_tensors_round_trip() -> None:
    calibrator = trained(Calibrator.identity(LAYERS, rank=3))
    assert all(tensor.is_contiguous() for tensor in calibrator.tensors().values())  # as safetensors needs
    again = Calibrator.from_tensors(calibrator.tensors())
    assert again.tensors().keys() == calibrator.tensors().keys()
    for one, other in zip(calibrator(states()), again(states()), strict=True):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(one.tensors(), other.tensors(), strict=True))
    assert again.trainable_values == calibrator.trainable_values


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda t: t.pop("layers.1.key.update"), "LowRank consists of basis, update, found basis"),
        (lambda t: t.update({"layers.1.query.basis": torch.ones(1)}), "layers.1.query.basis"),
        (lambda t: t.update({"layers.x.key.basis": torch.ones(1)}), "layers.x.key.basis"),
        (lambda t: t["layers.0.conv_state.scale"].fill_(float("nan")), "ChannelAffine holds NaN"),
    ],
)
def test_spoilt_tensors_are_refused_by_name(spoil, named: str) -> None:  # type: ignore[no-untyped-def]
    tensors = {n: x.clone() for n, x in Calibrator.identity(LAYERS, rank=2).tensors().items()}
    spoil(tensors)
    with pytest.raises(StateFileError, match=named):
        Calibrator.from_tensors(tensors)


def test_another_geometry_is_refused_by_name() -> None:
    calibrator = Calibrator.identity(LAYERS, rank=2)
    assert calibrator.require(LAYERS) is calibrator
    transposed = LayerSpec(recurrent_state=(3, 6, 10), conv_state=(14, 4))
    with pytest.raises(StateMismatch, match="layer 2 recurrent_state") as error:
        calibrator.require((GDN, ATTENTION, transposed, HYBRID))
    assert list(error.value.differences) == ["layer 2 recurrent_state"]
    with pytest.raises(StateMismatch, match="layer 3 conv_state"):
        calibrator.require(LAYERS[:3])
    for name in ("layers.1.key.update", "layers.0.recurrent_state.right_update", "layers.0.conv_state.shift"):
        cut = {n: x[:-1] if n == name else x for n, x in calibrator.tensors().items()}
        with pytest.raises(StateMismatch, match=" ".join(name.split(".")[:3]).replace("layers", "layer")):
            Calibrator.from_tensors(cut).require(LAYERS)


def test_wrong_ranks_and_components_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 7 does not fit 6 dims"):
        Calibrator.identity(LAYERS, rank=7)
    with pytest.raises(ConfigError, match="'X' is no component"):
        Calibrator.identity(LAYERS, rank=2, components=["X"])  # type: ignore[list-item]


def test_every_residual_names_all_its_tensors() -> None:
    shapes: dict[type[Residual], tuple[int, ...]] = {
        LowRank: (2, 12),
        TwoSided: (3, 10, 6),
        ChannelAffine: (14, 4),
    }
    for kind, shape in shapes.items():
        made = kind.identity(shape, 2, torch.Generator())
        assert set(made.tensors()) == set(made.state_dict())
        assert made.fits(shape)
