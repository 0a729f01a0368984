"""`validate --profile`: the step times that a measured run is simulated with."""

from __future__ import annotations

from dataclasses import dataclass

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.profile_source import asked_graph_sizes, tensor_parallel
from servetwin.sim.commands.validate import ValidateFlags
from servetwin.sim.engine_options import EngineOptions
from servetwin.sim.host_model import HostModel
from servetwin.sim.model_shape_reader import read_model_shape
from servetwin.sim.steptime.calibration import Calibration
from servetwin.sim.steptime.features import StepModel
from servetwin.sim.steptime.profiles import KernelProfile, Profile, write_profile
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
        before = 1.0 if self.profile.calibrated is None else self.profile.calibrated.value
        found = Calibration(
            value=factor if isinstance(self.profile, KernelProfile) else factor * before, on=on
        )
        calibrated = self.profile.model_copy(update={"calibrated": found})
        write_profile(calibrated, flags.save_profile)


def validated_times(
    profile: Profile, run: MeasuredRun, options: EngineOptions, flags: ValidateFlags
) -> ValidatedTimes:
    """Raises UsageError and other ValueErrors."""
    cards = _cards(run, flags)
    if isinstance(profile, StepsProfile):
        return _of_steps(profile, cards, flags)
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


def _of_steps(profile: StepsProfile, cards: int, flags: ValidateFlags) -> ValidatedTimes:
    given = {
        f"--tensor-parallel-size {cards}": cards != 1,
        "--gpu": flags.gpu is not None,
        "--cudagraph-capture-sizes": flags.cudagraph_capture_sizes is not None,
        "--max-cudagraph-capture-size": flags.max_cudagraph_capture_size is not None,
        "--enforce-eager": flags.enforce_eager,
    }
    for name in (n for n, is_given in given.items() if is_given):
        raise UsageError(
            f"{name}: goes with a profile of kernels; {flags.profile} holds times of whole steps, as they were measured"
        )
    model = profile.step_model()
    return ValidatedTimes(profile, model, model, DEVICE, profile.host_model(), (profile.describe_error(),))
