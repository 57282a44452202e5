"""What notebook 01 refuses before anything is started: parameters that this machine, or no machine, can satisfy."""

from __future__ import annotations

from p99lab.errors import BadParameterError
from p99lab.lab.headline_arms import Arm, arm, long_arms, measured_arms
from p99lab.lab.parameters import Headline01
from p99lab.lab.vllm_server import spec_of
from p99lab.observe import hardware


def check(parameters: Headline01) -> None:
    """Return if the run can be measured here.

    Raises:
        BadParameterError: none of the arms can be, an arm is to get open loads that it cannot have, there is no vLLM
            where it is said to be, no GPU, or not as many CPUs as threads are wanted.
    """
    if parameters.on_gpu and not hardware.has_gpu():
        raise BadParameterError(f"device={parameters.device} needs an NVIDIA GPU, and there is none here")
    if parameters.threads > (usable := hardware.num_usable_cpus()):
        raise BadParameterError(f"threads: {parameters.threads} are more than the {usable} CPUs that can be used here")
    spec_of(parameters.vllm_site, parameters.vllm_model, parameters.vllm_arguments)
    if not measured_arms(parameters):
        lacks = (f"{name} {_lacks(arm(name), parameters)}" for name in parameters.arms or ())
        raise BadParameterError(f"arms: {'; '.join(lacks)}")
    opened = [arm.name for arm in long_arms(parameters)]
    if others := [name for name in parameters.open_arms or () if name not in opened]:
        can = f"of this run's arms {', '.join(opened) or 'none'} can"
        raise BadParameterError(f"open_arms: {', '.join(others)} cannot get open loads, {can}")


def _lacks(arm: Arm, parameters: Headline01) -> str:
    """Why an arm that is named is not measured."""
    if not arm.built:
        return "is not built yet"
    return "needs vllm_site and vllm_model" if parameters.vllm_site is None else "needs transport=http"
