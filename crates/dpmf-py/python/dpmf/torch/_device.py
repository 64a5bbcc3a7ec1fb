"""A step on the devices of the parameters: sums, noise, rounding and digest in operations of PyTorch, in whole numbers.

The host makes the row of noise ahead and ships it as int64, W in units that divide those of the sum S. A device adds
T = S·2**lift + W and rounds by a shift. Where T is too close to a tie, its few coordinates are resolved on the host, with as many
digits as it takes: what is released has the same bits on every device, and on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .._core import PrivateRun, _ComingRow

#: Numbers that are worked on at once: 8 MB for each copy of them in int64 or float64.
SLICE = 1 << 20

#: Numbers that are shipped at once, 64 MB of pinned memory, of which there are two.
PIECE = 1 << 23

#: Coordinates of a block of the digest, and its prime: see crates/dpmf/src/noise/digest.rs.
BLOCK = 1 << 14
PRIME = (1 << 61) - 1

#: Binary digits of the parts of a key and of a sum: 2**14 products of them add up to less than 2**53, so that float64 is exact.
KEY_BITS, SUM_BITS = 21, 18


@dataclass(frozen=True)
class Extent:
    """Some coordinates that lie one after the other, in the model as on a device."""

    #: Where they begin in the flat tensors of the device, in the model, and among the coordinates of the run.
    local: int
    coordinate: int
    place: int
    length: int


class Bank:
    """All coordinates on one device: their sum, the coming row of noise, and what is released."""

    def __init__(
        self, total: torch.Tensor, released: torch.Tensor, extents: Sequence[Extent], *, exact: bool
    ) -> None:
        device = self.device = total.device
        self.extents = list(extents)
        self.length = sum(extent.length for extent in extents)
        self.exact = exact
        #: The sum, in units of the clip's grid.
        self.sum = total
        #: The noise of the coming step; after a release, T.
        self.row = torch.empty(self.length, dtype=torch.int64 if exact else torch.float32, device=device)
        #: What was released, rounded to float32.
        self.released = released

    def slices(self) -> Iterator[slice]:
        return (slice(first, min(first + SLICE, self.length)) for first in range(0, self.length, SLICE))

    def add_exact(self, lift: int, shift: int, doubt: int, grid: float) -> torch.Tensor:
        """Adds the row to the sum and rounds; returns how many coordinates are in doubt, a number on the device."""
        half = 1 << (shift - 1)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        for part in self.slices():
            moved = self.row[part].add_(self.sum[part], alpha=1 << lift).add_(half)
            count += _near(moved, doubt, shift).sum()
            # Whole numbers below 2**53 times a power of two: rounded once, to float32.
            self.released[part] = (moved >> shift).double().mul_(grid)
        return count

    def doubtful(self, doubt: int, shift: int) -> torch.Tensor:
        """The coordinates where add_exact() was in doubt. There are almost never any, and then this is not called."""
        found = [_near(self.row[part], doubt, shift).nonzero().view(-1) + part.start for part in self.slices()]
        return torch.cat(found)

    def coordinate(self, index: int) -> int:
        """The number of a coordinate in the model."""
        for extent in self.extents:
            if extent.local <= index < extent.local + extent.length:
                return extent.coordinate + index - extent.local
        raise IndexError(index)

    def add_float(self, unit: float, scale: float) -> None:
        """Adds the row to the sum in float64 and rounds that to float32."""
        for part in self.slices():
            noise = self.row[part].double().mul_(scale)
            self.released[part] = self.sum[part].double().mul_(unit).add_(noise)


def _near(moved: torch.Tensor, doubt: int, shift: int) -> torch.Tensor:
    return (moved + doubt).bitwise_and_((1 << shift) - 1) <= 2 * doubt


class Digest:
    """The digest of the sums of a bank: two universal hashes modulo 2**61 - 1, the same as in the core.

    A sum has parts of 18 binary digits and a key of 21. Their products over a block are one product of matrices in float64, all of
    whose numbers are whole and below 2**53: it is exact in any order.
    """

    def __init__(self, run: PrivateRun, bank: Bank) -> None:
        self.bank = bank
        #: Pieces that lie in whole blocks but for their ends: where they begin on the device, in the first block, and among all blocks.
        self.pieces: list[tuple[int, int, int, int]] = []
        blocks: list[int] = []
        for extent in bank.extents:
            done = 0
            while done < extent.length:
                at = extent.coordinate + done
                length = min(SLICE - at % BLOCK, extent.length - done)
                count = -(-(at % BLOCK + length) // BLOCK)
                self.pieces.append((extent.local + done, length, at % BLOCK, len(blocks)))
                blocks.extend(range(at // BLOCK, at // BLOCK + count))
                done += length
        places, multipliers = (torch.from_numpy(keys) for keys in run.digest_keys(blocks))
        mask = (1 << KEY_BITS) - 1
        parts = [(places >> (KEY_BITS * k)) & mask for k in range(3)]
        #: One column for each part of each hash.
        self.keys = torch.stack(parts, 2).view(BLOCK, 6).double().to(bank.device)
        self.multipliers = multipliers.to(bank.device)

    def __call__(self) -> torch.Tensor:
        """Two numbers on the device."""
        mask = (1 << SUM_BITS) - 1
        total = torch.zeros(2, dtype=torch.int64, device=self.bank.device)
        for first, length, skip, block in self.pieces:
            count = -(-(skip + length) // BLOCK)
            sums = self.bank.sum[first : first + length]
            if skip or length % BLOCK:
                sums = torch.nn.functional.pad(sums, (skip, count * BLOCK - skip - length))
            sums = sums.view(count, BLOCK)
            # Only the last part has a sign.
            parts = ((sums & mask).double(), ((sums >> SUM_BITS) & mask).double(), (sums >> (2 * SUM_BITS)).double())
            inner = torch.zeros(count, 2, dtype=torch.int64, device=self.bank.device)
            for w, part in enumerate(parts):
                products = (part @ self.keys).to(torch.int64).view(count, 2, 3)
                for k in range(3):
                    inner = reduced(inner + rotated(reduced(products[:, :, k]), SUM_BITS * w + KEY_BITS * k))
            total = reduced(total + folded(product(inner, self.multipliers[block : block + count])))
        return total


def reduced(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers modulo the prime, not negative."""
    return torch.remainder(numbers, PRIME)


def rotated(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Numbers below the prime, times 2**by modulo the prime: their 61 binary digits go round."""
    by %= 61
    if by == 0:
        return numbers
    return ((numbers & ((1 << (61 - by)) - 1)) << by) | (numbers >> (61 - by))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products modulo the prime of numbers below it."""
    mask = (1 << 21) - 1
    total = torch.zeros_like(a)
    for i in range(3):
        for j in range(3):
            one = ((a >> (21 * i)) & mask) * ((b >> (21 * j)) & mask)
            total = reduced(total + rotated(one, 21 * (i + j)))
    return total


def folded(numbers: torch.Tensor) -> torch.Tensor:
    """The sum along the first axis modulo the prime."""
    low, high = (numbers & ((1 << 31) - 1)).sum(0), (numbers >> 31).sum(0)
    return reduced(reduced(low) + rotated(reduced(high), 31))


class Shipper:
    """Brings the coming row of noise to the devices, by a thread of its own where rows are made ahead."""

    def __init__(self, run: PrivateRun, banks: Sequence[Bank]) -> None:
        self.run, self.banks = run, banks
        self.thread = ThreadPoolExecutor(1, "dpmf-ship") if run.ahead else None
        self.pending: Future[None] | None = None
        self.buffers: list[torch.Tensor] = []
        self.streams: dict[torch.device, Any] = {}
        self.arrived: list[Any] = []

    def begin(self) -> None:
        """Ships the row of the coming step, or begins to: that of the step before is no longer needed."""
        if self.thread is not None and self.run.next_step < self.run.steps and self.pending is None:
            row, free = self.run.coming_row(self.run.ahead), [_record(bank.device) for bank in self.banks]
            self.pending = self.thread.submit(self._ship, row, free)

    def wait(self) -> None:
        """Waits for the row to have left the host; the devices wait for its arrival."""
        if self.pending is None:
            self._ship(self.run.coming_row(), [_record(bank.device) for bank in self.banks])
        else:
            # An interrupt leaves it for the next call: the thread still writes the row.
            self.pending.result()
            self.pending = None
        for event, bank in zip(self.arrived, self.banks):
            if event is not None:
                torch.cuda.current_stream(bank.device).wait_event(event)

    def forget(self) -> None:
        """Waits for copies under way, whose row is not used."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.exception()

    def close(self) -> None:
        self.forget()
        if self.thread is not None:
            self.thread.shutdown()

    def _ship(self, row: _ComingRow, free: Sequence[Any]) -> None:
        self.arrived = [self._ship_to(row, bank, event) for bank, event in zip(self.banks, free)]

    def _ship_to(self, row: _ComingRow, bank: Bank, free: Any) -> Any:
        if bank.device.type == "cpu":
            for extent in bank.extents:
                self.fill(row, extent.place, bank.row[extent.local : extent.local + extent.length])
            return None
        if free is None:
            self._copy(row, bank, None)
            return None
        stream = self.streams.setdefault(bank.device, torch.cuda.Stream(bank.device))
        with torch.cuda.stream(stream):
            stream.wait_event(free)
            self._copy(row, bank, stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return arrived

    @staticmethod
    def fill(row: _ComingRow, place: int, buffer: torch.Tensor) -> None:
        """Writes numbers of the row, from a place on, into memory of the host."""
        row.ship(place, buffer.numpy())

    def _copy(self, row: _ComingRow, bank: Bank, stream: Any) -> None:
        """In pieces, one of which is filled while the other is on its way."""
        if not self.buffers:
            length = min(PIECE, max(bank.length for bank in self.banks))
            self.buffers = [torch.empty(length, dtype=bank.row.dtype, pin_memory=stream is not None) for _ in range(2)]
        copied: list[Any] = [None, None]
        turn = 0
        for extent in bank.extents:
            for done in range(0, extent.length, PIECE):
                length = min(PIECE, extent.length - done)
                buffer = self.buffers[turn][:length]
                if copied[turn] is not None:
                    copied[turn].synchronize()
                self.fill(row, extent.place + done, buffer)
                bank.row[extent.local + done : extent.local + done + length].copy_(buffer, non_blocking=stream is not None)
                if stream is not None:
                    copied[turn] = torch.cuda.Event()
                    copied[turn].record(stream)
                turn = 1 - turn
        for event in copied:
            if event is not None:
                event.synchronize()


def _record(device: torch.device) -> Any:
    """An event after all that a device was asked for so far; None where there is nothing to wait for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class DeviceStep:
    """The releases of a run whose sums lie on devices."""

    def __init__(self, run: PrivateRun, banks: Sequence[Bank], shipper: type[Shipper] = Shipper) -> None:
        self.run, self.banks = run, banks
        self.shipper = shipper(run, banks)
        self.digests = [Digest(run, bank) for bank in banks] if run.durable else []
        self.shipper.begin()

    def verdict(self) -> torch.Tensor:
        """Adds and rounds; what the host has to know, on the first device: two numbers of digest, and how many are in doubt."""
        home = self.banks[0].device
        total = torch.zeros(2, dtype=torch.int64, device=home)
        for digest in self.digests:
            total = reduced(total + digest().to(home))
        count = torch.zeros(1, dtype=torch.int64, device=home)
        if self.run.arithmetic == "exact":
            row = self.run.fixed_row()
            for bank in self.banks:
                count += bank.add_exact(*row).to(home)
        else:
            for bank in self.banks:
                bank.add_float(self.run.clip.unit, self.run.scale)
        return torch.cat((total, count))

    @staticmethod
    def read(verdict: torch.Tensor) -> list[int]:
        """The numbers of a verdict, for which the host waits."""
        numbers: list[int] = verdict.to("cpu").tolist()
        return numbers

    def release(self, joined: Any = None) -> int:
        """Releases the sums of all banks, which become zero; returns the step. Nothing was released if it is refused.

        joined makes the verdict of all ranks from that of this one.
        """
        run = self.run
        run.check_release()
        if run.needs_sum:
            return self._release_on_host()
        self.shipper.wait()
        exact = run.arithmetic == "exact"
        try:
            verdict = self.verdict()
            # The one synchronisation of a step, of 24 bytes; none in float arithmetic without a journal.
            first, second, count = self.read(verdict) if exact or run.durable else (0, 0, 0)
            digest = (first, second)
            if joined is not None and run.durable:
                digest = joined(digest)
            places: list[tuple[Bank, torch.Tensor]] = []
            doubtful: list[tuple[int, int]] = []
            if count:
                _, shift, doubt, grid = run.fixed_row()
                for bank in self.banks:
                    where = bank.doubtful(doubt, shift)
                    places.append((bank, where))
                    doubtful += zip(map(bank.coordinate, where.tolist()), bank.sum[where].tolist())
            step, resolved = run.release_elsewhere(digest if run.durable else None, doubtful)
            for bank, where in places:
                own, resolved = resolved[: len(where)], resolved[len(where) :]
                numbers = torch.tensor(own, dtype=torch.int64).double().mul_(grid)
                bank.released[where] = numbers.to(torch.float32).to(bank.device)
        except BaseException:
            # The row has been added to, but the step may be tried again. What was not released is not left anywhere.
            self.shipper.pending = None
            for bank in self.banks:
                bank.row.zero_()
                bank.released.zero_()
            raise
        for bank in self.banks:
            bank.sum.zero_()
        self.shipper.begin()
        return step

    def _release_on_host(self) -> int:
        """A step that version 0.2 left in the journal can be compared by its sum only."""
        self.shipper.forget()
        length = sum(bank.length for bank in self.banks)
        total, released = torch.zeros(length, dtype=torch.int64), torch.zeros(length)
        for bank in self.banks:
            for extent in bank.extents:
                total[extent.place : extent.place + extent.length] = bank.sum[extent.local : extent.local + extent.length].cpu()
        step = self.run.release(total.numpy(), released.numpy())
        for bank in self.banks:
            for extent in bank.extents:
                part = released[extent.place : extent.place + extent.length]
                bank.released[extent.local : extent.local + extent.length] = part.to(bank.device)
            bank.sum.zero_()
        self.shipper.begin()
        return step

    def burn(self) -> int:
        self.shipper.forget()
        step = self.run.burn()
        self.shipper.begin()
        return step

    def close(self) -> None:
        self.shipper.close()
