"""A handle like ``attach``'s, for a single rank and without a model."""

from sparsync import Correction
from sparsync.feedback.reducer_state import parse_state, reducer_state, restore_reducer
from sparsync.fields import opened, sealed
from sparsync.transports.driver import run
from sparsync.transports.groups import SoloCommunicator

from .small_reducers import gradients, reducer_on


class Sync:
    """A reducer that is trained on noise."""

    def __init__(self, steps=0, momentum=0.0):
        self.reducer = reducer_on(SoloCommunicator(), correction=Correction(momentum=momentum))
        for step in range(steps):
            self.train(step)

    def train(self, step):
        run(self.reducer.reduce(gradients(self.reducer, step)))

    def state_dict(self):
        return sealed("gradients", {"reducer": reducer_state(self.reducer), "pieces": {}})

    def validate(self, state):
        parse_state(self.reducer, opened(state, "gradients")["reducer"])

    def load_state_dict(self, state):
        run(restore_reducer(self.reducer, opened(state, "gradients")["reducer"]))


def residual(sync):
    return sync.reducer.residuals[0].value
