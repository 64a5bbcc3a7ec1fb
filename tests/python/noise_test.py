"""Keys and streams: rows against NumPy, zero copies, restarts, forks, and what newcomers do wrong."""

import copy
import multiprocessing
import os
import pickle
import stat
import subprocess
import sys

import dpmf
import numpy as np
import pytest
from dpmf import _core

STEPS, DIMENSION = 20, 300


def plan(**options):
    return dpmf.mechanism(**{**dict(steps=STEPS, momentum=0.9, epsilon=8, delta=1e-6, clip=0.5), **options})


MECHANISM = plan()
KEY = dpmf.NoiseKey.from_seed(7)


def stream(mechanism=MECHANISM, key=KEY, **options):
    return dpmf.NoiseStream(mechanism, key, **{**dict(run="test", dimension=DIMENSION), **options})


def rows(source):
    return np.stack([source.next_row() for _ in range(source.steps)])


@pytest.mark.parametrize("mechanism", ["independent", "tree", "honaker-online", "honaker-full", "sqrt-toeplitz",
                                       "structured", "optimal", "optimal:dense"])
def test_rows_are_the_coloring_of_white_noise(mechanism):
    made = plan(mechanism=mechanism)
    coloring = made.coloring()
    white = np.stack([_core._white_noise(stream(made), i) for i in range(coloring.shape[1])])
    expected = made.privacy.noise_std * (coloring @ white)
    found, grid = rows(stream(made)), stream(made).grid
    assert (found.dtype, white.dtype) == (np.float32, np.float64)
    # To the nearest multiple of the grid; the scale is rounded up to float32.
    assert np.abs(found - expected).max() <= grid / 2 + 1e-6 * np.abs(expected).max()
    assert np.abs(found - expected).max() > 0.45 * grid
    # In single precision, and what reaches the iterates, A N Z = B Z.
    white = np.stack([_core._white_noise(stream(made, arithmetic="float"), i) for i in range(coloring.shape[1])])
    assert white.dtype == np.float32
    expected = made.privacy.noise_std * (coloring @ white)
    found = rows(stream(made, arithmetic="float"))
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    iterates = rows(stream(made, output="iterate"))
    expected = made.privacy.noise_std * (made.matrices()[0] @ white)
    assert np.abs(iterates - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_noise_has_the_variance_that_the_privacy_statement_names():
    # α = 1e-6 two-sided by the normal approximation of χ² with 2·10⁶ degrees of freedom; σ·1.05 would be 70 times off.
    white = stream(plan(mechanism="independent"), key=dpmf.NoiseKey.from_seed(1), dimension=100_000)
    z = rows(white).astype(np.float64) / MECHANISM.privacy.noise_std
    assert abs((z**2).mean() - 1) < 4.9 * np.sqrt(2 / z.size)
    assert abs(((1.05 * z) ** 2).mean() - 1) > 4.9 * np.sqrt(2 / z.size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_is_added_in_place_without_a_copy(dtype):
    noise = stream(arithmetic="float").next_row()
    values = np.linspace(-1, 1, DIMENSION, dtype=dtype)
    before, address = values.copy(), values.ctypes.data
    source = stream(arithmetic="float")
    assert source.add_to(values) == 0 and source.next_step == 1
    assert values.ctypes.data == address and values == pytest.approx(before + noise, rel=1e-6, abs=1e-6)
    # A contiguous view of something larger is as good.
    whole = np.zeros((3, DIMENSION), dtype)
    assert source.add_to(whole[1]) == 1
    assert not whole[0].any() and whole[1].all() and not whole[2].any()


def on_grid(values, grid):
    """Multiples of the grid, as whole numbers; exact, since it is a power of two."""
    assert np.frexp(grid)[0] == 0.5
    whole = np.asarray(values, np.float64) / grid
    assert np.array_equal(whole, np.round(whole))
    return whole


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_releases_are_on_the_grid(dtype, size):
    source = stream()
    for step in range(STEPS):
        values = (size * np.random.default_rng(step).standard_normal(DIMENSION)).astype(dtype)
        source.add_to(values)
        assert on_grid(values, source.grid).any()


def test_sum_and_noise_are_rounded_together():
    """round(g + w) for the real number w that every stream of a run has: g need not be on the grid, and none of it is lost."""
    def released(shift):
        values = np.full(DIMENSION, shift)
        source = stream()
        source.add_to(values)
        return on_grid(values, source.grid)

    grid = stream().grid
    # Where g pushes the sum over the middle between two neighbours says what w is, to 1/64 of the grid.
    shifts = np.arange(65) / 64
    steps = np.stack([released(shift * grid) for shift in shifts])
    assert np.array_equal(steps[64], steps[0] + 1)
    assert (np.diff(steps, axis=0) >= 0).all()
    over = shifts[np.argmax(steps > steps[0], axis=0)]
    w = steps[0] + 0.5 - over
    white = _core._white_noise(stream(), 0)
    expected = stream().scale * MECHANISM.coloring()[0, 0] * white / grid
    assert np.abs(w + 1 / 128 - expected).max() <= 1 / 128 + 1e-4


def test_sums_in_double_precision_are_taken_exactly():
    """A sum that float32 cannot hold: what is below its last bit decides which way the middle is rounded."""
    grid, big = stream().grid, 2.0**24
    zero = np.zeros(DIMENSION)
    stream().add_to(zero)
    moved = {}
    for fraction in (0.0, 0.25, 0.5, 0.75):
        values = np.full(DIMENSION, (big + fraction) * grid)
        assert (values.astype(np.float32) == np.float32(big * grid)).all()
        stream().add_to(values)
        moved[fraction] = on_grid(values, grid) - on_grid(zero, grid) - big
    assert not moved[0.0].any()
    shares = [moved[fraction].mean() for fraction in (0.25, 0.5, 0.75)]
    # A fraction of a grid moves as large a share of the coordinates; 300 of them, 5 standard deviations.
    assert np.abs(np.array(shares) - [0.25, 0.5, 0.75]).max() < 5 * np.sqrt(0.25 / DIMENSION)
    # The same number has the same release in either precision, but for the rounding to float32 of what comes out.
    single, double = (np.linspace(-1, 1, DIMENSION, dtype=np.float32).astype(dtype) for dtype in (np.float32, np.float64))
    stream().add_to(single), stream().add_to(double)
    assert np.array_equal(single, double)


def test_float_and_exact_arithmetic():
    exact, single = stream(), stream(arithmetic="float")
    assert (exact.arithmetic, single.arithmetic) == ("exact", "float")
    assert exact.grid > 0 and single.grid is None
    assert not np.array_equal(exact.next_row(), single.next_row())
    assert stream(output="iterate").arithmetic == "float"
    assert "Every bit" in str(exact.privacy) and "Floating-point" not in str(exact.privacy)
    assert "Floating-point" in str(single.privacy) and "Every bit" not in str(single.privacy)
    with pytest.raises(dpmf.UnsupportedError, match="iterate noise in exact arithmetic"):
        stream(output="iterate", arithmetic="exact")
    with pytest.raises(ValueError, match="arithmetic is double, but it must be exact or float"):
        stream(arithmetic="double")


@pytest.mark.parametrize("begun, other", [("exact", "float"), ("float", "exact")])
def test_a_journal_or_checkpoint_of_another_arithmetic_is_refused(tmp_path, begun, other):
    options = dict(dimension=DIMENSION)
    with dpmf.DurableStream.create(MECHANISM, KEY, tmp_path / "journal", arithmetic=begun, **options) as source:
        source.release(np.zeros(DIMENSION))
        assert source.arithmetic == begun and (source.grid is None) == (begun == "float")
        state, run = source.checkpoint_bytes(), source.run
    for checkpoint in (None, state):
        with pytest.raises(dpmf.BindingError, match=f"another arithmetic: it has {begun}, but this stream has {other}"):
            dpmf.DurableStream.open(
                MECHANISM, KEY, tmp_path / "journal", checkpoint=checkpoint, arithmetic=other, **options
            )
    with pytest.raises(dpmf.BindingError, match=f"another arithmetic: it has {begun}, but this stream has {other}"):
        stream(run=run, arithmetic=other).restore(state)
    with dpmf.DurableStream.open(
        MECHANISM, KEY, tmp_path / "journal", checkpoint=state, arithmetic=begun, **options
    ) as again:
        assert again.next_step == 1 and again.arithmetic == begun


def test_shards_draw_what_one_process_draws():
    whole = rows(stream())
    parts = [rows(stream(dimension=None, coordinates=range(a, b))) for a, b in [(0, 1), (1, 37), (37, DIMENSION)]]
    assert np.array_equal(whole, np.concatenate(parts, axis=1))
    assert stream(dimension=None, coordinates=range(5, 9)).coordinates == range(5, 9)


def test_mechanism_key_and_run_each_change_the_noise():
    first = stream().next_row()
    assert np.array_equal(first, stream().next_row())
    others = [stream(run="other"), stream(key=dpmf.NoiseKey.from_seed(8)), stream(plan(epsilon=4)), stream(run=None),
              stream(run=None), stream(key=dpmf.NoiseKey.generate(), run=None), stream(unit_noise=True)]
    noise = [first, *(other.next_row() for other in others)]
    assert len({row.tobytes() for row in noise}) == len(noise)
    # A run is named by words or by its own digits.
    assert np.array_equal(first, stream(run=stream().run).next_row())
    assert len(dpmf.new_run()) == 32 != dpmf.new_run()


def test_a_stream_says_what_it_is():
    source = stream()
    assert (source.steps, source.next_step, source.coordinates) == (STEPS, 0, range(DIMENSION))
    # Buffers are kept in packets, whole ones.
    for kind, each in ((source, 8), (stream(arithmetic="float"), 4)):
        assert each * DIMENSION * MECHANISM.buffers <= kind.memory <= each * (DIMENSION + 64) * MECHANISM.buffers
    assert source.scale == pytest.approx(MECHANISM.privacy.noise_std, rel=1e-6)
    assert source.scale >= MECHANISM.privacy.noise_std
    assert source.mechanism == MECHANISM
    assert repr(source).startswith(f"<dpmf.NoiseStream: step 0 of {STEPS}, coordinates 0..{DIMENSION}, run ")


def test_a_seeded_key_is_told_in_the_statement():
    assert stream().privacy.key == "seeded" and "derived from a seed" in str(stream().privacy)
    assert stream(key=dpmf.NoiseKey.generate(), run=None).privacy.key == "system"


def test_words_name_a_run_only_where_it_may_begin_again(tmp_path):
    key = dpmf.NoiseKey.create(tmp_path / "key")
    for secret in (dpmf.NoiseKey.generate(), key, dpmf.NoiseKey.read(tmp_path / "key")):
        for options in (dict(), dict(unit_noise=True)):
            with pytest.raises(ValueError, match=r'run is "test", .* begins again with the same noise at every start.*'
                                                 r"Leave run out.*\.run \(32 hexadecimal digits\).*from_seed"):
                stream(key=secret, **options)
    first = stream(key=key, run=None)
    row = first.next_row()
    assert np.array_equal(row, stream(key=key, run=first.run).next_row())
    assert not np.array_equal(row, stream(key=key, run=None).next_row())
    assert stream(run="words").run == stream(run="words").run != first.run
    # A journal is no help where it is lost or another is begun beside it.
    with pytest.raises(ValueError, match="begins again with the same noise"):
        dpmf.DurableStream.create(MECHANISM, key, tmp_path / "journal", run="words", dimension=DIMENSION)
    assert not (tmp_path / "journal").exists()
    with dpmf.DurableStream.create(MECHANISM, key, tmp_path / "journal", run=first.run, dimension=DIMENSION) as source:
        source.release(np.zeros(DIMENSION, np.float32))
    with dpmf.DurableStream.open(MECHANISM, key, tmp_path / "journal", dimension=DIMENSION) as again:
        assert again.recorded_steps == 1
        with pytest.raises(dpmf.StepReusedError):
            again.release(np.ones(DIMENSION, np.float32))


def test_uncalibrated_noise_must_be_asked_for():
    bare = dpmf.make_mechanism(MECHANISM.workload)
    with pytest.raises(ValueError, match=r"not calibrated.*mechanism.calibrate\(epsilon, delta, clip\)"):
        stream(bare)
    assert stream(bare, unit_noise=True).scale == 1
    assert stream(bare, unit_noise=True).privacy is None
    # Unit noise promises nothing, whatever the mechanism does.
    assert stream(unit_noise=True).scale == 1 and stream(unit_noise=True).privacy is None


@pytest.mark.parametrize("array, error, message", [
    (np.zeros(DIMENSION, np.float16), TypeError, "half precision cannot hold the noise: sum and clip in float32"),
    (np.zeros(DIMENSION, np.longdouble), TypeError, r"this array is \S+; .* \.astype\(numpy.float32\)"),
    (np.zeros(DIMENSION, np.int32), TypeError, "this array is int32"),
    (np.zeros(DIMENSION, ">f4"), TypeError, "this array is >f4"),
    (np.zeros(2 * DIMENSION, np.float32)[::2], ValueError, r"not contiguous.*numpy.ascontiguousarray\(array\)"),
    (np.zeros(DIMENSION, np.float32)[::-1], ValueError, "not contiguous"),
    (np.zeros((DIMENSION // 2, 2), np.float32), ValueError, r"2 dimensions; \.reshape\(-1\)"),
    (np.zeros(DIMENSION - 1, np.float32), ValueError, f"length {DIMENSION - 1}, but this stream has {DIMENSION}"),
    (np.frombuffer(bytes(4 * DIMENSION), np.float32), ValueError, "read-only"),
    ([0.0] * DIMENSION, TypeError, "this is a list"),
])
def test_arrays_that_would_need_a_copy_are_refused_with_what_to_do(array, error, message):
    source = stream()
    with pytest.raises(error, match=message):
        source.add_to(array)
    assert source.next_step == 0


def test_what_is_not_finite_is_refused_before_anything_moves():
    source = stream()
    values = np.ones(DIMENSION, np.float32)
    values[17] = np.nan
    with pytest.raises(ValueError, match=r"values\[17\] is NaN.*clip before adding noise"):
        source.add_to(values)
    assert source.next_step == 0 and np.array_equal(np.delete(values, 17), np.ones(DIMENSION - 1))


def test_one_step_too_many():
    source = stream()
    source.skip_to(STEPS)
    values = np.zeros(DIMENSION, np.float32)
    with pytest.raises(dpmf.ExhaustedError, match="plan a mechanism for more steps") as failure:
        source.add_to(values)
    assert failure.value.steps == STEPS and not values.any()


@pytest.mark.parametrize("options, message", [
    (dict(dimension=None), "pass either dimension"),
    (dict(coordinates=range(3)), "pass either dimension"),
    (dict(dimension=None, coordinates=range(0, 9, 2)), "must count up by one"),
    (dict(dimension=None, coordinates=range(-3, 9)), "must count up by one"),
    (dict(dimension=0), "coordinates"),
    (dict(output="weights"), "output is weights, but it must be gradient or iterate"),
])
def test_streams_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        stream(**options)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_restored_stream_goes_on_bit_for_bit(as_bytes, tmp_path):
    whole = rows(stream())
    source = stream()
    source.skip_to(8)
    source.checkpoint(tmp_path / "state")
    state = source.checkpoint_bytes() if as_bytes else tmp_path / "state"
    again = stream()
    again.restore(state)
    assert again.next_step == 8
    assert np.array_equal(np.stack([again.next_row() for _ in range(8, STEPS)]), whole[8:])


def test_a_stream_never_goes_back():
    source = stream()
    state = source.checkpoint_bytes()
    source.next_row()
    with pytest.raises(ValueError, match="at step 1, and going back would release noise twice"):
        source.restore(state)
    source.skip_to(3)
    with pytest.raises(ValueError, match="only moves forward"):
        source.skip_to(2)
    assert source.next_step == 3


def test_the_checkpoint_of_another_stream_is_refused():
    state = stream().checkpoint_bytes()
    for other, what in [(stream(key=dpmf.NoiseKey.from_seed(8)), "key"), (stream(run="other"), "run"),
                        (stream(plan(epsilon=4)), "mechanism"), (stream(dimension=DIMENSION + 1), "range")]:
        with pytest.raises(dpmf.BindingError, match=f"belongs to another {what}"):
            other.restore(state)
        with pytest.raises(dpmf.HaltedError, match="a restore failed"):
            other.next_row()
    with pytest.raises(dpmf.FormatError, match="damaged"):
        stream().restore(state[:-1] + bytes([state[-1] ^ 1]))


def test_a_key_is_kept_by_its_owner_alone(tmp_path):
    path = tmp_path / "run.key"
    key = dpmf.NoiseKey.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert dpmf.NoiseKey.read(path).fingerprint == key.fingerprint and key.origin == "system"
    secret = path.read_text().split("secret ")[1].split()[0]
    assert secret not in repr(key) and key.fingerprint in repr(key)
    with pytest.raises(dpmf.NoiseKeyError, match="a key is never overwritten"):
        dpmf.NoiseKey.create(path)
    path.chmod(0o644)
    with pytest.raises(dpmf.NoiseKeyError, match="treat it as disclosed"):
        dpmf.NoiseKey.read(path)


def test_a_lost_key(tmp_path):
    message = r"lost.key is missing: .* cannot be resumed.*stays private.*NoiseKey.create\(path\)"
    with pytest.raises(dpmf.NoiseKeyError, match=message):
        dpmf.NoiseKey.read(tmp_path / "lost.key")


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_secrets_and_streams_are_not_copied(duplicate):
    with pytest.raises(TypeError, match="NoiseKey.read"):
        duplicate(KEY)
    with pytest.raises(TypeError, match="release the same noise twice"):
        duplicate(stream())


def test_a_durable_stream_goes_on_after_a_stop(tmp_path):
    journal, expected = tmp_path / "journal", rows(stream(key=KEY))
    options = dict(dimension=DIMENSION)
    with dpmf.DurableStream.create(MECHANISM, KEY, journal, run="test", **options) as source:
        for step in range(5):
            values = np.full(DIMENSION, step, np.float32)
            assert source.release(values) == step
            assert values == pytest.approx(step + expected[step], rel=1e-6, abs=1e-6)
            if step == 2:
                state = source.checkpoint_bytes()
                source.checkpoint(tmp_path / "state")
        run = source.run
        with pytest.raises(dpmf.LockedError):
            dpmf.DurableStream.open(MECHANISM, KEY, journal, **options)
    with pytest.raises(dpmf.HaltedError, match="it was closed"):
        source.next_step
    for checkpoint, begins in [(state, 3), (tmp_path / "state", 3), (None, 0)]:
        with dpmf.DurableStream.open(MECHANISM, KEY, journal, checkpoint=checkpoint, **options) as again:
            assert (again.next_step, again.recorded_steps, again.run) == (begins, 5, run)
    again = dpmf.DurableStream.open(MECHANISM, KEY, journal, checkpoint=state, **options)
    # The same input again gives the same release; another one is refused.
    values = np.full(DIMENSION, 3, np.float32)
    assert again.release(values) == 3 and values == pytest.approx(3 + expected[3], rel=1e-6, abs=1e-6)
    other = np.full(DIMENSION, 5, np.float32)
    with pytest.raises(dpmf.StepReusedError, match="burn the step") as failure:
        again.release(other)
    assert failure.value.step == 4 and (other == 5).all()
    assert again.burn() == 4 and again.burned == [4]
    assert again.release(other) == 5 and other == pytest.approx(5 + expected[5], rel=1e-6, abs=1e-6)
    assert again.privacy.key == "seeded" and again.steps == STEPS


def test_a_new_journal_is_a_new_run(tmp_path):
    values = [np.zeros(DIMENSION, np.float32) for _ in range(2)]
    for name, row in zip("ab", values):
        dpmf.DurableStream.create(MECHANISM, KEY, tmp_path / name, dimension=DIMENSION).release(row)
    assert not np.array_equal(*values)
    with pytest.raises(dpmf.FileError):
        dpmf.DurableStream.create(MECHANISM, KEY, tmp_path / "a", dimension=DIMENSION)
    with pytest.raises(dpmf.BindingError, match="another key"):
        dpmf.DurableStream.open(MECHANISM, dpmf.NoiseKey.from_seed(9), tmp_path / "a", dimension=DIMENSION)


def child(queue):
    """Everything that uses threads, in a process made by a fork."""
    big = dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=200_000)
    queue.put((dpmf.factorize(dpmf.Workload.prefix_sum(3000)).certificate.gap, big.next_row().sum()))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
def test_everything_works_in_a_forked_child():
    # The parent's threads exist before the fork, and do not survive it.
    expected = dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=200_000).next_row().sum()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    gap, total = queue.get(timeout=600)
    process.join(600)
    assert process.exitcode == 0 and gap <= 1e-6 and total == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_stream_copied_by_a_fork_emits_nothing():
    source = stream()
    source.next_row()
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        message = "emitted"
        try:
            source.next_row()
        except dpmf.HaltedError as error:
            message = str(error)
        finally:
            os.write(write, message.encode())
            os._exit(0)
    os.waitpid(process, 0)
    os.close(write)
    message = os.read(read, 10_000).decode()
    assert "copied into another process by a fork" in message and "Make the stream in the process" in message
    assert source.next_step == 1 and source.add_to(np.zeros(DIMENSION, np.float32)) == 1


def test_the_number_of_threads_changes_no_bit():
    program = (
        "import dpmf, hashlib; m = dpmf.mechanism(steps=20, momentum=0.9, epsilon=8, delta=1e-6, clip=0.5);"
        "s = dpmf.NoiseStream(m, dpmf.NoiseKey.from_seed(7), run='test', dimension=100_000);"
        "print(m.identity, hashlib.sha256(b''.join(s.next_row().tobytes() for _ in range(20))).hexdigest())"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "RAYON_NUM_THREADS": threads},
                       capture_output=True, text=True, check=True).stdout
        for threads in "123"
    }
    assert len(outputs) == 1
