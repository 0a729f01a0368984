"""`validate --profile`: the step times that a measured run is simulated with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.profile_source import asked_graph_sizes, tensor_parallel
from servetwin.sim.commands.steps_source import refuse_kernel_flags
from servetwin.sim.commands.validate import ValidateFlags
from servetwin.sim.engine_options import EngineOptions
from servetwin.sim.host_model import HostModel
from servetwin.sim.model_shape_reader import read_model_shape
from servetwin.sim.steptime.calibration import Calibration
from servetwin.sim.steptime.features import StepModel
from servetwin.sim.steptime.profiles import KernelProfile, Profile, write_profile
from servetwin.sim.steptime.step_sources import SAME
from servetwin.sim.steptime.steps_profile import StepsProfile
from servetwin.sim.validation.calibration import Scalable
from servetwin.sim.validation.measured import MeasuredRun

DENSE, DEVICE = "the dense operators", "all times on the device"


@dataclass(frozen=True)
class ValidatedTimes:
    """Of the steps and of the host between them."""

    profile: Profile
    model: StepModel
    scalable: Scalable
    """The model, of which a factor can be calibrated ..."""
    factor_of: str
    """... that of these."""
    host: HostModel | None
    """None: no time."""
    notes: tuple[str, ...]

    def save(self, factor: float, on: str, flags: ValidateFlags) -> None:
        """Writes the profile with the calibrated factor."""
        assert flags.save_profile is not None, "asked for"
        if isinstance(self.profile, KernelProfile):
            update = {"calibrated": Calibration(value=factor, on=on)}
        else:
            before = 1.0 if self.profile.factor is None else self.profile.factor.value
            update = {"factor": Calibration(value=factor * before, on=on)}
        write_profile(self.profile.model_copy(update=update), flags.save_profile)


def validated_times(
    profile: Profile, run: MeasuredRun, options: EngineOptions, flags: ValidateFlags
) -> ValidatedTimes:
    """Raises UsageError and other ValueErrors."""
    cards = _cards(run, flags)
    if isinstance(profile, StepsProfile):
        check_steps_flags(flags, cards)
        return _of_steps(profile, run, flags.model.resolve().name)
    shape = read_model_shape(flags.model)
    parallel = tensor_parallel(profile, shape, cards, flags.gpu)
    model = profile.step_model(shape.num_layers, parallel=parallel, capture_sizes=asked_graph_sizes(options))
    return ValidatedTimes(
        profile, model, model, DENSE, None, () if parallel is None else (parallel.describe(),)
    )


def _cards(run: MeasuredRun, flags: ValidateFlags) -> int:
    """As the run says, or the flag where it does not."""
    said, asked = run.engine.get("tensor_parallel_size"), flags.tensor_parallel_size
    if None not in (said, asked) and said != asked:
        raise UsageError(f"--tensor-parallel-size {asked}: the run was measured with {said}")
    return next((n for n in (asked, said) if n is not None), 1)


def check_steps_flags(flags: ValidateFlags, cards: int | None) -> None:
    """Raises UsageError for what times of whole steps cannot heed."""
    refuse_kernel_flags(
        tensor_parallel_size=cards or 1,
        gpu=flags.gpu,
        cudagraph_capture_sizes=flags.cudagraph_capture_sizes,
        max_cudagraph_capture_size=flags.max_cudagraph_capture_size,
        enforce_eager=flags.enforce_eager,
    )


def _of_steps(profile: StepsProfile, run: MeasuredRun, named: str) -> ValidatedTimes:
    model = profile.step_model()
    notes = [profile.describe_error(), *_unlike(profile, run)]
    if named != (served := run.about.get("model", named)):
        notes.append(f"--model is {named!r}, the run served {served!r}")
    return ValidatedTimes(profile, model, model, DEVICE, profile.host_model(), tuple(notes))


def _unlike(profile: StepsProfile, run: MeasuredRun) -> Iterator[str]:
    """Where the run was of something else than the profile, which explains an error."""
    for name in SAME:
        ours, theirs = profile.about.get(name), run.about.get(name)
        if run.about and ours != theirs:
            yield f"{name} is {theirs!r} in the run, {ours!r} in the profile"
