"""Looks at what a run of dpmf.torch or dpmf.opacus is given."""


class Watched:
    """A PrivateRun that keeps the sums it is given; quiet, it releases them without noise."""

    def __init__(self, run, quiet=False):
        vars(self).update(run=run, quiet=quiet, sums=[])

    def __getattr__(self, name):
        return getattr(vars(self)["run"], name)

    def __setattr__(self, name, value):
        setattr(vars(self)["run"], name, value)

    @property
    def given(self):
        """The sum of the last step, as numbers."""
        return self.sums[-1]

    def release(self, total, released):
        self.sums.append(total * self.clip.unit)  # a power of two: nothing is rounded
        step = vars(self)["run"].release(total, released)
        if self.quiet:
            released[:] = self.given
        return step


def watch(optimizer, quiet=False):
    """Replaces the run of an optimizer with one that is watched, unless it is already, and returns it."""
    noise = optimizer._noise
    if not isinstance(noise.run, Watched):
        noise.run = Watched(noise.run, quiet)
    return noise.run
