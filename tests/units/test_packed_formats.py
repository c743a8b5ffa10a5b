"""Laws of packed formats: published codes, the reference's bits in every kernel, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from stronghold import native
from stronghold.errors import ConfigError
from stronghold.model.packed_formats import DTYPES, FORMATS, PackedTensors, decode_weights
from stronghold.native import code_books
from tests.support.packed_weights import (
    SHAPES,
    assert_decodes_like_torch,
    assert_same_inner,
    bits,
    empty_inner,
    encoded_cases,
    exhaustive_cases,
    hazardous,
    weight_of,
)

BF16, F32 = torch.bfloat16, torch.float32
# A 70 B model's matrices, and gpt-oss-120b's fused experts.
REAL_SHAPES = ((8192, 8192), (28672, 8192), (1024, 8192), (128, 2880, 5760))
MOST_BYTES = {"nf4": 0.56}


@pytest.fixture(scope="module")
def pool() -> Iterator[native.Pool]:
    with native.Pool(2) as threads:
        yield threads


# ---- The table ------------------------------------------------------------------------------


def test_table_and_kernels_have_the_same_formats():
    assert set(FORMATS) == set(native.formats()) == set(MOST_BYTES)
    assert all(name == format.name for name, format in FORMATS.items())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_bytes_per_element_are_at_most_the_formats(name, shape):
    format = FORMATS[name]
    assert format.packed_bytes(shape) / math.prod(shape) <= MOST_BYTES[name]
    assert format.can_pack(shape, BF16)


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_become_smaller_is_not_packed(name):
    format = FORMATS[name]
    assert not format.can_pack((64,), BF16)
    assert not format.can_pack((1, 2, 64, 64), BF16)
    assert not format.can_pack((64, 64), torch.int8)
    assert not format.can_pack((64, 64), torch.float64)
    assert not format.can_pack((0, 64), BF16)
    assert not format.can_pack((1, 1), BF16)
    assert format.can_pack((64, 64), BF16)


# ---- Published formats ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_codes_and_weights_are_those_of_bitsandbytes(dtype, shape):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight, inner = weight_of(shape, dtype), empty_inner(FORMATS["nf4"], shape)
    FORMATS["nf4"].encode(weight, inner)
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    assert torch.equal(codes.view(-1), inner["codes"])
    # Its mean depends on the order of addition, and a new one shifts the codes of the absmax.
    assert inner["nested_offset"].item() == pytest.approx(state.offset.item(), rel=1e-6)
    # Its compiled kernel takes the other neighbour near the middle between two values, and another
    # code where the absmax of all blocks are equal.
    steps = (inner["absmax"].int() - state.absmax.int()).abs()
    assert steps.max() <= 1 or inner["nested_absmax"].max() < 1e-37
    if shape[-1] % 2:  # it compiles a program for each odd size, for many seconds
        return
    state.absmax, state.offset = inner["absmax"], inner["nested_offset"][0]
    state.state2.absmax = inner["nested_absmax"]
    state.state2.code = code_books.dynamic_map(weight.device)
    out = torch.empty_like(weight)
    FORMATS["nf4"].decode(inner, out)
    theirs = functional.dequantize_4bit(codes, state).view(shape)
    assert torch.equal(bits(out), bits(theirs))


def test_dynamic_map_is_that_of_bitsandbytes_but_for_last_bits():
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map()
    ours = code_books.dynamic_map(theirs.device)
    assert torch.equal(ours.sort().values, ours)
    # torch.linspace, from which theirs comes, has other last bits on other CPUs.
    torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=0)


# ---- Encoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_encodes_the_references_bits_on_every_instruction_set(name, dtype):
    format = FORMATS[name]
    pools = [native.Pool(threads, isa=isa) for threads in (1, 3) for isa in native.isas()]
    for shape in SHAPES:
        for weight in (weight_of(shape, dtype), hazardous(shape, dtype)):
            expected = empty_inner(format, shape)
            error = format.encode(weight, expected)
            assert error.numel == weight.numel()
            for pool in pools:
                inner = empty_inner(format, shape)
                by_kernel = format.encode(weight, inner, pool)
                assert_same_inner(expected, inner, (name, shape, dtype, pool.isa))
                assert by_kernel.largest == error.largest
                # The reference's order of addition is torch's.
                assert by_kernel.square_sum == pytest.approx(error.square_sum, rel=1e-9)
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("name", FORMATS)
def test_error_is_that_of_the_decoded_weight(name, pool):
    weight = weight_of((130, 257), BF16)
    inner, out = empty_inner(FORMATS[name], weight.shape), torch.empty_like(weight)
    error = FORMATS[name].encode(weight, inner, pool)
    decode_weights(pool, [PackedTensors(FORMATS[name], inner, out)])
    differences = (out.double() - weight.double()).abs()
    assert error.largest == differences.max().item() > 0
    assert error.rms == pytest.approx(differences.square().mean().sqrt().item(), rel=1e-12)
    assert error.rms < 0.0025  # of a weight with deviation 0.02


@pytest.mark.parametrize("strides", ["transposed", "sliced"])
def test_strides_of_the_weight_do_not_matter(strides, pool):
    weight = weight_of((65, 200), BF16)
    strided = weight.T.contiguous().T if strides == "transposed" else torch.cat([weight] * 2, 1)
    strided = strided[:, :200]
    assert not strided.is_contiguous()
    for format in FORMATS.values():
        expected, inner = (empty_inner(format, weight.shape) for _ in range(2))
        format.encode(weight, expected)
        format.encode(strided, inner, pool)
        assert_same_inner(expected, inner, format.name)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_zeros_are_exact(name, pool):
    weight = weight_of((256, 256), BF16)
    weight[:128, :128] = 0
    weight[200] = 0
    inner, out = empty_inner(FORMATS[name], weight.shape), torch.empty_like(weight)
    FORMATS[name].encode(weight, inner, pool)
    FORMATS[name].decode(inner, out)
    assert (out[weight == 0] == 0).all()
    for zeros in (torch.zeros(3, 70, 130), torch.zeros(1, 1)):
        inner, out = empty_inner(FORMATS[name], zeros.shape), torch.ones_like(zeros)
        error = FORMATS[name].encode(zeros, inner, pool)
        FORMATS[name].decode(inner, out)
        assert error == (0.0, zeros.numel(), 0.0)
        assert (out == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_are_refused(name, bad, position, pool):
    weight = weight_of((130, 257), BF16)
    weight.view(-1)[position] = bad
    for threads in (None, pool):
        with pytest.raises(ConfigError, match=f"{name}: the weight has NaN or infinity"):
            FORMATS[name].encode(weight, empty_inner(FORMATS[name], weight.shape), threads)


def test_magnitudes_that_decode_to_infinity_are_refused(pool):
    # The codes of the absmax round the largest ones up, past fp16's largest number.
    weight = torch.zeros(64, 64, dtype=torch.float16)
    weight[:, 0] = torch.linspace(0, 65504, 64)
    weight[1::2, 0] = 65400
    for threads in (None, pool):
        with pytest.raises(ConfigError, match=r"nf4: decoded, .* would be infinite in torch.float"):
            FORMATS["nf4"].encode(weight, empty_inner(FORMATS["nf4"], weight.shape), threads)


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_that_do_not_fit_are_refused(name, pool):
    format, weight = FORMATS[name], weight_of((4, 256), BF16)
    first = format.inner(weight.shape)[0].name
    good = empty_inner(format, weight.shape)
    format.encode(weight, good)
    missing = {key: value for key, value in good.items() if key != first}
    other_dtype = {**good, first: good[first].view(torch.uint8).to(torch.int16)}
    other_shape = {**good, first: good[first].view(-1)[:-1]}
    for inner, reason in ((missing, "missing"), (other_dtype, "int16"), (other_shape, "shape")):
        for call in (
            lambda inner=inner: format.encode(weight, inner, pool),
            lambda inner=inner: format.decode(inner, weight.clone()),
            lambda inner=inner: decode_weights(pool, [PackedTensors(format, inner, weight)]),
        ):
            with pytest.raises(ConfigError, match=f"{name}: .*{first}.*{reason}|{first}.*{reason}"):
                call()
    for out in (weight.double(), weight.T.contiguous().T, weight.view(-1)):
        with pytest.raises(ConfigError, match=name):
            decode_weights(pool, [PackedTensors(format, good, out)])


def test_unknown_format_is_refused(pool):
    with pytest.raises(ConfigError, match='format is "nf5"; the kernels have nf4'):
        pool.decode("nf5", BF16, [])


# ---- Decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", native.isas())
def test_every_code_and_scale_decodes_like_the_reference(isa, dtype):
    with native.Pool(1, isa=isa) as pool:
        for skip in (0, 1):
            assert_decodes_like_torch(pool, exhaustive_cases(), dtype, skip)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("isa", native.isas())
def test_sizes_addresses_and_threads_never_change_a_bit(isa, num_threads, dtype):
    with native.Pool(num_threads, isa=isa) as pool:
        for skip in (0, 1, 8, 31):
            assert_decodes_like_torch(pool, encoded_cases(), dtype, skip)


def test_weights_longer_than_a_thread_claims(pool):
    for name, format in FORMATS.items():
        for shape in ((300, 1023), (1, 100_001)):
            inner = empty_inner(format, shape)
            format.encode(weight_of(shape, F32), inner, pool)
            assert_decodes_like_torch(pool, [(name, shape, inner)], BF16)
