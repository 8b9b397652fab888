"""`Observer`: a run in a store, as somebody sees it who takes no part.

observer = Observer(model, method, Archive.open("s3://bucket/run"))
observer.begin()
while observer.advance():
    ...
observer.show()

It has no data and no inner optimizer, it is no member, and it writes nothing. It decodes the messages that commits
name, takes the outer steps, and finds the same anchor as the replicas, to the bit, or raises an error.
"""

from __future__ import annotations

import torch
from torch import nn

from overtone.errors import ModelError
from overtone.exchange.buffers import Buffers
from overtone.exchange.description import compare_described, describe
from overtone.exchange.message import NOBODY
from overtone.exchange.parameters import Parameters
from overtone.exchange.round import Exchanger
from overtone.methods import Method
from overtone.swarm.archive import Archive
from overtone.swarm.follower import Followed, Follower
from overtone.swarm.records import Member
from overtone.swarm.store import refuse_unfit
from overtone.transport import Solo


class Observer:
    """Follows a run with a model of the same shapes and the same method. The model's own weights are lost.

    ``steps``, ``rounds``, ``fingerprint`` and the other attributes are those that a run log is made from, as a
    `Replica` has them.
    """

    def __init__(self, model: nn.Module, method: Method, archive: Archive) -> None:
        refuse_unfit(method)
        told = archive.founded.description
        self.model = model
        self.method = method
        self.archive = archive
        self.transport = Solo()
        self.inner = _holder(model)
        parameters = Parameters(model, self.inner)
        private = any(str(about).endswith(", private") for name, about in told.items() if name.startswith("buffer "))
        buffers = Buffers(model, "private" if private else "shared")
        refused = str(told.get("refused"))
        description = describe(method, parameters.all, buffers, refused)
        compare_described(f"the run in {archive.url}", told, description)
        self.exchanger = Exchanger(
            method, parameters, buffers, self.transport,
            seal=archive.seal, schema=archive.about.schema, refused=refused, pattern="gathered",
        )  # fmt: skip
        # Lossless: it never sends anything, so it needs no residual.
        self.exchanger.begin(NOBODY, lossless=True)
        self.follower = Follower(self.exchanger, archive)

    # -- following -------------------------------------------------------------------------------------------------

    def begin(self, *, from_start: bool = False, most: int | None = None) -> None:
        """Take over the newest snapshot that can be believed, at most that before round ``most``; with ``from_start``
        the first weights."""
        self.follower.begin(0 if from_start else most)

    def advance(self) -> Followed | None:
        """Follow the next round, if its commit is there. Raises an error if its fingerprint is not that of the anchor
        here."""
        return self.follower.advance()

    def show(self) -> nn.Module:
        """Put the anchor and the shared buffers into the model, to the bit as `Replica.anchor` does, and return it."""
        exchanger = self.exchanger
        exchanger.show(exchanger.state.tensors["anchor"])
        exchanger.buffers.put(exchanger.buffers.shared)
        return self.model

    # -- as a replica says it --------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """The number of rounds since the beginning of the run."""
        return self.follower.index

    @property
    def steps(self) -> int:
        """The local steps that these rounds stand for: those of a replica that was there in all of them."""
        return self.rounds * (self.method.every or 1)

    @property
    def progress(self) -> int:
        """The same: a run in a store counts its steps by its rounds."""
        return self.steps

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the present anchor."""
        return self.follower.lineage.anchor.hex()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the run, by the last commit."""
        return self.follower.members

    @property
    def device(self) -> torch.device:
        """The device of the model and of the shared state."""
        return self.exchanger.device


def _holder(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that holds the trainable parameters, and never takes a step: it has no state."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("model: no parameter requires a gradient, so no run can be about it")
    return torch.optim.SGD(trainable, lr=1.0)
