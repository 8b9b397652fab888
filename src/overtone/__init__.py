"""Train one model on many machines joined by thin wires.

inner   = torch.optim.AdamW(model.parameters(), lr=3e-4)
replica = overtone.Replica(model, inner, overtone.decoupled(every=64))
for batch in data:
    model(batch).backward()
    replica.step()            # was: inner.step()
    inner.zero_grad()
replica.finish()
"""

from overtone.errors import (
    CheckpointError,
    ConfigError,
    DamagedLogWarning,
    EnvironmentVariableError,
    FileNameError,
    GaveUpError,
    MachineError,
    MethodError,
    MismatchError,
    ModelError,
    NotALogError,
    NotFiniteError,
    OvertoneError,
    OvertoneWarning,
    PeerError,
    RelayedError,
    ReplicaError,
    RunError,
    RunLogError,
    StateError,
    StreamError,
    TaskError,
    UnfitRunError,
    WireError,
)
from overtone.ledger import Count, Ledger, Round
from overtone.methods import METHODS, Method, alone, ddp, decoupled, demo, diloco, local_sgd, published, sparse_loco
from overtone.replica import Replica
from overtone.sim.cluster import Cluster
from overtone.sim.network import Absence, Link
from overtone.transport import Solo
from overtone.version import __version__
from overtone.world.join import connect
from overtone.world.process_group import Torch

__all__ = [
    "METHODS",
    "Absence",
    "CheckpointError",
    "Cluster",
    "ConfigError",
    "Count",
    "DamagedLogWarning",
    "EnvironmentVariableError",
    "FileNameError",
    "GaveUpError",
    "Ledger",
    "Link",
    "MachineError",
    "Method",
    "MethodError",
    "MismatchError",
    "ModelError",
    "NotALogError",
    "NotFiniteError",
    "OvertoneError",
    "OvertoneWarning",
    "PeerError",
    "RelayedError",
    "Replica",
    "ReplicaError",
    "Round",
    "RunError",
    "RunLogError",
    "Solo",
    "StateError",
    "StreamError",
    "TaskError",
    "Torch",
    "UnfitRunError",
    "WireError",
    "__version__",
    "alone",
    "connect",
    "ddp",
    "decoupled",
    "demo",
    "diloco",
    "local_sgd",
    "published",
    "sparse_loco",
]
