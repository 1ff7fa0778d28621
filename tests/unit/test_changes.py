"""How ranks compare the weights with which they begin."""

import pytest
import torch

from sparsync.errors import DisagreementError, PeerError
from sparsync.feedback import changes
from sparsync.transports.groups import SoloCommunicator
from tests.tables import cases


@cases((DisagreementError("ranks differ"), ", or load them before attach"), (PeerError("gone"), ""))
def test_only_ranks_that_disagree_are_told_when_to_load(error, advice, monkeypatch):
    async def failing(*_):
        raise error

    monkeypatch.setattr(changes, "agree", failing)
    with pytest.raises(type(error)) as caught:
        changes.begin_together([SoloCommunicator()], False, torch.zeros(1))
    assert str(caught.value) == f"{error}{advice}"
