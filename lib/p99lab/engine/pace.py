"""When the next step has to be planned, if the device is not to wait for it.

A step is planned while the one before it runs. What arrives after that has to wait for another whole step, so the later
the better: as late as planning and launching take before the running step ends.
"""

from __future__ import annotations

from p99lab.engine.costs import StepCost
from p99lab.engine.plan import StepPlan

MARGIN = 0.08  # of a predicted step: it may end so much sooner
SLACK_S = 0.0005  # by which a sleeping thread may be late
LEARNING = 0.1  # what a new step changes of what is known of them
FORGETTING = 0.95  # of the longest time that the host took, with each step


class Pace:
    """Learns from steps how long predicted ones take and how long the host needs to plan and launch one.

    Nothing is known without `costs`, on a device that does not time its steps, or before the first of them has ended.
    """

    def __init__(self, costs: StepCost | None) -> None:
        self._costs = costs
        self._host_s = 0.0
        self._ratio: float | None = None  # of the device's own times to predicted ones

    def predict_s(self, plan: StepPlan) -> float | None:
        """Seconds of a step by the cost model alone."""
        return None if self._costs is None else self._costs.step_time_s(plan.rows, plan.groups)

    def launched(self, host_s: float) -> None:
        """The host has planned and launched a step."""
        self._host_s = max(host_s, FORGETTING * self._host_s)

    def ended(self, predicted_s: float | None, device_s: float | None) -> None:
        if predicted_s is None or device_s is None:
            return
        ratio = device_s / predicted_s
        self._ratio = ratio if self._ratio is None else self._ratio + LEARNING * (ratio - self._ratio)

    def spare_s(self, predicted_s: float | None) -> float:
        """How long after a step has begun the next one need not be planned; 0 where that is not known."""
        if predicted_s is None or self._ratio is None:
            return 0.0
        return max(0.0, predicted_s * self._ratio * (1 - MARGIN) - self._host_s - SLACK_S)
