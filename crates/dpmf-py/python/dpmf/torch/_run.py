"""The run of a mechanism over the parameters of an optimizer."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import distributed

from .._checks import check_experiment, statement_of
from .._core import Mechanism, NoiseKey, PrivacyStatement, PrivateRun, new_run
from .._errors import BindingError, MismatchError
from ._data import Batches, name_of
from ._device import PRIME, Bank, DeviceStep, Extent
from ._sharded import as_shard, check_held, check_sharded, cuts_of, is_sharded, local

STATE_VERSION = 1


def shard(dimension: int, rank: int | None = None, world_size: int | None = None) -> range:
    """The coordinates of one rank, of sizes that differ by at most one.

    Without rank and world_size, those of torch.distributed. The noise of a coordinate depends on its number alone, so
    the shards of any number of ranks are together, bit for bit, what one process draws.

    >>> [dpmf.torch.shard(10, rank, 3) for rank in range(3)]  # doctest: +SKIP
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    if rank is None or world_size is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(
                "rank and world_size are not given, and torch.distributed is not initialised: call "
                "torch.distributed.init_process_group first, or pass both"
            )
        rank = distributed.get_rank() if rank is None else rank
        world_size = distributed.get_world_size() if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, but it must be at least 0 and below world_size, {world_size}")
    return range(dimension * rank // world_size, dimension * (rank + 1) // world_size)


def check_dtype(p: torch.Tensor, name: str) -> None:
    """Refuses parameters that are not float32."""
    if p.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"parameter {name} is {p.dtype}, and half precision cannot hold the noise: keep the parameters in float32 "
            "(model.float()) and compute in half precision under torch.autocast, or train a model in bfloat16 with "
            "dpmf.torch.PrivateOptimizer, which keeps masters in float32; leave parameters that are never trained out of the optimizer"
        )
    if p.dtype != torch.float32:
        raise TypeError(f"parameter {name} is {p.dtype}, but what is released is float32: convert the model with model.float()")


def check_alone() -> None:
    """Refuses to serve one of several ranks as if it were the only one."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise MismatchError(
            f"this is one of {distributed.get_world_size()} ranks, and each would draw noise of its own and train a "
            "model of its own: use dpmf.torch.PrivateOptimizer(…, group=True) with one key for all ranks, without "
            "DistributedDataParallel. For independent runs, do not initialise torch.distributed, or pass a group of this rank alone"
        )


def check_unscaled(optimizer: Any) -> None:
    """Refuses a step that torch.amp.GradScaler takes: it sets these for optimizers that ask for them."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise MismatchError(
            "a GradScaler scaled the loss, so every gradient was too long before it was clipped: train without it; bfloat16 under "
            "torch.autocast needs no scaling"
        )


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters that an optimizer can move, trained at the moment or not."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _merged(parts: Iterable[tuple[int, int]]) -> list[range]:
    """Ranges by their beginnings and lengths, in order, those that touch made one."""
    ranges: list[range] = []
    for first, length in parts:
        if length and ranges and ranges[-1].stop == first:
            ranges[-1] = range(ranges[-1].start, first + length)
        elif length:
            ranges.append(range(first, first + length))
    return ranges


class FlatRun:
    """A PrivateRun over the flat view of an optimizer's parameters, and the exact sum of clipped contributions to its coming
    step; in one process, or a shard of it in each of several.

    A row of noise covers every parameter that the optimizer had when this was made, whatever is trained at that step.
    What is released comes from contributions that were added here, and from nothing else.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        optimizer: torch.optim.Optimizer,
        *,
        arithmetic: Literal["exact", "float"],
        key: NoiseKey | None,
        experiment: str | None,
        journal: str | os.PathLike[str] | None,
        group: Any,
        name: str | None = None,
        release_on: Literal["host", "device"] | None = None,
        ahead: int | None = None,
    ) -> None:
        self.mechanism, self.optimizer = mechanism, optimizer
        if release_on not in ("host", "device", None):
            raise ValueError(f'release_on is {release_on!r}, but it must be "host", "device" or None')
        self.norm = statement_of(mechanism).clip
        self.parameters = held(optimizer)
        if not any(p.requires_grad for p in self.parameters):
            raise ValueError("the optimizer has no parameter that requires a gradient")
        self.numbers = {id(p): number for number, p in enumerate(self.parameters)}
        if len(self.numbers) != len(self.parameters):
            raise ValueError("a parameter is in the optimizer twice: its gradient would be released twice")
        self._check_parameters()
        self.dimension = sum(p.numel() for p in self.parameters)
        self.arithmetic: Literal["exact", "float"] = arithmetic
        check_experiment(key, experiment)
        self.grouped = group is not None
        self.group = None if group is True else group
        #: Whether the parameters are cut over the ranks; then each rank releases what it holds of them, and no more.
        self.sharded = any(map(is_sharded, self.parameters))
        if self.sharded:
            check_sharded(self.parameters, self.grouped)
        self.rank, self.world_size = 0, 1
        name = name or experiment
        if self.grouped:
            self.rank = distributed.get_rank(self.group)
            self.world_size = distributed.get_world_size(self.group)
            key, name = self._agree(key, name)
        else:
            check_alone()
        if key is None:
            if journal is not None:
                raise ValueError(
                    "a run with a journal needs its key when it is resumed: pass key=NoiseKey.create(path), and NoiseKey.read(path) "
                    "to resume"
                )
            key = NoiseKey.generate()
        self.key = key
        if self.sharded:
            self.cuts = cuts_of(self.parameters, self.world_size)
            check_held(self.parameters, self.cuts[self.rank])
            self.ranges = _merged((cut.coordinate, cut.length) for cut in self.cuts[self.rank])
            if not self.ranges:
                raise ValueError(f"rank {self.rank} holds no rows of any parameter: use fewer ranks for a model of this size")
        else:
            self.ranges = [shard(self.dimension, self.rank, self.world_size)]
        self.coordinates = range(self.ranges[0].start, self.ranges[-1].stop)
        self.journal = journal
        self.ahead = ahead
        #: None while the journal of a run that was begun waits for the state that belongs to it.
        self.run: PrivateRun | None = None
        if journal is None or not os.path.exists(journal):
            self.run = PrivateRun(
                mechanism,
                key,
                dimension=self.dimension,
                ranges=self.ranges,
                run=name,
                journal=journal,
                arithmetic=arithmetic,
                ranks=self.world_size,
                ahead=ahead,
                part=self.sharded,
            )
        #: What decides who is in which batch, as the data tells it; None while nobody said.
        self.order: Mapping[str, int | str] | str | None = None
        devices = list(dict.fromkeys(p.device for p in self.parameters))
        self.on_device = release_on == "device" or (release_on is None and any(d.type != "cpu" for d in devices))
        if self.on_device and self.world_size > 1 and len(devices) > 1:
            raise ValueError(
                f"the parameters lie on {len(devices)} devices of a rank, which are added up over the ranks one by one: give every "
                'rank one device, or release_on="host"'
            )
        #: For each device, the sum in units of the clip's grid, and what was released, rounded to float32.
        self.sums: dict[torch.device, torch.Tensor] = {}
        self.releases: dict[torch.device, torch.Tensor] = {}
        #: Whether the sums may hold anything: set before anything is added, and taken back once they are zero.
        self.added = False
        self.exact_views: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []
        self._lay_out(devices if self.on_device else [torch.device("cpu")])
        #: What releases on devices; None on the host, and while there is no run.
        self.device_step: DeviceStep | None = None
        self._begin_on_devices()

    def _lay_out(self, devices: list[torch.device]) -> None:
        """Flat tensors for each device, and each parameter's place in them."""
        sizes = dict.fromkeys(devices, 0)
        self.extents: dict[torch.device, list[Extent]] = {device: [] for device in devices}
        if self.sharded:
            self._lay_out_shards(devices[0])
            return
        places, coordinate = [], 0
        for p in self.parameters:
            device = p.device if self.on_device else devices[0]
            extents, local = self.extents[device], sizes[device]
            if extents and extents[-1].coordinate + extents[-1].length == coordinate:
                last = extents.pop()
                extents.append(Extent(last.local, last.coordinate, last.place, last.length + p.numel()))
            else:
                extents.append(Extent(local, coordinate, coordinate, p.numel()))
            places.append((device, local))
            sizes[device] += p.numel()
            coordinate += p.numel()
        for device, size in sizes.items():
            self.sums[device] = torch.zeros(size, dtype=torch.int64, device=device)
            self.releases[device] = torch.zeros(size, dtype=torch.float32, device=device)
        for p, (device, local) in zip(self.parameters, places):
            part = slice(local, local + p.numel())
            self.exact_views.append(self.sums[device][part].view(p.shape))
            self.views.append(self.releases[device][part].view(p.shape))

    def _lay_out_shards(self, device: torch.device) -> None:
        """The sums of all ranks, rank after rank, and what this rank releases of them."""
        own = self.cuts[self.rank]
        length = sum(cut.length for cut in own)
        self.sums[device] = torch.zeros(self.dimension, dtype=torch.int64, device=device)
        self.releases[device] = torch.zeros(length, dtype=torch.float32, device=device)
        begin = self.own.start
        for cut in own:
            at = cut.place - begin
            self.views.append(self.releases[device][at : at + cut.length].view(cut.shape))
        extents, place = [], 0
        for part in self.ranges:
            extents.append(Extent(place, part.start, place, len(part)))
            place += len(part)
        self.extents[device] = extents

    def _owned_by(self, rank: int) -> slice:
        """Where the sums that a rank releases lie among all."""
        if self.sharded:
            cuts = self.cuts[rank]
            return slice(cuts[0].place, cuts[-1].place + cuts[-1].length)
        part = shard(self.dimension, rank, self.world_size)
        return slice(part.start, part.stop)

    @property
    def own(self) -> slice:
        """Where the sums that are released here lie among all."""
        return self._owned_by(self.rank)

    @property
    def exact(self) -> torch.Tensor:
        """The sum, in units of the clip's grid, where it lies on one device."""
        (only,) = self.sums.values()
        return only

    @property
    def flat(self) -> torch.Tensor:
        """What was released, rounded to float32, where it lies on one device."""
        (only,) = self.releases.values()
        return only

    def _begin_on_devices(self) -> None:
        if not self.on_device or self.run is None:
            return
        exact = self.arithmetic == "exact"
        if exact and self.run.next_step < self.run.steps:
            self.run.fixed_row()  # refuses what does not fit 64 bits
        if self.sharded:
            (extents,) = self.extents.values()
            banks = [Bank(self.exact[self.own], self.flat, extents, exact=exact)]
        elif self.world_size == 1:
            banks = [Bank(self.sums[d], self.releases[d], self.extents[d], exact=exact) for d in self.sums]
        else:
            first, last = self.coordinates.start, self.coordinates.stop
            extents = [Extent(0, first, 0, last - first)]
            banks = [Bank(self.exact[first:last], self.flat[first:last], extents, exact=exact)]
        self.device_step = DeviceStep(self.run, banks)

    def _agree(self, key: NoiseKey | None, name: str | None) -> tuple[NoiseKey, str]:
        """One run for all ranks, and an error unless they have one key, mechanism, model and arithmetic."""
        if key is None:
            raise ValueError(
                "every rank needs the same key: make it once with NoiseKey.create(path) and pass "
                "key=NoiseKey.read(path) in every rank"
            )
        mine = {
            "key": key.fingerprint,
            "mechanism": self.mechanism.identity,
            "number of parameters": self.dimension,
            "arithmetic": self.arithmetic,
            **{f"shape of parameter {number}": tuple(p.shape) for number, p in enumerate(self.parameters)},
            # Each rank has others, where they are cut.
            "values of parameters": None if self.sharded else self._digest(),
        }
        all_ranks: list[Any] = [None] * self.world_size
        distributed.all_gather_object(all_ranks, (mine, name or new_run()), group=self.group)
        for what in mine:
            if len({values.get(what) for values, _ in all_ranks}) != 1:
                listed = ", ".join(f"{values.get(what)} in rank {rank}" for rank, (values, _) in enumerate(all_ranks))
                raise MismatchError(f"the ranks differ in their {what}: {listed}; give all of them the same")
        return key, all_ranks[0][1]

    def _digest(self) -> str:
        """Tells models apart."""
        hashed = hashlib.sha256()
        for p in self.parameters:
            hashed.update(p.detach().cpu().contiguous().numpy().tobytes())
        return hashed.hexdigest()[:16]

    def _check_parameters(self) -> None:
        for number, p in enumerate(self.parameters):
            if p.is_meta:
                raise ValueError(
                    f"parameter {number} is on the device meta, where it has no values: give them to the model first, with "
                    "model.to_empty(device=…) and what initialises it"
                )
            check_dtype(p, str(number))

    def _check_unchanged(self) -> None:
        """Refuses parameters that were not there, or not so, when this was made: no noise covers them."""
        now = held(self.optimizer)
        if len(now) != len(self.parameters) or any(p is not q for p, q in zip(now, self.parameters)):
            strangers = sum(id(p) not in self.numbers for p in now)
            raise ValueError(
                f"the optimizer's parameters have changed since the noise was laid out ({strangers} are new, of {len(now)}), "
                "and new ones would move without noise: pass all parameters that will ever be trained to the optimizer, and freeze "
                "those that are not trained yet with requires_grad_(False)"
            )
        self._check_parameters()
        for number, p in enumerate(self.parameters):
            self.check_shape(str(number), p)

    def check_shape(self, name: str, p: torch.Tensor) -> None:
        """Refuses a parameter that was resized."""
        expected = self.views[self.numbers[id(p)]].shape
        if local(p).shape != expected:
            raise ValueError(
                f"parameter {name} has shape {tuple(local(p).shape)}, and had {tuple(expected)} when the noise was laid out: resize the "
                "model before it is trained"
            )

    @property
    def next_step(self) -> int:
        return self.live().next_step

    @property
    def privacy(self) -> PrivacyStatement | None:
        return self.live().privacy

    def live(self) -> PrivateRun:
        if self.run is None:
            raise ValueError(
                f"journal {os.fspath(self.journal or '')} belongs to a run that has begun: continue it with load_state_dict(…), or "
                "pass the path of a new journal for a new run"
            )
        return self.run

    def add(self, sums: Iterable[tuple[int, torch.Tensor]], count: int) -> None:
        """Adds a sum of count contributions, int64 in units of the grid, by the number of each parameter."""
        self.begin_adding(count)
        for number, tensor in sums:
            for part, total in zip(*self.parts([number], [tensor[None]])):
                total += part[0].to(total.device)

    def begin_adding(self, count: int) -> None:
        """Counts contributions, whose sums the caller then adds to totals(); call clear() if that fails."""
        run = self.live()
        self.mechanism.check_steps(run.next_step + 1)
        if self.added and run.contributions is None:
            # An interrupt came between the release of a step, or its end, and the time when its sum was zero.
            self._zero()
        self.added = True
        run.contribute(count)

    def parts(
        self, numbers: Iterable[int], rows: Iterable[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Contributions to some parameters, and the sums that they are added to: one for each parameter, or for each rank's part."""
        if not self.sharded:
            return list(rows), [self.exact_views[number] for number in numbers]
        pieces, totals = [], []
        for number, row in zip(numbers, rows):
            for cuts in self.cuts:
                cut = cuts[number]
                if cut.length:
                    pieces.append(row[:, cut.first : cut.last])
                    totals.append(self.exact[cut.place : cut.place + cut.length].view(cut.shape))
        return pieces, totals

    def add_rows(self, number: int, first: int, values: torch.Tensor) -> None:
        """Adds integers to the sum of some rows of a parameter; begin_adding() comes before."""
        if not self.sharded:
            total = self.exact_views[number]
            total = total[first : first + len(values)] if total.dim() else total
            total += values.to(total.device)
            return
        for cuts in self.cuts:
            cut = cuts[number]
            begin, end = max(first, cut.first), min(first + len(values), cut.last)
            if begin < end:
                held = self.exact[cut.place : cut.place + cut.length].view(cut.shape)
                held[begin - cut.first : end - cut.first] += values[begin - first : end - first].to(held.device)

    def follow(self, batches: Batches | None) -> None:
        """Takes batches of these from now on, the same as when the run began; None stands for one pass of a plain loader."""
        order = "one pass of a loader" if batches is None else batches.order
        drawing = None if batches is None else batches.sampler_in_use
        by_step = batches is not None and batches.by_step
        self.live().follow(name_of(order), by_step=by_step, sampler=drawing)
        self.order = order

    def check_ranks(self, batches: Any) -> None:
        """Refuses batches of which each rank would have the whole, or of which the ranks have different ones."""
        if self.world_size == 1:
            return
        mine = (getattr(batches, "rank", None), getattr(batches, "world_size", None), getattr(batches, "order", None))
        all_ranks: list[Any] = [None] * self.world_size
        distributed.all_gather_object(all_ranks, mine, group=self.group)
        for rank, (own, size, _) in enumerate(all_ranks):
            if (own, size) != (rank, self.world_size):
                raise MismatchError(
                    f"rank {rank} of {self.world_size} has batches for rank {own} of {size}, so that an example would count in "
                    "several ranks: in every rank, pass rank=torch.distributed.get_rank() and "
                    "world_size=torch.distributed.get_world_size() to Cohorts or SampledBatches"
                )
        if any(order != all_ranks[0][2] for _, _, order in all_ranks):
            raise MismatchError(
                "the ranks have batches of different orders, so that an example would take part in several steps: give all of them "
                "the same seed, or samplers of one key and run"
            )

    def clear(self) -> None:
        """Forgets what was added since the last step."""
        if self.added:
            self._zero()
        # After the sums: what is left of them, should this be interrupted, still counts.
        if self.run is not None and self.run.contributions is not None:
            self.run.clear()
        self.added = False

    def _zero(self) -> None:
        for total in self.sums.values():
            total.zero_()

    def check(self) -> None:
        """Refuses a release before anything is summed over the ranks."""
        run = self.live()
        self._check_unchanged()
        if not self.grouped:
            check_alone()  # torch.distributed may have been initialised since
        if self.world_size > 1:
            self._check_together(run)
        run.check_release()

    def release(self) -> int:
        """Sums over the ranks without error, releases the sum with one row of noise, and rounds that to float32, into flat;
        returns the step. check() comes before.

        Every rank sums its shard, adds noise to it and passes it on: the journal of each rank sees all of the data that
        its noise covers.
        """
        run = self.live()
        mine = self.own
        try:
            if self.world_size > 1:
                self._exchange(self.exact, distributed.reduce)
            if self.device_step is not None:
                step = self.device_step.release(self._joined if self.sharded else None)
            else:
                total, released = self.exact[mine].numpy(), (self.flat if self.sharded else self.flat[mine]).numpy()
                if self.sharded and run.durable:
                    step = run.release(total, released, self._joined(run.digest(total)))
                else:
                    step = run.release(total, released)
        except BaseException:
            if self.world_size > 1:
                self.clear()  # shards hold the sum over all ranks by now
            raise
        if self.world_size > 1:
            self.exact.zero_()
        self.added = False
        if self.world_size > 1 and not self.sharded:
            self._exchange(self.flat, distributed.broadcast)
        return step

    def _joined(self, digest: Sequence[int]) -> list[int]:
        """The digest of the sums of all ranks."""
        mine = torch.tensor(list(digest), dtype=torch.int64, device=self.exact.device)
        all_ranks = [torch.zeros_like(mine) for _ in range(self.world_size)]
        distributed.all_gather(all_ranks, mine, group=self.group)
        return [sum(int(one[h]) for one in all_ranks) % PRIME for h in range(2)]

    def _check_together(self, run: PrivateRun) -> None:
        """Refuses a step that the ranks do not take together: one of them may have burned a step, or have nothing to release."""
        mine = torch.tensor([run.next_step, run.contributions is None], device=self.exact.device)
        all_ranks = [torch.zeros_like(mine) for _ in range(self.world_size)]
        distributed.all_gather(all_ranks, mine, group=self.group)
        steps = [int(one[0]) for one in all_ranks]
        if len(set(steps)) > 1:
            raise MismatchError(
                f"the ranks are at different steps ({', '.join(map(str, steps))}), and would add up batches of different steps: call "
                "burn() in every rank, and resume every rank from states of one step"
            )
        idle = [rank for rank, one in enumerate(all_ranks) if one[1]]
        if idle and len(idle) < self.world_size:
            raise MismatchError(
                f"rank {idle[0]} has nothing to release in step {steps[0]}, but others have: call accumulate(…) in every rank, or "
                "add_sum({}, 0) where a rank has no examples of a step"
            )

    def _exchange(self, flat: torch.Tensor, start: Callable[..., Any]) -> None:
        """Sums the shards at their owners, or hands them out."""
        pending = []
        for rank in range(self.world_size):
            part = flat[self._owned_by(rank)]
            if len(part):
                owner = rank if self.group is None else distributed.get_global_rank(self.group, rank)
                pending.append(start(part, owner, group=self.group, async_op=True))
        for work in pending:
            work.wait()

    def divide(self, by: float) -> None:
        """Makes a mean of what was released."""
        for released in self.releases.values():
            released.div_(by)

    def fill_gradients(self) -> None:
        """Puts what was released into .grad. A parameter that is frozen at this step gets none and stays."""
        for p, view in zip(self.parameters, self.views):
            if self.sharded:
                p.grad = as_shard(view, p) if p.requires_grad else None
            else:
                p.grad = view.to(p.device) if p.requires_grad else None

    def burn(self) -> int:
        self.clear()
        return self.live().burn() if self.device_step is None else self.device_step.burn()

    def state_dict(self) -> dict[str, Any]:
        run = self.live()
        state = {
            "version": STATE_VERSION,
            "step": run.next_step,
            "run": run.run,
            "mechanism": self.mechanism.identity,
            "coordinates": self._places(),
            "data": self.order,
            "denominator": run.denominator,
        }
        if self.sharded:
            state["sharded"] = True
        if run.durable:
            state["noise"] = torch.frombuffer(bytearray(run.checkpoint_bytes()), dtype=torch.uint8)
        else:
            warnings.warn(
                "this state cannot be loaded: the run has no journal, so it ends with its process. To resume, train with "
                "key=NoiseKey.create(path) and journal=path",
                stacklevel=3,
            )
        return state

    def _places(self) -> list[Any]:
        """The coordinates whose noise is drawn here."""
        places = [[part.start, part.stop] for part in self.ranges]
        return places if self.sharded else places[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["version"] != STATE_VERSION:
            raise BindingError(f"the state has version {state['version']}, but this is version {STATE_VERSION}")
        if state["mechanism"] != self.mechanism.identity:
            raise BindingError(
                f"the state belongs to mechanism {state['mechanism'][:16]}…, but this is {self.mechanism.identity[:16]}…: "
                "keep the mechanism of a run with mechanism.save(path) and resume with Mechanism.load(path)"
            )
        same = list(state["coordinates"]) == self._places()
        # Journals of shards say the same on all ranks, and the noise up to here can be drawn again.
        anew = not same and bool(state.get("sharded")) and (self.sharded or self.world_size == 1)
        if not same and not anew:
            first, last = state["coordinates"][0], state["coordinates"][-1]
            raise BindingError(
                f"the state is for coordinates {first}..{last}, but this is {self.coordinates.start}.."
                f"{self.coordinates.stop}: resume with the same model, number of ranks and rank"
            )
        if self.journal is None or "noise" not in state:
            raise ValueError(
                "a run is resumed from its journal, which shows that no noise is released twice: train with "
                "key=NoiseKey.create(path) and journal=path, and resume with key=NoiseKey.read(path) and the same journal"
            )
        if self.run is not None:
            # A journal that this object has just begun, or goes on with, is not the one that the state was kept beside.
            raise ValueError(
                f"journal {os.fspath(self.journal)} was begun or resumed by this optimizer, at step "
                f"{self.run.next_step}; a state is loaded once, beside the journal of its run"
            )
        run = PrivateRun.open(
            self.mechanism,
            self.key,
            self.journal,
            dimension=self.dimension,
            ranges=self.ranges,
            checkpoint=None if anew else state["noise"].numpy().tobytes(),
            at=state["step"] if anew else None,
            arithmetic=self.arithmetic,
            ranks=self.world_size,
            ahead=self.ahead,
            part=self.sharded,
        )
        found = (run.run, run.next_step)
        if found != (state["run"], state["step"]):
            run.close()
            raise BindingError(
                f"the state is at step {state['step']} of run {state['run']}, but its noise is at step {found[1]} of "
                f"run {found[0]}: the state was altered"
            )
        self.order = state.get("data")
        run.recall(None if self.order is None else name_of(self.order), state.get("denominator"))
        self.run = run
        self._begin_on_devices()

    def close(self) -> None:
        if self.device_step is not None:
            self.device_step.close()
        if self.run is not None and self.journal is not None:
            self.run.close()
