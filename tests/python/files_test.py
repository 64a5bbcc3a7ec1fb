"""Files that the program shares with NumPy."""

import json
import os
import subprocess

import numpy as np
import pytest

PROGRAM = os.environ["DPMF"]
#: The prefix sum of three steps and its golden total loss; see golden/PROVENANCE.md.
MATRIX, LOSS = np.tri(3), 4.6078616


def dpmf(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments), "--json"], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["<f8", ">f8", "<f4", ">f4", "<i8", ">i8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.save, np.savez, np.savez_compressed])
def test_matrices_of_numpy_are_read(save, order, kind, tmp_path):
    path = tmp_path / ("a.npy" if save is np.save else "a.npz")
    save(path, np.asarray(MATRIX, dtype=kind, order=order))
    status, found = dpmf("factorize", "--matrix", path)
    assert status == 0 and abs(found["loss"] / LOSS - 1) < 2e-6, found


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(version, tmp_path):
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, MATRIX, version=version)
    status, found = dpmf("factorize", "--matrix", tmp_path / "a.npy")
    assert status == 0 and abs(found["loss"] / LOSS - 1) < 2e-6, found


def test_what_is_no_matrix_is_refused(tmp_path):
    np.savez(tmp_path / "two.npz", MATRIX, MATRIX)
    np.save(tmp_path / "cube.npy", np.zeros((2, 2, 2)))
    np.save(tmp_path / "complex.npy", MATRIX * 1j)
    np.save(tmp_path / "records.npy", np.zeros((2, 2), dtype=[("a", "<f8")]))
    (tmp_path / "text.npy").write_text("1 0\n1 1\n")
    for name, words in [
        ("two.npz", "holds 2 arrays"),
        ("cube.npy", "3 dimensions"),
        ("complex.npy", "<c16"),
        ("records.npy", "array of numbers"),
        ("text.npy", "not a NumPy array file"),
    ]:
        status, found = dpmf("factorize", "--matrix", tmp_path / name)
        assert status == 1 and found["error"]["kind"] == "format", found
        assert words in found["error"]["message"] and name in found["error"]["message"], found


def test_numpy_reads_the_noise(tmp_path):
    key, mechanism, noise = (tmp_path / name for name in ("run.key", "m.safetensors", "z.npy"))
    for arguments in [
        ("key", "new", key),
        ("factorize", "--steps", 16, "--streaming", "--buffers", 2, "--out", mechanism),
        ("noise", mechanism, "--dimension", 1000, "--key-file", key, "-o", noise),
    ]:
        assert dpmf(*arguments)[0] == 0
    rows = np.load(noise)
    assert rows.shape == (16, 1000) and rows.dtype == np.dtype("<f4") and rows.flags.c_contiguous
    # Bytes in another order would be numbers of every size.
    assert np.abs(rows).max() < 13 and 0.5 < rows.std() < 1.5
