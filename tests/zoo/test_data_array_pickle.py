"""A pickle of arrays is read, and a hostile or broken one runs nothing."""

from __future__ import annotations

import pickle
import pickletools
import warnings
from typing import Any, Literal

import numpy as np
import pytest

from cifar_files import ARRAY, python2, short
from flatness.zoo.data.array_pickle import ArrayPickleError, load_array_pickle


def clause(raw: bytes) -> str:
    with pytest.raises(ArrayPickleError) as caught:
        load_array_pickle(raw)
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("numpy", "load"),
        ("numpy", "fromfile"),
        ("numpy.core.multiarray", "fromstring"),
        ("numpy", "core.multiarray._reconstruct"),
        ("numpy", "ndarray.tofile"),
        ("numpy.testing._private.utils", "runstring"),
        ("numpy.f2py.crackfortran", "myeval"),
        ("_codecs", "decode"),
        ("copyreg", "_reconstructor"),
        ("flatness.zoo.data.array_pickle", "pickle.loads"),
    ],
)
def test_other_names_of_numpy_and_the_rest_are_refused(module: str, name: str) -> None:
    on_stack = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    for named in (f"c{module}\n{name}\n".encode(), on_stack + b"\x93"):  # GLOBAL, STACK_GLOBAL
        raw = b"\x80\x04}" + short(b"data") + named + short(b"1") + b"\x85Rs."
        assert clause(raw) == f"it asks for {module}.{name}, which is refused"


U1 = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R", "it has an array of type 'O8'"),
        (b"cnumpy\ndtype\nU\x01VK\x00K\x01\x87R", "it has an array of type 'V'"),
        (b"cnumpy\ndtype\nNK\x00K\x01\x87R", "it has an array of type None"),
        (U1 + b"(K\x03U\x01|NU\x01a\x85}K\x08K\x01K\x3ftb", "it has an array with fields"),
        (U1 + b"}b", "it has an array with fields"),
        (ARRAY + b"(K\x01J\xff\xff\xff\x7f\x85" + U1 + b"\x89U\x01atb",
         "it has an array of shape (2147483647,) and type uint8 with 1 bytes"),
        (ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + U1 + b"\x89U\x00tb",
         "it has an array of another kind than whole numbers"),
        (ARRAY + b"(K\x01K\x01\x85" + U1 + b"\x89](K\x01etb",
         "it has an array of another kind than whole numbers"),
        (ARRAY + b"U\x01ab", "it has an array of another kind than whole numbers"),
        (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R",
         "it has an array of a class of its own"),
        (b"cnumpy\ndtype\n}b", "it changes numpy.dtype"),
        (b"cnumpy.core.multiarray\n_reconstruct\nN}U\x0c__defaults__Ns\x86b",
         "it changes numpy.core.multiarray._reconstruct"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R", "it encodes text as 'zlib'"),
        (b"cnumpy\nndarray\nK\x05\x85R", "it is truncated or corrupted"),
        (b"cnumpy\nndarray\n)\x81", "it is truncated or corrupted"),
        (b"cnumpy\nndarray\nK\x05a", "it is truncated or corrupted"),
        (b"\x82\x01", "it is truncated or corrupted"),
        (b"K\x05Q", "it is truncated or corrupted"),
        (b"K\x05r\xff\xff\xff\x7f", "it asks for memo slot 2147483647"),
    ],
)  # fmt: skip
def test_forged_arrays_are_refused(payload: bytes, reason: str) -> None:
    assert clause(b"\x80\x02}" + short(b"data") + payload + b"s.") == reason


def test_a_pickle_of_something_else() -> None:
    assert clause(pickle.dumps([1, 2])) == "it holds list instead of a dictionary"


def test_a_pickle_cut_anywhere_is_refused() -> None:
    raw = python2("test_batch")
    for length in [*range(0, 120), *range(120, len(raw), 997), len(raw) - 1]:
        assert clause(raw[:length]) == "it is truncated or corrupted"


def test_random_damage_is_refused_or_harmless() -> None:
    raw, random = python2("test_batch"), np.random.default_rng(0)
    structure = [position for _, _, position in pickletools.genops(raw) if position is not None]
    for _ in range(300):
        damaged = bytearray(raw)
        damaged[random.choice(structure)] = random.integers(256)
        try:
            assert isinstance(load_array_pickle(bytes(damaged)), dict)
        except ArrayPickleError:
            continue


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "|u1", "<u2", "|b1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_stand_ins_agree_with_numpy(dtype: str, order: Literal["C", "F"]) -> None:
    values = np.asarray(np.random.default_rng(0).integers(0, 2, (3, 4)), dtype=dtype, order=order)
    loaded = load_array_pickle(pickle.dumps({"data": values}, protocol=4))["data"]
    assert isinstance(loaded, np.ndarray)
    np.testing.assert_array_equal(loaded, values)
    assert loaded.dtype == values.dtype


def test_the_python_2_batch_of_these_tests_is_one_that_numpy_reads() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core is called numpy._core today
        trusted = pickle.loads(python2("test_batch"), encoding="bytes")
    ours: dict[Any, Any] = load_array_pickle(python2("test_batch"))
    assert trusted.keys() == ours.keys()
    assert all(np.array_equal(trusted[key], ours[key]) for key in trusted)
